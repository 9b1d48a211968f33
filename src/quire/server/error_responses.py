"""Responses in JSON, and errors as clients of OpenAI's, Anthropic's and Ollama's APIs expect them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import InvalidRequest, Overloaded, QuireError, TooLarge, Unauthorized, Unavailable, nearest
from quire.frontend.offload import offload
from quire.server.fields import NO_ADAPTERS, NO_THREADS

JSON = "application/json"

# nginx's status for a client that has closed its connection. No client reads it.
GONE = 499

# Seconds of Retry-After while the server is starting, restarting or shutting down.
_RETRY_AFTER = 5

OLLAMA_PATHS = (
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/show", "/api/ps"),
    *("/api/version", "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"),
)
"""The paths of Ollama's API."""

INTERNAL = "the server met an error of its own; its log says more"


_NO_SPEECH = "speech is neither read nor written here"
_RESPONSES = "use /v1/responses, whose previous_response_id continues a conversation"
_TRAINING = "models are served here, not trained"
_DOCUMENTS = "documents are not stored here: put what the model should read into a message"
_ABOUT = "see /v1/models, /stats and /tokenizer_info"
_SLEEP = "stop the server and start it again: it is ready in seconds"
_PROFILE = "see /metrics, and /v1/requests/{id}/explain"

NOT_SERVED: Mapping[str, str] = {
    "/v1/audio": _NO_SPEECH,
    "/v1/realtime": _NO_SPEECH,
    "/v1/images": "images are not made here; where the model reads images, they are parts of messages",
    "/v1/videos": "videos are not made here",
    "/v1/moderations": "this server does not moderate",
    "/v1/assistants": _RESPONSES,
    "/v1/threads": _RESPONSES,
    "/v1/conversations": _RESPONSES,
    "/v1/chatkit": _RESPONSES,
    "/v1/fine_tuning": _TRAINING,
    "/v1/evals": _TRAINING,
    "/v1/vector_stores": _DOCUMENTS,
    "/v1/containers": "this server runs no code",
    "/v1/uploads": "send a file whole to /v1/files, which needs --batch-dir",
    "/v1/messages/batches": "use /v1/files and /v1/batches, which need --batch-dir",
    "/v1/complete": "use /v1/messages, or /v1/completions",
    "/infill": "use /v1/completions, with prompt and suffix",
    "/completion": "use /v1/completions, where n_predict is max_tokens",
    "/embedding": "use /v1/embeddings",
    "/reranking": "use /rerank",
    "/generate_stream": "use /generate, with stream: true",
    "/chat_tokenize": "/tokenize takes messages",
    "/info": _ABOUT,
    "/model_info": _ABOUT,
    "/get_load": "see /load and /stats",
    "/health_generate": "see /health, which fails where no step is made, and /health/ready",
    "/flush_cache": "use /reset_prefix_cache",
    "/encode": "use /v1/embeddings, or /pooling",
    "/separate_reasoning": "answers have thoughts apart",
    "/parse_function_call": "answers have calls apart",
    "/abort_request": "close the connection, which ends the request",
    "/v1/chat/completions/render": "/tokenize shows what a template makes of messages",
    "/v1/completions/render": "/tokenize shows the tokens of a prompt",
    "/inference/v1/generate": "use /v1/completions, whose prompt may be token ids",
    "/v1/responses/compact": "prompts are never edited: send the part that matters",
    "/cohere": "use /v1/chat/completions",
    "/collective_rpc": "ranks run the model and nothing else",
    "/pause": _SLEEP,
    "/resume": _SLEEP,
    "/release_memory_occupation": _SLEEP,
    "/resume_memory_occupation": _SLEEP,
    "/update_weights_from_disk": _SLEEP,
    "/update_weights_from_tensor": _SLEEP,
    "/update_weights_from_distributed": _SLEEP,
    "/init_weights_update_group": _SLEEP,
    "/open_session": "prefixes are found by their tokens: send the whole prompt",
    "/close_session": "prefixes are found by their tokens: send the whole prompt",
    "/apply-template": "/tokenize shows what a template makes of messages",
    "/props": _ABOUT,
    "/server_info": _ABOUT,
    "/get_server_info": _ABOUT,
    "/get_model_info": _ABOUT,
    "/slots": "see /stats, and /v1/requests for those that run",
    "/lora-adapters": NO_ADAPTERS,
    "/v1/load_lora_adapter": NO_ADAPTERS,
    "/v1/unload_lora_adapter": NO_ADAPTERS,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/invocations": "use /v1/chat/completions, /v1/completions or /v1/embeddings",
}
"""Paths of other servers' APIs, by how they begin, that this server lacks, and what to do instead."""


