"""The whole house, from the official client's socket to the K/V page and back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.live import Behind, Live, ended_server, serving, standing


@pytest.fixture(scope="module", params=["native", "upstream"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    with standing(request.param, folder, "--dtype", "float32", "--max-num-seqs", "32") as live:
        yield live


THROUGH_ANOTHER_AT_NIGHT = pytest.mark.parametrize(
    "live", ["native", pytest.param("upstream", marks=pytest.mark.nightly)], indirect=True, scope="module"
)
"""What depends on the server that generates: how answers are passed on is in `tests/server/test_proxy.py`."""


def test_ready_in_little_more_than_twice_what_importing_torch_takes(tmp_path: Path) -> None:
    """Of processor time, which no neighbour takes: that of both processes, their end included."""

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system

    def importing() -> float:
        before = spent()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        return spent() - before

    def starting() -> float:
        before = spent()
        with serving(tmp_path, start=subprocess.Popen):
            pass
        return spent() - before

    before, took, after = importing(), starting(), importing()
    assert took < 2.4 * max(before, after)


@THROUGH_ANOTHER_AT_NIGHT
def test_sixty_four_streams_do_not_mix_and_none_is_lost(live: Live) -> None:
    """Each stream equals its answer among three others, and some what they are alone; twice as many as there are
    seats."""
    prompts = [f"Once upon a time, a {animal} number {i}" for i in range(32) for animal in ("dog", "cat")]
    ask: dict[str, Any] = {"model": "embedded", "temperature": 0, "max_tokens": 24}

    async def story() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False, timeout=1200)
        ) as many:

            async def one(prompt: str) -> str:
                stream = await many.completions.create(prompt=prompt, stream=True, **ask)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(p) for p in prompts))

    crowd = asyncio.run(story())

    def few(prompt: str) -> str:
        return str(live.openai.completions.create(prompt=prompt, **ask).choices[0].text)

    with ThreadPoolExecutor(4) as threads:
        quiet = list(threads.map(few, prompts))
    assert crowd == quiet and len(set(crowd)) > 50
    assert crowd[::9] == [few(prompt) for prompt in prompts[::9]]
    live.settled()
    assert live.stats()["max_batch_observed"] == 32


def test_chat_streams_with_the_official_client(live: Live) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story about a dog and a boat."}]
    ask: dict[str, Any] = {"model": "embedded", "messages": messages, "seed": 5, "max_tokens": 60, "temperature": 0.7}
    whole = live.openai.chat.completions.create(**ask)
    stream = live.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and len(text) > 50
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seeded_answer_is_the_same_in_a_crowd_and_choices_differ(live: Live) -> None:
    ask: dict[str, Any] = {"model": "embedded", "prompt": "The old king", "seed": 11, "max_tokens": 24, "n": 3}
    alone = live.openai.completions.create(**ask)
    together = [
        live.http.build_request("POST", "/v1/completions", json={**ask, "seed": 11 if i == 3 else i + 20})
        for i in range(6)
    ]

    async def crowd() -> list[Any]:
        async with httpx.AsyncClient(trust_env=False, timeout=600) as many:
            return [
                r.json()
                for r in await asyncio.gather(
                    *(many.post(t.url, content=t.content, headers=t.headers) for t in together)
                )
            ]

    again = asyncio.run(crowd())[3]
    texts = [c.text for c in alone.choices]
    assert [c["text"] for c in again["choices"]] == texts and len(set(texts)) == 3


def test_a_client_that_hangs_up_frees_its_pages(live: Live) -> None:
    async def leaves(streaming: bool) -> None:
        body = {"model": "embedded", "prompt": "Long ago", "max_tokens": 1500, "ignore_eos": True, "stream": streaming}
        async with httpx.AsyncClient(base_url=live.url, timeout=600, trust_env=False) as rude:
            asked = asyncio.create_task(rude.post("/v1/completions", json=body))
            while not live.stats()["active_requests"]:
                await asyncio.sleep(0.01)
            asked.cancel()

    before = live.settled()["completed_requests"]
    for streaming in (True, False):
        asyncio.run(leaves(streaming))
        live.settled()
    began = time.monotonic()
    while live.settled()["completed_requests"] < before + 2:
        assert time.monotonic() - began < 100
    assert live.metric("vllm:request_success_total", finished_reason="abort") >= 2


OVERLONG = {"model": "embedded", "prompt": "a b c " * 3000, "max_tokens": 4}
BAD: list[tuple[str, dict[str, Any] | bytes, int, str | None]] = [
    ("wrong type", {"model": "embedded", "prompt": "x", "max_tokens": "ten"}, 400, "max_tokens"),
    ("unknown field", {"model": "embedded", "prompt": "x", "max_tokns": 4}, 400, "max_tokns"),
    ("NaN", b'{"model": "embedded", "prompt": "x", "temperature": NaN}', 400, None),
    ("NaN as text", {"model": "embedded", "prompt": "x", "temperature": "nan"}, 400, "temperature"),
    ("out of vocabulary", {"model": "embedded", "prompt": [1, 2, 99999]}, 400, "prompt"),
    ("over-long", OVERLONG, 400, "prompt"),
    ("unknown model", {"model": "gpt-9", "prompt": "x"}, 404, "model"),
    ("malformed", b'{"model": "embedded", "prompt": ', 400, None),
    ("ten megabytes", {"model": "embedded", "prompt": "x" * (10 << 20)}, 413, None),
    ("empty prompt", {"model": "embedded", "prompt": []}, 400, "prompt"),
    ("no prompt", {"model": "embedded"}, 400, "prompt"),
    ("too hot", {"model": "embedded", "prompt": "x", "temperature": 1e9}, 400, "temperature"),
]


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_ended_by_a_stop_string_says_so_when_asked(live: Live, n: int) -> None:
    """The end is found in the front while the engine runs ahead, and is the engine's to tell of."""
    ask: dict[str, Any] = {"model": "embedded", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 500}
    whole = live.openai.completions.create(**{**ask, "max_tokens": 40}).choices[0].text
    stop = whole[60:66]
    answer = live.openai.completions.create(**ask, stop=[stop], n=n, extra_body={"ignore_eos": True})
    assert all(choice.finish_reason == "stop" and stop not in choice.text for choice in answer.choices)
    assert answer.usage is not None
    live.settled()
    story = live.http.get(f"/v1/requests/{answer.id}/explain").json()
    assert story["id"] == answer.id and len(story["answers"]) == (1 if isinstance(live, Behind) else n)
    counted, made = answer.usage.completion_tokens, [told["generated_tokens"] for told in story["answers"]]
    assert counted <= sum(made) <= counted + 4 * n  # what was made after the stop is counted by nobody else
    for told in story["answers"]:
        assert (told["state"], told["finish_reason"]) == ("finished", "stop")
        [end] = [event["says"] for event in told["events"] if event["what"] == "finished"]
        assert "stop" in end and end.endswith(f", with {told['generated_tokens']} tokens generated")


