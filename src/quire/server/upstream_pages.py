"""The engines behind a server on its live page: frames of their own pages, all in one stream.

A browser may connect to the page's own server only, by the page's content policy; so the server fetches them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import Overloaded, Unavailable
from quire.frontend.upstream import UpstreamDown
from quire.server.error_responses import JSON, NotFound
from quire.server.stream import HEADERS, KEEP_ALIVE, cancel, event, unless_gone

log = logging.getLogger(__name__)

PATH = "/ui/servers"

MAX_VIEWERS = 16
"""Each holds a connection to every upstream."""

_MAX_WAITING = 20
"""Frames that a viewer may be behind; then none are read from the upstreams."""

_RETRY = 3.0
"""Seconds until an upstream whose stream ended is asked again."""

_SILENCE = 15.0
"""Seconds between the comments of a stream without frames."""


class LivePage(Protocol):
    """The live page of an engine behind this server: an upstream's, or a replica's."""

    @property
    def name(self) -> str:
        """What errors call the engine."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """Its frames as they come; empty ones mean nothing. Raises UpstreamDown and Overloaded."""

    async def explanation(self, id: str) -> tuple[int, bytes]:
        """Status and body of its `/v1/requests/{id}/explain`. Raises UpstreamDown and Unavailable."""


class UpstreamPages:
    """The handlers below `/ui/servers`, where pages go by their index."""

    def __init__(self, pages: Sequence[LivePage]) -> None:
        self._pages = pages
        self._viewers = 0

    def routes(self) -> list[Route]:
        """They must come before `/ui/{name}`."""
        return [Route(PATH, self.events), Route(PATH + "/{number:int}/requests/{id}/explain", self.explain)]

    async def explain(self, request: Request) -> Response:
        """`GET /ui/servers/{number}/requests/{id}/explain`: as `/v1/requests/{id}/explain` of that upstream."""
        number, id = request.path_params["number"], request.path_params["id"]
        if number >= len(self._pages):
            raise NotFound(f"there is no upstream {number}: there are {len(self._pages)}, from 0")
        try:
            status, body = await self._pages[number].explanation(id)
        except UpstreamDown as error:
            raise Unavailable(f"upstream {self._pages[number].name}: {error}") from error
        return Response(body, status, media_type=JSON)

    async def events(self, request: Request) -> ASGIApp:
        """`GET /ui/servers`: an upstream's number, a space and a frame, or `{"why": ...}` where it sends none."""
        return self._stream

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send_frames(send))

    async def _send_frames(self, send: Send) -> None:
        if self._viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers of the upstreams are connected already, which is the limit", retry_after=10
            )
        frames = asyncio.Queue[bytes](_MAX_WAITING)
        self._viewers += 1
        async with AsyncExitStack() as stack:
            stack.callback(self._leave)
            for number, page in enumerate(self._pages):
                stack.push_async_callback(cancel, asyncio.ensure_future(_follow(number, page, frames)))
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            data = KEEP_ALIVE
            while True:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                try:
                    async with asyncio.timeout(_SILENCE):
                        data = event(await frames.get())
                except TimeoutError:
                    data = KEEP_ALIVE

    def _leave(self) -> None:
        self._viewers -= 1


async def _follow(number: int, page: LivePage, frames: asyncio.Queue[bytes]) -> None:
    """Put an upstream's frames into the queue until cancelled; after each failure, why it sends none."""
    while True:
        why = "its stream of frames ended"
        try:
            async with aclosing(page.frames()) as events:
                async for frame in events:
                    if frame:
                        await frames.put(b"%d %b" % (number, frame))
        except (UpstreamDown, Overloaded) as error:
            why = str(error)
        except Exception as error:  # of whatever class: a page that says nothing of it would look idle
            log.exception("the live page of %s", page.name)
            why = f"its frames cannot be read ({type(error).__name__})"
        await frames.put(b"%d %b" % (number, msgspec.json.encode({"why": why})))
        await asyncio.sleep(_RETRY)
