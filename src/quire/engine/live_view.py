"""Looking into an engine from outside: the door through which the live page's stream and explanations leave."""

from __future__ import annotations

from typing import Protocol

from quire.engine.engine import Engine


class LiveView(Protocol):
    """What those who watch see of an engine. Costs nothing while nobody does."""

    def watch(self, on: bool) -> None:
        """Somebody watches and begins with a whole picture; or nobody does any more."""

    def frame(self, engine: Engine, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        """What is to be told now, and whether it is a whole picture. last: the engine falls idle after this."""

    def explain(self, id: str, now: float) -> bytes:
        """What happened to a request (to all, if `id` is empty), as JSON."""


class NoLiveView:
    """Nobody can look in: the degenerate window."""

    def watch(self, on: bool) -> None:
        """There is nothing to see."""

    def frame(self, engine: Engine, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        return None

    def explain(self, id: str, now: float) -> bytes:
        return b"null"
