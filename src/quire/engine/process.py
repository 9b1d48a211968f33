"""The engine's side of its process: take commands, step, tell. Sleeps in the kernel when there is nothing to do."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any

from quire.engine.engine import Engine
from quire.engine.wire import Abort, Frames, Submit, ToEngine, Update, frame
from quire.errors import InvalidRequest
from quire.values import Tokens

_STATS_EVERY = 0.1
"""Seconds between two statistics while busy."""


class EngineLoop:
    """Drives an engine from a socket. `metrics` makes the snapshot that /metrics is rendered from."""

    def __init__(self, engine: Engine, link: socket.socket, metrics: Callable[[], dict[str, Any]]) -> None:
        self.engine, self.link, self.metrics = engine, link, metrics
        self.frames = Frames(ToEngine)
        self.refused: list[Tokens] = []
        self.told = float("-inf")

    def run(self) -> None:
        """Until the front goes away, in the middle of a sentence or not."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._tell([])
            while self._listen():
                events = self.engine.step()
                if self.refused:
                    events, self.refused = self.refused + events, []
                self._tell(events)

    def _listen(self) -> bool:
        """Take what has been said; wait for it when idle. False: the front is gone."""
        busy = self.engine.has_pending_work or bool(self.refused)
        while select.select([self.link], [], [], 0 if busy else None)[0]:
            if not (data := self.link.recv(1 << 20)):
                return False
            for message in self.frames.feed(data):
                self._obey(message)
            busy = True
        return True

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                try:
                    self.engine.add(request)
                except InvalidRequest as error:
                    self.refused.append(Tokens(request.id, (), "error", error=str(error)))
        elif isinstance(message, Abort):
            for id in message.ids:
                self.engine.abort(id)

    def _tell(self, events: list[Tokens]) -> None:
        engine, now = self.engine, self.engine.clock.now()
        idle = not engine.has_pending_work
        due = idle or now - self.told >= _STATS_EVERY
        if due:
            self.told = now
        self.link.sendall(
            frame(
                Update(
                    engine.ledger.steps,
                    events,
                    idle,
                    engine.metrics_snapshot() if due else None,
                    self.metrics() if due else None,
                )
            )
        )
