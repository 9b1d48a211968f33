"""A backend that forwards requests to one or several OpenAI-compatible servers, such as vLLM."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from quire.errors import InvalidConfig, Overloaded, Unavailable
from quire.frontend.http_client import Connection, ConnectionLost, Headers, Origin, Pool
from quire.frontend.interface import DrainingService
from quire.frontend.supervisor import PrivateServer
from quire.frontend.upstream_response import UpstreamResponse
from quire.observability.observer import FrontendObserver, RequestObserver
from quire.scheduler.routing import Chunks, RoutingPolicy
from quire.types import FinishedRequest, SamplingParams, TraceContext

log = logging.getLogger("uvicorn.error")

_START_CHECK_INTERVAL = 0.5
"""Seconds between two checks while no server has answered yet."""
_CHECK_INTERVAL = 5.0
"""Seconds between two checks of a healthy server."""
_RETRY_INTERVAL = 0.5
"""Seconds between two checks of an unhealthy server."""
_CHECK_TIMEOUT = 10.0
"""Seconds after which a check has failed."""
_MAX_FAILURES = 2
"""Failed checks in a row after which a server is unhealthy."""
_SCRAPE = 2.0
"""Seconds until a request for a server's metrics fails."""
_MAX_EVENT_BYTES = 1 << 23
"""The largest event that is read of an upstream's stream."""
_NO_EVENTS: Mapping[int, str] = MappingProxyType(
    {
        401: "it wants its admin key: set --upstream-api-key to that",
        403: "it is on another machine and has no --admin-key",
        404: "it has no live page",
    }
)
"""Why a server sends no events, by status."""
_CHUNK = 512
"""Bytes of a prompt's text in each of the chunks that routing policies compare."""
_MAX_CHUNKS = 128
"""Chunks of a prompt that are compared at most."""


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class UpstreamDown(Exception):
    """No response, or a wrong one."""


class Upstream:
    """One upstream server. name: its address, by which routing policies know it. healthy: it answers."""

    def __init__(self, origin: Origin, headers: Headers) -> None:
        self.origin = origin
        self.name = str(origin)
        self.pool = Pool(origin)
        self.headers = headers
        self.healthy = False
        self.num_requests = self.num_failed = 0
        self.why = "not asked yet"
        self._failures = 0
        self._changed = asyncio.Event()

    async def get(self, path: str, *, timeout: float = _CHECK_TIMEOUT) -> tuple[int, bytes]:
        """Send a GET request. Returns (status, body). Raises UpstreamDown."""
        try:
            async with asyncio.timeout(timeout):
                connection = await self.pool.exchange("GET", path, self.headers, b"")
                try:
                    parts = []
                    while data := await connection.read():
                        parts.append(data)
                finally:
                    self.pool.give_back(connection)
        except TimeoutError as error:
            raise UpstreamDown(f"no answer within {timeout:g} s") from error
        except ConnectionLost as error:
            raise UpstreamDown(str(error)) from error
        return connection.status, b"".join(parts)

    async def events(self, path: str) -> AsyncGenerator[bytes, None]:
        """The data of each event of a stream, for as long as the server sends it. Raises UpstreamDown."""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT):
                connection = await self.pool.exchange("GET", path, self.headers, b"")
            try:
                if connection.status != 200:
                    raise UpstreamDown(_NO_EVENTS.get(connection.status, f"its {path} says {connection.status}"))
                rest = b""
                while data := await connection.read():
                    *whole, rest = (rest + data).split(b"\n\n")
                    if len(rest) > _MAX_EVENT_BYTES:
                        raise UpstreamDown(f"an event of its {path} is larger than {_MAX_EVENT_BYTES} bytes")
                    for each in whole:
                        if each.startswith(b"data: "):
                            yield each[6:]
            finally:
                connection.close()
        except TimeoutError as error:
            raise UpstreamDown(f"no answer within {_CHECK_TIMEOUT:g} s") from error
        except ConnectionLost as error:
            raise UpstreamDown(str(error)) from error

    def frames(self) -> AsyncGenerator[bytes, None]:
        """The frames of its live page, as long as it sends them. Raises UpstreamDown."""
        return self.events("/ui/events")

    async def explanation(self, id: str) -> tuple[int, bytes]:
        """Status and body of its `/v1/requests/{id}/explain`. Raises UpstreamDown."""
        return await self.get(f"/v1/requests/{quote(id, safe='')}/explain")

    async def check(self) -> None:
        """Update `healthy`. Any status below 500 counts, since a server may have no /health."""
        try:
            status, _ = await self.get("/health")
        except UpstreamDown as error:
            self.record_failure(str(error))
            return
        if status >= 500:
            self.record_failure(f"its /health says {status}")
            return
        if not self.healthy:
            log.info("upstream %s is available", self.origin)
        self.healthy = True
        self._failures = 0
        self.why = ""

    def record_failure(self, why: str, *, surely: bool = False) -> None:
        """A check failed; `_MAX_FAILURES` in a row, or one that is certain, make the server unhealthy."""
        self._failures += 1
        if self.healthy and (surely or self._failures >= _MAX_FAILURES):
            log.warning("upstream %s is unavailable: %s", self.origin, why)
            self.healthy = False
            self._changed.set()
        self.why = why

    async def watch(self) -> None:
        """Check it periodically until cancelled."""
        while True:
            if self.healthy and not self._failures:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_INTERVAL):
                        await self._changed.wait()
            else:
                await asyncio.sleep(_RETRY_INTERVAL)
            self._changed.clear()
            await self.check()


