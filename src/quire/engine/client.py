"""The engine as the frontend sees it, wherever it runs, and the frontend's side of an engine process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, cast

from quire import errors
from quire.engine.executor import Description
from quire.engine.protocol import (
    REPORT_SIGNAL,
    Abort,
    BuildFailed,
    Configure,
    Explain,
    Explanation,
    FrameReader,
    LiveFrame,
    Ready,
    ResetPrefixCache,
    ToEngine,
    ToFront,
    Update,
    WatchLive,
    encode_frame,
    submission,
)
from quire.engine.spawn import Spawned, spawn
from quire.engine.timing import RestartBackoff
from quire.errors import QuireError, Unavailable
from quire.types import FinishReason, Request, RequestStepOutput

OnTokens = Callable[[Sequence[RequestStepOutput]], None]
OnDeath = Callable[[str], None]
OnFrame = Callable[[bytes, bool], None]


class EngineClient(Protocol):
    """Used from one event loop. Nothing here blocks; outputs come through `subscribe`."""

    async def start(self) -> Description:
        """Return when requests are accepted. Raises InvalidModel, InvalidConfig or Unavailable."""

    async def close(self) -> None:
        """End the engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. One that can never run gets an output with finish 'error'."""

    def abort(self, ids: Sequence[str], why: FinishReason = "abort") -> None:
        """End these, for this reason; their blocks are free within a step. Unknown ids are ignored."""

    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find nothing computed before. Raises Unavailable where there is no engine."""

    def subscribe(self, on_tokens: OnTokens, on_death: OnDeath) -> None:
        """`on_tokens` is called once a step or once for several; `on_death` when all requests in flight were lost,
        with the reason."""

    def snapshot(self) -> Mapping[str, Any]:
        """The engine's latest counters: `Engine.metrics_snapshot`, plain JSON."""

    def prometheus(self) -> bytes:
        """The engine's share of /metrics."""

    def alive(self) -> bool:
        """Whether it makes progress: no request is outstanding, or steps are being committed."""

    def ready(self) -> bool:
        """Whether requests are accepted."""


class LiveViewClient(Protocol):
    """The frontend's side of an engine's live view."""

    def watch(self, on: bool) -> None:
        """Send frames from now on, a whole one first; or stop. Lasts over the engine's restarts."""

    def on_frames(self, on_frame: OnFrame) -> None:
        """`on_frame` is called with every frame, as JSON, and whether it is a whole one."""

    async def explain(self, id: str) -> bytes:
        """What happened to a request (to all known, if `id` is empty), as JSON. Raises Unavailable."""


log = logging.getLogger("uvicorn.error")

_CHECK_INTERVAL = 1.0
"""Seconds between two checks of an engine that has work."""


class StallDetector:
    """Whether an engine process is late with its next step. Times are seconds of one clock, `now` the start."""

    def __init__(self, now: float) -> None:
        self.idle = True
        self.step_timeout = math.inf
        """Seconds that the engine allows its next step, sent with each update."""
        self.reported = False
        """Whether it has been asked where it is stuck."""
        self._since, self._step, self._num_submitted = now, 0, 0

    def on_submit(self, now: float) -> None:
        """Work is about to be sent."""
        self._num_submitted += 1
        if self.idle:
            self.idle, self._since = False, now

    def on_update(self, update: Update, now: float) -> None:
        """The engine has sent an update. One that says idle counts only if it had taken all that was sent."""
        self.idle, self.step_timeout = update.idle and update.num_submits == self._num_submitted, update.step_timeout
        if update.num_steps != self._step or self.idle:
            self._step, self._since, self.reported = update.num_steps, now, False

    def is_stalled(self, now: float) -> float:
        """By how many seconds the next step is late; 0 or less: it is not."""
        return 0.0 if self.idle else now - self._since - self.step_timeout


_EXIT_TIMEOUT = 5.0
"""Seconds an engine has to exit once its socket is closed."""


