"""Runs the server: listens, and shuts down in order. A first signal drains, a second one does not wait."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
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
from quire.server.batch_api.runner import BatchService
from quire.server.connection import Connection, Timeouts, connection_limits, raise_descriptor_limit

# Threads of the event loop's executor: the same number on every machine.
_THREADS = 4

# Bytes of blocks that malloc returns to the system when they are freed: without this, one body of megabytes would make
# it keep such blocks.
_LARGE = 256 << 10

# Bytes of an answer that the system buffers for a slow reader: some seconds of the fastest stream.
_SEND_BUFFER = 128 << 10

# Seconds that drained answers may take to reach slow readers.
_LAST_BYTES = 5

_FEWER = (
    "at most %d clients are connected at once, not %d (--max-connections): this process may not have more descriptors "
    "open; raise its hard limit (ulimit -Hn)"
)

UNIX = "unix:"
"""What an address begins with that is the path of a Unix socket."""

log = logging.getLogger("uvicorn.error")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 lets the system choose. Raises InvalidConfig where the address cannot be used."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            sock.bind(address)
            undo.pop_all()
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidConfig(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from error
    return sock


def listen_unix(path: str) -> socket.socket:
    """A socket bound to `path`, in place of one that a server which has ended left behind.

    Raises InvalidConfig where that cannot be: a server listens there, or something else has that name.
    """
    try:
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if Path(path).is_socket():
                try:
                    sock.connect(path)
                except ConnectionRefusedError:
                    Path(path).unlink()
                else:
                    raise OSError(errno.EADDRINUSE, "a server listens there")
            sock.bind(path)
            sock.listen()  # at once: otherwise another server that starts would take this one's place
            undo.pop_all()
    except OSError as error:
        raise InvalidConfig(f"cannot listen on {path}: {error.strerror or error}", param="uds") from error
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
    """Start `backend`, serve `app` on `sock`, and return after SIGTERM, SIGHUP or Ctrl-C, when all has ended.

    After the signal new requests get 503 and Retry-After; those running may take `shutdown_timeout` seconds.
    tls: files of the private key and of the certificate. batch_service: starts after the backend, and ends before it
    drains. address_file: contains the server's address while it listens. on_ready: called with that address.
    Raises what `Service.start` raises, before anything listens, and InvalidConfig for an address_file that cannot be
    written.
    """
    timeouts = Timeouts() if timeouts is None else timeouts
    limits = connection_limits(timeouts.connections, raise_descriptor_limit(), timeouts.descriptors)
    wanted = timeouts.connections
    timeouts = replace(timeouts, connections=limits.connections)
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
        backlog=limits.backlog,
        ssl_keyfile=tls and tls[0],
        ssl_certfile=tls and tls[1],
        timeout_keep_alive=cast(int, timeouts.keep_alive),
        timeout_graceful_shutdown=_LAST_BYTES,
    )
    if limits.connections < wanted:
        log.warning(_FEWER, limits.connections, wanted)
    heap.mapped_from(_LARGE)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="server"))
    async with AsyncExitStack() as shutdown:
        shutdown.enter_context(_listening(sock))
        shutdown.push_async_callback(backend.close)
        if batch_service is not None:
            shutdown.push_async_callback(batch_service.stop)
        _check_writable(address_file)
        await backend.start()
        if batch_service is not None:
            await batch_service.start()
        server = _Server(config, backend, batch_service, shutdown_timeout)
        answering = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started and not answering.done():
            await asyncio.sleep(0.005)
        with _written(address_file, url(sock, "http" if tls is None else "https")) as address:
            on_ready(address)
            await answering


@contextmanager
def _listening(sock: socket.socket) -> Iterator[None]:
    """Within, `sock` is open; then the file of a Unix socket is removed."""
    file = sock.getsockname() if sock.family == socket.AF_UNIX else None
    try:
        yield
    finally:
        sock.close()
        if file is not None:
            Path(file).unlink(missing_ok=True)


def url(sock: socket.socket, scheme: str = "http") -> str:
    """The URL of a server that listens on `sock`, or `UNIX` and the path of a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return f"{UNIX}{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_writable(file: str | None) -> None:
    """Raise InvalidConfig where a health check would never find the address. Leaves no file that was not there."""
    if file is None:
        return
    there = Path(file).exists()
    try:
        Path(file).open("a").close()
        if not there:
            Path(file).unlink()
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidConfig(
            f"address_file: {file} cannot be written: {why}; name a file in a folder that this user may write to",
            param="address_file",
        ) from error


@contextmanager
def _written(file: str | None, address: str) -> Iterator[str]:
    """Within, `file` contains `address`, as programs on this machine reach it. What keeps it from being written once
    the server answers is only logged."""
    if file is None:
        yield address
        return
    try:
        local = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        Path(file).write_text(local, "ascii")
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
    """uvicorn's server, which drains the backend before it stops listening: meanwhile requests are refused with 503."""

    def __init__(
        self, config: uvicorn.Config, backend: Service, batch_service: BatchService | None, timeout: float
    ) -> None:
        super().__init__(config)
        self._backend = backend
        self._batch_service = batch_service
        self._timeout = timeout
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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's; besides, the end of the terminal drains the server, unless that is ignored (nohup)."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            hangs_up = threading.current_thread() is threading.main_thread() and before is signal.SIG_DFL
            if hangs_up:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if hangs_up:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler, which may run in any thread. The signal is not kept, so that the exit code is 0."""
        self._loop.call_soon_threadsafe(self._exit)

    def _exit(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
            return
        self.should_exit = self.force_exit = True
        # Python 3.12 and later wait for open connections.
        for connection in list(self.server_state.connections):
            cast(Connection, connection).transport.abort()

    async def _drain(self) -> None:
        """Stop batches, then drain the backend; an error of either is logged, and the server exits all the same."""
        try:
            async with AsyncExitStack() as then:
                then.push_async_callback(self._backend.drain, self._timeout)
                if self._batch_service is not None:
                    await self._batch_service.stop()
        except Exception as error:
            log.error("the shutdown was not clean: %s: %s", type(error).__name__, error)
        finally:
            self.should_exit = True
