"""The ASGI application in front of other servers: a relay with this server's keys, limits and error objects."""

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
from quire.server.access import Hosts, Keys, Rates, trace_context
from quire.server.app import METRICS, build_app, gone_or_json, health_routes, json_response
from quire.server.limits import Limits, deadline, read_body
from quire.server.live_page import LiveSource, NotFound, Page
from quire.server.stream import DONE, Chunks, EventStream, event, unless_gone
from quire.types import SamplingParams

T = TypeVar("T")

# Header fields of a request that are not passed on: those of the connection, and those that this server handles.
_REQUEST_ONLY = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id", b"cookie", b"x-request-timeout"),
        *(b"proxy-authorization", b"proxy-authenticate"),
    }
)

# Header fields of an answer that are not passed on, nor are those of CORS: this server decides which pages may read
# its answers.
_RESPONSE_ONLY = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id"}
)
_CORS = b"access-control-"

# Paths whose requests observers see.
_GENERATE = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")

_KEYS = frozenset({b"authorization", b"x-api-key"})

# Occurs in the names of other header fields that may contain keys.
_SECRETS = re.compile(rb"auth|key|token|secret|credential")


class _PeekedFields(msgspec.Struct):
    """What observers see of a request; nothing else uses it."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


_peek = msgspec.json.Decoder(_PeekedFields)


def peek_fields(body: bytes) -> tuple[int, SamplingParams]:
    """(max_tokens, 0 if not given, sampling parameters) of a request. Invalid ones are for the upstream to refuse."""
    try:
        asked = _peek.decode(body)
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "seed")}
        sampling = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except (msgspec.DecodeError, RecursionError, QuireError):
        return 0, SamplingParams()
    return asked.max_completion_tokens or asked.max_tokens or asked.max_output_tokens or 0, sampling


class _RelayedChunks(Chunks[bytes]):
    """An upstream's events as they come, and an error in the format that clients of `path` expect."""

    def __init__(self, path: str) -> None:
        self._path = path

    def encode(self, delta: bytes) -> bytes:
        return delta

    def failed(self, error: Exception) -> bytes:
        if self._path.endswith("/v1/messages"):
            return b"event: error\n" + event(error_responses.anthropic(error))
        if self._path.endswith("/v1/responses"):
            return b"event: error\n" + event(error_responses.of(error))
        return event(error_responses.of(error)) + DONE


class Relay:
    """The handlers that pass requests on to upstream servers. keys: of this server, which are not passed on."""

    def __init__(self, backend: UpstreamBackend, limits: Limits, rates: Rates, *, keys: Keys) -> None:
        self._backend = backend
        self._limits = limits
        self._rates = rates
        self._keys = keys

    def routes(self) -> list[Route]:
        """All paths that are passed on, and those that this server answers with upstreams' answers."""
        paths = ("/v1/{path:path}", "/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify")
        return [
            Route("/v1/generate", self.generate, methods=["POST"]),
            Route("/metrics", self.metrics),
            *(Route(path, self.relay, methods=["GET", "POST", "DELETE"]) for path in paths),
        ]

    async def relay(self, request: Request) -> Response | _RelayedStream:
        """Any other path: the upstream's answer, as it is."""
        self._backend.admit()
        body = await read_body(request, self._limits) if request.method == "POST" else b""
        until = _until(request.headers)
        upstream = await self._send(request, request.scope["raw_path"], body, until)
        if upstream is not None and upstream.streams and upstream.status < 400:
            return _RelayedStream(upstream, request.url.path, until, self._limits.keep_alive)
        whole = await self._read(request, upstream, until)
        if upstream is None or whole is None:
            return gone_or_json(None)
        headers = [
            (name, value) for name, value in upstream.headers if not (name in _RESPONSE_ONLY or name.startswith(_CORS))
        ]
        response = Response(whole, upstream.status)
        response.raw_headers[:] = [*headers, (b"content-length", b"%d" % len(whole))]
        return response

    async def generate(self, request: Request) -> Response:
        """`POST /v1/generate`, as a completion of the upstream."""
        began = time.perf_counter()
        until = _until(request.headers)
        self._backend.admit()
        raw = await read_body(request, self._limits)
        body = await offload(len(raw), partial(self._as_completion, raw))
        upstream = await self._send(request, b"/v1/completions", body, until)
        whole = await self._read(request, upstream, until)
        if upstream is None or whole is None:
            return gone_or_json(None)
        if upstream.status >= 400:
            return Response(whole, upstream.status, media_type="application/json")
        return await json_response(len(whole), partial(_generated, whole, time.perf_counter() - began))

    async def _read(self, request: Request, upstream: UpstreamResponse | None, until: float | None) -> bytes | None:
        """The upstream's whole answer; None if the client has disconnected. Raises what `_check` raises."""
        if upstream is None:
            return None
        whole = await unless_gone(request.receive, _whole(upstream, until))
        if whole is not None and upstream.status >= 400:
            await offload(len(whole), partial(self._check, upstream, whole))
        return whole

    def _as_completion(self, raw: bytes) -> bytes:
        """The body of a completion. Raises InvalidRequest naming the field."""
        schemas.parse(raw, schemas.GenerateRequest, self._limits)
        asked = msgspec.json.decode(raw)
        if "max_new_tokens" in asked:
            asked["max_tokens"] = asked.pop("max_new_tokens")
        asked.setdefault("model", self._backend.name)
        return msgspec.json.encode(asked)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: this server's, and those of every upstream."""
        scraped = await self._backend.scrape()
        size = sum(len(text) for _, text in scraped)
        text = await offload(size, partial(merge_metrics, self._backend.metrics(), scraped))
        return Response(text, media_type=METRICS)

    async def _send(self, request: Request, path: bytes, body: bytes, until: float | None) -> UpstreamResponse | None:
        """The head of the upstream's answer; None if the client disconnects first. until: see `_until`."""
        (max_tokens, sampling), prefix = await offload(len(body), lambda: (peek_fields(body), prompt_prefix(body)))
        trace = trace_context(request.scope)
        headers = [*self._passed_headers(request.scope["headers"]), (b"x-request-id", trace.request_id.encode())]
        target = path.decode("latin-1").removeprefix(request.scope.get("root_path", ""))
        if any(part in ("..", ".") for part in unquote(target).split("/")):
            raise NotFound("a path with dots in it goes nowhere")
        if query := request.scope.get("query_string"):
            target += "?" + query.decode("latin-1")
        generates = target.startswith(_GENERATE) and request.method == "POST"
        spend = partial(self._rates.spend, request.scope["key"])
        about = RequestInfo(trace, max_tokens, sampling, spend, generates, prefix)
        # The answer to a GET has the length that the answer to a HEAD states.
        method = "GET" if request.method == "HEAD" else request.method
        work = self._backend.send(method, target, headers, body, about)
        return await unless_gone(request.receive, _by(until, work))

    def _passed_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        """The header fields of a request that are passed on.

        Not those of the connection (RFC 9110, 7.6.1), nor any with a key of this server in it. A client's own key is
        passed on where neither clients nor the upstream need a key that this server has.
        """
        dropped = {*_REQUEST_ONLY, *_KEYS} if self._keys.needed or self._backend.keyed else {*_REQUEST_ONLY}
        for name, value in headers:
            if name == b"connection":
                dropped.update(option.strip().lower() for option in value.split(b","))
        for name, value in headers:
            if name not in dropped and not (_SECRETS.search(name) and self._keys.in_field(value)):
                yield name, value

    def _check(self, upstream: UpstreamResponse, whole: bytes) -> None:
        """Raises an error for an upstream's refusal, unless its answer is an error object that can be passed on."""
        if upstream.status in (401, 403) and self._backend.keyed:
            raise Unavailable(f"the upstream refused this server's key ({upstream.status})", code="upstream_key")
        try:
            error = msgspec.json.decode(whole).get("error")
        except (msgspec.DecodeError, AttributeError, RecursionError):
            error = None
        if not isinstance(error, dict):
            raise UpstreamRefusal(upstream.status, whole)