class EngineProcess:
    """An `EngineClient` of an engine in another process.

    argv: the command that starts it; the number of an inherited socket is appended. settings: what it is built from.
    render: /metrics text of a metrics snapshot. backoff: seconds before the second restart of one that keeps dying.
    environment: variables for it, where they are not set already. standby_after: seconds after an engine is ready until
    a second process is started, which imports what an engine needs and waits to replace it; None: none is started.
    begun: a process that waits already, of the same command, or builds the engine of these settings.
    """

    def __init__(
        self,
        argv: Sequence[str],
        settings: Mapping[str, Any],
        render: Callable[[Mapping[str, Any]], bytes],
        *,
        backoff: float = 0.5,
        environment: Mapping[str, str] = MappingProxyType({}),
        standby_after: float | None = None,
        begun: Spawned | None = None,
    ) -> None:
        self.argv = list(argv)
        self.settings = dict(settings)
        self.render = render
        self.environment = dict(environment)
        self.standby_after = standby_after
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._on_tokens: OnTokens = lambda events: None
        self._on_death: OnDeath = lambda reason: None
        self._on_frame: OnFrame = lambda frame, whole: None
        self._watching = False
        self._call_ids = itertools.count()
        self._pending_explanations: dict[int, asyncio.Future[bytes]] = {}
        self._link: _EngineConnection | None = None
        self._stats: Mapping[str, Any] = {}
        self._metrics: Mapping[str, Any] = {}
        self._closing = False
        self._restart: asyncio.Task[None] | None = None
        self._backoff, self._began = RestartBackoff(backoff), 0.0
        self._stall_detector = StallDetector(time.monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._standby = begun
        self._standby_timer: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- life

    async def start(self) -> Description:
        """Start the process and wait until it is ready. Raises the error for which the engine could not be built."""
        self.process, here, configured = self._take_standby() or self._spawn()
        self._stall_detector = StallDetector(time.monotonic())
        loop = asyncio.get_running_loop()
        link = _EngineConnection(self, loop.create_future())
        await loop.create_connection(lambda: link, sock=here)
        if not configured:
            link.send(Configure(self.settings))
        self._link = link
        try:
            about = await link.ready
        except QuireError:
            await self._reap()
            raise
        self._began = time.monotonic()
        if self._watching:
            link.send(WatchLive(True))
        if self.standby_after is not None:
            self._standby_timer = loop.call_later(self.standby_after, self._start_standby)
        return about

    def _spawn(self) -> Spawned:
        return spawn(self.argv, self.environment)

    def _start_standby(self) -> None:
        """Only for an engine that has lived for a while: one that dies young should not cost two processes each
        time."""
        if self.ready() and self._standby is None:
            try:
                self._standby = self._spawn()
            except OSError as error:  # no process or descriptor is left: the engine that runs goes on
                log.warning("no standby engine can be started: %s", error)

    def _take_standby(self) -> Spawned | None:
        """The process that waits to replace an engine, if there is one and it lives."""
        if self._standby_timer is not None:
            self._standby_timer.cancel()
        standby, self._standby = self._standby, None
        if standby is not None and standby.process.poll() is not None:
            standby.sock.close()
            return None
        return standby

    async def close(self) -> None:
        """End the process; it exits when its socket closes."""
        self._closing = True
        for under_way in (self._restart, self._timer):
            if under_way is not None:
                under_way.cancel()
        standby = self._take_standby()
        if standby is not None:
            standby.sock.close()
            standby.process.kill()
            await asyncio.to_thread(standby.process.wait)
        await self._reap(_EXIT_TIMEOUT if self.ready() else 0.0)  # one that is being built hears nothing

    async def _reap(self, timeout: float = _EXIT_TIMEOUT) -> None:
        """Wait for the process to exit, which it does when its socket closes; kill it after `timeout`."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self._cancel_explanations()
        if self.process is not None:
            try:
                await asyncio.to_thread(self.process.wait, timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)

    def on_connection_lost(self, link: _EngineConnection) -> None:
        """The process is gone: report it, and start another."""
        if self._closing or link is not self._link:
            return
        self._link = None
        self._cancel_explanations()
        reason = "the engine process ended" + self._exit_code()
        self._on_death(reason)
        if link.was_ready:
            self._restart = asyncio.get_running_loop().create_task(self._schedule_restart())

    def _exit_code(self) -> str:
        code = self.process.poll() if self.process is not None else None
        return "" if code is None else f" (exit code {code})"

    async def _schedule_restart(self) -> None:
        """Start another: the first time at once, then after pauses that double while engines keep dying young."""
        self._backoff.on_death(time.monotonic() - self._began)
        await self._reap(timeout=1.0)
        while not self._closing:
            await asyncio.sleep(self._backoff.next_delay())
            self.restarts += 1
            try:
                await self.start()
                return
            except Exception as error:  # whatever it is, the next try may do better
                log.error("the engine cannot be started: %s; next try in %.1f s", error, self._backoff.delay)

    # ---------------------------------------------------------------- EngineClient

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises Unavailable while no engine is ready."""
        link = self._ready_link()
        self._stall_detector.on_submit(time.monotonic())
        link.send(submission(requests))
        if self._timer is None:
            self._check_progress()

    def abort(self, ids: Sequence[str], why: FinishReason = "abort") -> None:
        """End these; ignored while there is no engine."""
        if self._link is not None:
            self._link.send(Abort(list(ids), why))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Raises Unavailable while no engine is ready."""
        self._ready_link().send(ResetPrefixCache())

    def _ready_link(self) -> _EngineConnection:
        """Raises Unavailable while no engine is ready."""
        if self._link is None or not self._link.was_ready:
            raise Unavailable("the engine is starting: try again in a moment", code="engine_starting")
        return self._link

    def subscribe(self, on_tokens: OnTokens, on_death: OnDeath) -> None:
        """Set the callbacks for outputs and for the engine's death."""
        self._on_tokens, self._on_death = on_tokens, on_death

    def snapshot(self) -> Mapping[str, Any]:
        """The counters of the last update that had them."""
        return self._stats

    def metrics(self) -> Mapping[str, Any]:
        """The metrics of the last update that had them, empty before the first."""
        return self._metrics

    def prometheus(self) -> bytes:
        """See EngineClient."""
        return self.render(self._metrics) if self._metrics else b""

    def ready(self) -> bool:
        """Whether an engine is connected and built."""
        return self._link is not None and self._link.was_ready

    def alive(self) -> bool:
        """Whether it is ready and its next step is not late."""
        return self.ready() and self._stall_detector.is_stalled(time.monotonic()) <= 0

    def _check_progress(self) -> None:
        """Once a second while there is work: an engine that is stuck must report where, and later exit."""
        self._timer = None
        progress, process = self._stall_detector, self.process
        if self._closing or progress.idle or process is None or not self.ready():
            return
        late = progress.is_stalled(time.monotonic())
        if late > 0 and not progress.reported:
            progress.reported = True
            log.error(
                "no step for %.1f s with requests outstanding: the engine dumps its stacks",
                late + progress.step_timeout,
            )
            process.send_signal(REPORT_SIGNAL)
        elif late > progress.step_timeout:
            log.error("no step for %.1f s: the engine process is killed", late + progress.step_timeout)
            process.kill()
            return
        self._timer = asyncio.get_running_loop().call_later(_CHECK_INTERVAL, self._check_progress)

    # ---------------------------------------------------------------- live view

    def watch(self, on: bool) -> None:
        """Start or stop frames, for this engine and the next ones."""
        self._watching = on
        if self._link is not None and self._link.was_ready:
            self._link.send(WatchLive(on))

    def on_frames(self, on_frame: OnFrame) -> None:
        """Set the callback for frames."""
        self._on_frame = on_frame

    async def explain(self, id: str) -> bytes:
        """Ask the engine and wait for its answer. Raises Unavailable."""
        link = self._ready_link()
        number = next(self._call_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending_explanations[number] = answer
        link.send(Explain(number, id))
        try:
            return await answer
        finally:
            self._pending_explanations.pop(number, None)

    def _cancel_explanations(self) -> None:
        for answer in self._pending_explanations.values():
            if not answer.done():
                answer.set_exception(Unavailable("the engine stopped, and its record of requests is lost"))

    def on_live_message(self, message: LiveFrame | Explanation) -> None:
        """A frame, or an answer to `explain`."""
        if isinstance(message, LiveFrame):
            self._on_frame(message.frame, message.whole)
        elif (answer := self._pending_explanations.get(message.call_id)) is not None and not answer.done():
            answer.set_result(message.body)

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Updates that arrived together: a front that was slow has less to do for each."""
        now, events = time.monotonic(), []
        for update in updates:
            self._stall_detector.on_update(update, now)
            if update.stats is not None:
                self._stats = update.stats
            if update.metrics is not None:
                self._metrics = update.metrics
            events += update.events
        if events:
            self._on_tokens(events)


class _EngineConnection(asyncio.Protocol):
    """The socket to one engine process.

    What is sent in one turn of the event loop is written at its end, in one piece: requests that clients sent together
    reach an idle engine together, and its first step has them all, even where it would have run in place of this
    process after the first.
    """

    def __init__(self, owner: EngineProcess, ready: asyncio.Future[Description]) -> None:
        self.owner, self.ready = owner, ready
        self.frames = FrameReader(ToFront)
        self.transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []

    @property
    def was_ready(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, message: ToEngine) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(encode_frame(message))

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self.transport is not None and unsent:
            self.transport.write(b"".join(unsent))

    def close(self) -> None:
        self._write()
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        updates = []
        for message in self.frames.feed(data):
            if isinstance(message, Update):
                updates.append(message)
            elif isinstance(message, LiveFrame | Explanation):
                self.owner.on_live_message(message)
            elif self.ready.done():
                continue  # who waited for it was cancelled
            elif isinstance(message, Ready):
                self.ready.set_result(message.about)
            elif isinstance(message, BuildFailed):
                self.ready.set_exception(_error(message))
        self.owner.on_updates(updates)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(Unavailable("the engine process ended before it was ready: see its log"))
        self.owner.on_connection_lost(self)


def _error(refused: BuildFailed) -> QuireError:
    kind = getattr(errors, refused.kind, QuireError)
    made = kind(refused.message) if isinstance(kind, type) and issubclass(kind, QuireError) else None
    return made if made is not None else QuireError(refused.message)
