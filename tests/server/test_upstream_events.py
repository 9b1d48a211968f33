"""The stream of an upstream's answer: every part once and in order, however slowly it is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.errors import DeadlineExceeded, Unavailable
from quire.server.proxy import UpstreamEvents

pytestmark = pytest.mark.anyio

PARTS = [b"data: %d\n\n" % i for i in range(8)]


class Upstream:
    """An answer whose parts are there at once."""

    def __init__(self, *parts: bytes | Exception) -> None:
        self.parts = list(parts)
        self.num_read = 0
        self.closed = False

    async def read(self) -> bytes:
        if not self.parts:
            return b""
        self.num_read += 1
        part = self.parts.pop(0)
        if isinstance(part, Exception):
            raise part
        return part

    def close(self) -> None:
        self.closed = True


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_part_waits_until_the_one_before_is_taken() -> None:
    upstream: Any = Upstream(*PARTS)
    events = UpstreamEvents(upstream, None)
    taken: list[bytes] = []
    for i in range(len(PARTS)):
        await turns()
        assert upstream.num_read == i + 1, "no more is fetched than the reader takes"
        taken += events.take() or ()
        assert events.take() == []
    await turns()
    assert taken == PARTS and events.take() is None
    events.close()
    assert upstream.closed


async def test_an_error_comes_after_the_parts_before_it() -> None:
    upstream: Any = Upstream(*PARTS[:2], Unavailable("gone"))
    events = UpstreamEvents(upstream, None)
    seen = []
    for _ in range(2):
        await turns()
        seen += events.take() or ()
    await turns()
    assert seen == PARTS[:2]
    with pytest.raises(Unavailable, match="gone"):
        events.take()


async def test_the_reader_is_called_for_each_part_and_for_the_end() -> None:
    upstream: Any = Upstream(*PARTS[:2])
    events = UpstreamEvents(upstream, None)
    calls: list[list[bytes] | None] = []
    events.subscribe(lambda: calls.append(events.take()))
    await turns()
    assert calls == [[PARTS[0]], [PARTS[1]], None]


async def test_an_answer_that_is_late_ends_with_that() -> None:
    upstream: Any = Upstream()
    upstream.read = asyncio.Event().wait
    events = UpstreamEvents(upstream, asyncio.get_running_loop().time() + 0.01)
    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineExceeded):
        events.take()
