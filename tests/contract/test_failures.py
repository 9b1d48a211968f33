"""A failure on the device, or of the engine process, affects as few requests as possible and shows no internals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.streams import hear_all
from tests.contract.unreliable import SECRET, Fate
from tests.contract.wire import ask
from tests.live import Live, serving


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("unreliable"), module="tests.contract.unreliable") as live:
        yield live


def events(body: bytes) -> list[Any]:
    """What a stream said, [DONE] left out."""
    said = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    return [json.loads(event) for event in said if event != b"[DONE]"]


@pytest.mark.parametrize(
    ("fate", "stream"),
    [
        *((Fate.MEMORY, False), (Fate.KERNEL, True)),
        *(pytest.param(fate, fate != Fate.KERNEL, marks=pytest.mark.nightly) for fate in (Fate.MEMORY, Fate.NAN)),
        *((Fate.NAN, False), pytest.param(Fate.KERNEL, False, marks=pytest.mark.nightly)),
    ],
)
def test_a_step_that_fails_costs_only_the_request_that_makes_it_fail(live: Live, fate: Fate, stream: bool) -> None:
    async def story() -> tuple[list[bytes], list[bytes], Any]:
        quiet = await hear_all(live.port, 16, 48)
        streams = asyncio.ensure_future(hear_all(live.port, 16, 48))
        await asyncio.sleep(0.05)
        body = {"prompt": "boo", "seed": int(fate), "max_tokens": 20, "stream": stream, "ignore_eos": True}
        culprit = await ask(live.port, "POST", "/v1/completions", body, seconds=200)
        return quiet, await streams, culprit

    before = live.engine_pid()
    quiet, beside, culprit = asyncio.run(story())
    assert beside == quiet
    assert culprit.status == 500
    error = culprit.json()["error"]
    assert error["type"] == "server_error" and error["message"]
    assert SECRET.encode() not in culprit.body and b"0x" not in culprit.body and b"/" not in culprit.body
    assert live.engine_pid() == before and live.metric("vllm:kv_cache_usage_perc") == 0
    live.settled()
    assert fate == Fate.NAN or SECRET in live.log


def test_a_killed_engine_is_reported_at_once_and_restarts_by_itself(live: Live) -> None:
    async def story() -> None:
        quiet = await hear_all(live.port, 8, 32)
        long = {"prompt": "Long ago", "max_tokens": 1800, "ignore_eos": True}
        streams = [
            asyncio.ensure_future(ask(live.port, "POST", "/v1/completions", {**long, "stream": True}, seconds=300))
            for _ in range(4)
        ]
        whole = asyncio.ensure_future(ask(live.port, "POST", "/v1/completions", long, seconds=300))
        while (await ask(live.port, "GET", "/stats")).json()["active_requests"] < 5:
            await asyncio.sleep(0.02)
        old = live.engine_pid()
        os.kill(old, signal.SIGKILL)
        heard = await asyncio.gather(*streams)
        refused = await whole
        for answer in heard:
            assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
            error = events(answer.body)[-1]["error"]
            assert error["code"] == 503 and error["type"] == "service_unavailable_error"
            assert "engine stopped" in error["message"]
        assert refused.status == 503 and "retry-after" in refused.headers
        assert (await ask(live.port, "GET", "/health/ready")).status == 503
        early = await ask(live.port, "POST", "/v1/completions", {"prompt": "x"})
        assert early.status == 503 and "retry-after" in early.headers
        async with asyncio.timeout(200):
            while (await ask(live.port, "GET", "/health/ready")).status != 200:
                await asyncio.sleep(0.05)
        assert (await ask(live.port, "GET", "/health/live")).status == 200
        assert live.engine_pid() != old
        assert await hear_all(live.port, 8, 32) == quiet

    asyncio.run(story())
    live.settled()


def test_health_stays_200_during_a_long_prefill(live: Live) -> None:
    async def story() -> None:
        long = {"prompt": [7, *range(5, 2000)], "max_tokens": 1}
        answer = asyncio.ensure_future(ask(live.port, "POST", "/v1/completions", long, seconds=600))
        looks = 0
        while not answer.done():
            for path in ("/health/live", "/health/ready"):
                assert (await ask(live.port, "GET", path)).status == 200
            looks += 1
            await asyncio.sleep(0.02)
        assert (await answer).status == 200 and looks > 5

    asyncio.run(story())
