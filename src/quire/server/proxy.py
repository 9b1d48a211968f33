"""The ASGI application in front of other servers: a relay with this server's keys, limits and error objects."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.errors import DeadlineExceeded, InvalidRequest, QuireError, Unavailable
from quire.frontend.offload import offload
from quire.frontend.upstream import RequestInfo, UpstreamBackend, prompt_chunks
from quire.frontend.upstream_response import UpstreamResponse
from quire.observability.prometheus import merge_metrics
from quire.server import error_responses, schemas
from quire.server.access import Hosts, Keys, Rates, trace_context
from quire.server.app import METRICS, build_app, health_routes
from quire.server.calls import ONE_NAME
from quire.server.endpoints import GENERATE_PATHS
from quire.server.error_responses import GONE, JSON, NotFound, offloaded_json
from quire.server.item_references import is_reference
from quire.server.limits import Limits, deadline, read_body
from quire.server.live_page import LiveSource, Page
from quire.server.outputs import generate_answer
from quire.server.stream import DONE, Chunks, EventStream, event, unless_gone
from quire.server.upstream_pages import UpstreamPages
from quire.types import SamplingParams

T = TypeVar("T")

# Header fields of a request that are not passed on: those of the connection, and those that this server handles.
_REQUEST_ONLY = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade host content-length accept-encoding "
    b"expect x-request-id cookie x-request-timeout proxy-authorization proxy-authenticate".split()
)

# Header fields of an answer that are not passed on, nor are those of CORS: this server decides which pages may read
# its answers.
_RESPONSE_ONLY = frozenset(b"connection keep-alive transfer-encoding content-length date server x-request-id".split())
_CORS = b"access-control-"

# Paths whose requests observers see.
_GENERATE = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate"),
)

_KEYS = frozenset({b"authorization", b"x-api-key"})

# Occurs in the names of other header fields that may contain keys.
_SECRETS = re.compile(rb"auth|key|token|secret|credential")


class _PeekedOptions(msgspec.Struct):
    """Those of Ollama's `options`."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class _PeekedFields(msgspec.Struct):
    """What observers see of a request; nothing else uses it."""

    options: _PeekedOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class _PeekedState(msgspec.Struct):
    """Fields that need a response that the upstream has stored, or will."""

    previous_response_id: Any = None
    background: Any = None
    conversation: Any = None
    input: Any = None


_peek = msgspec.json.Decoder(_PeekedFields)
_peek_state = msgspec.json.Decoder(_PeekedState)

_RESPONSES = "/v1/responses"
_INPUT_TOKENS = "/v1/responses/input_tokens"


def peek_fields(body: bytes) -> tuple[int, SamplingParams]:
    """(max_tokens, 0 if not given, sampling parameters) of a request. Invalid ones are for the upstream to refuse."""
    try:
        peeked = _peek.decode(body)
        where = peeked if peeked.options is None else peeked.options
        given = {name: getattr(where, name) for name in ("temperature", "top_p", "seed")}
        sampling = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except (msgspec.DecodeError, RecursionError, QuireError):
        return 0, SamplingParams()
    if peeked.options is not None:
        return max(peeked.options.num_predict or 0, 0), sampling
    return peeked.max_completion_tokens or peeked.max_tokens or peeked.max_output_tokens or 0, sampling


def state_field(path: str, body: bytes) -> str | None:
    """What of a request needs responses that the upstream stores: a field, or `id`, that in the path. None: nothing.

    path: without escapes; some servers take `//` for `/`, and ignore one at the end.
    """
    path = re.sub("/+", "/", path).rstrip("/")
    if path not in (_RESPONSES, _INPUT_TOKENS):
        return "id" if path.startswith(_RESPONSES + "/") else None
    try:
        peeked = _peek_state.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    items = peeked.input if isinstance(peeked.input, list) else []
    peeked.input = any(isinstance(each, dict) and is_reference(each) for each in items)
    return next((name for name in peeked.__struct_fields__ if getattr(peeked, name) not in (None, False)), None)


class _RelayedChunks(Chunks[bytes]):
    """An upstream's events as they come, and an error in the format that clients of `path` expect."""

    def __init__(self, path: str) -> None:
        self._path = path

    def encode(self, delta: bytes) -> bytes:
        return delta

    def failed(self, error: Exception) -> bytes:
        data = event(error_responses.of(error, self._path))
        if self._path.endswith(("/v1/messages", "/v1/responses")):
            return b"event: error\n" + data
        return data + DONE


