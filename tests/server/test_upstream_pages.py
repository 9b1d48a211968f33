"""The engines behind a relay on its live page: a relay in front of a relay, whose page is the one that is shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from quire.server import upstream_pages
from tests.frontend.stub import stub
from tests.server.doubles import check_error
from tests.server.relayed import Relayed, relaying

pytestmark = pytest.mark.anyio


async def message(lines: Any) -> tuple[int, dict[str, Any]]:
    """The next message: the number of a server and a frame of it."""
    number, _, text = (await asyncio.wait_for(anext(lines), 100))[6:].partition(" ")
    return int(number), json.loads(text)


def lines_of(response: httpx.Response) -> Any:
    return (line async for line in response.aiter_lines() if line.startswith("data: "))


async def test_frames_of_the_servers_behind_come_in_one_stream_with_their_numbers() -> None:
    async with stub() as server, relaying(server) as inner, relaying(server, address(inner)) as outer:
        async with outer.client.stream("GET", "/ui/servers") as seen:
            assert seen.headers["content-type"].startswith("text/event-stream")
            lines = lines_of(seen)
            first = dict([await message(lines), await message(lines)])
            assert first[0] == {"why": "it has no live page"}
            assert first[1]["whole"]["requests"] == []
            await inner.text("fine")
            number, frame = await message(lines)
            while number == 0:
                number, frame = await message(lines)
            assert [what for what, *_ in frame["events"]] == ["new", "open", "first", "end"]
        await unwatched(inner)
        told = await outer.client.get("/ui/servers/1/requests/cmpl-7/explain")
        assert told.json() == (await inner.client.get("/v1/requests/cmpl-7/explain")).json()
        check_error(await outer.client.get("/ui/servers/1/requests/x/explain"), 404)
        check_error(await outer.client.get("/ui/servers/7/requests/x/explain"), 404, words="there are 2")


def address(relay: Relayed) -> Any:
    return str(relay.client.base_url)


async def unwatched(relay: Relayed) -> None:
    """Once nobody makes it draw frames: the viewer's connection is gone, and with it ours."""
    for _ in range(6000):
        if not relay.timeline.watched:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("frames are still made")


async def test_a_server_without_frames_says_why() -> None:
    locked = {"api_keys": ("client",), "admin_keys": ("boss",)}
    async with stub() as gone:
        away: Any = gone.url
    async with stub() as server, relaying(server, **locked) as inner:
        outer = relaying(server, address(inner), away, key="client")
        async with outer as relay, relay.client.stream("GET", "/ui/servers") as seen:
            lines = lines_of(seen)
            found = dict([await message(lines) for _ in range(3)])
    assert found[0]["why"] == "it has no live page"
    assert found[1]["why"] == "it wants its admin key: set --upstream-api-key to that"
    assert found[2]["why"] == "nothing listens there"


async def test_a_page_that_fails_in_an_unexpected_way_says_so_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        name = "http://x:1"

        async def frames(self) -> AsyncGenerator[bytes, None]:
            yield b'{"now":1}'
            raise ValueError("no frame")

        async def explanation(self, id: str) -> tuple[int, bytes]:
            raise AssertionError

    monkeypatch.setattr(upstream_pages, "_RETRY", 0.0)
    frames = asyncio.Queue[bytes](1)
    following = asyncio.ensure_future(upstream_pages._follow(3, Failing(), frames))
    found = [await asyncio.wait_for(frames.get(), 100) for _ in range(4)]
    following.cancel()
    assert found == [b'3 {"now":1}', b'3 {"why":"its frames cannot be read (ValueError)"}'] * 2
    assert "http://x:1" in caplog.text and "no frame" in caplog.text


async def test_there_are_only_so_many_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_pages, "MAX_VIEWERS", 1)
    async with stub() as server, relaying(server) as relay, relay.client.stream("GET", "/ui/servers") as seen:
        await anext(lines_of(seen))
        check_error(await relay.client.get("/ui/servers"), 429, words="viewers of the upstreams are connected")
