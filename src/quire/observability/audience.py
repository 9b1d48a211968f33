"""Those who watch the live page: each has a short queue of frames, and whoever falls behind begins again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from quire.engine.client import LiveViewClient
from quire.errors import Overloaded

DEPTH = 20
"""Frames a viewer may be behind: three seconds."""

SILENCE = 15.0
"""Seconds after which a viewer gets an empty frame, to show that somebody is there."""

MOST = 64
"""Viewers at once."""


class _Viewer:
    """asking: it waits for a whole frame. behind: it has missed frames and not read since; it will ask when it does."""

    __slots__ = ("asking", "behind", "frames", "news")

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.asking, self.behind = True, False
        self.news = asyncio.Event()


class Audience:
    """Hands one engine's frames to many viewers: the same bytes to all.

    The engine makes frames only while at least one viewer keeps up. One that stops reading holds at most `DEPTH`
    frames until it is found behind, and nothing afterwards.
    """

    def __init__(self, panes: LiveViewClient) -> None:
        self._panes = panes
        self._viewers: set[_Viewer] = set()
        self._making = False
        panes.on_frames(self._seen)

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames as they come, a whole one first, and again after frames were missed; an empty one after a silence.

        Raises Overloaded.
        """
        if len(self._viewers) >= MOST:
            raise Overloaded(f"{MOST} viewers watch already, and no more may", retry_after=10)
        viewer = _Viewer()
        self._viewers.add(viewer)
        try:
            self._look()
            while True:
                if viewer.behind:
                    viewer.behind, viewer.asking = False, True
                    self._look()
                while viewer.frames:
                    yield viewer.frames.popleft()
                if not viewer.behind:
                    viewer.news.clear()
                    try:
                        async with asyncio.timeout(SILENCE):
                            await viewer.news.wait()
                    except TimeoutError:
                        yield b""
        finally:
            self._viewers.discard(viewer)
            self._rest()

    async def explain(self, id: str) -> bytes:
        """What happened to a request as JSON, `null` if it is not known. Raises Unavailable."""
        return await self._panes.explain(id)

    def _look(self) -> None:
        self._making = True
        self._panes.watch(True)

    def _rest(self) -> None:
        if self._making and all(viewer.behind for viewer in self._viewers):
            self._making = False
            self._panes.watch(False)

    def _seen(self, frame: bytes, whole: bool) -> None:
        for viewer in self._viewers:
            if viewer.behind or (viewer.asking and not whole):
                continue
            viewer.asking = False
            if len(viewer.frames) < DEPTH:
                viewer.frames.append(frame)
            else:
                viewer.frames.clear()
                viewer.behind = True
            viewer.news.set()
        self._rest()
