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

from quire.backends.http1 import Broken, Connection, Headers, Origin
from quire.backends.keeper import Keeper
from quire.backends.load import Departures
from quire.backends.observer import LaneObserver, NoLanes, RimObserver, Unobserved
from quire.backends.passage import Passage
from quire.backends.remote import Away, Upstream
from quire.errors import InvalidConfig, Overloaded, Unavailable
from quire.values import Ended, SamplingParams
from quire.values import Origin as Caller

log = logging.getLogger("uvicorn.error")

_ASK_EVERY = 0.5
"""Seconds between two looks while none has answered yet."""
_SLACK = 4
"""Requests that the server with the same prefix may have more than the one with the fewest."""
_SCRAPE = 2.0
"""Seconds that a server may take over its metrics."""
_PREFIX = 512
"""Bytes of a prompt that tell which server has seen it."""


class About(NamedTuple):
    """What observers are told of a request. caller: its request_id is what it goes by here.

    most: tokens it may get, 0 if untold. spend: hears how many tokens prompt and answer had, once they are known.
    told: whether observers hear of it at all. begins: the part of it that tells which others begin alike (`beginning`).
    """

    caller: Caller
    most: int = 0
    sampling: SamplingParams = SamplingParams()
    spend: Callable[[int], None] = lambda tokens: None
    told: bool = True
    begins: bytes = b""


class _Ask:
    """One request under way: what is heard of it goes to the observers."""

    def __init__(self, backend: UpstreamBackend, about: About) -> None:
        self.backend, self.about = backend, about
        self.rim: RimObserver = backend.rim if about.told else Unobserved()
        self.lanes: LaneObserver = backend.lanes if about.told else NoLanes()
        self.arrived = self.last = backend.clock()
        self.first: float | None = None
        self.server: Upstream | None = None
        self.lane = self.lanes.on_ask(about.caller.request_id, about.most, self.arrived)

    def taken_by(self, server: Upstream | None) -> None:
        if self.server is not None:
            self.server.outstanding -= 1
        if server is not None:
            server.outstanding += 1
            server.asked += 1
            self.lanes.on_sent(self.lane, str(server.origin), self.backend.clock())
        self.server = server

    def on_made(self, tokens: int) -> None:
        now = self.backend.clock()
        if self.first is None:
            self.first = now
            self.rim.on_first(now - self.arrived)
        else:
            self.rim.on_gap(now - self.last, tokens)
        self.last = now
        self.backend.generated += tokens
        self.lanes.on_made(self.lane, tokens, now)

    def on_over(self, passage: Passage, error: str | None) -> None:
        if error and self.server is not None:
            self.server.failed += 1
        failed = bool(error) or passage.status >= 400
        reason = "abort" if error == "" else "error" if failed else _REASONS.get(passage.finish, "stop")
        self.backend.generated += passage.tokens - passage.made
        self.over(reason, passage.prompt, passage.tokens, passage.id)

    def over(self, reason: str, prompt: int = 0, tokens: int = 0, known_as: str = "") -> None:
        """known_as: what the answer was called."""
        now, about = self.backend.clock(), self.about
        self.taken_by(None)
        about.spend(prompt + tokens)
        self.rim.on_end(
            Ended(
                known_as or about.caller.request_id,
                0,
                reason,
                about.sampling,
                about.caller,
                prompt,
                cached=0,
                tokens=tokens,
                max_tokens=about.most,
                first=None if self.first is None else self.first - self.arrived,
                seconds=now - self.arrived,
            )
        )
        self.lanes.on_end(self.lane, known_as, reason, prompt, tokens, now)
        self.backend.left(about.told, now)


_REASONS: Mapping[str, str] = {"length": "length", "max_tokens": "length", "abort": "abort", "timeout": "timeout"}
"""What upstreams call the ends of answers, where it is not a stop of some kind."""


