"""The routes around generation, keys, and what every answer carries."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.errors import QuireError
from quire.server.access import Keys
from quire.server.app import create_app
from tests.server.doubles import ANSWER, HI, TOKENIZER, check_error, served, status

pytestmark = pytest.mark.anyio

KEY = {"authorization": "Bearer secret"}


async def test_the_model_is_listed_as_clients_read_it() -> None:
    card = {
        "id": "tiny",
        "object": "model",
        "created": 1700000000,
        "owned_by": "quire",
        "root": "tiny",
        "parent": None,
        "max_model_len": 128,
        "permission": [],
        "tool_call_parser": "hermes",
        "reasoning_parser": "none",
    }
    async with served() as server:
        assert (await server.client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await server.client.get("/v1/models/tiny")).json() == card
        error = check_error(await server.client.get("/v1/models/org/other"), 404, "model", "'org/other'")
    assert error["code"] == "model_not_found"


async def test_every_name_of_the_model_answers_and_answers_have_the_first() -> None:
    async with served(about={"aliases": ("org/also", "third")}) as server:
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["tiny", "org/also", "third"]
        assert (await server.client.get("/v1/models/org/also")).json() == listed[1]
        for name in ("tiny", "org/also", "third"):
            assert (await server.chat(model=name))["model"] == "tiny"
            chunks = await server.stream("/v1/completions", model=name, prompt="say dog")
            assert {chunk["model"] for chunk in chunks} == {"tiny"}
            assert (await server.post("/tokenize", model=name, prompt="a")).status_code == 200
        refused = await server.post("/v1/completions", model="other", prompt="a")
        check_error(refused, 404, "model", "this server has 'tiny', 'org/also', 'third'")


async def test_text_becomes_tokens_and_tokens_text() -> None:
    ids = list(TOKENIZER.encode("the dog"))
    async with served() as server:
        got = (await server.post("/tokenize", prompt="the dog")).json()
        assert got == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
        named = (await server.post("/tokenize", prompt="the dog", return_token_strs=True)).json()
        assert "".join(named["token_strs"]) == "the dog"
        assert (await server.post("/detokenize", tokens=ids)).json() == {"prompt": "the dog"}
        assert (await server.post("/tokenize", prompt="")).json()["count"] == 0
        chat = (await server.post("/tokenize", messages=[{"role": "user", "content": "hi"}])).json()
        assert TOKENIZER.decode(chat["tokens"]).endswith("<|im_start|>assistant\n")


async def test_health_distinguishes_liveness_and_readiness() -> None:
    async with served() as server:
        for path in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await server.client.get(path)).status_code == 200
        await server.backend.drain(1)
        assert (await server.client.get("/health/live")).status_code == 200
        response = await server.client.get("/health/ready")
        check_error(response, 503)
        assert int(response.headers["retry-after"]) > 0
        response = await server.post("/v1/completions", prompt="a")
        check_error(response, 503, words="shutting down")
        assert int(response.headers["retry-after"]) > 0
        server.port.up = False
        check_error(await server.client.get("/health"), 503)


async def test_stats_have_the_fields_dashboards_read() -> None:
    async with served() as server:
        got = (await server.client.get("/stats")).json()
    assert set(got) == {
        *("running", "model", "waiting_requests", "active_requests", "completed_requests", "generated_tokens"),
        *("decode_steps", "average_batch_size", "max_batch_observed", "cache", "latency_ms"),
    }
    assert set(got["latency_ms"]) == {"ttft", "itl", "e2e"}
    assert set(got["cache"]) == {
        *("page_size", "max_pages", "used_pages", "free_pages", "active_sequences", "pressure_events"),
        *("evictions", "utilization", "policy"),
    }


async def test_the_tokenizer_is_described_where_the_server_was_started_so() -> None:
    async with served() as server:
        error = check_error(await server.client.get("/tokenizer_info"), 404, None, "--enable-tokenizer-info-endpoint")
        assert error["code"] == "no_tokenizer_info"
        info = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "chat_template": "{{ messages }}"}
        app = create_app(server.backend, keys=Keys(("sesame",)), tokenizer_info=info)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
            assert (await client.get("/tokenizer_info")).status_code == 401
            answer = await client.get("/tokenizer_info", headers={"authorization": "Bearer sesame"})
            assert answer.json() == info
            assert (await client.post("/tokenizer_info", headers={"authorization": "Bearer sesame"})).status_code == 405


async def test_the_load_counts_prompts_being_answered_as_routers_of_vllm_read_it() -> None:
    async with served() as server:
        assert (await server.client.get("/load")).json() == {"server_load": 0}
        server.port.stepping.clear()
        body = {"model": "tiny", "prompt": ["hello", "hello"], "max_tokens": 5}
        pending = asyncio.ensure_future(server.client.post("/v1/completions", json=body))
        while len(server.port.running) < 2:
            await asyncio.sleep(0)
        assert (await server.client.get("/load")).json() == {"server_load": 2}
        server.port.stepping.set()
        assert (await pending).status_code == 200
        assert (await server.client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize(("older", "newer"), [(5, 6), (6, 5), (999, 6), (6, 6)])
async def test_of_max_tokens_and_max_completion_tokens_the_newer_name_wins(older: int, newer: int) -> None:
    async with served() as server:
        both = {"max_tokens": older, "max_completion_tokens": newer, "return_sampling_params": True}
        chat = await server.chat(**both)
        assert server.port.submitted[-1].max_new_tokens == newer
        assert chat["sampling_params"]["max_tokens"] == {"value": newer, "source": "request"}
        chunks = await server.stream("/v1/chat/completions", messages=HI, **both)
        assert server.port.submitted[-1].max_new_tokens == newer
        assert chunks[-1]["sampling_params"]["max_tokens"]["value"] == newer


async def test_the_prefix_cache_is_reset_with_vllms_parameters_where_they_change_nothing() -> None:
    async with served() as server:
        for target in ("", "?reset_running_requests=false", "?reset_external=0"):
            answer = await server.client.post("/reset_prefix_cache" + target)
            assert (answer.status_code, answer.content) == (200, b"")
        assert server.port.resets == 3
        check_error(await server.client.post("/reset_prefix_cache", headers={"sec-fetch-site": "cross-site"}), 403)
        refused = await server.client.post("/reset_prefix_cache?reset_running_requests=true")
        check_error(refused, 400, param="reset_running_requests", words="must be false")
        unknown = await server.client.post("/reset_prefix_cache?reset_externals=0")
        check_error(unknown, 400, param="reset_externals", words="Did you mean 'reset_external'?")
        assert server.port.resets == 3


async def test_metrics_are_prometheus_text_of_engine_and_server() -> None:
    async with served() as server:
        await server.complete()
        response = await server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert "fake_steps" in families
    counted = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert counted["stop"] == 1
    first = families["vllm:time_to_first_token_seconds"].samples
    assert [s.value for s in first if s.name.endswith("_count")] == [1]


async def test_the_version_is_served() -> None:
    async with served() as server:
        assert (await server.client.get("/version")).json() == {"version": "9.9"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v2", 404),
    ],
)
async def test_wrong_turns_get_the_whole_error_object(method: str, path: str, status: int) -> None:
    async with served() as server:
        response = await server.client.request(method, path)
    check_error(response, status, words=f"{method} {path}")
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/embedding", "/v1/embeddings"),
        ("/v1/health/ready", "/health/ready"),
    ],
)
async def test_an_unknown_path_gets_a_404_with_the_nearest_path(path: str, meant: str) -> None:
    async with served() as server:
        answered = await server.client.post(path)
        far = await server.client.get("/" + "x" * 20_000)
    check_error(answered, 404, words=f"POST {path}: not found. Did you mean '{meant}'?")
    check_error(far, 404, words="not found")
    assert "Did you mean" not in far.text and "GET /openapi.json describes all paths" in far.text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/audio/transcriptions", "speech is neither read nor written here"),
        ("/v1/images/generations", "images are not made here"),
        ("/v1/moderations", "this server does not moderate"),
        ("/v1/conversations", "use /v1/responses, whose previous_response_id continues a conversation"),
        ("/v1/threads/t1/runs", "use /v1/responses"),
        ("/v1/vector_stores", "put what the model should read into a message"),
        ("/v1/messages/batches", "use /v1/files and /v1/batches, which need --batch-dir"),
        ("/infill", "use /v1/completions, with prompt and suffix"),
        ("/v1/load_lora_adapter", "merge the adapter into the weights"),
        ("/sleep", "stop the server and start it again"),
    ],
)
async def test_what_other_servers_have_and_this_one_lacks_is_said(path: str, words: str) -> None:
    async with served() as server:
        answered = await server.client.post(path)
    assert answered.status_code == 404
    assert f"POST {path}: not found: " in answered.text and words in answered.text


PATHS = ["/v1/models", "/v1/completions", "/stats", "/metrics", "/version", "/ping", "/nope", "/health/x", "//health"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer secret2"},
        {"authorization": "Bearer"},
        {"authorization": "Basic secret"},
        {"authorization": "secret"},
        {"x-api-key": "nope"},
    ],
)
async def test_without_the_key_nothing_opens_but_health(path: str, headers: dict[str, str]) -> None:
    async with served(api_keys=("secret", "other")) as server:
        response = await server.client.get(f"http://server{path}", headers=headers)
        error = check_error(response, 401)
        assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        for open_path in ("/health", "/health/live", "/health/ready"):
            assert (await server.client.get(open_path)).status_code == 200


async def test_any_of_the_keys_opens() -> None:
    async with served(api_keys=("secret", "other")) as server:
        for key in ("secret", "other"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/models", "/health/../v1/models", "/api/health/../v1/models", "/apihealth"])
async def test_a_path_prefix_opens_nothing(path: str) -> None:
    async with served(api_keys=("secret",)) as server:
        assert await status(server.app, "GET", path, root_path="/api") == 401


async def test_requests_keep_the_id_their_client_gave() -> None:
    async with served() as server:
        for path in ("/health", "/nope"):
            response = await server.client.get(path, headers={"x-request-id": "abc-1.2:3"})
            assert response.headers["x-request-id"] == "abc-1.2:3"
        body = {"prompt": "a", "stream": True}
        response = await server.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\tb", "<script>"])
async def test_ids_that_are_not_harmless_are_replaced(given: str) -> None:
    async with served() as server:
        response = await server.client.get("/health", headers=[(b"x-request-id", given.encode())])
    sent = response.headers["x-request-id"]
    assert sent != given
    assert len(sent) == 32


async def test_two_requests_with_one_id_do_not_meet() -> None:
    async with served() as server:
        for _ in range(2):
            headers = {"x-request-id": "same"}
            response = await server.client.post(
                "/v1/completions", json={"prompt": "the", "max_tokens": 64}, headers=headers
            )
            assert response.json()["choices"][0]["text"] == ANSWER
    assert len({request.id for request in server.port.submitted}) == 2


class Broken:
    """A backend with a bug in it."""

    def model(self) -> Any:
        raise RuntimeError("/secret/path at 0x7f00")


async def test_errors_of_our_own_show_nothing_of_the_inside() -> None:
    app = create_app(Broken())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        response = await client.get("/v1/models")
    error = check_error(response, 500)
    assert error["type"] == QuireError.kind
    assert "secret" not in response.text
    assert response.headers["connection"] == "close", "so that the client does not send the next request into a reset"
