"""HTTP in front of servers that speak it themselves: requests pass as they came, keys, limits and errors are ours."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import DeadlineExceeded, InvalidRequest, QuireError, Unavailable
from quire.frontend.offload import offload
from quire.frontend.upstream import RequestInfo, UpstreamBackend, prompt_prefix
from quire.frontend.upstream_response import UpstreamResponse
from quire.observability.prometheus import merge_metrics
from quire.server import error_responses, schemas
from quire.server.app import METRICS, build_app, gone_or_json, health_routes, written
from quire.server.chunks import DONE, event
from quire.server.hosts import Hosts
from quire.server.limits import Keys, Limits, deadline, origin, read_body
from quire.server.live_page import LiveSource, NotFound, Page
from quire.server.rates import Rates
from quire.server.stream import EventStream, unless_gone
from quire.types import SamplingParams

T = TypeVar("T")

_OURS = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id", b"cookie", b"x-request-timeout"),
        *(b"proxy-authorization", b"proxy-authenticate"),
    }
)
"""Header fields of a request that end here: those of the connection, and what this server sees to."""

_GENERATE = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""What observers hear of."""

_KEYS = frozenset({b"authorization", b"x-api-key"})
_SECRETS = re.compile(rb"auth|key|token|secret|credential")
"""What the names of header fields with keys in them say."""
_THEIRS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id"}
)
"""Header fields of an answer that go no further."""

_CORS = b"access-control-"
"""Nor do those: which pages may read answers is for this server to say."""


