"""The live page: its files, its stream of frames, explanations of requests, and browsers' sessions.

An event stream cannot send headers, so where there are API keys a browser sends its key once and gets a cookie.
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
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import InvalidRequest, Unauthorized
from quire.frontend.offload import offload
from quire.server.access import Keys
from quire.server.error_responses import JSON, NotFound, json_response
from quire.server.limits import Limits, read_body
from quire.server.stream import HEADERS, KEEP_ALIVE, cancel, event, unless_gone

COOKIE = "quire_session"

# Seconds until a browser has to sign in again.
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 1024

# Seconds between the comments of a stream without frames.
_SILENCE = 15.0

# Seconds that the first frame may take; then the stream begins without it.
_FIRST_FRAME_TIMEOUT = 0.2

_FOLDER = Path(__file__).parent / "static"
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILE_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_NO_STORE: Mapping[str, str] = {"cache-control": "no-store"}

# Paths that a browser's session may use, besides /v1/requests, /ui/servers and the page's own files.
_SESSION_PATHS = frozenset({"/ui/events", "/v1/chat/completions", "/v1/models", "/stats"})


class LiveSource(Protocol):
    """What the live page shows of an engine."""

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames of JSON as they come, and an empty one after a silence. Raises Overloaded beyond the most viewers."""

    async def explain(self, id: str) -> bytes:
        """What happened to an answer as JSON, `null` if it is unknown; a line for each known one if `id` is empty."""


class Sessions:
    """Browsers that have sent a key. A cookie is a random number, of which only the digest is kept."""

    def __init__(self, lasts: float = SESSION_SECONDS) -> None:
        self._lasts = lasts
        self._expires: dict[bytes, float] = {}

    def open(self) -> str:
        """The cookie of a new session, which replaces the oldest one beyond MOST_SESSIONS."""
        while len(self._expires) >= MOST_SESSIONS:
            del self._expires[next(iter(self._expires))]
        cookie = secrets.token_urlsafe(32)
        self._expires[_digest(cookie)] = time.monotonic() + self._lasts
        return cookie

    def known(self, cookie: str) -> bool:
        """Whether a cookie belongs to a session that has not expired."""
        return self._expires.get(_digest(cookie), 0.0) > time.monotonic()

    def close(self, cookie: str) -> None:
        """End the session of a cookie, if there is one."""
        self._expires.pop(_digest(cookie), None)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).digest()


class _SignIn(msgspec.Struct):
    key: str


def reads_html(headers: Mapping[str, str]) -> bool:
    """Whether a client is a browser, which shows what it gets."""
    return "text/html" in headers.get("accept", "")


