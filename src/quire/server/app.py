"""The routes. What they do is in the rooms they call."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from quire.errors import InvalidRequest, QuireError, Unavailable, nearest
from quire.frontend.interface import Backend, Delta, ModelCard, ResultStream, Service
from quire.frontend.offload import offload
from quire.parsers.tools.styles import STYLES
from quire.server import calls, error_responses, openapi, outputs, prompts, schemas
from quire.server.admission import AdmissionGate, AdmissionSlot
from quire.server.batch_api.service import BatchService, NoBatchService
from quire.server.calls import Job
from quire.server.chunks import Chunks
from quire.server.embeddings import EmbeddingsRequest
from quire.server.endpoints import (
    ENDPOINTS,
    TOKEN_COUNT_ENDPOINTS,
    Endpoint,
    TokenCountEndpoint,
    gather,
    with_trace_context,
)
from quire.server.hosts import CrossOrigin, Hosts, refuse_cross_site
from quire.server.limits import Guard, Keys, Limits, deadline, origin, read_body
from quire.server.live_page import LiveSource, NoLiveSource, Page
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.rates import Rates
from quire.server.recordings import Recordings
from quire.server.stream import EventStream, answer_all, unless_gone
from quire.server.tools import make_tool_set

T = TypeVar("T")
JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
_GONE = 499
"""nginx's code for a client that closed its request; nobody reads it."""
_RESETS: Mapping[str, str] = {
    "reset_running_requests": "who runs goes on with what it has computed, and is in the way of nothing",
    "reset_external": "there is no cache outside",
}
"""vLLM's parameters of a reset, and why they would change nothing."""


