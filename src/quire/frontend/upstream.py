"""The upper door where answers are made elsewhere: one or several OpenAI-compatible servers, vLLM say."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from quire.errors import InvalidConfig, Overloaded, Unavailable
from quire.frontend.drain_rate import DrainRate
from quire.frontend.http_client import Connection, ConnectionLost, Headers, Origin
from quire.frontend.observer import FrontendObserver, NoObserver, NoRequestObserver, RequestObserver
from quire.frontend.supervisor import Supervisor
from quire.frontend.upstream_response import UpstreamResponse
from quire.frontend.upstream_server import Upstream, UpstreamDown
from quire.types import FinishedRequest, SamplingParams
from quire.types import TraceContext as Caller

log = logging.getLogger("uvicorn.error")

_START_CHECK_INTERVAL = 0.5
"""Seconds between two looks while none has answered yet."""
_MAX_IMBALANCE = 4
"""Requests that the server with the same prefix may have more than the one with the fewest."""
_SCRAPE = 2.0
"""Seconds that a server may take over its metrics."""
_PREFIX = 512
"""Bytes of a prompt that tell which server has seen it."""


class RequestInfo(NamedTuple):
    """What observers are told of a request. trace_context: its request_id is what it goes by here.

    max_tokens: it may get, 0 if untold. on_usage: hears how many tokens prompt and answer had, once they are known.
    observed: whether observers hear of it at all. begins: the part of it that tells which others begin alike
    (`prompt_prefix`).
    """

    trace_context: Caller
    max_tokens: int = 0
    sampling: SamplingParams = SamplingParams()
    on_usage: Callable[[int], None] = lambda tokens: None
    observed: bool = True
    begins: bytes = b""


class _UpstreamRequest:
    """One request under way: what is heard of it goes to the observers."""

    def __init__(self, backend: UpstreamBackend, about: RequestInfo) -> None:
        self.backend, self.info = backend, about
        self.observer: FrontendObserver = backend.observer if about.observed else NoObserver()
        self.request_observer: RequestObserver = backend.request_observer if about.observed else NoRequestObserver()
        self.arrived = self.last = backend.clock()
        self.first: float | None = None
        self.server: Upstream | None = None
        self.lane = self.request_observer.on_ask(about.trace_context.request_id, about.max_tokens, self.arrived)

    def assign(self, server: Upstream | None) -> None:
        if self.server is not None:
            self.server.outstanding -= 1
        if server is not None:
            server.outstanding += 1
            server.num_requests += 1
            self.request_observer.on_sent(self.lane, str(server.origin), self.backend.clock())
        self.server = server

    def on_tokens(self, tokens: int) -> None:
        now = self.backend.clock()
        if self.first is None:
            self.first = now
            self.observer.on_first(now - self.arrived)
        else:
            self.observer.on_gap(now - self.last, tokens)
        self.last = now
        self.backend.generated += tokens
        self.request_observer.on_made(self.lane, tokens, now)

    def on_end(self, passage: UpstreamResponse, error: str | None) -> None:
        if error and self.server is not None:
            self.server.num_failed += 1
        failed = bool(error) or passage.status >= 400
        reason = "abort" if error == "" else "error" if failed else _REASONS.get(passage.finish, "stop")
        self.backend.generated += passage.tokens - passage.num_events
        self.finish(reason, passage.prompt_tokens, passage.tokens, passage.id)

    def finish(self, reason: str, prompt: int = 0, tokens: int = 0, known_as: str = "") -> None:
        """known_as: what the answer was called."""
        now, about = self.backend.clock(), self.info
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
        self.request_observer.on_end(self.lane, known_as, reason, prompt, tokens, now)
        self.backend.on_finished(about.observed, now)


_REASONS: Mapping[str, str] = {"length": "length", "max_tokens": "length", "abort": "abort", "timeout": "timeout"}
"""What upstreams call the ends of answers, where it is not a stop of some kind."""


class UpstreamBackend:
    """Passes requests on as they came (the upper door, an `interface.Service`).

    headers: what is sent with every request; keyed: a key is among them. max_outstanding: requests at once; one more
    is refused. affinity: requests that begin alike go to one server, while it is not much busier than the rest.
    start_timeout: seconds that `start` waits for a server to answer.
    """

    def __init__(
        self,
        origins: Sequence[Origin],
        *,
        supervisor: Supervisor,
        observer: FrontendObserver,
        request_observer: RequestObserver,
        kind: str,
        headers: Headers,
        max_outstanding: int,
        affinity: bool,
        start_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstreams = [Upstream(origin, headers) for origin in origins]
        self.supervisor, self.observer, self.request_observer, self.kind, self.clock = (
            supervisor,
            observer,
            request_observer,
            kind,
            clock,
        )
        self.name, self.generated = "", 0
        self.keyed = any(name == b"authorization" for name, _ in headers)
        self._headers, self._max_outstanding, self._affinity, self._start_timeout = (
            headers,
            max_outstanding,
            affinity,
            start_timeout,
        )
        self._completed = self._round_robin = self._under_way = 0
        self._drain_rate = DrainRate()
        self._watching: list[asyncio.Task[None]] = []
        self._open: set[UpstreamResponse] = set()
        self._draining = False
        self._empty = asyncio.Event()

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        await self.supervisor.start(self._lost)
        began, told = self.clock(), 0.0
        while True:
            await asyncio.gather(*(upstream.check() for upstream in self.upstreams))
            if any(upstream.healthy for upstream in self.upstreams):
                break
            waited = self.clock() - began
            if (why := self.supervisor.failure()) is not None:
                raise Unavailable(why)
            if waited > self._start_timeout:
                raise Unavailable(f"no upstream answered within {self._start_timeout:g} s: {self._why()}")
            if waited >= told:
                log.info("waiting for an upstream to answer: %s", self._why())
                told += 10.0
            await asyncio.sleep(min(_START_CHECK_INTERVAL, self._start_timeout))
        self.supervisor.on_ready()
        self.name = await self._model()
        self._watching = [asyncio.ensure_future(upstream.watch()) for upstream in self.upstreams]

    async def _model(self) -> str:
        """What the first server that is well calls its model. Raises InvalidConfig if it will not say."""
        first = next(upstream for upstream in self.upstreams if upstream.healthy)
        try:
            status, body = await first.get("/v1/models")
            if status in (401, 403):
                raise InvalidConfig(
                    f"upstream {first.origin} wants a key ({status}): set --upstream-api-key", param="upstream_api_key"
                )
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (UpstreamDown, msgspec.DecodeError, LookupError, TypeError) as error:
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
        self._draining = True
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._break_off()
        for upstream in self.upstreams:
            upstream.pool.close()
        await self.supervisor.close()

    async def drain(self, timeout: float) -> None:
        self._draining = True
        if self._under_way:
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), timeout)
            except TimeoutError:
                self._break_off()

    def _break_off(self) -> None:
        for passage in list(self._open):
            passage.close()

    def alive(self) -> bool:
        return True

    def ready(self) -> bool:
        return not self._draining and any(upstream.healthy for upstream in self.upstreams)

    # ---------------------------------------------------------------- requests

    async def send(self, method: str, path: str, headers: Headers, body: bytes, info: RequestInfo) -> UpstreamResponse:
        """Pass a request on; returns when the status has come. The caller reads the passage, and closes it.

        Raises Overloaded, and Unavailable when no server takes it.
        """
        self.admit()
        ask = _UpstreamRequest(self, info)
        self._under_way += 1
        try:
            connection, server = await self._exchange(ask, method, path, [*headers, *self._headers], body)
        except BaseException as error:
            ask.finish("error" if isinstance(error, Exception) else "abort")
            raise

        def over(connection: Connection) -> None:
            self._open.discard(passage)
            server.pool.give_back(connection)

        passage = UpstreamResponse(connection, over, ask, f"upstream {server.origin}")
        self._open.add(passage)
        return passage

    async def _exchange(
        self, request: _UpstreamRequest, method: str, path: str, headers: Headers, body: bytes
    ) -> tuple[Connection, Upstream]:
        """By the first server that takes a connection: what one may have read is never asked of another.

        A server that took the request and died may have died of it, and would take the next one with it.
        """
        left = [upstream for upstream in self.upstreams if upstream.healthy]
        while left:
            server = self._choose(left, request.info.begins)
            request.assign(server)
            try:
                return await server.pool.exchange(method, path, headers, body), server
            except ConnectionLost as error:
                server.num_failed += 1
                if error.code != "upstream_unreachable":
                    raise Unavailable(f"upstream {server.origin} failed: {error}", code=error.code) from error
                server.record_failure(str(error), surely=True)
                left.remove(server)
        self.observer.on_refused("unavailable")
        raise Unavailable(f"no upstream answers now: {self._why()}", code="upstream_unreachable")

    def admit(self) -> None:
        """Raises Overloaded and Unavailable, as `send` would, before a body is read."""
        if self._draining:
            self.observer.on_refused("draining")
            raise Unavailable("the server is shutting down")
        if self._under_way >= self._max_outstanding:
            self.observer.on_refused("max_num_queued_reqs")
            raise Overloaded(
                f"{self._under_way} requests are with the upstreams, and at most {self._max_outstanding} may be",
                retry_after=self._drain_rate.wait(self._under_way, self.clock()),
            )

    def _choose(self, left: Sequence[Upstream], begins: bytes) -> Upstream:
        """The one with the fewest outstanding, in turn among equals; or the one that has seen the prefix."""
        self._round_robin += 1
        least = min(
            (left[(i + self._round_robin) % len(left)] for i in range(len(left))), key=lambda one: one.outstanding
        )
        if not self._affinity or len(left) == 1:
            return least
        kin = max(left, key=lambda one: blake2b(begins + str(one.origin).encode(), digest_size=8).digest())
        return kin if kin.outstanding <= least.outstanding + _MAX_IMBALANCE else least

    def on_finished(self, told: bool, now: float) -> None:
        """A request is over."""
        self._under_way -= 1
        self._completed += told
        self._drain_rate.record(now)
        if not self._under_way:
            self._empty.set()

    # ---------------------------------------------------------------- what can be read

    def stats(self) -> dict[str, Any]:
        return {
            "running": self.ready(),
            "model": self.name,
            "backend": self.kind,
            "waiting_requests": 0,
            "active_requests": self._under_way,
            "completed_requests": self._completed,
            "generated_tokens": self.generated,
            "upstreams": [
                {
                    "url": str(upstream.origin),
                    "well": upstream.healthy,
                    "why": upstream.why,
                    "outstanding": upstream.outstanding,
                    "requests": upstream.num_requests,
                    "failed": upstream.num_failed,
                }
                for upstream in self.upstreams
            ],
        }

    def load(self) -> int:
        return self._under_way

    def metrics(self) -> bytes:
        return self.observer.text()

    async def scrape(self) -> list[tuple[str, bytes]]:
        """(name, /metrics text) of each server that has some."""

        async def one(upstream: Upstream) -> tuple[str, bytes]:
            try:
                status, text = await upstream.get("/metrics", timeout=_SCRAPE)
            except UpstreamDown:
                return upstream.origin.authority, b""
            return upstream.origin.authority, text if status == 200 else b""

        return list(await asyncio.gather(*(one(upstream) for upstream in self.upstreams if upstream.healthy)))


_PROMPT_START = re.compile(rb'"(?:messages|prompt|input)"')


def prompt_prefix(body: bytes) -> bytes:
    """The part of a request that tells which others begin alike: the first bytes of its prompt, as written."""
    found = _PROMPT_START.search(body)
    return body[found.end() : found.end() + _PREFIX] if found else b""
