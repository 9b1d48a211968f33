"""The live page: its files, its stream of events, what happened to a request, and a way to sign in for browsers.

An event stream cannot send headers, so where there are API keys a browser shows its key once and gets a cookie.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequest, QuireError, Unauthorized
from quire.frontend.offload import offload
from quire.server.chunks import KEEP_ALIVE, event
from quire.server.limits import Keys, Limits, read_body
from quire.server.stream import HEADERS, until_gone

COOKIE = "quire_session"
LASTS = 12 * 3600
"""Seconds until a browser has to sign in again."""
MOST_SESSIONS = 1024

_SILENCE = 15.0
"""Seconds after which somebody who has nothing to see is told so."""
_PATIENCE = 0.2
"""Seconds that a first frame may take; then the stream begins without one."""
_FOLDER = Path(__file__).parent / "static"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_SAFE: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class LiveSource(Protocol):
    """What there is to see."""

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames of JSON as they come, and an empty one after a silence. Raises Overloaded when too many watch."""

    async def explain(self, id: str) -> bytes:
        """What happened to an answer as JSON, `null` if it is not known; a line for each known, if `id` is empty."""


class NoLiveSource:
    """Nothing to see: a backend that cannot be looked into."""

    async def watch(self) -> AsyncGenerator[bytes, None]:
        while True:
            await asyncio.sleep(_SILENCE)
            yield b""

    async def explain(self, id: str) -> bytes:
        return b"null"


class Sessions:
    """Browsers that have shown a key. A cookie is a random number; here only its digest is kept."""

    def __init__(self, lasts: float = LASTS) -> None:
        self._lasts = lasts
        self._until: dict[bytes, float] = {}

    def open(self) -> str:
        while len(self._until) >= MOST_SESSIONS:
            del self._until[next(iter(self._until))]
        cookie = secrets.token_urlsafe(32)
        self._until[_digest(cookie)] = time.monotonic() + self._lasts
        return cookie

    def known(self, cookie: str) -> bool:
        return self._until.get(_digest(cookie), 0.0) > time.monotonic()

    def close(self, cookie: str) -> None:
        self._until.pop(_digest(cookie), None)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).digest()


class _SignIn(msgspec.Struct):
    key: str


class Page:
    """`/ui`, and `/v1/requests/{id}/explain` behind it."""

    def __init__(self, view: LiveSource, keys: Keys, limits: Limits) -> None:
        self._view, self._keys, self._limits = view, keys, limits
        self._sessions = Sessions()
        self._files = {path.name: _File(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}

    def routes(self) -> list[Route]:
        return [
            Route("/ui", self.index),
            Route("/ui/", self.elsewhere),
            Route("/ui/session", self.session),
            Route("/ui/session", self.sign_in, methods=["POST"]),
            Route("/ui/session", self.sign_out, methods=["DELETE"]),
            Route("/ui/events", self.events),
            Route("/ui/{name}", self.file),
            Route("/v1/requests", self.explain),
            Route("/v1/requests/{id}/explain", self.explain),
        ]

    def admits(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether there is no need to ask for a key: for the page's own files, which are the same for everybody, and
        for what the page asks of the server once a browser has signed in."""
        if path in ("/ui", "/ui/", "/ui/session") or path.removeprefix("/ui/") in self._files:
            return True
        if path not in _ALLOWED and not path.startswith("/v1/requests"):
            return False
        return self._sessions.known(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))

    # ---------------------------------------------------------------- files

    async def index(self, request: Request) -> Response:
        return self._files["index.html"].response(request)

    async def elsewhere(self, request: Request) -> Response:
        return RedirectResponse("../ui")

    async def file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise NotFound(f"the page has no file {request.path_params['name']!r}")
        return found.response(request)

    # ---------------------------------------------------------------- signing in

    async def session(self, request: Request) -> Response:
        """Whether a key is needed, and whether this browser has shown one."""
        known = self._sessions.known(request.cookies.get(COOKIE, ""))
        return _json({"needed": self._keys.needed_for_admins, "signed_in": known or not self._keys.needed_for_admins})

    async def sign_in(self, request: Request) -> Response:
        body = await read_body(request, self._limits)
        await offload(len(body), partial(self._check, body))
        answer = _json({"signed_in": True})
        answer.set_cookie(
            COOKIE,
            self._sessions.open(),
            max_age=LASTS,
            path=request.scope.get("root_path", "") or "/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _check(self, body: bytes) -> None:
        try:
            key = msgspec.json.decode(body, type=_SignIn).key
        except msgspec.DecodeError as error:
            raise InvalidRequest(f'send {{"key": "..."}}: {error}', param="key") from error
        try:
            self._keys.check({"authorization": f"Bearer {key}"}, admin=True)
        except Unauthorized:
            raise Unauthorized("this is not a key of this server", code="invalid_api_key") from None

    async def sign_out(self, request: Request) -> Response:
        self._sessions.close(request.cookies.get(COOKIE, ""))
        answer = _json({"signed_in": not self._keys.needed_for_admins})
        answer.delete_cookie(COOKIE, path=request.scope.get("root_path", "") or "/", httponly=True, samesite="strict")
        return answer

    # ---------------------------------------------------------------- what there is to see

    async def events(self, request: Request) -> Frames:
        return Frames(self._view)

    async def explain(self, request: Request) -> Response:
        id = request.path_params.get("id", "")
        story = await self._view.explain(id)
        if story == b"null":
            raise NotFound(f"no request {id!r} is known here: it never was, or it was forgotten since")
        return Response(story, media_type="application/json")


_ALLOWED = frozenset({"/ui/events", "/v1/chat/completions", "/v1/models", "/stats"})


class NotFound(QuireError):
    """A path that names nothing."""

    status = 404
    kind = "invalid_request_error"


class _File:
    """One file of the page, read once."""

    def __init__(self, path: Path) -> None:
        self._body, self._type = path.read_bytes(), _TYPES[path.suffix]
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:16]}"'

    def response(self, request: Request) -> Response:
        headers = {**_SAFE, "etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._body, headers=headers, media_type=self._type)


class Frames:
    """An ASGI answer that streams frames for as long as somebody reads.

    Sending waits while the reader's socket is full, and then nothing is taken from the view, which notices.
    """

    def __init__(self, view: LiveSource) -> None:
        self._view = view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(until_gone(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait((leaving, pump), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (leaving, pump):
                task.cancel()
            await asyncio.gather(leaving, pump, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._view.watch()) as frames:
            first = asyncio.ensure_future(anext(frames))
            try:
                await asyncio.wait((first,), timeout=_PATIENCE)
                if first.done():
                    first.result()  # a refusal has a status of its own
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                await self._send(send, await first)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            async for frame in frames:
                await self._send(send, frame)

    async def _send(self, send: Send, frame: bytes) -> None:
        data = event(frame) if frame else KEEP_ALIVE
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})
