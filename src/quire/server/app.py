"""The ASGI application of a server with an engine: its routes and their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from quire.errors import InvalidRequest, QuireError, Unavailable, nearest
from quire.frontend.interface import Backend, Delta, ModelCard, ResultStream, Service
from quire.frontend.offload import offload
from quire.observability.recording_format import SUFFIX, written_bytes
from quire.parsers.tools.styles import STYLES
from quire.server import calls, error_responses, openapi, outputs, prompts, schemas
from quire.server.access import CrossOrigin, Guard, Hosts, Keys, Rates, refuse_cross_site, trace_context
from quire.server.batch_api.runner import BatchService
from quire.server.batch_api.store import UnknownFile
from quire.server.calls import Job
from quire.server.embeddings import EmbeddingsRequest
from quire.server.endpoints import (
    ENDPOINTS,
    TOKEN_COUNT_ENDPOINTS,
    Endpoint,
    TokenCountEndpoint,
    gather,
    with_fields,
)
from quire.server.limits import AdmissionGate, AdmissionSlot, Limits, deadline, read_body
from quire.server.live_page import LiveSource, Page
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.stream import Chunks, EventStream, answer_all, unless_gone
from quire.server.tools import make_tool_set

T = TypeVar("T")
JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"

# nginx's status for a client that has closed its connection. No client reads it.
_GONE = 499

# vLLM's parameters of a reset, and why they change nothing here.
_RESETS: Mapping[str, str] = {
    "reset_running_requests": "running requests keep their blocks, and do not delay the reset",
    "reset_external": "there is no cache outside",
}


class Api:
    """The handlers of one backend. recording: the folder of the flight recorder, None if it is off."""

    def __init__(
        self, backend: Backend, limits: Limits, version: str, rates: Rates, recording: Path | None = None
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._system_fingerprint = f"quire-{version}"
        self._rates = rates
        self._recording = recording
        self._gate = AdmissionGate(lambda held: backend.admit(1, held))

    # ---------------------------------------------------------------- generation

    async def generation(self, endpoint: Endpoint, request: Request) -> Response | EventStream[Delta]:
        """Any of ENDPOINTS."""
        text = self._backend.token_text

        def prepare(asked: Any) -> tuple[Any, Job, Chunks[Delta] | None]:
            job = self._from(request, endpoint.make_job(asked, self._backend, self._limits))
            return asked, job, endpoint.chunks(asked, job, text) if job.stream and endpoint.chunks is not None else None

        with self._gate.slot() as slot:
            size, (asked, job, chunks) = await self._read(request, endpoint.request_type, prepare, slot)
        if chunks is not None:
            return EventStream(partial(self._begin, job), chunks, keep_alive=self._limits.keep_alive)
        made = await unless_gone(request.receive, self._gathered(job))
        if made is None:
            return gone_or_json(None)
        return await json_response(
            size + outputs.cost(job, made[0]),
            lambda: endpoint.response(asked, job, *made, text, self._system_fingerprint),
        )

    async def count(self, count: TokenCountEndpoint, request: Request) -> Response:
        """Any of TOKEN_COUNT_ENDPOINTS."""
        _, job = await self._read(
            request, count.request_type, lambda asked: count.make_job(asked, self._backend, self._limits)
        )
        return gone_or_json(count.response(len(job.calls[0].prompt)))

    async def generate(self, request: Request) -> Response:
        """`POST /v1/generate`."""
        began = time.perf_counter()

        def prepare(asked: schemas.GenerateRequest) -> Job:
            return self._from(request, calls.generate(asked, self._backend, self._limits))

        with self._gate.slot() as slot:
            _, job = await self._read(request, schemas.GenerateRequest, prepare, slot)
        made = await unless_gone(request.receive, self._gathered(job))
        return gone_or_json(made and outputs.generated(job, made[0][0], time.perf_counter() - began))

    def _from(self, request: Request, job: Job) -> Job:
        """The job with where its request came from, and what charges for its tokens."""
        return with_fields(
            job, trace_context=trace_context(request.scope), spend=self._rates.meter(request.scope["key"])
        )

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

    def _gathered(self, job: Job) -> Coroutine[Any, Any, tuple[list[ChoiceBuilder], Usage]]:
        return gather(job, partial(self._begin, job), self._backend.token_text)

    async def _read(
        self,
        request: Request,
        kind: type[schemas.T],
        prepare: Callable[[schemas.T], T],
        slot: AdmissionSlot | None = None,
    ) -> tuple[int, T]:
        """The size of the body in bytes, and what `prepare` makes of the request in it, offloaded together.

        slot: of a request that will be queued (see AdmissionGate).
        """
        body = await read_body(request, self._limits)
        await self._gate.wait_turn(slot)

        def read() -> T:
            asked = schemas.parse(body, kind, self._limits)
            if isinstance(asked, schemas.Sampling | EmbeddingsRequest) and asked.timeout is None:
                asked.timeout = deadline(request.headers)
            return prepare(asked)

        return len(body), await offload(len(body), read)

    # ---------------------------------------------------------------- tokens

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        _, answer = await self._read(request, schemas.TokenizeRequest, self._tokenized)
        return Response(answer, media_type=JSON)

    def _tokenized(self, asked: schemas.TokenizeRequest) -> bytes:
        card = prompts.model(asked.model, self._backend)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if asked.messages is not None:
            tools = make_tool_set(asked.tools, None, None, STYLES[card.tool_parser]).for_template
            _, tokens = prompts.render(asked.messages, asked, self._backend, tools)
        else:
            [(_, tokens)] = prompts.encode([asked.prompt or ""], asked.add_special_tokens is not False, self._backend)
        names = [self._backend.token_text(token)[0] for token in tokens] if asked.return_token_strs else None
        return msgspec.json.encode(
            {
                "count": len(tokens),
                "max_model_len": card.max_model_len,
                "tokens": list(tokens),
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        _, answer = await self._read(request, schemas.DetokenizeRequest, self._detokenized)
        return Response(answer, media_type=JSON)

    def _detokenized(self, asked: schemas.DetokenizeRequest) -> bytes:
        card = prompts.model(asked.model, self._backend)
        prompts.in_vocabulary(asked.tokens, "tokens", card)
        return msgspec.json.encode({"prompt": self._backend.decode(tuple(asked.tokens))})

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

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return gone_or_json({"object": "list", "data": [_card(self._backend.model())]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        return gone_or_json(_card(prompts.model(request.path_params["id"], self._backend)))

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        return Response(self._backend.metrics(), media_type=METRICS)

    async def recording(self, request: Request) -> Response:
        """`GET /v1/recording`: the flight recorder's files, oldest first, as one file for `quire replay`."""
        if self._recording is None:
            raise UnknownFile("nothing is recorded: start the server with --recording-dir")
        paths = sorted(self._recording.glob(f"*{SUFFIX}"))
        headers = {"Content-Disposition": f'attachment; filename="recording{SUFFIX}"'}
        return StreamingResponse(_segments(paths), media_type="application/octet-stream", headers=headers)


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
) -> ASGIApp:
    """The ASGI application of a backend and a batch service, which the caller starts and closes.

    view: what the live page shows. recording: the folder of the flight recorder's files. hosts: the names by which the
    server may be asked, any by default. origins: those whose pages may use it (CORS).
    """
    limits = Limits() if limits is None else limits
    keys = Keys() if keys is None else keys
    rates = Rates() if rates is None else rates
    api = Api(backend, limits, version, rates, recording)
    page = Page(view, keys, limits)
    routes = [
        *(Route(path, partial(api.generation, one), methods=["POST"]) for path, one in ENDPOINTS.items()),
        *(Route(path, partial(api.count, one), methods=["POST"]) for path, one in TOKEN_COUNT_ENDPOINTS.items()),
        Route("/v1/generate", api.generate, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/v1/recording", api.recording),
        Route("/openapi.json", partial(_openapi, openapi.document(version))),
        *health_routes(backend, version),
        *(_no_batch_routes() if batch_service is None else batch_service.routes()),
        *page.routes(),
    ]
    return build_app(routes, keys, page, rates, hosts, origins)


def _no_batch_routes() -> list[Route]:
    """The paths of files and batches where there is no folder for them: a 404 that says how to get one."""

    async def refuse(request: Request) -> Response:
        raise UnknownFile("files and batches need a folder: start the server with --batch-dir", code="no_batch_dir")

    paths = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
    return [Route(path, refuse, methods=["GET", "POST", "DELETE"]) for path in paths]


def health_routes(service: Service, version: str) -> list[Route]:
    """Health, statistics and version of any service."""

    async def live(request: Request) -> Response:
        if not service.alive():
            raise Unavailable("the engine makes no progress", code="not_alive")
        return gone_or_json({"status": "ok"})

    async def ready(request: Request) -> Response:
        if not service.ready():
            raise Unavailable("requests are not accepted now", code="not_ready")
        return gone_or_json({"status": "ok"})

    async def stats(request: Request) -> Response:
        return gone_or_json(service.stats())

    async def load(request: Request) -> Response:
        return gone_or_json({"server_load": service.load()})

    async def show_version(request: Request) -> Response:
        return gone_or_json({"version": version})

    return [
        Route("/health", live),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/ping", live, methods=["GET", "POST"]),
        Route("/stats", stats),
        Route("/load", load),
        Route("/version", show_version),
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
            Exception: error_responses.internal_error,
        },
    )
    app.router.redirect_slashes = False
    guard = Guard(app, keys, page.has_session, rates, hosts)
    return CrossOrigin(guard, origins) if origins else guard


async def _openapi(document: bytes, request: Request) -> Response:
    return Response(document, media_type=JSON)


def gone_or_json(value: Any) -> Response:
    """A response with `value` as JSON; None: an empty one, for a client that has disconnected."""
    if value is None:
        return Response(status_code=_GONE)
    return Response(msgspec.json.encode(value), media_type=JSON)


async def json_response(size: int, make: Callable[[], Any]) -> Response:
    """A response with what `make` returns as JSON, offloaded as work of `size` bytes."""
    return Response(await offload(size, lambda: msgspec.json.encode(make())), media_type=JSON)


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "quire",
        "root": card.root or card.id,
        "parent": None,
        "max_model_len": card.max_model_len,
        "permission": [],
        "tool_call_parser": card.tool_parser,
        "reasoning_parser": card.reasoning_parser,
    }