@pytest.mark.parametrize(("name", "body", "status", "param"), BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_refused_by_name_and_the_next_request_is_served(
    live: Live, name: str, body: dict[str, Any] | bytes, status: int, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = live.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert param is None or error["param"] == param
    fine = live.http.post("/v1/completions", json={"model": "embedded", "prompt": "x", "max_tokens": 2})
    assert fine.status_code == 200


def test_unknown_routes_and_methods_answer_in_the_same_shape(live: Live) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/stats", 405)):
        answer = live.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_counters_equal_what_clients_saw(live: Live) -> None:
    live.settled()
    made, asked = live.metric("vllm:generation_tokens_total"), live.metric("vllm:prompt_tokens_total")
    usage = [
        live.openai.completions.create(model="embedded", prompt=f"A tale {i}", max_tokens=5 + i).usage for i in range(6)
    ]
    live.settled()
    assert live.metric("vllm:generation_tokens_total") - made == sum(u.completion_tokens for u in usage if u)
    assert live.metric("vllm:prompt_tokens_total") - asked == sum(u.prompt_tokens for u in usage if u)
    assert live.metric("vllm:num_requests_running") == 0 and live.metric("vllm:kv_cache_usage_perc") == 0


@THROUGH_ANOTHER_AT_NIGHT
def test_an_idle_server_sleeps(live: Live) -> None:
    live.settled()

    def ticks() -> int:
        total = 0
        for pid in (live.process.pid, live.engine_pid()):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    def spent() -> float:
        before = ticks()
        time.sleep(3.0)
        return (ticks() - before) / os.sysconf("SC_CLK_TCK")

    assert any(spent() <= 0.03 for _ in range(5))  # what ends a request may come late on a busy machine


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-num-seqs", "1", "--max-num-queued-reqs", "2") as small:
        body = {"model": "embedded", "prompt": "x", "max_tokens": 150, "ignore_eos": True}

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=small.url, trust_env=False, timeout=600) as many:
                return await asyncio.gather(*(many.post("/v1/completions", json=body) for _ in range(8)))

        answers = asyncio.run(crowd())
        refused = [a for a in answers if a.status_code == 429]
        assert len(refused) >= 4 and sum(a.status_code == 200 for a in answers) == 8 - len(refused)
        assert all(int(a.headers["retry-after"]) >= 1 and a.json()["error"]["type"] for a in refused)


def test_a_killed_engine_fails_what_is_in_flight_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path, start=subprocess.Popen) as live:
        body = {"model": "embedded", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(live.engine_pid(), signal.SIGKILL)
            rest = list(lines)
        assert live.http.get("/health/ready").status_code == 503, "said at once, not when another engine is there"
        assert rest[-2] == "data: [DONE]" or "data: [DONE]" in rest
        assert any("error" in json.loads(line[6:]) for line in rest if line.startswith("data: {"))
        began = time.monotonic()
        while live.http.get("/health/ready").status_code != 200:
            assert time.monotonic() - began < 300
            time.sleep(0.02)
        assert live.http.post("/v1/completions", json={"model": "embedded", "prompt": "x"}).status_code == 200


def test_sigterm_lets_running_answers_finish(tmp_path: Path) -> None:
    with serving(tmp_path, "--shutdown-timeout", "600") as live:
        body = {"model": "embedded", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.process.send_signal(signal.SIGTERM)
            late = {"model": "embedded", "prompt": "x", "max_tokens": 1}
            while (refused := live.http.post("/v1/completions", json=late)).status_code == 200:
                time.sleep(0.01)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_key_covers_every_route_but_health(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-key", "sesame") as live:
        for path in ("/v1/models", "/stats", "/metrics", "/version"):
            assert live.http.get(path).status_code == 401
            assert live.http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert live.http.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert live.http.get("/health").status_code == 200
        assert "sesame" not in live.log


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("./nowhere",), "nowhere"),
        (("--max-model-len", "99999"), "max_model_len"),
        (("--num-gpu-blocks-overide", "3"), "--num-gpu-blocks-override"),
        (("--device", "cuda"), "cuda"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(args: tuple[str, ...], says: str) -> None:
    done = ended_server(*args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
