"""The engine's side of its process: take commands, step, tell. Sleeps in the kernel when there is nothing to do."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from quire import heap
from quire.core.constraint import Constraints, NoConstraints
from quire.engine.engine import Engine
from quire.engine.watch import Watch
from quire.engine.window import NoWindow, Window
from quire.engine.wire import Abort, Ask, Forget, Frames, Look, Seen, Submit, ToEngine, Told, Update, frame, submitted
from quire.errors import InvalidRequest, StepFailed
from quire.text.harmless import block
from quire.values import Request, Tokens, failed

_STATS_EVERY = 0.1
"""Seconds between two statistics while busy."""

_REST = 3.0
"""Seconds of idleness after which memory is given back: what traffic with pauses would take again at once is kept."""


class EngineLoop:
    """Drives an engine from a socket. `metrics` makes the snapshot that /metrics is rendered from.

    watch: one of the engine's observers; how long the next step may take.
    """

    def __init__(
        self,
        engine: Engine,
        link: socket.socket,
        metrics: Callable[[], dict[str, Any]],
        watch: Watch,
        constraints: Constraints | None = None,
        window: Window | None = None,
    ) -> None:
        self.engine, self.link, self.metrics, self.watch = engine, link, metrics, watch
        self.constraints: Constraints = NoConstraints() if constraints is None else constraints
        self.window: Window = NoWindow() if window is None else window
        self.frames = Frames(ToEngine)
        self.refused: list[Tokens] = []
        self.told = float("-inf")
        self.taken = 0
        self.rested = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._wakers: set[int] = set()

    def run(self) -> None:
        """Until the front goes away, in the middle of a sentence or not."""
        with self._selector, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._tell([])
            while self._listen():
                events = self.engine.step()
                if self.refused:
                    events, self.refused = self.refused + events, []
                self._tell(events)

    def _listen(self) -> bool:
        """Take what has been said; wait for it when idle, or until the next plan is due. False: the front is gone."""
        busy = self.engine.can_step or bool(self.refused)
        while True:
            heard = self._wait(self.engine.spare()) if busy else self._select(self._patience())
            if self.link.fileno() in heard:
                if not (data := self.link.recv(1 << 20)):
                    return False
                for message in self.frames.feed(data):
                    self._obey(message)
            self._provide()
            if not heard:
                self._rest(idle=not busy)
                return True
            busy, self.rested = True, False

    def _wait(self, seconds: float) -> set[int]:
        """Descriptors with something to read within `seconds`, less up to a millisecond.

        Selectors count in milliseconds and round up; a plan that is late costs more than one that is a little early.
        """
        return self._select(math.floor(seconds * 1e3) * 1e-3)

    def _select(self, seconds: float | None) -> set[int]:
        """Descriptors with something to read within `seconds`; None: however long that takes. Of any number:
        select(2) takes those below 1,024 only, and an inherited one may be above."""
        for waker in self.constraints.wakers():
            if waker not in self._wakers:
                self._wakers.add(waker)
                self._selector.register(waker, selectors.EVENT_READ)
        return {key.fd for key, _ in self._selector.select(seconds)}

    def _patience(self) -> float | None:
        """Seconds to wait for something to be said; None for as long as it takes."""
        patience = self.constraints.patience()
        if self.rested:
            return patience
        return _REST if patience is None else min(patience, _REST)

    def _rest(self, *, idle: bool) -> None:
        """Nothing was said. After work, and once until there is more, give back what the work left free."""
        if idle and not self.rested:
            heap.trim()
        self.rested = idle

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.taken += 1
            for request in submitted(message):
                self._add(request)
        elif isinstance(message, Abort):
            for id in message.ids:
                self.engine.abort(id, message.why)
        elif isinstance(message, Forget):
            self.engine.reset_prefix_cache()
        elif isinstance(message, Look):
            self.window.watch(message.on)
        elif isinstance(message, Ask):
            self.link.sendall(frame(Told(message.number, self._explained(message.id))))

    def _explained(self, id: str) -> bytes:
        try:
            return self.window.explain(id, self.engine.clock.now())
        except Exception:  # nobody's answer depends on it
            print(block(traceback.format_exc()), file=sys.stderr, flush=True)
            return b"null"

    def _picture(self, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        try:
            return self.window.frame(self.engine, now, last=last)
        except Exception:  # as little
            print(block(traceback.format_exc()), file=sys.stderr, flush=True)
            return None

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request, self.constraints.of(request))
        except InvalidRequest as error:
            self.refused.append(failed(request.id, error))
        except Exception as error:  # a request that something chokes on is that request's affair
            print(block(traceback.format_exc()), file=sys.stderr, flush=True)
            why = f"the engine could not take this request ({type(error).__name__})"
            self.refused.append(failed(request.id, StepFailed(why)))

    def _provide(self) -> None:
        for id, made in self.constraints.made():
            if isinstance(made, InvalidRequest):
                self.engine.fail(id, made)
            else:
                self.engine.provide(id, made)

    def _tell(self, events: list[Tokens]) -> None:
        engine, now = self.engine, self.engine.clock.now()
        idle = not engine.can_step
        due = idle or now - self.told >= _STATS_EVERY
        if due:
            self.told = now
        self.link.sendall(
            frame(
                Update(
                    engine.ledger.steps + engine.failures,
                    events,
                    idle,
                    self.taken,
                    self.watch.due(engine.scheduler.budget),
                    engine.metrics_snapshot() if due else None,
                    self.metrics() if due else None,
                )
            )
        )
        if (seen := self._picture(now, last=idle)) is not None:
            self.link.sendall(frame(Seen(*seen)))
