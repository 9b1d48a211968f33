"""The live page of a relay over the life of its requests, and how its frames reach viewers, as written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.client import OnFrame
from quire.errors import Overloaded
from quire.observability import live_view
from quire.observability.live_view import Broadcaster, RequestTimeline
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"


def test_requests_of_a_relay_are_shown_as_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "FRAME_INTERVAL", 1e9)
    lines: list[str] = []
    now = [10.0]

    async def story() -> None:
        timeline = RequestTimeline("two servers", clock=lambda: now[0])
        timeline.epoch = 0.0
        timeline.on_frames(lambda frame, whole: lines.append(f"{whole} {frame.decode()}"))

        async def seen(seconds: float, *ids: str) -> None:
            now[0] += seconds
            timeline._tick()
            for id in ids:
                lines.append((await timeline.explain(id)).decode())

        unseen = timeline.on_ask("early", 5, now[0])
        timeline.watch(True)
        await asyncio.sleep(0)
        a = timeline.on_ask("a", 0, now[0])
        b = timeline.on_ask("b", 99, now[0] + 0.5)
        await seen(1.0, "a", "")
        timeline.on_sent(a, "http://x:1", 11.0)
        timeline.on_sent(b, "http://x:1", 11.25)
        timeline.on_sent(b, "http://y:2", 11.5)
        timeline.on_made(b, 2, 12.0)
        timeline.on_made(b, 3, 12.5)
        timeline.on_made(a, 1, 12.75)
        await seen(3.0, "b")
        await seen(1.0)
        timeline.on_end(b, "cmpl-9", "length", 7, 6, 15.5)
        timeline.on_made(a, 1, 15.75)
        timeline.on_end(unseen, "", "error", 0, 0, 15.75)
        await seen(1.0, "cmpl-9", "b", "early", "nothing")
        await seen(live_view.WHOLE_INTERVAL)
        timeline.watch(True)
        await asyncio.sleep(0)
        timeline.watch(False)
        timeline.on_end(a, "cmpl-1", "stop", 3, 2, 40.0)
        await asyncio.sleep(0)
        lines.append(f"running {len(timeline._running)} timer {timeline._timer} {timeline._fresh} {timeline._events}")
        timeline.watch(True)
        await asyncio.sleep(0)
        timeline.watch(False)
        lines.append((await timeline.explain("")).decode())

    asyncio.run(story())
    check(EXPECTED / "relayed-page.txt", "\n".join(lines))


class Frames:
    """A client that writes down whether it is watched."""

    def __init__(self) -> None:
        self.watched: list[bool] = []
        self.send: OnFrame = lambda frame, whole: None

    def watch(self, on: bool) -> None:
        self.watched.append(on)

    def on_frames(self, on_frame: OnFrame) -> None:
        self.send = on_frame

    async def explain(self, id: str) -> bytes:
        return json.dumps(id).encode()


def watched(scene: Callable[[Frames, Broadcaster], object]) -> Frames:
    async def run() -> Frames:
        frames = Frames()
        await scene(frames, Broadcaster(frames))  # type: ignore[misc]
        return frames

    return asyncio.run(run())


def test_a_viewer_begins_with_a_whole_frame_and_the_last_one_to_leave_stops_them() -> None:
    async def scene(frames: Frames, page: Broadcaster) -> None:
        first, second = page.watch(), page.watch()
        reads = [asyncio.ensure_future(one.__anext__()) for one in (first, second)]
        await asyncio.sleep(0)
        assert page.viewers == 2
        frames.send(b"changes", False)
        frames.send(b"whole", True)
        frames.send(b"more", False)
        assert [await read for read in reads] == [b"whole", b"whole"]
        third = asyncio.ensure_future((late := page.watch()).__anext__())
        await asyncio.sleep(0)
        frames.send(b"again", False)
        frames.send(b"whole again", True)
        assert await third == b"whole again"
        assert [await first.__anext__() for _ in range(3)] == [b"more", b"again", b"whole again"]
        await first.aclose()
        await late.aclose()
        assert frames.watched == [True, True, True] and page.viewers == 1
        await second.aclose()
        assert frames.watched == [True, True, True, False] and page.viewers == 0
        assert await page.explain("x") == b'"x"'

    watched(scene)


def test_a_viewer_that_does_not_read_gets_no_frames_until_it_does_and_then_a_whole_one() -> None:
    async def scene(frames: Frames, page: Broadcaster) -> None:
        slow = page.watch()
        read = asyncio.ensure_future(slow.__anext__())
        await asyncio.sleep(0)
        frames.send(b"first", True)
        assert await read == b"first"
        for i in range(live_view.MAX_VIEWER_FRAMES):
            frames.send(b"%d" % i, False)
        assert frames.watched == [True]
        frames.send(b"one too many", False)
        assert frames.watched == [True, False], "nobody keeps up"
        frames.send(b"not kept", True)
        read = asyncio.ensure_future(slow.__anext__())
        await asyncio.sleep(0)
        assert frames.watched == [True, False, True]
        frames.send(b"changes", False)
        frames.send(b"whole", True)
        assert await read == b"whole"
        await slow.aclose()

    watched(scene)


def test_a_quiet_page_is_kept_alive_and_viewers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(frames: Frames, page: Broadcaster) -> None:
        monkeypatch.setattr(live_view, "KEEPALIVE_INTERVAL", 0.001)
        monkeypatch.setattr(live_view, "MAX_VIEWERS", 2)
        viewers = [page.watch() for _ in range(3)]
        assert [await one.__anext__() for one in viewers[:2]] == [b"", b""]
        with pytest.raises(Overloaded, match="2 viewers") as refused:
            await viewers[2].__anext__()
        assert refused.value.retry_after == 10
        for one in viewers:
            await one.aclose()
        assert page.viewers == 0

    watched(scene)