class _RelayedLines(_RelayedChunks):
    """An upstream's lines of JSON as they come. Between them nothing is sent: an empty line is no JSON."""

    media_type: ClassVar[bytes] = b"application/x-ndjson"

    def keep_alive(self) -> bytes:
        return b""

    def failed(self, error: Exception) -> bytes:
        return error_responses.of(error, self._path) + b"\n"


class Relay:
    """The handlers that pass requests on to upstream servers. keys: of this server, which are not passed on."""

    def __init__(self, backend: UpstreamBackend, limits: Limits, rates: Rates, *, keys: Keys) -> None:
        self._backend = backend
        self._limits = limits
        self._rates = rates
        self._keys = keys

    def routes(self) -> list[Route]:
        """All paths that are passed on, and those that this server answers with upstreams' answers."""
        tokens = ("/tokenize", "/detokenize", "/tokenizer_info")
        paths = (
            "/v1/{path:path}",
            "/api/{path:path}",
            "/",
            *tokens,
            "/score",
            "/rerank",
            "/v2/rerank",
            "/pooling",
            "/classify",
        )
        return [
            *(Route(path, self.generate, methods=["POST"]) for path in GENERATE_PATHS),
            Route("/metrics", self.metrics),
            *(Route(path, self.relay, methods=["GET", "POST", "DELETE"]) for path in paths),
        ]

    async def relay(self, request: Request) -> Response | EventStream[bytes]:
        """Any other path: the upstream's answer, as it is."""
        self._backend.admit()
        any_type = request.url.path.endswith(error_responses.OLLAMA_PATHS)
        has_body = request.method == "POST" or request.url.path.endswith("/api/delete")
        body = await read_body(request, self._limits, any_type=any_type) if has_body else b""
        until = _until(request.headers)
        work = self._exchange(request, request.scope["raw_path"], body, until, may_stream=True)
        if (answer := await unless_gone(request.receive, work)) is None:
            return Response(status_code=GONE)
        upstream, whole = answer
        if whole is None:
            chunks = (_RelayedLines if upstream.lines else _RelayedChunks)(request.url.path)
            return EventStream(partial(UpstreamEvents, upstream, until), chunks, keep_alive=self._limits.keep_alive)
        headers = [
            (name, value) for name, value in upstream.headers if not (name in _RESPONSE_ONLY or name.startswith(_CORS))
        ]
        response = Response(whole, upstream.status)
        response.raw_headers[:] = [*headers, (b"content-length", b"%d" % len(whole))]
        return response

    async def generate(self, request: Request) -> Response:
        """`POST /generate`, as a completion of the upstream."""
        began = time.perf_counter()
        until = _until(request.headers)
        self._backend.admit()
        raw = await read_body(request, self._limits)
        body = await offload(len(raw), partial(self._as_completion, raw))
        work = self._exchange(request, b"/v1/completions", body, until, may_stream=False)
        if (answer := await unless_gone(request.receive, work)) is None:
            return Response(status_code=GONE)
        upstream, whole = answer
        if whole is None or upstream.status >= 400:
            return Response(whole, upstream.status, media_type=JSON)
        return await offloaded_json(len(whole), partial(_generated, whole, began))

    async def _exchange(
        self, request: Request, path: bytes, body: bytes, until: float | None, *, may_stream: bool
    ) -> tuple[UpstreamResponse, bytes | None]:
        """The upstream's answer, and its body, None if that is to be streamed. until: see `_until`.

        Raises what `_check` raises.
        """
        upstream = await self._send(request, path, body, until)
        if may_stream and upstream.streams and upstream.status < 400:
            return upstream, None
        whole = await _by(until, _whole(upstream))
        if upstream.status >= 400:
            await offload(len(whole), partial(self._check, upstream, whole, path.decode("latin-1")))
        return upstream, whole

    def _as_completion(self, raw: bytes) -> bytes:
        """The body of a completion. Raises InvalidRequest naming the field."""
        request = schemas.parse(raw, schemas.GenerateRequest, self._limits)
        if request.stream:
            raise InvalidRequest(
                "stream: this server forwards requests, and only /v1/completions streams", param="stream"
            )
        if None not in (request.max_tokens, request.max_new_tokens):
            raise InvalidRequest(ONE_NAME, param="max_new_tokens")
        fields = msgspec.json.decode(raw)
        if "max_new_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_new_tokens")
        fields.setdefault("model", self._backend.name)
        return msgspec.json.encode(fields)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: this server's, and those of every upstream."""
        scraped = await self._backend.scrape()
        size = sum(len(text) for _, text in scraped)
        text = await offload(size, partial(merge_metrics, self._backend.metrics(), scraped))
        return Response(text, media_type=METRICS)

    async def _send(self, request: Request, path: bytes, body: bytes, until: float | None) -> UpstreamResponse:
        """The head of the upstream's answer."""
        (max_tokens, sampling), prompt = await offload(len(body), lambda: (peek_fields(body), prompt_chunks(body)))
        trace = trace_context(request.scope)
        headers = [*self._passed_headers(request.scope["headers"]), (b"x-request-id", trace.request_id.encode())]
        target = path.decode("latin-1").removeprefix(request.scope.get("root_path", ""))
        plain = unquote(target)
        if any(part in ("..", ".") for part in plain.split("/")):
            raise NotFound("a path with dots in it is not forwarded")
        if not_kept := self._no_state(request.scope["tenant"]):
            field = await offload(len(body), partial(state_field, plain, body))
            if field is not None:
                raise InvalidRequest(f"{field}: {not_kept}", param=field, code="unsupported_field")
        if query := request.scope.get("query_string"):
            target += "?" + query.decode("latin-1")
        generates = target.startswith(_GENERATE) and request.method == "POST"
        spend = partial(self._rates.spend, request.scope["key"])
        about = RequestInfo(trace, max_tokens, sampling, spend, generates, prompt)
        # The answer to a GET has the length that the answer to a HEAD states.
        method = "GET" if request.method == "HEAD" else request.method
        return await _by(until, self._backend.send(method, target, headers, body, about))

    def _no_state(self, tenant: str) -> str:
        """Why stored responses cannot be used here; empty where they can be. tenant: that of the request."""
        if len(self._backend.upstreams) > 1:
            return "responses are stored by one of several upstreams: send the whole conversation as input"
        if tenant:
            return "the upstream would show stored responses to every key: send the whole conversation as input"
        return ""

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

    def _check(self, upstream: UpstreamResponse, whole: bytes, path: str) -> None:
        """Raises an error for an upstream's refusal, unless its answer is an error object that can be passed on."""
        if upstream.status in (401, 403) and self._backend.keyed:
            raise Unavailable(f"the upstream refused this server's key ({upstream.status})", code="upstream_key")
        try:
            error = msgspec.json.decode(whole).get("error")
        except (msgspec.DecodeError, AttributeError, RecursionError):
            error = None
        if not isinstance(error, str if path.endswith(error_responses.OLLAMA_PATHS) else dict):
            raise UpstreamRefusal(upstream.status, whole)