class NotFound(InvalidRequest):
    """The path, or an id in it, names nothing."""

    status = 404


class UnsupportedMedia(InvalidRequest):
    """The body is not declared to be JSON. Without a preflight, pages of other sites cannot declare that."""

    status = 415


# Anthropic's error types, by status.
_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `value` as JSON."""
    return Response(msgspec.json.encode(value), headers=headers, media_type=JSON)


async def offloaded_json(size: int, make: Callable[[], Any], headers: Mapping[str, str] | None = None) -> Response:
    """A response with what `make` returns as JSON, offloaded as work of `size` bytes."""
    return Response(await offload(size, lambda: msgspec.json.encode(make())), headers=headers, media_type=JSON)


def body(
    message: str, status: int, kind: str, *, param: str | None = None, code: str | int | None = None, path: str = ""
) -> bytes:
    """The error object that clients of `path` expect: Anthropic's, Ollama's or OpenAI's. kind: of OpenAI's."""
    if "/v1/messages" in path:
        kind = _KINDS.get(status, InvalidRequest.kind if status < 500 else "api_error")
        details = {"details": {"error_code": code, "unsupported": [param]}} if code == NO_THREADS else {}
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message, **details}})
    if path.endswith(OLLAMA_PATHS):
        return msgspec.json.encode({"error": message})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def of(error: Exception, path: str = "") -> bytes:
    """The error object of an exception. Unexpected errors are not shown: they may name files or values."""
    if not isinstance(error, QuireError):
        error = QuireError(INTERNAL)
    code = error.code or error.status
    return body(str(error), error.status, error.kind, param=error.param, code=code, path=path)


def response(error: Exception, path: str) -> Response:
    """A response with the error object that clients of `path` expect."""
    status = error.status if isinstance(error, QuireError) else 500
    return Response(of(error, path), status, headers(error), JSON)


def headers(error: Exception) -> dict[str, str]:
    """Header fields of an error's response, besides those of its body."""
    if isinstance(error, Overloaded):
        return {"retry-after": str(math.ceil(error.retry_after))}
    if isinstance(error, Unavailable):
        # OpenAI's and Anthropic's clients repeat a request after a 503, unless x-should-retry is false.
        once = {"x-should-retry": "false"} if error.code == "upstream_died" else {}
        return {"retry-after": str(_RETRY_AFTER), **once}
    if isinstance(error, TooLarge) or not isinstance(error, QuireError):
        # The rest of the body is not read. uvicorn closes the connection after an unexpected error.
        return {"connection": "close"}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


async def error_response(request: Request, error: Exception) -> Response:
    """The exception handler for all errors but those of the router. uvicorn logs the traceback of unexpected ones."""
    return response(error, request.url.path)


async def routing_error(request: Request, error: Exception) -> Response:
    """The exception handler for errors of the router: no such path, no such method."""
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    message = f"{request.method} {path}: {HTTPStatus(status).phrase.lower()}"
    if status == 405 and error.headers:
        message += f"; allowed: {error.headers.get('Allow', '')}"
    if status == 404:
        message += _hint(path, request)
    text = body(message, status, InvalidRequest.kind, code=status, path=path)
    return Response(text, status, error.headers, JSON)


def _hint(path: str, request: Request) -> str:
    """What a client of a path that is not there should know."""
    for start, why in NOT_SERVED.items():
        if path == start or path.startswith(f"{start}/"):
            return f": {why}"
    return "." + (nearest(path, _paths(request)) or " GET /openapi.json describes all paths")


def _paths(request: Request) -> list[str]:
    """Paths without parameters."""
    return [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
