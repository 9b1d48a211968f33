"""The ASGI application of a server with an engine: its routes and their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from quire.errors import InvalidRequest, QuireError, Unavailable, nearest
from quire.frontend.interface import Backend, Delta, ModelCard, ResultStream, Service
from quire.observability.recording_format import SUFFIX, written_bytes
from quire.parsers.tools.styles import tool_style
from quire.server import api_page, error_responses, openapi, outputs, prompts, schemas
from quire.server.access import CrossOrigin, Guard, Hosts, Keys, Rates, refuse_cross_site, trace_context
from quire.server.batch_api.runner import BatchService
from quire.server.calls import Job
from quire.server.embeddings import PoolingFields
from quire.server.endpoints import (
    ENDPOINTS,
    GENERATE,
    GENERATE_PATHS,
    OLLAMA_ENDPOINTS,
    RESPONSE_INPUT_TOKENS,
    RESPONSES,
    TOKEN_COUNT_ENDPOINTS,
    Endpoint,
    continuing,
    gather,
)
from quire.server.error_responses import GONE, JSON, NotFound, json_response, offloaded_json
from quire.server.item_references import Referred, references
from quire.server.limits import AdmissionGate, Limits, deadline, read_body
from quire.server.live_page import LiveSource, Page
from quire.server.media import offload_reading
from quire.server.ollama_models import OllamaModels, OllamaPullRequest, OllamaShowRequest
from quire.server.outputs import Usage
from quire.server.response_state import Record, ResponseState
from quire.server.response_store import ResponseStore
from quire.server.responses import ResponseChunks, ResponsesRequest
from quire.server.stream import Chunks, EventStream, answer_all, unless_gone
from quire.server.tools import make_tool_set
from quire.server.upstream_pages import LivePage, UpstreamPages
from quire.weights.details import ModelDetails

T = TypeVar("T")
METRICS = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's parameters of a reset, and why they change nothing here.
_RESETS: Mapping[str, str] = {
    "reset_running_requests": "running requests keep their blocks, and do not delay the reset",
    "reset_external": "there is no cache outside",
}


class Api:
    """The handlers of one backend. state: of responses. recording: the folder of the flight recorder, None if it is
    off."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        version: str,
        rates: Rates,
        state: ResponseState,
        recording: Path | None = None,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._system_fingerprint = f"quire-{version}"
        self._rates = rates
        self._state = state
        self._recording = recording
        self._gate = AdmissionGate(lambda held: backend.admit(1, held))

    # ---------------------------------------------------------------- generation

    async def generation(self, endpoint: Endpoint, request: Request) -> Response | EventStream[Delta]:
        """Any of ENDPOINTS, and GENERATE."""
        began = time.perf_counter()

        def prepare(parsed: Any, limits: Limits) -> tuple[Job, Chunks[Delta] | None]:
            job = self._job(endpoint, parsed, request, began, limits)
            return job, endpoint.chunks(job) if job.stream and endpoint.chunks is not None else None

        with self._gate.slot() as slot:
            kind, any_type = endpoint.request_type, endpoint.any_type
            size, (job, chunks) = await self._read(request, kind, prepare, slot, any_type=any_type)
        begin = partial(self._begin, job)
        if chunks is not None:
            return EventStream(begin, chunks, keep_alive=self._limits.keep_alive, headers=job.headers())
        made = await unless_gone(request.receive, gather(job, begin))
        if made is None:
            return Response(status_code=GONE)
        size += outputs.cost(job, made[0])
        return await offloaded_json(size, partial(endpoint.response, job, *made), job.headers())

    def _job(self, endpoint: Endpoint, parsed: Any, request: Request, began: float, limits: Limits) -> Job:
        """The job of a request, on behalf of its client. Blocking."""
        fields = {"trace_context": trace_context(request.scope), "spend": self._rates.meter(request.scope["key"])}
        return endpoint.job(parsed, self._backend, limits, self._system_fingerprint, began, **fields)

    async def respond(self, request: Request) -> Response | EventStream[Delta] | EventStream[bytes]:
        """`POST /v1/responses`. It is read in two steps: what it continues, whose size is known only then, may be much
        longer than itself."""
        began = time.perf_counter()
        owner = request.scope["owner"]
        with self._gate.slot() as slot:
            size, (parsed, referred) = await self._read(request, ResponsesRequest, _with_references, slot)
            earlier = self._state.earlier(parsed, referred, owner, size)
            size += earlier.size

            def prepare(limits: Limits) -> tuple[Job, Record | None, ResponseChunks]:
                items = earlier.items and earlier.items()
                parsed.input = earlier.resolve(parsed.input)
                job = self._job(continuing(RESPONSES, items), parsed, request, began, limits)
                record = self._state.record(job, owner, earlier.entry)
                return job, record, _response_chunks(job, record)

            job, record, chunks = await offload_reading(size, self._limits, prepare)
        begin = partial(self._begin, job)
        if parsed.background and record is not None:
            running = await self._state.begin(record, chunks, begin)
            if job.stream:
                return self._state.follow(running, 0, job.headers())
            return Response(await running.shown(), media_type=JSON, headers=job.headers())
        if job.stream:
            return EventStream(begin, chunks, keep_alive=self._limits.keep_alive, headers=job.headers())
        made = await unless_gone(request.receive, gather(job, begin))
        if made is None:
            return Response(status_code=GONE)
        [choice], chunks.usage = made
        size = max(size + outputs.cost(job, [choice]), chunks.edge_cost)
        return await offloaded_json(size, partial(chunks.whole, choice), job.headers())

    def _begin(self, job: Job) -> ResultStream[Delta]:
        """Raises what `Backend.answer` raises.

        Prompts are charged once all of them are admitted: a client that disconnects afterwards has used them all the
        same, and one whose request was refused has not.
        """
        admitted = answer_all(self._backend, job.calls, job.n)
        for call in job.calls:
            if call.spend is not None:
                call.spend(len(call.prompt))
        return admitted

    async def _read(
        self,
        request: Request,
        kind: type[schemas.T],
        prepare: Callable[[schemas.T, Limits], T],
        slot: ExitStack | None = None,
        *,
        any_type: bool = False,
    ) -> tuple[int, T]:
        """The size of the body in bytes, and what `prepare` makes of the request in it, within limits, offloaded
        together.

        slot: of a request that will be queued (see AdmissionGate). any_type: as of `read_body`.
        """
        body = await read_body(request, self._limits, any_type=any_type)
        await self._gate.wait_turn(slot)

        def read(limits: Limits) -> T:
            parsed = schemas.parse(body, kind, limits)
            if isinstance(parsed, schemas.Sampling | PoolingFields) and parsed.timeout is None:
                parsed.timeout = deadline(request.headers)
            return prepare(parsed, limits)

        return len(body), await offload_reading(len(body), self._limits, read)

    # ---------------------------------------------------------------- tokens

    def token_routes(self) -> list[Route]:
        """Paths that encode or decode, and generate nothing."""
        answers: dict[str, tuple[type[Struct], Callable[[Any, Limits], Any]]] = {
            "/tokenize": (schemas.TokenizeRequest, self._tokenize),
            "/detokenize": (schemas.DetokenizeRequest, self._detokenize),
        }
        answers |= {path: (one.request_type, partial(self._count, one)) for path, one in TOKEN_COUNT_ENDPOINTS.items()}
        del answers["/v1/responses/input_tokens"]
        routes = [Route(path, partial(self.answer, *answer), methods=["POST"]) for path, answer in answers.items()]
        return [*routes, Route("/v1/responses/input_tokens", self.count_input, methods=["POST"])]

    async def answer(
        self, kind: type[Struct], make: Callable[[Any, Limits], Any], request: Request, *, any_type: bool = False
    ) -> Response:
        """What `make` returns for a request of this type, as JSON. any_type: as of `read_body`."""
        _, encoded = await self._read(
            request, kind, lambda parsed, limits: msgspec.json.encode(make(parsed, limits)), any_type=any_type
        )
        return Response(encoded, media_type=JSON)

    async def count_input(self, request: Request) -> Response:
        """`POST /v1/responses/input_tokens`, with what the request continues."""
        size, (parsed, referred) = await self._read(request, ResponsesRequest, _with_references)
        earlier = self._state.earlier(parsed, referred, request.scope["owner"], size)

        def count(limits: Limits) -> bytes:
            items = earlier.items and earlier.items()
            parsed.input = earlier.resolve(parsed.input)
            return msgspec.json.encode(self._count(continuing(RESPONSE_INPUT_TOKENS, items), parsed, limits))

        return Response(await offload_reading(size + earlier.size, self._limits, count), media_type=JSON)

    def _count(self, endpoint: Endpoint, request: Struct, limits: Limits) -> dict[str, Any]:
        job = endpoint.make_job(request, self._backend, limits)
        return endpoint.response(job, (), Usage(job))

    def _tokenize(self, request: schemas.TokenizeRequest, limits: Limits) -> dict[str, Any]:
        card = prompts.model(request.model, self._backend)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if request.messages is not None:
            tools = make_tool_set(request.tools, None, None, tool_style(card.tool_parser), limits).for_template
            messages = limits.prompt_header.remove(request.messages).messages
            tokens = prompts.render(messages, request, self._backend, limits.images, tools).ids
        else:
            special = request.add_special_tokens is not False
            [(_, tokens)] = prompts.encode([request.prompt or ""], special, self._backend)
        names = [self._backend.token_text(token)[0] for token in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens, "token_strs": names}

    def _detokenize(self, request: schemas.DetokenizeRequest, limits: Limits) -> dict[str, str]:
        card = prompts.model(request.model, self._backend)
        prompts.in_vocabulary(request.tokens, "tokens", card)
        return {"prompt": self._backend.decode(tuple(request.tokens))}

    # ---------------------------------------------------------------- models, metrics, administration

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`POST /reset_prefix_cache`, with vLLM's parameters where they change nothing."""
        refuse_cross_site(request.scope)
        for name, value in request.query_params.items():
            if name not in _RESETS:
                raise InvalidRequest(f"unknown parameter {name!r}.{nearest(name, _RESETS)}", param=name)
            if value.lower() not in ("false", "0"):
                raise InvalidRequest(f"{name} must be false: {_RESETS[name]}", param=name)
        self._backend.reset_prefix_cache()
        return Response()

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        name = request.path_params["id"]
        return json_response(_card(prompts.model(name, self._backend), name, self._limits))

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        return Response(self._backend.metrics(), media_type=METRICS)

    async def recording(self, request: Request) -> Response:
        """`GET /v1/recording`: the flight recorder's files, oldest first, as one file for `quire replay`."""
        if self._recording is None:
            raise NotFound("recording is off: start the server with --recording-dir")
        paths = sorted(self._recording.glob(f"*{SUFFIX}"))
        headers = {"Content-Disposition": f'attachment; filename="recording{SUFFIX}"'}
        return StreamingResponse(_segments(paths), media_type="application/octet-stream", headers=headers)


