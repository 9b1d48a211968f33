"""A call while it is answered: between the engine's steps and who reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.backends.answer import OutputProcessor
from quire.backends.base import Call, Delta
from quire.errors import QuireError


class ActiveRequest:
    """A call being answered (see base.Answers). `answers` go on; `deltas` are ready to be told; `made` are tokens of
    answers that ended.

    `error` ends the call for all its answers, after what is ready. leave: hears when nobody reads on.
    """

    __slots__ = (
        "_on_close",
        "arrived",
        "call",
        "deltas",
        "error",
        "max_new",
        "num_tokens",
        "on_ready",
        "processors",
        "timer",
    )

    def __init__(self, call: Call, arrived: float, max_new: int, on_close: Callable[[ActiveRequest], None]) -> None:
        self.call, self.arrived, self.max_new, self._on_close = call, arrived, max_new, on_close
        self.processors: dict[str, OutputProcessor] = {}
        self.deltas: list[Delta] = []
        self.error: QuireError | None = None
        self.num_tokens = 0
        self.timer: asyncio.TimerHandle | None = None
        self.on_ready: Callable[[], None] = _no_reader

    def subscribe(self, news: Callable[[], None]) -> None:
        self.on_ready = news

    def take(self) -> list[Delta] | None:
        if self.deltas:
            ready, self.deltas = self.deltas, []
            return ready
        if self.error is not None:
            raise self.error
        return [] if self.processors else None

    def close(self) -> None:
        self.on_ready = _no_reader  # the reader knows us too: or only a search for garbage would find the two
        self._on_close(self)


def _no_reader() -> None:
    """Nobody listens yet."""