class UpstreamRefusal(QuireError):
    """An upstream refused a request with something other than an error object. body: of its answer."""

    def __init__(self, status: int, body: bytes) -> None:
        words = " ".join(body[:2000].decode("utf-8", "replace").split())[:300]
        super().__init__(f"the upstream answered {status}: {words or 'nothing'}", code="upstream_error")
        self.status = status
        self.kind = InvalidRequest.kind if status < 500 else QuireError.kind


class UpstreamEvents:
    """An upstream's answer as a `ResultStream`: each part is fetched once the one before is taken.

    Closing it releases the connection to the upstream.
    """

    def __init__(self, upstream: UpstreamResponse, until: float | None) -> None:
        self._upstream = upstream
        self._part: list[bytes] = []
        self._news: Callable[[], None] = lambda: None
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._fetch(until))
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
        self._upstream.close()

    async def _fetch(self, until: float | None) -> None:
        while part := await _by(until, self._upstream.read()):
            self._taken.clear()
            self._part = [part]
            self._news()
            await self._taken.wait()


async def _whole(upstream: UpstreamResponse) -> bytes:
    parts = []
    try:
        while data := await upstream.read():
            parts.append(data)
    finally:
        upstream.close()
    return b"".join(parts)


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
        raise DeadlineExceeded("the answer was not complete before the timeout", param="x-request-timeout") from error


def _generated(whole: bytes, began: float) -> dict[str, Any]:
    """A completion as an answer of /generate. Raises Unavailable if it is not a completion."""
    try:
        made = msgspec.json.decode(whole)
        choice, tokens = made["choices"][0], made["usage"]["completion_tokens"]
        return generate_answer(made["id"], choice["text"], tokens, began, choice["finish_reason"], made["model"])
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
    pages = UpstreamPages(backend.upstreams)
    routes = [*health_routes(backend, version), *pages.routes(), *page.routes(), *relay.routes()]
    return build_app(routes, keys, page, rates, hosts, origins)
