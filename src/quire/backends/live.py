"""A call while it is answered: between the engine's steps and who reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.backends.answer import Answer
from quire.backends.base import Call, Delta
from quire.errors import QuireError


class Live:
    """A call being answered (see base.Answers). `answers` go on; `deltas` are ready to be told; `made` are tokens of
    answers that ended.

    `error` ends the call for all its answers, after what is ready. leave: hears when nobody reads on.
    """

    __slots__ = ("_leave", "answers", "arrived", "call", "deltas", "error", "made", "max_new", "news", "timer")

    def __init__(self, call: Call, arrived: float, max_new: int, leave: Callable[[Live], None]) -> None:
        self.call, self.arrived, self.max_new, self._leave = call, arrived, max_new, leave
        self.answers: dict[str, Answer] = {}
        self.deltas: list[Delta] = []
        self.error: QuireError | None = None
        self.made = 0
        self.timer: asyncio.TimerHandle | None = None
        self.news: Callable[[], None] = _nobody

    def listen(self, news: Callable[[], None]) -> None:
        self.news = news

    def take(self) -> list[Delta] | None:
        if self.deltas:
            ready, self.deltas = self.deltas, []
            return ready
        if self.error is not None:
            raise self.error
        return [] if self.answers else None

    def close(self) -> None:
        self.news = _nobody  # the reader knows us too: or only a search for garbage would find the two
        self._leave(self)


def _nobody() -> None:
    """Nobody listens yet."""
