"""Listening, and leaving in order: a signal drains, a second one does not wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from quire.backends.base import Backend
from quire.errors import InvalidConfig
from quire.server.desk import Desk, NoDesk

_LAST_BYTES = 5
"""Seconds that drained answers may take to reach slow readers."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 lets the system choose. Raises InvalidConfig when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            undo.pop_all()
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidConfig(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from error
    return sock


async def serve(
    app: ASGIApp,
    backend: Backend,
    sock: socket.socket,
    *,
    shutdown_timeout: float = 30.0,
    log_level: str = "info",
    root_path: str = "",
    desk: Desk | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Start `backend`, answer on `sock`, and return when SIGTERM or Ctrl-C came and everything has ended.

    After the signal new requests get 503 and Retry-After; those running may take `shutdown_timeout` seconds.
    desk: who works beside the answers; it starts after the backend and ends before it drains.
    Raises what `Backend.start` raises; nothing listens before it has returned.
    """
    desk = NoDesk() if desk is None else desk
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_level=log_level,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=root_path,
        timeout_graceful_shutdown=_LAST_BYTES,
    )
    try:
        await backend.start()
        await desk.start()
        server = _Server(config, backend, desk, shutdown_timeout)
        answering = asyncio.ensure_future(server.serve(sockets=[sock]))
        await server.listening(answering)
        on_ready(url(sock))
        await answering
    finally:
        await desk.stop()
        await backend.close()
        sock.close()


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, draining before it closes its door: a refusal with a reason beats a closed port."""

    def __init__(self, config: uvicorn.Config, backend: Backend, desk: Desk, timeout: float) -> None:
        super().__init__(config)
        self._backend, self._desk, self._timeout = backend, desk, timeout
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def listening(self, answering: asyncio.Future[None]) -> None:
        while not self.started and not answering.done():
            await asyncio.sleep(0.005)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs as a signal handler, anywhere: only tells the loop. Not kept, so that the exit code is 0."""
        self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._desk.stop()
            await self._backend.drain(self._timeout)
        finally:
            self.should_exit = True