class UpstreamBackend:
    """Passes requests on as they came (the upper door, a `base.Service`).

    headers: what is sent with every request; keyed: a key is among them. most: requests that may be outstanding; one
    more is refused. affinity: requests that begin alike go to one server, while it is not much busier than the rest.
    patience: seconds that `start` waits for a server to answer.
    """

    def __init__(
        self,
        origins: Sequence[Origin],
        *,
        keeper: Keeper,
        rim: RimObserver,
        lanes: LaneObserver,
        kind: str,
        headers: Headers,
        most: int,
        affinity: bool,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstreams = [Upstream(origin, headers) for origin in origins]
        self.keeper, self.rim, self.lanes, self.kind, self.clock = keeper, rim, lanes, kind, clock
        self.name, self.generated = "", 0
        self.keyed = any(name == b"authorization" for name, _ in headers)
        self._headers, self._most, self._affinity, self._patience = headers, most, affinity, patience
        self._completed = self._turn = self._under_way = 0
        self._left = Departures()
        self._watching: list[asyncio.Task[None]] = []
        self._open: set[Passage] = set()
        self._draining = False
        self._empty = asyncio.Event()

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        await self.keeper.start(self._lost)
        began, told = self.clock(), 0.0
        while True:
            await asyncio.gather(*(upstream.look() for upstream in self.upstreams))
            if any(upstream.well for upstream in self.upstreams):
                break
            waited = self.clock() - began
            if (why := self.keeper.died()) is not None:
                raise Unavailable(why)
            if waited > self._patience:
                raise Unavailable(f"no upstream answered within {self._patience:g} s: {self._why()}")
            if waited >= told:
                log.info("waiting for an upstream to answer: %s", self._why())
                told += 10.0
            await asyncio.sleep(min(_ASK_EVERY, self._patience))
        self.keeper.ready()
        self.name = await self._model()
        self._watching = [asyncio.ensure_future(upstream.watch()) for upstream in self.upstreams]

    async def _model(self) -> str:
        """What the first server that is well calls its model. Raises InvalidConfig if it will not say."""
        first = next(upstream for upstream in self.upstreams if upstream.well)
        try:
            status, body = await first.get("/v1/models")
            if status in (401, 403):
                raise InvalidConfig(
                    f"upstream {first.origin} wants a key ({status}): set --upstream-api-key", param="upstream_api_key"
                )
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (Away, msgspec.DecodeError, LookupError, TypeError) as error:
            raise InvalidConfig(
                f"upstream {first.origin} does not speak OpenAI's API: its /v1/models names no model ({error})",
                param="upstream",
            ) from error

    def _lost(self, why: str) -> None:
        for upstream in self.upstreams:
            upstream.missed(why, surely=True)

    def _why(self) -> str:
        return "; ".join(f"{upstream.origin}: {upstream.why}" for upstream in self.upstreams if not upstream.well)

    async def close(self) -> None:
        self._draining = True
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._break_off()
        for upstream in self.upstreams:
            upstream.pool.close()
        await self.keeper.close()

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
        return not self._draining and any(upstream.well for upstream in self.upstreams)

    # ---------------------------------------------------------------- requests

    async def send(self, method: str, path: str, headers: Headers, body: bytes, about: About) -> Passage:
        """Pass a request on; returns when the status has come. The caller reads the passage, and closes it.

        Raises Overloaded, and Unavailable when no server takes it.
        """
        self.admit()
        ask = _Ask(self, about)
        self._under_way += 1
        try:
            connection, server = await self._exchange(ask, method, path, [*headers, *self._headers], body)
        except BaseException as error:
            ask.over("error" if isinstance(error, Exception) else "abort")
            raise

        def over(connection: Connection) -> None:
            self._open.discard(passage)
            server.pool.give_back(connection)

        passage = Passage(connection, over, ask, f"upstream {server.origin}")
        self._open.add(passage)
        return passage

    async def _exchange(
        self, ask: _Ask, method: str, path: str, headers: Headers, body: bytes
    ) -> tuple[Connection, Upstream]:
        """By the first server that takes a connection: what one may have read is never asked of another.

        A server that took the request and died may have died of it, and would take the next one with it.
        """
        left = [upstream for upstream in self.upstreams if upstream.well]
        while left:
            server = self._choose(left, ask.about.begins)
            ask.taken_by(server)
            try:
                return await server.pool.exchange(method, path, headers, body), server
            except Broken as error:
                server.failed += 1
                if error.code != "upstream_unreachable":
                    raise Unavailable(f"upstream {server.origin} failed: {error}", code=error.code) from error
                server.missed(str(error), surely=True)
                left.remove(server)
        self.rim.on_refused("unavailable")
        raise Unavailable(f"no upstream answers now: {self._why()}", code="upstream_unreachable")

    def admit(self) -> None:
        """Raises Overloaded and Unavailable, as `send` would, before a body is read."""
        if self._draining:
            self.rim.on_refused("draining")
            raise Unavailable("the server is shutting down")
        if self._under_way >= self._most:
            self.rim.on_refused("max_num_queued_reqs")
            raise Overloaded(
                f"{self._under_way} requests are with the upstreams, and at most {self._most} may be",
                retry_after=self._left.wait(self._under_way, self.clock()),
            )

    def _choose(self, left: Sequence[Upstream], begins: bytes) -> Upstream:
        """The one with the fewest outstanding, in turn among equals; or the one that has seen the prefix."""
        self._turn += 1
        least = min((left[(i + self._turn) % len(left)] for i in range(len(left))), key=lambda one: one.outstanding)
        if not self._affinity or len(left) == 1:
            return least
        kin = max(left, key=lambda one: blake2b(begins + str(one.origin).encode(), digest_size=8).digest())
        return kin if kin.outstanding <= least.outstanding + _SLACK else least

    def left(self, told: bool, now: float) -> None:
        """A request is over."""
        self._under_way -= 1
        self._completed += told
        self._left.note(now)
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
                    "well": upstream.well,
                    "why": upstream.why,
                    "outstanding": upstream.outstanding,
                    "requests": upstream.asked,
                    "failed": upstream.failed,
                }
                for upstream in self.upstreams
            ],
        }

    def load(self) -> int:
        return self._under_way

    def metrics(self) -> bytes:
        return self.rim.text()

    async def scrape(self) -> list[tuple[str, bytes]]:
        """(name, /metrics text) of each server that has some."""

        async def one(upstream: Upstream) -> tuple[str, bytes]:
            try:
                status, text = await upstream.get("/metrics", timeout=_SCRAPE)
            except Away:
                return upstream.origin.authority, b""
            return upstream.origin.authority, text if status == 200 else b""

        return list(await asyncio.gather(*(one(upstream) for upstream in self.upstreams if upstream.well)))


_BEGINS = re.compile(rb'"(?:messages|prompt|input)"')


def beginning(body: bytes) -> bytes:
    """The part of a request that tells which others begin alike: the first bytes of its prompt, as written."""
    found = _BEGINS.search(body)
    return body[found.end() : found.end() + _PREFIX] if found else b""