class RequestInfo(NamedTuple):
    """A request as observers see it.

    max_tokens: 0 if unknown. on_usage: called with the number of tokens of prompt and answer. observed: whether
    observers see it at all. prompt: its `prompt_chunks`.
    """

    trace_context: TraceContext
    max_tokens: int = 0
    sampling: SamplingParams = SamplingParams()
    on_usage: Callable[[int], None] = lambda tokens: None
    observed: bool = True
    prompt: Chunks = ()


class _UpstreamRequest:
    """One running request: the Listener of its response, which reports to the observers."""

    def __init__(self, backend: UpstreamBackend, about: RequestInfo) -> None:
        self.backend = backend
        self.info = about
        self.observer: FrontendObserver = backend.observer if about.observed else FrontendObserver()
        self.request_observer: RequestObserver | None = backend.request_observer if about.observed else None
        self.arrived = self.last = backend.clock()
        self.first: float | None = None
        self.server: Upstream | None = None
        self.number = 0
        if self.request_observer is not None:
            id = about.trace_context.request_id
            self.number = self.request_observer.on_ask(id, about.max_tokens, self.arrived)

    def assign(self, server: Upstream | None) -> None:
        """Move the request to another server, or to none at its end."""
        if self.server is not None:
            self.backend.routing.finished(self.server.name)
        if server is not None:
            self.backend.routing.sent(server.name, self.info.prompt)
            server.num_requests += 1
            if self.request_observer is not None:
                self.request_observer.on_sent(self.number, str(server.origin), self.backend.clock())
        self.server = server

    def on_tokens(self, tokens: int) -> None:
        """See Listener."""
        now = self.backend.clock()
        if self.first is None:
            self.first = now
            self.observer.on_first(now - self.arrived)
        else:
            self.observer.on_gap(now - self.last, tokens)
        self.last = now
        self.backend.generated += tokens
        if self.request_observer is not None:
            self.request_observer.on_made(self.number, tokens, now)

    def on_end(self, response: UpstreamResponse, error: str | None) -> None:
        """See Listener."""
        if error and self.server is not None:
            self.server.num_failed += 1
        failed = bool(error) or response.status >= 400
        reason = "abort" if error == "" else "error" if failed else _REASONS.get(response.finish, "stop")
        self.backend.generated += response.tokens - response.num_events
        self.finish(reason, response.prompt_tokens, response.tokens, response.id)

    def finish(self, reason: str, prompt: int = 0, tokens: int = 0, known_as: str = "") -> None:
        """Report the end. known_as: the id of the answer."""
        now = self.backend.clock()
        about = self.info
        self.assign(None)
        about.on_usage(prompt + tokens)
        self.observer.on_end(
            FinishedRequest(
                known_as or about.trace_context.request_id,
                0,
                reason,
                about.sampling,
                about.trace_context,
                prompt,
                cached=0,
                tokens=tokens,
                max_tokens=about.max_tokens,
                first=None if self.first is None else self.first - self.arrived,
                seconds=now - self.arrived,
            )
        )
        if self.request_observer is not None:
            self.request_observer.on_end(self.number, known_as, reason, prompt, tokens, now)
        self.backend.on_finished(about.observed, now)


_REASONS: Mapping[str, str] = {"length": "length", "max_tokens": "length", "abort": "abort", "timeout": "timeout"}
"""The finish reasons of upstreams other than a stop."""


