"""The short form, `POST /generate`, and the server's own bounds on new tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.limits import Limits
from tests.server.doubles import check_error, served

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"prompt": "the", "max_tokens": 5, "temperature": 0}
FIELDS = {"request_id", "text", "generated_tokens", "latency_ms", "finish_reason", "model"}


def events(text: str) -> list[str]:
    return [each.removeprefix("data: ") for each in text.split("\n\n") if each.startswith("data: ")]


@pytest.mark.parametrize("path", ["/generate", "/v1/generate"])
@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
async def test_a_stream_adds_up_to_the_answer_under_either_path_and_name(path: str, name: str) -> None:
    body = {"prompt": "the", name: 5, "temperature": 0}
    async with served() as server:
        whole = (await server.post(path, **body)).json()
        assert whole.keys() == FIELDS and whole["generated_tokens"] == 5 and whole["finish_reason"] == "length"
        streamed = await server.post(path, **body, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *deltas, done = events(streamed.text)
        assert done == "[DONE]" and len(deltas) > 1
        parsed = [json.loads(each) for each in deltas]
        assert "".join(each["text"] for each in parsed) == whole["text"]
        assert all(each.keys() == {"text"} for each in parsed[:-1])
        changing = {"request_id", "latency_ms", "text"}
        assert parsed[-1].keys() == FIELDS
        assert all(parsed[-1][field] == whole[field] for field in FIELDS - changing)


async def test_what_other_servers_call_it_and_both_names_are_refused_by_name() -> None:
    async with served() as server:
        check_error(await server.post("/generate", **BODY, max_new_tokens=5), 400, "max_new_tokens", "send one of them")
        check_error(await server.post("/generate", prompt="the", max_new_tokens=-3), 400, "max_new_tokens", "between 1")
        check_error(await server.post("/generate", inputs="the"), 400, "inputs", "prompt")
        check_error(await server.post("/generate", text="the"), 400, "text", "unknown field")
        for extra in ({"parameters": {"top_p": 0.5}}, {"sampling_params": {"top_p": 0.5}}):
            [name] = extra
            check_error(await server.post("/generate", **BODY, **extra), 400, name)


REQUESTS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "the"},
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 30},
    "/v1/responses": {"input": "the"},
    "/api/generate": {"prompt": "the", "stream": False},
    "/api/chat": {"messages": [{"role": "user", "content": "the"}], "stream": False},
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_every_endpoint_heeds_the_bound_and_the_default(path: str) -> None:
    said = "max_tokens" in REQUESTS[path]
    for limits, wanted in (
        (Limits(max_new_tokens=3), 3),
        (Limits(default_max_new_tokens=4), 30 if said else 4),
        (Limits(max_new_tokens=3, default_max_new_tokens=7), 3),
        (Limits(max_new_tokens=7, default_max_new_tokens=4), 7 if said else 4),
    ):
        async with served(limits=limits) as server:
            response = await server.post(path, **REQUESTS[path])
            assert response.status_code == 200, response.text
            assert server.port.submitted[-1].max_new_tokens == wanted


async def test_more_than_the_bound_is_cut_and_more_than_the_context_still_refused() -> None:
    async with served(limits=Limits(max_new_tokens=3)) as server:
        made = (await server.post("/generate", **BODY)).json()
        assert (made["generated_tokens"], made["finish_reason"]) == (3, "length")
