"""Errors as clients of OpenAI's and Anthropic's APIs expect them: a JSON object, a status, and header fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import InvalidRequest, Overloaded, QuireError, TooLarge, Unauthorized, Unavailable, nearest

# Seconds of Retry-After while the server is starting, restarting or shutting down.
_RETRY_AFTER = 5

INTERNAL = "the server met an error of its own; its log says more"


class UnsupportedMedia(InvalidRequest):
    """The body is not declared to be JSON. Without a preflight, pages of other sites cannot declare that."""

    status = 415


def body(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def of(error: Exception) -> bytes:
    """The error object of an exception. Unexpected errors are not shown: they may name files or values."""
    if isinstance(error, QuireError):
        return body(str(error), error.kind, param=error.param, code=error.code or error.status)
    return body(INTERNAL, QuireError.kind, code=500)


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


def anthropic(error: Exception) -> bytes:
    """Anthropic's error object of an exception."""
    if not isinstance(error, QuireError):
        return _anthropic(INTERNAL, 500)
    return _anthropic(str(error), error.status)


def _anthropic(message: str, status: int) -> bytes:
    kind = _KINDS.get(status, InvalidRequest.kind if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _is_anthropic(path: str) -> bool:
    return "/v1/messages" in path


def response(error: QuireError, path: str) -> Response:
    """A response with the error object that clients of `path` expect."""
    text = anthropic(error) if _is_anthropic(path) else of(error)
    return Response(text, error.status, headers(error), "application/json")


def headers(error: QuireError) -> dict[str, str]:
    """Header fields of an error's response, besides those of its body."""
    if isinstance(error, Overloaded):
        return {"retry-after": str(math.ceil(error.retry_after))}
    if isinstance(error, Unavailable):
        # OpenAI's and Anthropic's clients repeat a request after a 503, unless x-should-retry is false.
        once = {"x-should-retry": "false"} if error.code == "upstream_died" else {}
        return {"retry-after": str(_RETRY_AFTER), **once}
    if isinstance(error, TooLarge):
        # The rest of the body is not read.
        return {"connection": "close"}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


async def error_response(request: Request, error: Exception) -> Response:
    """The exception handler for QuireError."""
    assert isinstance(error, QuireError)
    return response(error, request.url.path)


async def routing_error(request: Request, error: Exception) -> Response:
    """The exception handler for errors of the router: no such path, no such method."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {HTTPStatus(status).phrase.lower()}"
    if status == 405 and error.headers:
        message += f"; allowed: {error.headers.get('Allow', '')}"
    if status == 404 and (hint := nearest(request.url.path, _paths(request))):
        message += "." + hint
    text = body(message, InvalidRequest.kind, code=status)
    if _is_anthropic(request.url.path):
        text = _anthropic(message, status)
    return Response(text, status, error.headers, "application/json")


def _paths(request: Request) -> list[str]:
    """Paths without parameters."""
    return [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]


async def internal_error(request: Request, error: Exception) -> Response:
    """The exception handler for all other errors. uvicorn logs the traceback, and closes the connection."""
    text = anthropic(error) if _is_anthropic(request.url.path) else of(error)
    return Response(text, 500, {"connection": "close"}, "application/json")