class UpstreamRefusal(QuireError):
    """An upstream refused a request with something other than an error object. body: of its answer."""

    def __init__(self, status: int, body: bytes) -> None:
        words = " ".join(body[:2000].decode("utf-8", "replace").split())[:300]
        super().__init__(f"the upstream answered {status}: {words or 'nothing'}", code="upstream_error")
        self.status = status
        self.kind = InvalidRequest.kind if status < 500 else QuireError.kind


class _RelayedStream(EventStream[bytes]):
    """An upstream's answer as a stream. The connection to the upstream is released however the stream ends."""

    def __init__(self, upstream: UpstreamResponse, path: str, until: float | None, keep_alive: float) -> None:
        super().__init__(lambda: UpstreamEvents(_events(upstream, until)), _RelayedChunks(path), keep_alive=keep_alive)
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._upstream.close()


class UpstreamEvents:
    """Parts that have to be awaited, as a `ResultStream`: each is fetched once the one before is taken."""

    def __init__(self, parts: AsyncGenerator[bytes, None]) -> None:
        self._part: list[bytes] = []
        self._news: Callable[[], None] = lambda: None
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._fetch(parts))
        self._task.add_done_callback(lambda task: self._news())

    def subscribe(self, news: Callable[[], None]) -> None:
        """Call `news` for each part from now on, and at the end."""
        self._news = news

    def take(self) -> list[bytes] | None:
        """The next part, if it is there; None at the end. Raises the error that ended it."""
        if self._part:
            part, self._part = self._part, []
            self._taken.set()
            return part
        if not self._task.done():
            return []
        self._task.result()
        return None

    def close(self) -> None:
        """Fetch no more."""
        self._news = lambda: None
        self._task.cancel()

    async def _fetch(self, parts: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(parts):
            async for part in parts:
                self._taken.clear()
                self._part = [part]
                self._news()
                await self._taken.wait()


async def _events(upstream: UpstreamResponse, until: float | None) -> AsyncGenerator[bytes, None]:
    while data := await _by(until, upstream.read()):
        yield data


async def _whole(upstream: UpstreamResponse, until: float | None) -> bytes:
    try:
        async with aclosing(_events(upstream, until)) as parts:
            return b"".join([data async for data in parts])
    finally:
        upstream.close()


def _until(headers: Mapping[str, str]) -> float | None:
    """The event loop's time at which an answer must be complete, None without a deadline."""
    seconds = deadline(headers)
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


async def _by(until: float | None, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises DeadlineExceeded at the loop's time `until`."""
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError as error:
        raise DeadlineExceeded("the answer was not complete in time", param="x-request-timeout") from error


def _generated(whole: bytes, seconds: float) -> dict[str, Any]:
    """A completion as an answer of /v1/generate. Raises Unavailable if it is not a completion."""
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
        raise Unavailable(f"the upstream's answer is not a completion: {error}", code="upstream_malformed") from error


def create_relay_app(
    backend: UpstreamBackend,
    *,
    limits: Limits,
    keys: Keys,
    rates: Rates,
    version: str,
    view: LiveSource | None,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
) -> ASGIApp:
    """The ASGI application of upstream servers, which the caller starts and closes. view: what the live page shows."""
    page = Page(view, keys, limits)
    relay = Relay(backend, limits, rates, keys=keys)
    routes = [*health_routes(backend, version), *page.routes(), *relay.routes()]
    return build_app(routes, keys, page, rates, hosts, origins)
