"""A call while it is answered: between the engine's steps and who reads."""

from __future__ import annotations

import asyncio

from quire.backends.answer import Answer
from quire.backends.base import Call, Delta
from quire.errors import QuireError


class Live:
    """A call being answered. `answers` go on; `deltas` are ready to be told; `made` are tokens of answers that ended.

    `error` ends the call for all its answers, after what is ready.
    """

    __slots__ = ("_waiter", "answers", "arrived", "call", "deltas", "error", "made", "max_new", "timer")

    def __init__(self, call: Call, arrived: float, max_new: int) -> None:
        self.call, self.arrived, self.max_new = call, arrived, max_new
        self.answers: dict[str, Answer] = {}
        self.deltas: list[Delta] = []
        self.error: QuireError | None = None
        self.made = 0
        self.timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def news(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
