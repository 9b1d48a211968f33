"""One replica's engine, without Ray Serve around it."""

from __future__ import annotations

import asyncio

import pytest

from quire.replicas import engine_replica
from quire.replicas.engine_replica import EngineReplica
from quire.replicas.messages import Addressed


class Engine:
    """Keeps whether it makes frames."""

    def __init__(self) -> None:
        self.watched: list[bool] = []

    def watch(self, on: bool) -> None:
        self.watched.append(on)


def test_frames_are_made_until_no_viewer_has_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second viewer, who begins with a whole frame, leaves no timer of the first behind, which would stop them."""

    async def story() -> None:
        replica, engine = object.__new__(EngineReplica), Engine()
        replica._engine, replica._frames, replica._unwatch = engine, [], None  # type: ignore[assignment]
        timers = list[asyncio.TimerHandle]()
        for whole in (True, False, True, False):
            await replica.frames(Addressed("r"), whole)
            assert replica._unwatch is not None
            timers.append(replica._unwatch)
        assert [timer.cancelled() for timer in timers] == [True, True, True, False]
        assert engine.watched == [True, True]
        replica._stop_watching()
        assert engine.watched == [True, True, False]

    monkeypatch.setattr(engine_replica, "_UNWATCHED", 1e6)
    asyncio.run(story())
