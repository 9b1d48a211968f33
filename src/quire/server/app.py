"""The routes. What they do is in the rooms they call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from quire.backends.base import Answers, Backend, Delta, ModelCard, Service
from quire.errors import InvalidRequest, QuireError, Unavailable, nearest
from quire.server import answers, calls, faults, openapi, prompts, schemas
from quire.server.calls import Job
from quire.server.desk import Desk, NoDesk
from quire.server.doors import COUNTS, DOORS, Count, Door, came, gather
from quire.server.embeddings import EmbeddingsRequest
from quire.server.limits import Guard, Keys, Limits, deadline, no_page_elsewhere, origin, read_body
from quire.server.page import Blank, Page, View
from quire.server.rates import Rates
from quire.server.recordings import Recordings
from quire.server.stream import EventStream, together, unless_gone
from quire.server.tools import toolbox
from quire.text.tools.styles import STYLES

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
        self._by, self._rates = f"quire-{version}", rates

    # ---------------------------------------------------------------- generation

    async def generation(self, door: Door, request: Request) -> Response | EventStream[Delta]:
        """Any of DOORS."""
        asked = await self._read(request, door.asks)
        job = came(await door.job(asked, self._backend, self._limits), origin(request.scope))
        if job.stream and door.chunks is not None:
            said = self._said(job, request)
            chunks = door.chunks(asked, job, self._backend.token_text)
            return EventStream(said, chunks, keep_alive=self._limits.keep_alive)
        made = await unless_gone(request.receive, gather(job, self._said(job, request), self._backend.token_text))
        return gone_or_json(made and door.whole(asked, job, *made, self._backend.token_text, self._by))

    async def count(self, count: Count, request: Request) -> Response:
        """Any of COUNTS."""
        job = await count.job(await self._read(request, count.asks), self._backend, self._limits)
        return gone_or_json(count.told(len(job.calls[0].prompt)))

    async def generate(self, request: Request) -> Response:
        began = time.perf_counter()
        asked = await self._read(request, schemas.GenerateRequest)
        job = came(await calls.generate(asked, self._backend, self._limits), origin(request.scope))
        made = await unless_gone(request.receive, gather(job, self._said(job, request), self._backend.token_text))
        return gone_or_json(made and answers.generated(job, made[0][0], time.perf_counter() - began))

    def _said(self, job: Job, request: Request) -> Callable[[], Answers[Delta]]:
        """What begins the answers, on the account of who asked."""
        key, prompts = request.scope["key"], sum(len(call.prompt) for call in job.calls)
        return lambda: self._rates.metered(key, prompts, together(self._backend, job.calls, job.n))

    async def _read(self, request: Request, kind: type[schemas.T]) -> schemas.T:
        asked = schemas.parse(await read_body(request, self._limits), kind, self._limits)
        if isinstance(asked, schemas.Sampling | EmbeddingsRequest) and asked.timeout is None:
            asked.timeout = deadline(request.headers)
        return asked

    # ---------------------------------------------------------------- tokens

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, schemas.TokenizeRequest)
        card = prompts.model(asked.model, self._backend)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if asked.messages is not None:
            tools = toolbox(asked.tools, None, None, STYLES[card.tool_parser]).shown
            _, tokens = await prompts.rendered(asked.messages, asked, self._backend, tools)
        else:
            [(_, tokens)] = await prompts.encoded(
                [asked.prompt or ""], asked.add_special_tokens is not False, self._backend
            )
        names = [self._backend.token_text(token)[0] for token in tokens] if asked.return_token_strs else None
        return gone_or_json(
            {
                "count": len(tokens),
                "max_model_len": card.max_model_len,
                "tokens": list(tokens),
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, schemas.DetokenizeRequest)
        card = prompts.model(asked.model, self._backend)
        prompts.in_vocabulary(asked.tokens, "tokens", card)
        return gone_or_json({"prompt": await prompts.decoded(asked.tokens, self._backend)})

    # ---------------------------------------------------------------- what there is, and how it is

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Takes vLLM's parameters where they say what happens anyway."""
        no_page_elsewhere(request.headers)
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
    view: View | None = None,
    desk: Desk | None = None,
    recording: Path | None = None,
) -> ASGIApp:
    """The ASGI application around a backend that the caller starts and closes, and so the desk, which has batches.

    view: what the live page shows. recording: the folder of the flight recorder's files.
    """
    limits, keys = Limits() if limits is None else limits, Keys() if keys is None else keys
    rates = Rates() if rates is None else rates
    api, page = Api(backend, limits, version, rates), Page(view or Blank(), keys, limits)
    routes = [
        *(Route(path, partial(api.generation, door), methods=["POST"]) for path, door in DOORS.items()),
        *(Route(path, partial(api.count, count), methods=["POST"]) for path, count in COUNTS.items()),
        Route("/v1/generate", api.generate, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/openapi.json", partial(_openapi, openapi.document(version))),
        *vitals(backend, version),
        *(NoDesk() if desk is None else desk).routes(),
        *Recordings(recording).routes(),
        *page.routes(),
    ]
    return assembled(routes, keys, page, rates)


def vitals(service: Service, version: str) -> list[Route]:
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


def assembled(routes: Sequence[BaseRoute], keys: Keys, page: Page, rates: Rates) -> ASGIApp:
    """Routes behind keys, errors in OpenAI's shape."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            QuireError: faults.raised,
            HTTPException: faults.routing,
            Exception: faults.unexpected,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, keys, page.admits, rates)


async def _openapi(document: bytes, request: Request) -> Response:
    return Response(document, media_type="application/json")


def gone_or_json(value: Any) -> Response:
    """JSON, or nothing for a client that left."""
    if value is None:
        return Response(status_code=_GONE)
    return Response(msgspec.json.encode(value), media_type="application/json")


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
