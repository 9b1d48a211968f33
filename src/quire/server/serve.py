"""Listening, and leaving in order: a signal drains, a second one does not wait."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from quire import heap
from quire.errors import InvalidConfig
from quire.frontend.interface import Service
from quire.server import connection_limits
from quire.server.batch_api.service import BatchService, NoBatchService
from quire.server.connection import Connection, Timeouts

_THREADS = 4
"""For what would hold the loop up, such as long texts: as many whatever the machine and the load."""

_LARGE = 256 << 10
"""Bytes of a block that is given back when it is freed: one body of megabytes must not teach the heap to keep it."""

_UNREAD = 128 << 10
"""Bytes of an answer that the system holds for a slow reader: some seconds of the fastest stream."""

_FEWER = (
    "at most %d clients are connected at once, not %d (--max-connections): this process may not have more descriptors "
    "open; raise its hard limit (ulimit -Hn)"
)

_LAST_BYTES = 5
"""Seconds that drained answers may take to reach slow readers."""

log = logging.getLogger("uvicorn.error")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 lets the system choose. Raises InvalidConfig when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
            sock.bind(address)
            undo.pop_all()
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidConfig(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from error
    return sock


async def serve(
    app: ASGIApp,
    backend: Service,
    sock: socket.socket,
    *,
    timeouts: Timeouts | None = None,
    shutdown_timeout: float = 30.0,
    log_level: str = "info",
    log_config: dict[str, Any] | None = None,
    root_path: str = "",
    tls: tuple[str, str] | None = None,
    batch_service: BatchService | None = None,
    address_file: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Start `backend`, answer on `sock`, and return when SIGTERM or Ctrl-C came and everything has ended.

    After the signal new requests get 503 and Retry-After; those running may take `shutdown_timeout` seconds.
    tls: files of the private key and of the certificate. batch_service: works beside the answers; it starts after the
    backend and ends before it drains. address_file: holds the server's address while it answers.
    Raises what `Service.start` raises; nothing listens before it has returned.
    """
    batch_service = NoBatchService() if batch_service is None else batch_service
    timeouts = Timeouts() if timeouts is None else timeouts
    room = connection_limits.connection_limits(
        timeouts.connections, connection_limits.raise_limit(), timeouts.descriptors
    )
    asked, timeouts = timeouts.connections, replace(timeouts, connections=room.connections)
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(Connection, timeouts=timeouts)),
        ws="none",
        lifespan="off",
        log_level=log_level,
        log_config=uvicorn.config.LOGGING_CONFIG if log_config is None else log_config,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=root_path,
        backlog=room.backlog,
        ssl_keyfile=tls and tls[0],
        ssl_certfile=tls and tls[1],
        timeout_keep_alive=cast(int, timeouts.keep_alive),
        timeout_graceful_shutdown=_LAST_BYTES,
    )
    if room.connections < asked:
        log.warning(_FEWER, room.connections, asked)
    heap.mapped_from(_LARGE)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="rim"))
    try:
        await backend.start()
        await batch_service.start()
        server = _Server(config, backend, batch_service, shutdown_timeout)
        answering = asyncio.ensure_future(server.serve(sockets=[sock]))
        await server.listening(answering)
        with _written(address_file, url(sock, "http" if tls is None else "https")) as address:
            on_ready(address)
            await answering
    finally:
        await batch_service.stop()
        await backend.close()
        sock.close()


def url(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _near(url: str) -> str:
    """The address as a program on this machine reaches it: a server that listens everywhere is on loopback too."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


@contextmanager
def _written(file: str | None, address: str) -> Iterator[str]:
    """`file`, if any, holds `address` meanwhile. Where it cannot be written the log says so: answers matter more."""
    if file is None:
        yield address
        return
    try:
        Path(file).write_text(_near(address), "ascii")
    except OSError as error:
        log.warning("address_file: %s cannot be written: %s", file, error.strerror or error)
    try:
        yield address
    finally:
        try:
            Path(file).unlink(missing_ok=True)
        except OSError as error:
            log.warning("address_file: %s cannot be removed: %s", file, error.strerror or error)


class _Server(uvicorn.Server):
    """uvicorn, draining before it closes its door: a refusal with a reason beats a closed port."""

    def __init__(self, config: uvicorn.Config, backend: Service, desk: BatchService, timeout: float) -> None:
        super().__init__(config)
        self._backend, self._batch_service, self._timeout = backend, desk, timeout
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            now = self._loop.time()
            for connection in list(self.server_state.connections):
                cast(Connection, connection).check_timeouts(now)
        if counter % 100 == 50:
            await asyncio.to_thread(heap.trim)
        return await super().on_tick(counter)

    async def listening(self, answering: asyncio.Future[None]) -> None:
        while not self.started and not answering.done():
            await asyncio.sleep(0.005)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs as a signal handler, anywhere: only tells the loop. Not kept, so that the exit code is 0."""
        self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            for connection in list(self.server_state.connections):  # or Python 3.12 and later wait for them
                cast(Connection, connection).transport.abort()
            return
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._batch_service.stop()
            await self._backend.drain(self._timeout)
        finally:
            self.should_exit = True
