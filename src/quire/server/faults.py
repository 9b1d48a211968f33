"""Errors as clients of OpenAI's API expect them: one JSON object, and the HTTP status that goes with it."""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest, Overloaded, QuireError, Unauthorized, Unavailable

_AGAIN = 5
"""Seconds after which to ask again when the server is starting, restarting or shutting down."""

_INTERNAL = "the server met an error of its own; its log says more"


class UnsupportedMedia(InvalidRequest):
    """The body is not declared to be JSON, which also keeps strange web pages from posting here."""

    status = 415


def body(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def of(error: Exception) -> bytes:
    """The error object of an exception. What was not raised on purpose is not told: it may name files or values."""
    if isinstance(error, QuireError):
        return body(str(error), error.kind, param=error.param, code=error.code or error.status)
    return body(_INTERNAL, QuireError.kind, code=500)


def response(error: QuireError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    elif isinstance(error, Unavailable):
        headers["retry-after"] = str(_AGAIN)
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(of(error), error.status, headers, "application/json")


async def raised(request: Request, error: Exception) -> Response:
    """For errors raised on purpose."""
    assert isinstance(error, QuireError)
    return response(error)


async def routing(request: Request, error: Exception) -> Response:
    """For what the router says: no such path, no such method."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {HTTPStatus(status).phrase.lower()}"
    if status == 405 and error.headers:
        message += f"; allowed: {error.headers.get('Allow', '')}"
    text = body(message, InvalidRequest.kind, code=status)
    return Response(text, status, error.headers, "application/json")


async def unexpected(request: Request, error: Exception) -> Response:
    """For everything else; the traceback goes to the log."""
    return Response(of(error), 500, None, "application/json")
