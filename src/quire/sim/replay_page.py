"""A replayed recording as a file that the live page opens: the frames that a viewer would have got."""

from __future__ import annotations

import json
import time
from pathlib import Path

from quire.engine.engine import Engine
from quire.engine.events import Completed, Observer, StepRecord
from quire.observability.live_view import EngineLiveView
from quire.observability.recording_format import Began
from quire.sim.replay_stats import ReplayStats
from quire.types import Request

STORIES = 48
"""Requests, the last ones, whose explanations are in the file."""


class ReplayPage(Observer):
    """Collects a replay's frames. An observer that must come after `stats`, whose history it shows."""

    def __init__(self, stats: ReplayStats) -> None:
        self._stats = stats
        self._view = EngineLiveView(stats.history)
        self._engine: Engine | None = None
        self._frames: list[bytes] = []
        self._now = 0.0

    def begin(self, engine: Engine, began: Began) -> None:
        """Take over the state with which the recording begins."""
        self._engine, self._now = engine, began.clock
        self._view.base, self._view.epoch = began.clock, began.unix
        self._view.watch(True)
        self._take(began.clock)

    def on_submit(self, request: Request, now: float) -> None:
        """See Observer."""
        self._view.on_submit(request, now)
        self._take(now)

    def on_step(self, record: StepRecord) -> None:
        """See Observer."""
        self._view.on_step(record)
        self._take(record.committed)

    def on_end(self, ended: Completed) -> None:
        """See Observer."""
        self._view.on_end(ended)
        self._take(ended.finished)

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """See Observer."""
        self._view.on_failure(reason, suspects, now)

    def _take(self, now: float, *, last: bool = False) -> None:
        assert self._engine is not None
        self._now = max(self._now, now)
        if (frame := self._view.frame(self._engine, self._now, last=last)) is not None:
            self._frames.append(frame[0])

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        self._take(self._now, last=True)
        ids = list(self._stats.history.requests)[-STORIES:]
        stories = ",".join(f"{json.dumps(id)}:{self._view.explain(id, self._now).decode()}" for id in ids)
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        head = json.dumps({"format": "quire live page", "version": 1, "saved": saved})[:-1]
        frames = ",\n".join(frame.decode() for frame in self._frames)
        path.write_text(f'{head},\n"stories":{{{stories}}},\n"frames":[\n{frames}\n]}}\n', encoding="utf-8")
