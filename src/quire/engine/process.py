"""The engine's loop in its own process: read commands from a socket, step, send what each request got."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from quire import heap
from quire.engine.engine import Engine
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
from quire.errors import InvalidRequest, ModelLost, RankLost, StepFailed, print_traceback
from quire.scheduler.constraint import FREE, Constraints
from quire.types import Request, RequestStepOutput, error_output

_STATS_EVERY = 0.1
"""Seconds between two snapshots of statistics while requests run."""

_TRIM_AFTER = 3.0
"""Seconds of idleness after which free memory goes back to the system: shorter pauses would only take it again."""


class LiveView(Protocol):
    """What viewers of the live page see of an engine. It costs nothing while there are none."""

    def watch(self, on: bool) -> None:
        """Start with a whole frame, or stop."""

    def frame(self, engine: Engine, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        """A frame to send now, if any, and whether it is a whole one. last: the engine is idle after this."""

    def explain(self, id: str, now: float) -> bytes:
        """What happened to a request (to all, if `id` is empty), as JSON."""


class EngineLoop:
    """Drives an engine from a socket.

    metrics: makes the snapshot that /metrics is rendered from. step_watch: one of the engine's observers; it says how
    long the next step may take. constraints: compiles grammars; None: requests cannot have one. live_view: None: the
    engine cannot be watched. exit_fds: become readable when a process ends without which the engine
    cannot go on, or the model is lost.
    """

    def __init__(
        self,
        engine: Engine,
        link: socket.socket,
        metrics: Callable[[], dict[str, Any]],
        step_watch: StepWatch,
        constraints: Constraints | None = None,
        live_view: LiveView | None = None,
        exit_fds: Iterable[int] = (),
    ) -> None:
        self.engine = engine
        self.link = link
        self.metrics = metrics
        self.step_watch = step_watch
        self.constraints = constraints
        self.live_view = live_view
        self.frames = FrameReader(ToEngine)
        self.refused: list[RequestStepOutput] = []
        self.last_stats_at = float("-inf")
        self.num_submits = 0
        self.trimmed = False
        self._lost_while_idle = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._exit_fds = set(exit_fds)
        for fd in self._exit_fds:
            self._selector.register(fd, selectors.EVENT_READ)
        self._constraint_fds: set[int] = set()
        self._copies_fd = engine.scheduler.kv.offload.fileno()
        if self._copies_fd is not None:
            self._selector.register(self._copies_fd, selectors.EVENT_READ)

    def run(self) -> bool:
        """Run until the front closes the socket, even in the middle of a message, or a rank or the model is lost: until
        those are there again nothing could be answered, and /health must say so. Returns whether it was the front."""
        with self._selector, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send([])
            while self._receive():
                outputs = self.engine.step()
                if self.refused:
                    outputs, self.refused = self.refused + outputs, []
                self._send(outputs)
                if isinstance(self.engine.lost, RankLost | ModelLost):
                    return False
        return not self._lost_while_idle

    def _receive(self) -> bool:
        """Handle commands; wait for them while idle, or until the next plan is due. False: the front is gone."""
        busy = self.engine.can_step or bool(self.refused)
        while True:
            ready = self._wait(self.engine.time_to_next_plan()) if busy else self._wait_idle()
            if ready & self._exit_fds:
                if not self.engine.can_step:
                    self._lost_while_idle = True
                    return False
                # The step that is due says which.
                return True
            if self.link.fileno() in ready:
                if not (data := self.link.recv(1 << 20)):
                    return False
                for message in self.frames.feed(data):
                    self._handle(message)
            self._poll_constraints()
            if ready <= {self._copies_fd}:  # the next step takes the copies that have ended
                self._trim_when_idle(idle=not busy and not ready)
                return True
            busy, self.trimmed = True, False

    def _wait(self, seconds: float) -> set[int]:
        """Descriptors readable within `seconds`, less up to a millisecond.

        Selectors count in milliseconds and round up; a plan that is late costs more than one that is a little early.
        """
        return self._select(math.floor(seconds * 1e3) * 1e-3)

    def _wait_idle(self) -> set[int]:
        """Descriptors readable once any is, or as `_idle_timeout` says; until then the executor prepares itself."""
        while not (ready := self._select(0.0)):
            if not self.engine.prepare():
                return self._select(self._idle_timeout())
        return ready

    def _select(self, seconds: float | None) -> set[int]:
        """Descriptors readable within `seconds`; None: without limit.

        With any descriptor: select(2) takes those below 1,024 only, and an inherited one may be above.
        """
        if self.constraints is not None:
            for fd in self.constraints.wait_fds():
                if fd not in self._constraint_fds:
                    self._constraint_fds.add(fd)
                    self._selector.register(fd, selectors.EVENT_READ)
        return {key.fd for key, _ in self._selector.select(seconds)}

    def _idle_timeout(self) -> float | None:
        """Seconds to wait for a command; None: without limit."""
        due = (
            None if self.constraints is None else self.constraints.timeout(),
            self.engine.scheduler.kv.offload.timeout(),
            None if self.trimmed else _TRIM_AFTER,
        )
        return min((seconds for seconds in due if seconds is not None), default=None)

    def _trim_when_idle(self, *, idle: bool) -> None:
        """After work, and once until there is more, give back the memory that it left free."""
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
            if self.live_view is not None:
                self.live_view.watch(message.on)
        elif isinstance(message, Explain):
            self.link.sendall(encode_frame(Explanation(message.call_id, self._explanation(message.id))))

    def _explanation(self, id: str) -> bytes:
        try:
            return b"null" if self.live_view is None else self.live_view.explain(id, self.engine.clock.now())
        except Exception:  # no request depends on it
            print_traceback()
            return b"null"

    def _live_frame(self, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        try:
            return None if self.live_view is None else self.live_view.frame(self.engine, now, last=last)
        except Exception:  # no request depends on it
            print_traceback()
            return None

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request, FREE if self.constraints is None else self.constraints.constraint_for(request))
        except InvalidRequest as error:
            self.refused.append(error_output(request.id, error))
        except Exception as error:  # an error in taking one request must not end the others
            print_traceback()
            why = f"the engine could not take this request ({type(error).__name__})"
            self.refused.append(error_output(request.id, StepFailed(why)))

    def _poll_constraints(self) -> None:
        if self.constraints is None:
            return
        for id, made in self.constraints.poll():
            if isinstance(made, InvalidRequest):
                self.engine.fail(id, made)
            else:
                self.engine.set_constraint(id, made)

    def _send(self, outputs: list[RequestStepOutput]) -> None:
        engine = self.engine
        now = engine.clock.now()
        idle = not engine.can_step
        due = idle or now - self.last_stats_at >= _STATS_EVERY
        if due:
            self.last_stats_at = now
        update = Update(
            engine.stats.num_steps + engine.failures,
            outputs,
            idle,
            self.num_submits,
            self.step_watch.step_timeout(engine.scheduler),
            engine.metrics_snapshot() if due else None,
            self.metrics() if due else None,
        )
        self.link.sendall(encode_frame(update))
        if (live_frame := self._live_frame(now, last=idle)) is not None:
            self.link.sendall(encode_frame(LiveFrame(*live_frame)))
