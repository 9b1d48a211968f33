"""The routes. What they do is in the rooms they call."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.backends.base import Backend, ModelCard
from quire.errors import InvalidRequest, QuireError, Unavailable
from quire.server import answers, calls, faults, prompts, schemas
from quire.server.answers import Gathered, Usage
from quire.server.calls import Job
from quire.server.chunks import ChatChunks, Chunks, CompletionChunks
from quire.server.limits import Guard, Keys, Limits, deadline, read_body
from quire.server.messages import CountRequest, MessagesRequest, message
from quire.server.messages import as_chat as message_as_chat
from quire.server.messages_stream import MessageChunks
from quire.server.page import Blank, Page, View
from quire.server.responses import ResponsesRequest
from quire.server.responses import as_chat as response_as_chat
from quire.server.responses_stream import ResponseBuilder, ResponseChunks, whole
from quire.server.stream import EventStream, deltas, unless_gone
from quire.server.tools import toolbox
from quire.text.tools.styles import STYLES

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_GONE = 499
"""nginx's code for a client that closed its request; nobody reads it."""


class Api:
    """One backend, answering over HTTP."""

    def __init__(self, backend: Backend, limits: Limits, version: str) -> None:
        self._backend, self._limits, self._version = backend, limits, version
        self._by = f"quire-{version}"

    # ---------------------------------------------------------------- generation

    async def completions(self, request: Request) -> Response | EventStream:
        job = await calls.completion(await self._read(request, schemas.CompletionRequest), self._backend, self._limits)
        if job.stream:
            return self._stream(job, CompletionChunks(job, self._backend.token_text))
        made = await unless_gone(request.receive, self._gather(job))
        return _json(made and answers.completion(job, *made, self._backend.token_text, self._by))

    async def chat(self, request: Request) -> Response | EventStream:
        job = await calls.chat(await self._read(request, schemas.ChatRequest), self._backend, self._limits)
        if job.stream:
            return self._stream(job, ChatChunks(job, self._backend.token_text))
        made = await unless_gone(request.receive, self._gather(job))
        return _json(made and answers.chat(job, *made, self._backend.token_text, self._by))

    async def responses(self, request: Request) -> Response | EventStream:
        asked = await self._read(request, ResponsesRequest)
        job = await calls.chat(response_as_chat(asked), self._backend, self._limits, "resp_")
        if job.stream:
            return self._stream(job, ResponseChunks(asked, job, self._backend.token_text))
        made = await unless_gone(request.receive, self._gather(job))
        return _json(made and whole(ResponseBuilder(asked, job, self._backend.token_text), job, made[0][0], made[1]))

    async def messages(self, request: Request) -> Response | EventStream:
        job = await self._asked(await self._read(request, MessagesRequest), "msg_")
        if job.stream:
            return self._stream(job, MessageChunks(job, self._backend.token_text))
        made = await unless_gone(request.receive, self._gather(job))
        return _json(made and message(job, made[0][0], made[1]))

    async def count(self, request: Request) -> Response:
        job = await self._asked(await self._read(request, CountRequest), "msg_")
        return _json({"input_tokens": len(job.calls[0].prompt)})

    async def _asked(self, asked: CountRequest, kind: str) -> Job:
        thinks = self._backend.model().reasoning_parser != "none"
        return await calls.chat(message_as_chat(asked, thinks=thinks), self._backend, self._limits, kind)

    async def generate(self, request: Request) -> Response:
        began = time.perf_counter()
        job = await calls.generate(await self._read(request, schemas.GenerateRequest), self._backend, self._limits)
        made = await unless_gone(request.receive, self._gather(job))
        return _json(made and answers.generated(job, made[0][0], time.perf_counter() - began))

    def _stream(self, job: Job, chunks: Chunks) -> EventStream:
        said = deltas(self._backend, job.calls, job.n)
        return EventStream(said, chunks, keep_alive=self._limits.keep_alive)

    async def _gather(self, job: Job) -> tuple[list[Gathered], Usage]:
        usage = Usage(job, self._backend.token_text)
        choices = [Gathered(job.splitter()) for _ in range(len(job.calls) * job.n)]
        async with aclosing(deltas(self._backend, job.calls, job.n)) as said:
            async for ready in said:
                for delta in ready:
                    usage.add(delta)
                    choices[delta.index].add(delta)
        return choices, usage

    async def _read(self, request: Request, kind: type[schemas.T]) -> schemas.T:
        asked = schemas.parse(await read_body(request, self._limits), kind, self._limits)
        if isinstance(asked, schemas.Sampling) and asked.timeout is None:
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
        return _json(
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
        return _json({"prompt": self._backend.decode(tuple(asked.tokens))})

    # ---------------------------------------------------------------- what there is, and how it is

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [_card(self._backend.model())]})

    async def model(self, request: Request) -> Response:
        return _json(_card(prompts.model(request.path_params["id"], self._backend)))

    async def live(self, request: Request) -> Response:
        if not self._backend.alive():
            raise Unavailable("the engine makes no progress", code="not_alive")
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if not self._backend.ready():
            raise Unavailable("requests are not accepted now", code="not_ready")
        return _json({"status": "ok"})

    async def stats(self, request: Request) -> Response:
        return _json(self._backend.stats())

    async def metrics(self, request: Request) -> Response:
        return Response(self._backend.metrics(), media_type=_METRICS)

    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})


def create_app(
    backend: Backend,
    *,
    limits: Limits | None = None,
    api_keys: Collection[str] = (),
    version: str = "0",
    view: View | None = None,
) -> ASGIApp:
    """The ASGI application around a backend that the caller starts and closes. view: what the live page shows."""
    limits, keys = Limits() if limits is None else limits, Keys(api_keys)
    api, page = Api(backend, limits, version), Page(view or Blank(), keys, limits)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count, methods=["POST"]),
        Route("/v1/generate", api.generate, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.live),
        Route("/health/live", api.live),
        Route("/health/ready", api.ready),
        Route("/ping", api.live, methods=["GET", "POST"]),
        Route("/stats", api.stats),
        Route("/metrics", api.metrics),
        Route("/version", api.version),
        *page.routes(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, keys=keys, admits=page.admits)],
        exception_handlers={
            QuireError: faults.raised,
            HTTPException: faults.routing,
            Exception: faults.unexpected,
        },
    )
    app.router.redirect_slashes = False
    return app


def _json(value: Any) -> Response:
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
