"""The replicas as the server sees them: one engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from operator import mul
from typing import Any, Protocol

import msgspec

from quire.engine.client import OnDeath, OnFrame, OnTokens
from quire.engine.executor import Description
from quire.errors import Interrupted, Unavailable
from quire.observability.explain import joined
from quire.observability.live_view import Broadcaster, RequestTimeline
from quire.replicas import messages
from quire.replicas.messages import Addressed, Prompt, Report
from quire.types import FinishReason, Request, RequestStepOutput, error_output

log = logging.getLogger("uvicorn.error")

REPORT_INTERVAL = 1.0
"""Seconds between two reports of every replica."""
_CALL_TIMEOUT = 10.0
"""Seconds that a call to a replica may take that should take none."""
_MAX_LATE = 3
"""Times in a row that reports do not come in time, after which no replica is taken to be there: one that is slow holds
up those of all, and is replaced meanwhile."""
_FRAME_INTERVAL = 0.25

Render = Callable[[Mapping[str, Mapping[str, Any]]], bytes]
"""/metrics text of several engines' metrics, by the label `engine`."""


class Handle(Protocol):
    """What is used of a Ray Serve `DeploymentHandle`: its methods are those of `EngineReplica`."""

    def options(self, **options: Any) -> Any:
        """The handle with other options."""

    def broadcast(self, method_name: str, *args: Any) -> Any:
        """Call every replica."""


class _Outstanding:
    """The requests of one call that have not ended."""

    def __init__(self, requests: Sequence[Request], number: int) -> None:
        self.ids = {request.id for request in requests}
        self.number = number
        self.prompt = len(requests[0].prompt)
        self.tokens = 0
        self.replica = ""
        self.stream: Any = None
        self.task: asyncio.Task[None] | None = None


