"""Many clients that leave, that do not read, that do not fit: all others are served, and nothing remains."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.streams import hear_all
from tests.contract.wire import HOST, Answer, ask, request
from tests.live import Live, serving

QUEUE = 64


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options = (
        "--dtype",
        "float32",
        "--max-num-queued-reqs",
        str(QUEUE),
        "--max-num-seqs",
        "32",
        "--write-timeout",
        "1",
    )
    with serving(tmp_path_factory.mktemp("storms"), *options) as live:
        yield live


def stream(**more: Any) -> bytes:
    body = {"prompt": "Once upon a time", "ignore_eos": True, "stream": True, **more}
    return request("POST", "/v1/completions", body, {"Connection": "keep-alive"})


def ended(live: Live) -> int:
    return int(live.stats()["completed_requests"])


async def drop(port: int, after: int) -> None:
    """Ask for a stream and leave: before it begins, or in the middle of it; by a reset, or in order."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(stream(max_tokens=1500))
    for _ in range(after % 4):
        await reader.readuntil(b"data: ")
    if after % 3:
        writer.transport.abort()
    else:
        writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def test_200_streams_opened_and_dropped_do_not_affect_others(live: Live) -> None:
    async def story() -> tuple[list[bytes], list[bytes]]:
        quiet = await hear_all(live.port, 8)
        beside = asyncio.ensure_future(hear_all(live.port, 8))
        for first in range(0, 200, 20):
            async with asyncio.timeout(300):
                await asyncio.gather(*(drop(live.port, i) for i in range(first, first + 20)))
        return quiet, await beside

    quiet, beside = asyncio.run(story())
    assert beside == quiet
    live.settled()
    assert live.metric("vllm:kv_cache_usage_perc") == 0 and live.metric("vllm:num_requests_waiting") == 0


def deaf(port: int) -> socket.socket:
    """Ask for a long stream, and read none of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((HOST, port))
    sock.sendall(stream(max_tokens=1500, logprobs=5))
    return sock


@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.nightly)])
def test_slow_readers_are_aborted_within_bounded_memory(live: Live, count: int) -> None:
    async def story() -> tuple[list[bytes], list[bytes], int]:
        quiet = await hear_all(live.port, 8)
        before = live.memory().front
        readers.extend(deaf(live.port) for _ in range(count))
        most = 0
        while not (stats := live.stats())["active_requests"] or stats["waiting_requests"] > QUEUE - 8:
            await asyncio.sleep(0.1)  # until the queue has room for eight more
        beside = await hear_all(live.port, 8)
        deadline = time.monotonic() + 600
        while live.stats()["active_requests"] or live.stats()["waiting_requests"]:
            most = max(most, live.memory().front)
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        return quiet, beside, most - before

    readers: list[socket.socket] = []
    aborted = live.metric("vllm:request_success_total", finished_reason="abort")
    try:
        quiet, beside, grown = asyncio.run(story())
    finally:
        for reader in readers:
            reader.close()
    assert beside == quiet
    assert grown < count * (4 << 20)
    assert live.metric("vllm:request_success_total", finished_reason="abort") - aborted > count / 2
    live.settled()


def test_1000_requests_at_a_queue_of_64_are_all_answered_or_refused(live: Live) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def story() -> tuple[Answer, list[Answer]]:
        quiet = await ask(live.port, "POST", "/v1/completions", body)
        answers = [ask(live.port, "POST", "/v1/completions", body, seconds=600) for _ in range(1000)]
        return quiet, await asyncio.gather(*answers)

    before = ended(live)
    quiet, answers = asyncio.run(story())
    counts = Counter(answer.status for answer in answers)
    assert counts[200] + counts[429] == 1000 and counts[200] >= QUEUE and counts[429], counts
    said = quiet.json()["choices"][0]["text"]
    assert all(answer.json()["choices"][0]["text"] == said for answer in answers if answer.status == 200)
    for answer in answers:
        if answer.status == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "rate_limit_error"
    live.settled()
    assert ended(live) - before == counts[200] + 1
    assert live.metric("vllm:kv_cache_usage_perc") == 0
