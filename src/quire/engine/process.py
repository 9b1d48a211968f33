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
from quire.engine.engine import Engine
from quire.engine.live_view import LiveView, NoLiveView
from quire.engine.protocol import (
    Abort,
    Explain,
    Explanation,
    FrameReader,
    LiveFrame,
    ResetPrefixCache,
    Submit,
    ToEngine,
    Update,
    WatchLive,
    encode_frame,
    submitted,
)
from quire.engine.step_watch import StepWatch
from quire.errors import InvalidRequest, StepFailed
from quire.scheduler.constraint import Constraints, NoConstraints
from quire.tokenization.escape import escape_control_lines
from quire.types import Request, RequestStepOutput, error_output

_STATS_EVERY = 0.1
"""Seconds between two statistics while busy."""

_TRIM_AFTER = 3.0
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
        step_watch: StepWatch,
        constraints: Constraints | None = None,
        live_view: LiveView | None = None,
    ) -> None:
        self.engine, self.link, self.metrics, self.step_watch = engine, link, metrics, step_watch
        self.constraints: Constraints = NoConstraints() if constraints is None else constraints
        self.live_view: LiveView = NoLiveView() if live_view is None else live_view
        self.frames = FrameReader(ToEngine)
        self.refused: list[RequestStepOutput] = []
        self.last_stats_at = float("-inf")
        self.num_submits = 0
        self.trimmed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._wakers: set[int] = set()

    def run(self) -> None:
        """Until the front goes away, in the middle of a sentence or not."""
        with self._selector, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send([])
            while self._receive():
                events = self.engine.step()
                if self.refused:
                    events, self.refused = self.refused + events, []
                self._send(events)

    def _receive(self) -> bool:
        """Take what has been said; wait for it when idle, or until the next plan is due. False: the front is gone."""
        busy = self.engine.can_step or bool(self.refused)
        while True:
            heard = self._wait(self.engine.time_to_next_plan()) if busy else self._select(self._idle_timeout())
            if self.link.fileno() in heard:
                if not (data := self.link.recv(1 << 20)):
                    return False
                for message in self.frames.feed(data):
                    self._handle(message)
            self._poll_constraints()
            if not heard:
                self._trim_when_idle(idle=not busy)
                return True
            busy, self.trimmed = True, False

    def _wait(self, seconds: float) -> set[int]:
        """Descriptors with something to read within `seconds`, less up to a millisecond.

        Selectors count in milliseconds and round up; a plan that is late costs more than one that is a little early.
        """
        return self._select(math.floor(seconds * 1e3) * 1e-3)

    def _select(self, seconds: float | None) -> set[int]:
        """Descriptors with something to read within `seconds`; None: however long that takes. Of any number:
        select(2) takes those below 1,024 only, and an inherited one may be above."""
        for waker in self.constraints.wait_fds():
            if waker not in self._wakers:
                self._wakers.add(waker)
                self._selector.register(waker, selectors.EVENT_READ)
        return {key.fd for key, _ in self._selector.select(seconds)}

    def _idle_timeout(self) -> float | None:
        """Seconds to wait for something to be said; None for as long as it takes."""
        patience = self.constraints.timeout()
        if self.trimmed:
            return patience
        return _TRIM_AFTER if patience is None else min(patience, _TRIM_AFTER)

    def _trim_when_idle(self, *, idle: bool) -> None:
        """Nothing was said. After work, and once until there is more, give back what the work left free."""
        if idle and not self.trimmed:
            heap.trim()
        self.trimmed = idle

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.num_submits += 1
            for request in submitted(message):
                self._add(request)
        elif isinstance(message, Abort):
            for id in message.ids:
                self.engine.abort(id, message.reason)
        elif isinstance(message, ResetPrefixCache):
            self.engine.reset_prefix_cache()
        elif isinstance(message, WatchLive):
            self.live_view.watch(message.on)
        elif isinstance(message, Explain):
            self.link.sendall(encode_frame(Explanation(message.call_id, self._explanation(message.id))))

    def _explanation(self, id: str) -> bytes:
        try:
            return self.live_view.explain(id, self.engine.clock.now())
        except Exception:  # nobody's answer depends on it
            print(escape_control_lines(traceback.format_exc()), file=sys.stderr, flush=True)
            return b"null"

    def _live_frame(self, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        try:
            return self.live_view.frame(self.engine, now, last=last)
        except Exception:  # as little
            print(escape_control_lines(traceback.format_exc()), file=sys.stderr, flush=True)
            return None

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request, self.constraints.constraint_for(request))
        except InvalidRequest as error:
            self.refused.append(error_output(request.id, error))
        except Exception as error:  # a request that something chokes on is that request's affair
            print(escape_control_lines(traceback.format_exc()), file=sys.stderr, flush=True)
            why = f"the engine could not take this request ({type(error).__name__})"
            self.refused.append(error_output(request.id, StepFailed(why)))

    def _poll_constraints(self) -> None:
        for id, made in self.constraints.poll():
            if isinstance(made, InvalidRequest):
                self.engine.fail(id, made)
            else:
                self.engine.set_constraint(id, made)

    def _send(self, events: list[RequestStepOutput]) -> None:
        engine, now = self.engine, self.engine.clock.now()
        idle = not engine.can_step
        due = idle or now - self.last_stats_at >= _STATS_EVERY
        if due:
            self.last_stats_at = now
        self.link.sendall(
            encode_frame(
                Update(
                    engine.stats.num_steps + engine.failures,
                    events,
                    idle,
                    self.num_submits,
                    self.step_watch.step_timeout(engine.scheduler),
                    engine.metrics_snapshot() if due else None,
                    self.metrics() if due else None,
                )
            )
        )
        if (live_frame := self._live_frame(now, last=idle)) is not None:
            self.link.sendall(encode_frame(LiveFrame(*live_frame)))