class ReplicaEngines:
    """An `EngineClient` and a `LiveViewClient` of all replicas of a deployment.

    A call goes to one replica, which the deployment's router chooses, and never to a second one: a replica that died of
    a request would take the next one with it. Calls wait where no replica is there yet.

    handle: of the deployment. render: see `Render`. max_replicas: as many as there may be. observer: of calls; it
    makes the live page's frames.
    """

    def __init__(self, handle: Handle, render: Render, observer: RequestTimeline, max_replicas: int) -> None:
        self.observer = observer
        self.views = [ReplicaView(self, rank) for rank in range(max_replicas)]
        self.reports: dict[str, Report] = {}
        """By replica, its latest report."""
        self._handle: Any = handle
        self._calls: Any = handle.options(_by_reference=False)
        self._streams: Any = handle.options(stream=True, _by_reference=False)
        self._render = render
        self._open: dict[str, _Outstanding] = {}
        self._about: Description | None = None
        self._watching: asyncio.Task[None] | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._num_late = 0
        self._gone: dict[str, dict[str, int]] = {}
        """By replica that is gone, what it has counted."""
        self._on_tokens: OnTokens = lambda events: None

    # ---------------------------------------------------------------- life cycle

    async def start(self) -> Description:
        """See EngineClient."""
        about = await self._calls.describe.remote()
        self._about = msgspec.msgpack.decode(about, type=Description)
        await self._look()
        self._watching = asyncio.ensure_future(self._keep_looking())
        return self._about

    async def close(self) -> None:
        """See EngineClient. The replicas are the deployment's, which is closed by who started it."""
        for call in {id(call): call for call in self._open.values()}.values():
            if call.task is not None:
                call.task.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            await self._look()

    async def _look(self) -> None:
        """Ask every replica for its report."""
        try:
            answers = await self._answers("report", True)
        except TimeoutError:
            self._num_late += 1
            if self._num_late < _MAX_LATE:
                return
            answers = []
        else:
            self._num_late = 0
        found: dict[str, Report] = {}
        for answer in answers:
            report = msgspec.msgpack.decode(answer, type=Report)
            found[report.replica] = report
        for name, last in self.reports.items():
            if name not in found:
                log.warning("replica %d (%s, process %d) takes no more requests", last.rank, name, last.pid)
                self._gone[name] = {what: last.stats.get(what, 0) for what in _COUNTERS}
        for name in found.keys() - self.reports.keys():
            self._gone.pop(name, None)  # one that was only late counts for itself again
            log.info("replica %d (%s) runs as process %d", found[name].rank, name, found[name].pid)
        self.reports = dict(sorted(found.items(), key=lambda each: each[1].rank))

    async def _ask_all(self, method: str, *args: Any) -> list[bytes]:
        """The answers of the replicas that answer."""
        with suppress(TimeoutError):
            return await self._answers(method, *args)
        return []

    async def _answers(self, method: str, *args: Any) -> list[bytes]:
        """The answers of the replicas that answer. Raises TimeoutError where one takes too long."""
        asked = self._handle.broadcast(method, *args)
        try:
            answers = await asked.results_async(timeout_s=_CALL_TIMEOUT, return_exceptions=True)
        except TimeoutError:
            raise
        except Exception:  # none is there, or Ray Serve is gone
            return []
        return [answer for answer in answers if isinstance(answer, bytes)]

    def ready(self) -> bool:
        """See EngineClient. Where no replica is there, calls wait for one."""
        return self._about is not None

    def alive(self) -> bool:
        """See EngineClient."""
        return any(report.alive for report in self.reports.values())

    def subscribe(self, on_tokens: OnTokens, on_death: OnDeath) -> None:
        """See EngineClient. `on_death` is never called: a replica takes no more than its own requests with it."""
        self._on_tokens = on_tokens

    # ---------------------------------------------------------------- requests

    def submit(self, requests: Sequence[Request]) -> None:
        """See EngineClient. All of them are answers to one prompt."""
        assert self._about is not None
        first, now = requests[0], time.monotonic()
        prompt = Prompt(messages.prompt_blocks(first, self._about.block_size), self._about.num_blocks)
        # First, as it may fail: nothing must be left of requests that were not sent.
        stream = self._streams.generate.remote(prompt, messages.ask(requests))
        # Of the id of a call's first answer, all but its number.
        number = self.observer.on_ask(first.id.rpartition("-")[0], first.max_new_tokens, now)
        call = _Outstanding(requests, number)
        self._open |= dict.fromkeys(call.ids, call)
        call.stream = stream
        call.task = asyncio.ensure_future(self._follow(call))

    async def _follow(self, call: _Outstanding) -> None:
        """Pass on what a call gets, and an error for each of its requests that the replica did not end."""
        try:
            async for message in call.stream:
                if not call.replica:
                    call.replica = message.decode()
                    self.observer.on_sent(call.number, self._shown(call.replica), time.monotonic())
                else:
                    self._pass_on(call, messages.outputs(message))
        except asyncio.CancelledError:
            call.stream.cancel()
            raise
        except Exception as error:  # whatever it is, the requests are lost, and clients may send them again
            log.warning("a request is lost, on replica %s: %s", call.replica, str(error).split("\n")[0])
        finally:
            for id in call.ids:
                self._open.pop(id, None)
        if call.ids:
            where = f"replica {self._shown(call.replica)}" if call.replica else "the replica"
            lost = Interrupted(f"{where} was lost while this request ran: send it again")
            self._pass_on(call, [error_output(id, lost) for id in sorted(call.ids)])

    def _pass_on(self, call: _Outstanding, outputs: Sequence[RequestStepOutput]) -> None:
        now, made, reason = time.monotonic(), 0, ""
        known = [output for output in outputs if output.id in call.ids]
        for output in known:
            made += len(output.tokens)
            if output.finish is not None:
                reason = output.finish
                call.ids.discard(output.id)
                self._open.pop(output.id, None)
        call.tokens += made
        if made:
            self.observer.on_made(call.number, made, now)
        if known:
            self._on_tokens(known)
            if not call.ids:
                self._report_end(call, reason)

    def _report_end(self, call: _Outstanding, reason: str) -> None:
        self.observer.on_end(call.number, "", reason, call.prompt, call.tokens, time.monotonic())

    def abort(self, ids: Sequence[str], why: FinishReason = "abort") -> None:
        """See EngineClient."""
        ended: dict[int, tuple[_Outstanding, list[str]]] = {}
        for id in ids:
            if (call := self._open.pop(id, None)) is not None:
                call.ids.discard(id)
                ended.setdefault(call.number, (call, []))[1].append(id)
        for call, its in ended.values():
            if not call.ids:
                self._report_end(call, why)
            self._in_background(self._end(call, its, why))

    async def _end(self, call: _Outstanding, ids: list[str], why: FinishReason) -> None:
        """Abort them at the replica. One that is to stop takes no such call: there the stream's end does it."""
        if call.replica and (call.ids or why != "abort"):
            with suppress(Exception):
                async with asyncio.timeout(_CALL_TIMEOUT):
                    await self._calls.abort.remote(Addressed(call.replica), ids, why)
        if not call.ids and call.task is not None:
            call.task.cancel()

    def reset_prefix_cache(self) -> None:
        """See EngineClient."""
        if not self.reports:
            raise Unavailable("no replica is there: try again in a moment", code="engine_starting")
        self._in_background(self._ask_all("reset_prefix_cache"))

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _shown(self, replica: str) -> str:
        """A replica's number and name."""
        report = self.reports.get(replica)
        return replica if report is None else f"{report.rank} ({replica})"

    # ---------------------------------------------------------------- statistics

    def snapshot(self) -> Mapping[str, Any]:
        """See EngineClient: sums over all replicas, and each of them in `replicas`."""
        reports = list(self.reports.values())
        total = add_up([report.stats for report in reports])
        for gone in self._gone.values():
            for what, number in gone.items():
                total[what] = total.get(what, 0) + number
        return {
            **total,
            "replicas": [
                {
                    "rank": report.rank,
                    "name": report.replica,
                    "node": report.node,
                    "pid": report.pid,
                    "engine_pid": report.engine_pid,
                    "alive": report.alive,
                    "outstanding": len({call.number for call in self._open.values() if call.replica == report.replica}),
                    "queued_tokens": report.queued_tokens,
                    **{what: report.stats.get(what, 0) for what in ("waiting_requests", "active_requests", *_COUNTERS)},
                }
                for report in reports
            ],
        }

    def prometheus(self) -> bytes:
        """See EngineClient: the metrics of each replica, with its rank as the label `engine`."""
        return self._render({str(report.rank): report.metrics for report in self.reports.values() if report.metrics})

    # ---------------------------------------------------------------- live view

    def watch(self, on: bool) -> None:
        """See LiveViewClient."""
        self.observer.watch(on)

    def on_frames(self, on_frame: OnFrame) -> None:
        """See LiveViewClient."""
        self.observer.on_frames(on_frame)

    async def explain(self, id: str) -> bytes:
        """See LiveViewClient: of the replicas that ran a request's prompts; all known requests of every replica."""
        answers = [answer for answer in await self._ask_all("explain", id) if answer != b"null"]
        if not answers:
            return b"null"
        parts = list(map(msgspec.json.decode, answers))
        found = joined(parts) if id else {"requests": [one for part in parts for one in part["requests"]]}
        return msgspec.json.encode(found)

    def named(self, rank: int) -> str | None:
        """The replica with this rank, if there is one."""
        return next((report.replica for report in self.reports.values() if report.rank == rank), None)

    async def frames(self, replica: str, whole: bool) -> list[tuple[bytes, bool]]:
        """Frames of a replica's live page since the last call, see `EngineReplica.frames`."""
        async with asyncio.timeout(_CALL_TIMEOUT):
            frames = await self._calls.frames.remote(Addressed(replica), whole)
        return msgspec.msgpack.decode(frames, type=list[tuple[bytes, bool]])