class Api:
    """One backend, answering over HTTP."""

    def __init__(self, backend: Backend, limits: Limits, version: str, rates: Rates) -> None:
        self._backend, self._limits, self._version = backend, limits, version
        self._system_fingerprint, self._rates = f"quire-{version}", rates
        self._gate = AdmissionGate(lambda held: backend.admit(1, held))

    # ---------------------------------------------------------------- generation

    async def generation(self, endpoint: Endpoint, request: Request) -> Response | EventStream[Delta]:
        """Any of DOORS."""
        text = self._backend.token_text

        def prepared(asked: Any) -> tuple[Any, Job, Chunks | None]:
            job = self._came(endpoint.make_job(asked, self._backend, self._limits), request)
            return asked, job, endpoint.chunks(asked, job, text) if job.stream and endpoint.chunks is not None else None

        with self._gate.slot() as place:
            size, (asked, job, chunks) = await self._read(request, endpoint.request_type, prepared, place)
        if chunks is not None:
            return EventStream(partial(self._begin, job), chunks, keep_alive=self._limits.keep_alive)
        made = await unless_gone(request.receive, self._gathered(job))
        if made is None:
            return gone_or_json(None)
        return await written(
            size + outputs.cost(job, made[0]),
            lambda: endpoint.response(asked, job, *made, text, self._system_fingerprint),
        )

    async def count(self, count: TokenCountEndpoint, request: Request) -> Response:
        """Any of COUNTS."""
        _, job = await self._read(
            request, count.request_type, lambda asked: count.make_job(asked, self._backend, self._limits)
        )
        return gone_or_json(count.response(len(job.calls[0].prompt)))

    async def generate(self, request: Request) -> Response:
        began = time.perf_counter()

        def prepared(asked: schemas.GenerateRequest) -> Job:
            return self._came(calls.generate(asked, self._backend, self._limits), request)

        with self._gate.slot() as place:
            _, job = await self._read(request, schemas.GenerateRequest, prepared, place)
        made = await unless_gone(request.receive, self._gathered(job))
        return gone_or_json(made and outputs.generated(job, made[0][0], time.perf_counter() - began))

    def _came(self, job: Job, request: Request) -> Job:
        return with_trace_context(job, origin(request.scope), self._rates.meter(request.scope["key"]))

    def _begin(self, job: Job) -> ResultStream[Delta]:
        """Raises what `Backend.answer` raises.

        Prompts are charged once all of them are admitted: a client that hangs up afterwards has used them all the same,
        and one whose request was refused has not.
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
        prepared: Callable[[schemas.T], T],
        place: AdmissionSlot | None = None,
    ) -> tuple[int, T]:
        """The size of the body in bytes, and what `prepared` makes of the request in it, offloaded together.

        In turn (see gate). place: that of a request which will be queued.
        """
        body = await read_body(request, self._limits)
        await self._gate.wait_turn(place)

        def read() -> T:
            asked = schemas.parse(body, kind, self._limits)
            if isinstance(asked, schemas.Sampling | EmbeddingsRequest) and asked.timeout is None:
                asked.timeout = deadline(request.headers)
            return prepared(asked)

        return len(body), await offload(len(body), read)

    # ---------------------------------------------------------------- tokens

    async def tokenize(self, request: Request) -> Response:
        _, told = await self._read(request, schemas.TokenizeRequest, self._tokenized)
        return Response(told, media_type=JSON)

    def _tokenized(self, asked: schemas.TokenizeRequest) -> bytes:
        card = prompts.model(asked.model, self._backend)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if asked.messages is not None:
            tools = make_tool_set(asked.tools, None, None, STYLES[card.tool_parser]).for_template
            _, tokens = prompts.rendered(asked.messages, asked, self._backend, tools)
        else:
            [(_, tokens)] = prompts.encoded([asked.prompt or ""], asked.add_special_tokens is not False, self._backend)
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
        _, told = await self._read(request, schemas.DetokenizeRequest, self._detokenized)
        return Response(told, media_type=JSON)

    def _detokenized(self, asked: schemas.DetokenizeRequest) -> bytes:
        card = prompts.model(asked.model, self._backend)
        prompts.in_vocabulary(asked.tokens, "tokens", card)
        return msgspec.json.encode({"prompt": self._backend.decode(tuple(asked.tokens))})

    # ---------------------------------------------------------------- what there is, and how it is

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Takes vLLM's parameters where they say what happens anyway."""
        refuse_cross_site(request.scope)
        for name, value in request.query_params.items():
            if name not in _RESETS:
                raise InvalidRequest(f"unknown parameter {name!r}.{nearest(name, _RESETS)}", param=name)
            if value.lower() not in ("false", "0"):
                raise InvalidRequest(f"{name} must be false: {_RESETS[name]}", param=name)
        self._backend.reset_prefix_cache()
        return Response()

    async def models(self, request: Request) -> Response:
        return gone_or_json({"object": "list", "data": [_card(self._backend.model())]})

    async def model(self, request: Request) -> Response:
        return gone_or_json(_card(prompts.model(request.path_params["id"], self._backend)))

    async def metrics(self, request: Request) -> Response:
        return Response(self._backend.metrics(), media_type=METRICS)


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
    """The ASGI application around a backend that the caller starts and closes, and so batch_service.

    view: what the live page shows. recording: the folder of the flight recorder's files. hosts: the names by which the
    server may be asked, any by default. origins: those whose pages may use it (CORS).
    """
    limits, keys = Limits() if limits is None else limits, Keys() if keys is None else keys
    rates = Rates() if rates is None else rates
    api, page = Api(backend, limits, version, rates), Page(view or NoLiveSource(), keys, limits)
    routes = [
        *(Route(path, partial(api.generation, door), methods=["POST"]) for path, door in ENDPOINTS.items()),
        *(Route(path, partial(api.count, count), methods=["POST"]) for path, count in TOKEN_COUNT_ENDPOINTS.items()),
        Route("/v1/generate", api.generate, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/openapi.json", partial(_openapi, openapi.document(version))),
        *health_routes(backend, version),
        *(NoBatchService() if batch_service is None else batch_service).routes(),
        *Recordings(recording).routes(),
        *page.routes(),
    ]
    return build_app(routes, keys, page, rates, hosts, origins)


def health_routes(service: Service, version: str) -> list[Route]:
    """How it is, whatever answers."""

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

    async def told(request: Request) -> Response:
        return gone_or_json({"version": version})

    return [
        Route("/health", live),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/ping", live, methods=["GET", "POST"]),
        Route("/stats", stats),
        Route("/load", load),
        Route("/version", told),
    ]


def build_app(
    routes: Sequence[BaseRoute],
    keys: Keys,
    page: Page,
    rates: Rates,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
) -> ASGIApp:
    """Routes behind keys, errors in OpenAI's shape. hosts, origins: as of `create_app`."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            QuireError: error_responses.error_response,
            HTTPException: error_responses.routing_error,
            Exception: error_responses.internal_error,
        },
    )
    app.router.redirect_slashes = False
    guard = Guard(app, keys, page.admits, rates, hosts)
    return CrossOrigin(guard, origins) if origins else guard


async def _openapi(document: bytes, request: Request) -> Response:
    return Response(document, media_type=JSON)


def gone_or_json(value: Any) -> Response:
    """JSON, or nothing for a client that left."""
    if value is None:
        return Response(status_code=_GONE)
    return Response(msgspec.json.encode(value), media_type=JSON)


async def written(size: int, told: Callable[[], Any]) -> Response:
    """JSON of what `told` returns; making and writing it costs about as much as reading `size` bytes."""
    return Response(await offload(size, lambda: msgspec.json.encode(told())), media_type=JSON)


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