@dataclass(eq=False)
class UpstreamBackend(DrainingService):
    """A Service that forwards requests unchanged.

    supervisor: of a private server, None where others run the servers. headers: sent with every request. keyed: an API
    key is among them. max_outstanding: the most concurrent requests; more are refused. routing: chooses the server.
    start_timeout: seconds that `start` waits for a server to answer.
    """

    origins: InitVar[Sequence[Origin]]
    _: KW_ONLY
    supervisor: PrivateServer | None
    observer: FrontendObserver
    request_observer: RequestObserver
    kind: str
    headers: Headers
    max_outstanding: int
    routing: RoutingPolicy
    start_timeout: float
    clock: Callable[[], float] = time.monotonic
    name: str = ""
    generated: int = 0
    _completed: int = 0
    _under_way: int = 0
    _watching: list[asyncio.Task[None]] = field(default_factory=list)
    _open: set[UpstreamResponse] = field(default_factory=set)
    _asking: set[asyncio.Task[Any]] = field(default_factory=set)
    """The tasks of requests whose response has not begun: that of a whole answer begins when it is made."""

    def __post_init__(self, origins: Sequence[Origin]) -> None:
        self.upstreams = [Upstream(origin, self.headers) for origin in origins]
        self.keyed = any(name == b"authorization" for name, _ in self.headers)

    # ---------------------------------------------------------------- life cycle

    async def start(self) -> None:
        """See Service."""
        if self.supervisor is not None:
            await self.supervisor.start(self._lost)
        began = self.clock()
        next_report = 0.0
        while True:
            await asyncio.gather(*(upstream.check() for upstream in self.upstreams))
            if any(upstream.healthy for upstream in self.upstreams):
                break
            waited = self.clock() - began
            if self.supervisor is not None and (why := self.supervisor.failure()) is not None:
                raise Unavailable(why)
            if waited > self.start_timeout:
                raise Unavailable(f"no upstream answered within {self.start_timeout:g} s: {self._why()}")
            if waited >= next_report:
                log.info("waiting for an upstream to answer: %s", self._why())
                next_report += 10.0
            await asyncio.sleep(min(_START_CHECK_INTERVAL, self.start_timeout))
        if self.supervisor is not None:
            self.supervisor.on_ready()
        self.name = await self._model()
        self._watching = [asyncio.ensure_future(upstream.watch()) for upstream in self.upstreams]

    async def _model(self) -> str:
        """The name of the first healthy server's model. Raises InvalidConfig where it reports none."""
        first = next(upstream for upstream in self.upstreams if upstream.healthy)
        try:
            status, body = await first.get("/v1/models")
            if status in (401, 403):
                raise InvalidConfig(
                    f"upstream {first.origin} needs a key ({status}): set --upstream-api-key", param="upstream_api_key"
                )
            return msgspec.json.decode(body, type=_ModelList).data[0].id
        except (UpstreamDown, msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
            raise InvalidConfig(
                f"upstream {first.origin} does not speak OpenAI's API: its /v1/models names no model ({error})",
                param="upstream",
            ) from error

    def _lost(self, why: str) -> None:
        for upstream in self.upstreams:
            upstream.record_failure(why, surely=True)

    def _why(self) -> str:
        return "; ".join(f"{upstream.origin}: {upstream.why}" for upstream in self.upstreams if not upstream.healthy)

    async def close(self) -> None:
        """See Service."""
        self._draining = True
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._abort_all()
        for upstream in self.upstreams:
            upstream.pool.close()
        if self.supervisor is not None:
            await self.supervisor.close()

    def _abort_all(self) -> None:
        while self._asking:
            self._asking.pop().cancel()
        for response in list(self._open):
            response.close()

    def alive(self) -> bool:
        """See Service."""
        return True

    def ready(self) -> bool:
        """See Service."""
        return not self._draining and any(upstream.healthy for upstream in self.upstreams)

    # ---------------------------------------------------------------- requests

    async def send(self, method: str, path: str, headers: Headers, body: bytes, info: RequestInfo) -> UpstreamResponse:
        """Forward a request; returns when status and headers have come. The caller reads the response and closes it.

        Raises Overloaded, and Unavailable where no server accepts it, or where this one shuts down first.
        """
        self.admit()
        request = _UpstreamRequest(self, info)
        self._under_way += 1
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            connection, server = await self._exchange(request, method, path, [*headers, *self.headers], body)
        except BaseException as error:
            request.finish("error" if isinstance(error, Exception) else "abort")
            if isinstance(error, asyncio.CancelledError) and task not in self._asking:
                task.uncancel()  # by `_abort_all`, not by who waits for it
                raise Unavailable("the server is shutting down") from None
            raise
        finally:
            self._asking.discard(task)

        def on_done(connection: Connection) -> None:
            self._open.discard(response)
            server.pool.give_back(connection)

        response = UpstreamResponse(connection, on_done, request, f"upstream {server.origin}")
        self._open.add(response)
        return response

    async def _exchange(
        self, request: _UpstreamRequest, method: str, path: str, headers: Headers, body: bytes
    ) -> tuple[Connection, Upstream]:
        """Send the request to the first server that accepts a connection, and never to a second one.

        A server that accepted the request and died may have died of it, and so might the next one.
        """
        tried: list[str] = []
        while (server := self._choose(request.info.prompt, tried)) is not None:
            request.assign(server)
            try:
                return await server.pool.exchange(method, path, headers, body), server
            except ConnectionLost as error:
                server.num_failed += 1
                if error.code != "upstream_unreachable":
                    raise Unavailable(f"upstream {server.origin} failed: {error}", code=error.code) from error
                server.record_failure(str(error), surely=True)
                tried.append(server.name)
        self.observer.on_refused("unavailable")
        raise Unavailable(f"no upstream is available: {self._why()}", code="upstream_unreachable")

    def admit(self) -> None:
        """The check of `send`, before a body is read. Raises Overloaded and Unavailable."""
        if self._draining:
            self.observer.on_refused("draining")
            raise Unavailable("the server is shutting down")
        if self._under_way >= self.max_outstanding:
            self.observer.on_refused("max_num_queued_reqs")
            raise Overloaded(
                f"{self._under_way} requests are outstanding at the upstreams, and at most "
                f"{self.max_outstanding} may be",
                retry_after=self._drain_rate.wait(self._under_way, self.clock()),
            )

    def _choose(self, prompt: Chunks, tried: Sequence[str] = ()) -> Upstream | None:
        """The routing policy's choice among healthy servers, none of `tried`; None: there is none."""
        for upstream in self.upstreams:
            if upstream.healthy:
                self.routing.add(upstream.name)
            else:
                self.routing.remove(upstream.name)
        name = self.routing.choose(prompt, tried)
        return next((upstream for upstream in self.upstreams if upstream.name == name), None)

    def on_finished(self, observed: bool, now: float) -> None:
        """A request ended."""
        self._under_way -= 1
        self._completed += observed
        self._drain_rate.record(now)
        if not self._under_way:
            self._empty.set()

    # ---------------------------------------------------------------- statistics

    def stats(self) -> dict[str, Any]:
        """See Service."""
        return {
            "running": self.ready(),
            "model": self.name,
            "backend": self.kind,
            "waiting_requests": 0,
            "active_requests": self._under_way,
            "completed_requests": self._completed,
            "generated_tokens": self.generated,
            "latency_ms": self.observer.latencies(),
            "upstreams": [
                {
                    "url": str(upstream.origin),
                    "well": upstream.healthy,
                    "why": upstream.why,
                    "outstanding": self.routing.outstanding.get(upstream.name, 0),
                    "requests": upstream.num_requests,
                    "failed": upstream.num_failed,
                }
                for upstream in self.upstreams
            ],
        }

    def load(self) -> int:
        """See Service."""
        return self._under_way

    def metrics(self) -> bytes:
        """See Service."""
        return self.observer.text()

    async def scrape(self) -> list[tuple[str, bytes]]:
        """(name, /metrics text) of each healthy server; empty text where it has none."""

        async def one(upstream: Upstream) -> tuple[str, bytes]:
            try:
                status, text = await upstream.get("/metrics", timeout=_SCRAPE)
            except UpstreamDown:
                return upstream.origin.authority, b""
            return upstream.origin.authority, text if status == 200 else b""

        return list(await asyncio.gather(*(one(upstream) for upstream in self.upstreams if upstream.healthy)))


_PROMPT_START = re.compile(rb'"(?:messages|prompt|input)"')


def prompt_chunks(body: bytes) -> Chunks:
    """The beginning of the prompt in a request's JSON, in chunks that requests with a common prefix share."""
    found = _PROMPT_START.search(body)
    if found is None:
        return ()
    start, end = found.end(), min(len(body), found.end() + _CHUNK * _MAX_CHUNKS)
    return tuple(body[at : min(at + _CHUNK, end)] for at in range(start, end, _CHUNK))