class Page:
    """The handlers of `/ui`, of `/docs` and of `/v1/requests`. view: None for a backend that cannot be looked into.
    api: the page of `/docs`, None to have none."""

    def __init__(self, view: LiveSource | None, keys: Keys, limits: Limits, api: bytes | None = None) -> None:
        self._view = view
        self._keys = keys
        self._limits = limits
        self._sessions = Sessions()
        self._files = {
            path.name: _File(path.read_bytes(), path.suffix)
            for path in sorted(_FOLDER.iterdir())
            if path.suffix in _TYPES
        }
        self._api = None if api is None else _File(api, ".html")

    def routes(self) -> list[Route]:
        """All paths of the page."""
        return [
            Route("/ui", self.index),
            Route("/ui/", self.redirect),
            Route("/ui/session", self.session),
            Route("/ui/session", self.sign_in, methods=["POST"]),
            Route("/ui/session", self.sign_out, methods=["DELETE"]),
            Route("/ui/events", self.events),
            Route("/ui/{name}", self.file),
            *([] if self._api is None else [Route("/docs", partial(self.api, self._api))]),
            Route("/v1/requests", self.explain),
            Route("/v1/requests/{id}/explain", self.explain),
        ]

    def has_session(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request needs no key: for the page's own files, which are the same for all readers, and for paths
        that the page uses once its browser has signed in."""
        if path == "/docs" and self._api is not None:
            return True
        if path in ("/ui", "/ui/", "/ui/session") or path.removeprefix("/ui/") in self._files:
            return True
        if path == "/" and reads_html(headers):
            return True
        if path not in _SESSION_PATHS and not path.startswith(("/v1/requests", "/ui/servers")):
            return False
        return self._sessions.known(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))

    async def index(self, request: Request) -> Response:
        """`GET /ui`."""
        return self._files["index.html"].response(request)

    async def redirect(self, request: Request) -> Response:
        """`GET /ui/`: to `/ui`, since the page's links are relative."""
        return RedirectResponse("../ui")

    async def file(self, request: Request) -> Response:
        """`GET /ui/{name}`."""
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise NotFound(f"the page has no file {request.path_params['name']!r}")
        return found.response(request)

    async def api(self, file: _File, request: Request) -> Response:
        """`GET /docs`."""
        return file.response(request)

    async def session(self, request: Request) -> Response:
        """`GET /ui/session`: whether a key is needed, and whether this browser has sent one."""
        known = self._sessions.known(request.cookies.get(COOKIE, ""))
        needed = self._keys.needed_for_admins
        return json_response({"needed": needed, "signed_in": known or not needed}, _NO_STORE)

    async def sign_in(self, request: Request) -> Response:
        """`POST /ui/session`: a key for a cookie."""
        body = await read_body(request, self._limits)
        await offload(len(body), partial(self._check, body))
        answer = json_response({"signed_in": True}, _NO_STORE)
        answer.set_cookie(
            COOKIE,
            self._sessions.open(),
            max_age=SESSION_SECONDS,
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
            raise Unauthorized("this is not one of this server's keys", code="invalid_api_key") from None

    async def sign_out(self, request: Request) -> Response:
        """`DELETE /ui/session`."""
        self._sessions.close(request.cookies.get(COOKIE, ""))
        answer = json_response({"signed_in": not self._keys.needed_for_admins}, _NO_STORE)
        answer.delete_cookie(COOKIE, path=request.scope.get("root_path", "") or "/", httponly=True, samesite="strict")
        return answer

    async def explain(self, request: Request) -> Response:
        """`GET /v1/requests/{id}/explain`, and `GET /v1/requests` without an id."""
        id = request.path_params.get("id", "")
        explanation = b"null" if self._view is None else await self._view.explain(id)
        if explanation == b"null":
            raise NotFound(f"no request {id!r} is known: it never existed, or its record has expired")
        return Response(explanation, media_type=JSON)

    async def events(self, request: Request) -> ASGIApp:
        """`GET /ui/events`: frames, as server-sent events."""
        return self._stream

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send_frames(send))

    async def _send_frames(self, send: Send) -> None:
        """Send frames one by one. While the reader's socket is full none is taken from the view, which notices."""

        async def send_frame(frame: bytes) -> None:
            data = event(frame) if frame else KEEP_ALIVE
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async with aclosing(_silence() if self._view is None else self._view.watch()) as frames:
            first = asyncio.ensure_future(anext(frames))
            try:
                await asyncio.wait((first,), timeout=_FIRST_FRAME_TIMEOUT)
                # A refusal is raised here, so that it gets a status of its own.
                if first.done():
                    first.result()
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await send_frame(b"")
                await send_frame(await first)
            finally:
                await cancel(first)
            async for frame in frames:
                await send_frame(frame)


async def _silence() -> AsyncGenerator[bytes, None]:
    """The frames of a page without a view."""
    while True:
        await asyncio.sleep(_SILENCE)
        yield b""


class _File:
    """One file of the page, whose type is that of names that end in `suffix`."""

    def __init__(self, body: bytes, suffix: str) -> None:
        self._body = body
        self._type = _TYPES[suffix]
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:16]}"'

    def response(self, request: Request) -> Response:
        headers = {**_FILE_HEADERS, "etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._body, headers=headers, media_type=self._type)
