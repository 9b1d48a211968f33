"""Many viewers of one engine: the same frames to all, and nothing for those who do not read."""

from __future__ import annotations

import asyncio

import pytest

from quire.errors import Overloaded
from quire.observability.live_view import MAX_VIEWER_FRAMES, MAX_VIEWERS, Broadcaster


class Engine:
    """The front's side of a window, played by a test."""

    def __init__(self) -> None:
        self.looks: list[bool] = []
        self.send = lambda frame, whole: None

    def watch(self, on: bool) -> None:
        self.looks.append(on)

    def on_frames(self, on_frame) -> None:  # type: ignore[no-untyped-def]
        self.send = on_frame

    async def explain(self, id: str) -> bytes:
        return id.encode()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_a_viewer_begins_with_a_whole_frame_and_gets_all_after_it() -> None:
    async def story() -> None:
        engine = Engine()
        frames = Broadcaster(engine).watch()
        first = asyncio.ensure_future(anext(frames))
        await settle()
        assert engine.looks == [True]
        engine.send(b"half", False)
        engine.send(b"whole", True)
        engine.send(b"next", False)
        assert await first == b"whole"
        assert await anext(frames) == b"next"
        await frames.aclose()
        assert engine.looks == [True, False]

    asyncio.run(story())


def test_who_stops_reading_holds_little_and_begins_again() -> None:
    async def story() -> None:
        engine = Engine()
        audience = Broadcaster(engine)
        slow = audience.watch()
        first = asyncio.ensure_future(anext(slow))
        await settle()
        engine.send(b"whole", True)
        assert await first == b"whole"
        for i in range(MAX_VIEWER_FRAMES + 1):
            engine.send(b"%d" % i, False)
        assert engine.looks == [True, False], "no frames are made for one that is behind"
        again = asyncio.ensure_future(anext(slow))
        await settle()
        assert engine.looks[-1] is True
        engine.send(b"a half one", False)
        engine.send(b"whole again", True)
        assert await again == b"whole again"
        await slow.aclose()
        assert audience.viewers == 0

    asyncio.run(story())


def test_one_that_is_behind_costs_the_others_nothing() -> None:
    async def story() -> None:
        engine = Engine()
        audience = Broadcaster(engine)
        slow, quick = audience.watch(), audience.watch()
        waiting = [asyncio.ensure_future(anext(viewer)) for viewer in (slow, quick)]
        await settle()
        engine.send(b"whole", True)
        assert await asyncio.gather(*waiting) == [b"whole", b"whole"]
        for i in range(3 * MAX_VIEWER_FRAMES):
            engine.send(b"%d" % i, False)
            assert await anext(quick) == b"%d" % i
        assert engine.looks[-1] is True
        await quick.aclose()
        assert engine.looks[-1] is False
        await slow.aclose()

    asyncio.run(story())


def test_a_silence_is_broken_by_an_empty_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.observability.live_view.KEEPALIVE_INTERVAL", 0.01)

    async def story() -> None:
        engine = Engine()
        frames = Broadcaster(engine).watch()
        assert await anext(frames) == b""
        engine.send(b"whole", True)
        assert await anext(frames) == b"whole"
        await frames.aclose()

    asyncio.run(story())


def test_there_is_a_most() -> None:
    async def story() -> None:
        audience = Broadcaster(Engine())
        viewers = [audience.watch() for _ in range(MAX_VIEWERS)]
        tasks = [asyncio.ensure_future(anext(viewer)) for viewer in viewers]
        await settle()
        with pytest.raises(Overloaded):
            await anext(audience.watch())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for viewer in viewers:
            await viewer.aclose()
        assert audience.viewers == 0

    asyncio.run(story())