class _PeekedFields(msgspec.Struct):
    """What observers are told of a request; nothing depends on it."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


_peek = msgspec.json.Decoder(_PeekedFields)


def peek_fields(body: bytes) -> tuple[int, SamplingParams]:
    """(most tokens, 0 if untold, how they are drawn) of a request; the upstream sees to what cannot be."""
    try:
        asked = _peek.decode(body)
        drawn = {name: getattr(asked, name) for name in ("temperature", "top_p", "seed")}
        sampling = SamplingParams(**{name: value for name, value in drawn.items() if value is not None})
    except (msgspec.DecodeError, RecursionError, QuireError):
        return 0, SamplingParams()
    return asked.max_completion_tokens or asked.max_tokens or asked.max_output_tokens or 0, sampling


class _GenerateChunks:
    """An upstream's events as they came, and an error in the shape that clients of `path` expect."""

    def __init__(self, path: str) -> None:
        self._path = path

    edges = 0

    def cost(self, ready: Sequence[bytes]) -> int:
        """They pass as they are."""
        return 0

    def opening(self) -> bytes:
        return b""

    def of(self, data: bytes) -> bytes:
        return data

    def closing(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        if self._path.endswith("/v1/messages"):
            return b"event: error\n" + event(error_responses.anthropic(error))
        if self._path.endswith("/v1/responses"):
            return b"event: error\n" + event(error_responses.of(error))
        return event(error_responses.of(error)) + DONE


class Relay:
    """Upstream servers, answering over HTTP through this one. keys: those of this server, which go no further."""

    def __init__(self, backend: UpstreamBackend, limits: Limits, rates: Rates, *, keys: Keys) -> None:
        self._backend, self._limits, self._rates, self._keys = backend, limits, rates, keys

    def routes(self) -> list[Route]:
        paths = ("/v1/{path:path}", "/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify")
        return [
            Route("/v1/generate", self.generate, methods=["POST"]),
            Route("/metrics", self.metrics),
            *(Route(path, self.passed, methods=["GET", "POST", "DELETE"]) for path in paths),
        ]

    async def passed(self, request: Request) -> Response | _RelayedResponse:
        self._backend.admit()
        body = await read_body(request, self._limits) if request.method == "POST" else b""
        until = _until(request.headers)
        passage = await self._send(request, request.scope["raw_path"], body, until)
        if passage is None:
            return gone_or_json(None)
        if passage.streams and passage.status < 400:
            return _RelayedResponse(passage, request.url.path, until, self._limits.keep_alive)
        whole = await unless_gone(request.receive, _whole(passage, until))
        if whole is None:
            return gone_or_json(None)
        if passage.status >= 400:
            await offload(len(whole), partial(self._check, passage, whole))
        headers = [(name, value) for name, value in passage.headers if not (name in _THEIRS or name.startswith(_CORS))]
        response = Response(whole, passage.status)
        response.raw_headers[:] = [*headers, (b"content-length", b"%d" % len(whole))]
        return response

    async def generate(self, request: Request) -> Response:
        """Our own short form, asked of the upstream as a completion."""
        began, until = time.perf_counter(), _until(request.headers)
        self._backend.admit()
        raw = await read_body(request, self._limits)
        body = await offload(len(raw), partial(self._as_completion, raw))
        passage = await self._send(request, b"/v1/completions", body, until)
        whole = None if passage is None else await unless_gone(request.receive, _whole(passage, until))
        if passage is None or whole is None:
            return gone_or_json(None)
        if passage.status >= 400:
            await offload(len(whole), partial(self._check, passage, whole))
            return Response(whole, passage.status, media_type="application/json")
        return await written(len(whole), partial(_generated, whole, time.perf_counter() - began))

    def _as_completion(self, raw: bytes) -> bytes:
        """Raises InvalidRequest naming the field."""
        schemas.parse(raw, schemas.GenerateRequest, self._limits)
        asked = msgspec.json.decode(raw)
        if "max_new_tokens" in asked:
            asked["max_tokens"] = asked.pop("max_new_tokens")
        asked.setdefault("model", self._backend.name)
        return msgspec.json.encode(asked)

    async def metrics(self, request: Request) -> Response:
        theirs = await self._backend.scrape()
        size = sum(len(text) for _, text in theirs)
        text = await offload(size, partial(merge_metrics, self._backend.metrics(), theirs))
        return Response(text, media_type=METRICS)

    # ---------------------------------------------------------------- on the way

    async def _send(self, request: Request, path: bytes, body: bytes, until: float | None) -> UpstreamResponse | None:
        """None if the client left before there was a status."""
        (most, sampling), begins = await offload(len(body), lambda: (peek_fields(body), prompt_prefix(body)))
        caller = origin(request.scope)
        headers = [*self._onward(request.scope["headers"]), (b"x-request-id", caller.request_id.encode())]
        target = path.decode("latin-1").removeprefix(request.scope.get("root_path", ""))
        if any(part in ("..", ".") for part in unquote(target).split("/")):
            raise NotFound("a path with dots in it goes nowhere")
        if query := request.scope.get("query_string"):
            target += "?" + query.decode("latin-1")
        generates = target.startswith(_GENERATE) and request.method == "POST"
        about = RequestInfo(caller, most, sampling, partial(self._rates.spend, request.scope["key"]), generates, begins)
        method = "GET" if request.method == "HEAD" else request.method  # whose answer is one that says how long it is
        work = self._backend.send(method, target, headers, body, about)
        return await unless_gone(request.receive, _by(until, work))

    def _onward(self, headers: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        """The header fields of a request that go to the upstream.

        Not those of the connection (RFC 9110, 7.6.1), nor a key of this server, wherever it stands. A client's own key
        goes on where neither clients nor the upstream have keys of this server's.
        """
        dropped = {*_OURS, *_KEYS} if self._keys.needed or self._backend.keyed else {*_OURS}
        for name, value in headers:
            if name == b"connection":
                dropped.update(option.strip().lower() for option in value.split(b","))
        for name, value in headers:
            if name not in dropped and not (_SECRETS.search(name) and self._keys.in_field(value)):
                yield name, value

    def _check(self, passage: UpstreamResponse, whole: bytes) -> None:
        """Raises what an upstream's refusal means, unless it says so itself in the right shape."""
        if passage.status in (401, 403) and self._backend.keyed:
            raise Unavailable(f"the upstream refused this server's key ({passage.status})", code="upstream_key")
        try:
            error = msgspec.json.decode(whole).get("error")
        except (msgspec.DecodeError, AttributeError, RecursionError):
            error = None
        if not isinstance(error, dict):
            raise UpstreamRefusal(passage.status, whole)


class UpstreamRefusal(QuireError):
    """An upstream refused a request in words that are not OpenAI's."""

    def __init__(self, status: int, said: bytes) -> None:
        words = " ".join(said[:2000].decode("utf-8", "replace").split())[:300]
        super().__init__(f"the upstream answered {status}: {words or 'nothing'}", code="upstream_error")
        self.status = status
        self.kind = InvalidRequest.kind if status < 500 else QuireError.kind


class _RelayedResponse(EventStream[bytes]):
    """A passage as a stream; whatever happens, the passage is closed."""

    def __init__(self, passage: UpstreamResponse, path: str, until: float | None, keep_alive: float) -> None:
        super().__init__(lambda: UpstreamEvents(_events(passage, until)), _GenerateChunks(path), keep_alive=keep_alive)
        self._passage = passage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._passage.close()


class UpstreamEvents:
    """What has to be waited for, as a `ResultStream`: the next part is fetched once the last is taken."""

    def __init__(self, parts: AsyncGenerator[bytes, None]) -> None:
        self._part: list[bytes] = []
        self._news: Callable[[], None] = lambda: None
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._fetch(parts))
        self._task.add_done_callback(lambda task: self._news())

    def subscribe(self, news: Callable[[], None]) -> None:
        self._news = news

    def take(self) -> list[bytes] | None:
        if self._part:
            part, self._part = self._part, []
            self._taken.set()
            return part
        if not self._task.done():
            return []
        self._task.result()  # raises what ended it
        return None

    def close(self) -> None:
        self._news = lambda: None  # as in backends.live
        self._task.cancel()

    async def _fetch(self, parts: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(parts):
            async for part in parts:
                self._taken.clear()
                self._part = [part]
                self._news()
                await self._taken.wait()


async def _events(passage: UpstreamResponse, until: float | None) -> AsyncGenerator[bytes, None]:
    while data := await _by(until, passage.read()):
        yield data


async def _whole(passage: UpstreamResponse, until: float | None) -> bytes:
    try:
        parts = []
        while data := await _by(until, passage.read()):
            parts.append(data)
        return b"".join(parts)
    finally:
        passage.close()


def _until(headers: Mapping[str, str]) -> float | None:
    """The loop's time at which an answer must be complete."""
    seconds = deadline(headers)
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


async def _by(until: float | None, work: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError as error:
        raise DeadlineExceeded("the answer was not complete in time", param="x-request-timeout") from error


def _generated(whole: bytes, seconds: float) -> dict[str, Any]:
    """A completion in our own short form. Raises Unavailable if it is none."""
    try:
        made = msgspec.json.decode(whole)
        choice = made["choices"][0]
        return {
            "request_id": made["id"],
            "text": choice["text"],
            "generated_tokens": made["usage"]["completion_tokens"],
            "latency_ms": round(seconds * 1000, 3),
            "finish_reason": choice["finish_reason"],
            "model": made["model"],
        }
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise Unavailable(f"the upstream's completion is none: {error}", code="upstream_malformed") from error


def create_relay_app(
    backend: UpstreamBackend,
    *,
    limits: Limits,
    keys: Keys,
    rates: Rates,
    version: str,
    view: LiveSource,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
) -> ASGIApp:
    """The ASGI application in front of a backend that the caller starts and closes. view: what the live page shows."""
    page, relay = Page(view, keys, limits), Relay(backend, limits, rates, keys=keys)
    return build_app(
        [*health_routes(backend, version), *page.routes(), *relay.routes()], keys, page, rates, hosts, origins
    )