_COUNTERS = ("completed_requests", "generated_tokens", "decode_steps")
"""Statistics that only grow: those of replicas that are gone still count."""


def add_up(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One engine's statistics of several engines'. Sums, but for sizes and averages."""
    if not stats:
        return {}
    total: dict[str, Any] = dict(stats[0])
    for name, value in stats[0].items():
        values = [each.get(name, 0) for each in stats]
        if isinstance(value, Mapping):
            total[name] = add_up([each.get(name, value) for each in stats])
        elif name == "max_batch_observed":
            total[name] = max(values)
        elif name in ("average_batch_size", "utilization"):
            weight = "decode_steps" if name == "average_batch_size" else "max_pages"
            weights = [each.get(weight, 0) for each in stats]
            total[name] = sum(map(mul, values, weights)) / sum(weights) if sum(weights) else 0.0
        elif name != "page_size" and isinstance(value, int | float):
            total[name] = sum(values)
    return total


class ReplicaView:
    """The live page of one replica, by rank: a `LiveViewClient`, and a `LivePage` for any number of viewers."""

    def __init__(self, engines: ReplicaEngines, rank: int) -> None:
        self.name = f"replica {rank}"
        self._engines, self._rank = engines, rank
        self._on_frame: OnFrame = lambda frame, whole: None
        self._polling: asyncio.Task[None] | None = None
        self._broadcaster = Broadcaster(self)

    def frames(self) -> AsyncGenerator[bytes, None]:
        """See LivePage."""
        return self._broadcaster.watch()

    async def explanation(self, id: str) -> tuple[int, bytes]:
        """See LivePage."""
        found = await self.explain(id)
        if found == b"null":
            error = {"message": f"no request {id!r} is known", "type": "invalid_request_error"}
            return 404, msgspec.json.encode({"error": error})
        return 200, found

    def on_frames(self, on_frame: OnFrame) -> None:
        """See LiveViewClient."""
        self._on_frame = on_frame

    def watch(self, on: bool) -> None:
        """See LiveViewClient."""
        if self._polling is not None:
            self._polling.cancel()
        self._polling = asyncio.ensure_future(self._poll()) if on else None

    async def _poll(self) -> None:
        before = None
        while True:
            replica = self._engines.named(self._rank)
            if replica is not None:
                try:
                    for frame in await self._engines.frames(replica, replica != before):
                        self._on_frame(*frame)
                    before = replica
                except Exception as error:  # it has just gone
                    before = None
                    log.debug("no frames of replica %d: %s", self._rank, error)
            await asyncio.sleep(_FRAME_INTERVAL)

    async def explain(self, id: str) -> bytes:
        """See LiveViewClient."""
        return await self._engines.explain(id)