def _with_references(parsed: ResponsesRequest, limits: Limits) -> tuple[ResponsesRequest, dict[str | None, Referred]]:
    """A request and the stored responses that its input refers to."""
    return parsed, references(parsed.input)


def _response_chunks(job: Job, record: Record | None) -> ResponseChunks:
    """Those of a response in the background are stored with their events, by the task that makes them."""
    if record is None:
        return ResponseChunks(job)
    return ResponseChunks(job, (lambda response: True) if job.request.background else record.keep, record.cost)


async def _segments(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        try:
            yield await asyncio.to_thread(written_bytes, path)
        # The oldest files are deleted for new ones while they are sent.
        except FileNotFoundError:
            continue


def create_app(
    backend: Backend,
    *,
    limits: Limits | None = None,
    keys: Keys | None = None,
    rates: Rates | None = None,
    version: str = "0",
    view: LiveSource | None = None,
    batch_service: BatchService | None = None,
    recording: Path | None = None,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
    tokenizer_info: Mapping[str, Any] | None = None,
    details: Callable[[], ModelDetails] = ModelDetails,
    state: ResponseState | None = None,
    pages: Sequence[LivePage] = (),
) -> ASGIApp:
    """The ASGI application of a backend, a batch service and stored responses, which the caller starts and closes.

    view: what the live page shows. recording: the folder of the flight recorder's files. hosts: the names by which the
    server may be asked, any by default. origins: those whose pages may use it (CORS). tokenizer_info: what
    /tokenizer_info answers, None to refuse it. details: what /api/tags and /api/show say of the checkpoint. state: of
    responses, by default in memory. pages: of engines behind this server, which the live page shows, too.
    """
    limits = Limits() if limits is None else limits
    keys = Keys() if keys is None else keys
    rates = Rates() if rates is None else rates
    template = (tokenizer_info or {}).get("chat_template")
    models = OllamaModels(backend, details, template if isinstance(template, str) else "")
    state = ResponseState(ResponseStore(), limits) if state is None else state
    api = Api(backend, limits, version, rates, state, recording)
    described = openapi.document(version)
    page = Page(view, keys, limits, api_page.page(described))

    routes = [
        *(
            Route(path, partial(api.generation, one), methods=["POST"])
            for path, one in {**ENDPOINTS, **OLLAMA_ENDPOINTS, **dict.fromkeys(GENERATE_PATHS, GENERATE)}.items()
            if one is not RESPONSES
        ),
        Route("/v1/responses", api.respond, methods=["POST"]),
        *api.token_routes(),
        *state.routes(),
        *models.routes(),
        Route("/api/show", partial(api.answer, OllamaShowRequest, models.show, any_type=True), methods=["POST"]),
        Route("/api/pull", partial(api.answer, OllamaPullRequest, models.pull, any_type=True), methods=["POST"]),
        _tokenizer_info_route(tokenizer_info),
        get_json("/v1/models", partial(_models, backend, limits)),
        Route("/v1/models/{id:path}", api.model),
        Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/v1/recording", api.recording),
        get_json("/openapi.json", partial(Raw, described)),
        *health_routes(backend, version),
        *(_no_batch_routes() if batch_service is None else batch_service.routes()),
        *(UpstreamPages(pages).routes() if pages else ()),
        *page.routes(),
    ]
    return build_app(routes, keys, page, rates, hosts, origins)


def _tokenizer_info_route(info: Mapping[str, Any] | None) -> Route:
    """`GET /tokenizer_info`. Encoded once: some tokenizers list thousands of tokens."""
    encoded = None if info is None else Raw(msgspec.json.encode(info))

    def show() -> Raw:
        if encoded is None:
            raise NotFound("start the server with --enable-tokenizer-info-endpoint", code="no_tokenizer_info")
        return encoded

    return get_json("/tokenizer_info", show)


def _no_batch_routes() -> list[Route]:
    """The paths of files and batches where there is no folder for them: a 404 that says how to get one."""

    async def refuse(request: Request) -> Response:
        raise NotFound("files and batches need a folder: start the server with --batch-dir", code="no_batch_dir")

    paths = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
    return [Route(path, refuse, methods=["GET", "POST", "DELETE"]) for path in paths]


def get_json(path: str, value: Callable[[], Any], methods: Sequence[str] = ("GET",)) -> Route:
    """A path whose answer is what `value` returns, as JSON."""

    async def show(request: Request) -> Response:
        return json_response(value())

    return Route(path, show, methods=list(methods))


def health_routes(service: Service, version: str) -> list[Route]:
    """Health, statistics and version of any service."""

    def live() -> dict[str, str]:
        if not service.alive():
            raise Unavailable("the engine makes no progress", code="not_alive")
        return {"status": "ok"}

    def ready() -> dict[str, str]:
        if not service.ready():
            raise Unavailable("the server is not accepting requests", code="not_ready")
        return {"status": "ok"}

    return [
        get_json("/health", live),
        get_json("/health/live", live),
        get_json("/health/ready", ready),
        get_json("/ping", live, ("GET", "POST")),
        get_json("/stats", lambda: service.stats()),
        get_json("/load", lambda: {"server_load": service.load()}),
        get_json("/version", lambda: {"version": version}),
    ]


def build_app(
    routes: Sequence[BaseRoute],
    keys: Keys,
    page: Page,
    rates: Rates,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
) -> ASGIApp:
    """An application of these routes, with access checks and error objects. hosts, origins: as of `create_app`."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            QuireError: error_responses.error_response,
            HTTPException: error_responses.routing_error,
            Exception: error_responses.error_response,
        },
    )
    app.router.redirect_slashes = False
    guard = Guard(app, keys, page.has_session, rates, hosts)
    return CrossOrigin(guard, origins) if origins else guard


def _models(backend: Backend, limits: Limits) -> dict[str, Any]:
    card = backend.model()
    return {"object": "list", "data": [_card(card, name, limits) for name in card.names]}


def _card(card: ModelCard, name: str, limits: Limits) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "quire",
        "root": card.root or card.id,
        "parent": None,
        "max_model_len": card.max_model_len,
        "permission": [],
        "tool_call_parser": card.tool_parser,
        "reasoning_parser": card.reasoning_parser,
        **({"architecture": {"input_modalities": ["text", "image"]}} if limits.images.reads else {}),
    }
