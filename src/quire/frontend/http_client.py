"""HTTP/1.1 towards one server: kept connections, answers read as they come. No more than a relay needs.

Parsing is httptools' (llhttp); RFC 9112 says when an answer is complete and when a connection may be used again.
"""

from __future__ import annotations

import asyncio
import math
import re
import select
import ssl
from collections.abc import Iterable
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from quire.errors import InvalidConfig

Headers = list[tuple[bytes, bytes]]

_CONNECT = 5.0
"""Seconds until a server that does not take a connection is given up."""
_IDLE = 64
"""Connections kept for later."""
_REST = 4.0
"""Seconds that a connection is kept unused: servers close theirs after 5 (uvicorn) or more, and a request that meets
the closing is lost, for nothing tells whether it was read."""
_KEEP_ALIVE = re.compile(rb"\btimeout\s*=\s*(\d{1,6})\b", re.IGNORECASE)
_MARGIN = 1.0
"""Seconds by which a connection is given up before the server says that it will."""
_SAFE = frozenset({"GET", "HEAD"})
"""Methods that change nothing, so that they may be sent again when an answer fails to come (RFC 9110, 9.2.1, 9.2.2)."""
_HIGH = 256 << 10
"""Bytes of an answer that may wait for its reader."""
_HEAD = 64 << 10
"""Bytes of an answer's header fields."""


class ConnectionLost(Exception):
    """An exchange broke off. unheard: nothing of an answer had come; the request may have been processed all the same.

    code: what to call it in an error; `upstream_unreachable` means that no connection was made, so nothing was sent.
    """

    def __init__(self, why: str, *, unheard: bool = False, code: str = "upstream_died") -> None:
        super().__init__(why)
        self.retryable, self.code = unheard, code


class Origin(NamedTuple):
    """Where a server is. prefix: what its paths begin with."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Of `http://HOST[:PORT][/PREFIX][/v1]`. Raises InvalidConfig."""
        try:
            parts = urlsplit(url if "://" in url else "http://" + url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidConfig(f"upstream: {url!r} is no address: {error}", param="upstream") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            raise InvalidConfig(f"upstream: {url!r} must look like http://HOST:PORT", param="upstream")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' * self.tls}://{self.authority}{self.prefix}"


class Connection(asyncio.Protocol):
    """One connection, one exchange after the other; also what httptools calls back.

    status and headers are there once `headed` has returned; `read` gives the body, b"" when it is complete.
    """

    def __init__(self) -> None:
        self.lost = False
        self.exchanges = 0
        self.status = 0
        self.headers: Headers = []
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._until = math.inf
        self._begin()

    def _begin(self) -> None:
        self.headers, self.status, self.until_closed = [], 0, False
        self._parts: list[bytes] = []
        self._size = self._fields = 0
        self._heard = self._headed = self._done = self._keep = self._paused = False
        self._broken: ConnectionLost | None = None

    # ---------------------------------------------------------------- for who asks

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._begin()
        self.exchanges += 1
        self._transport.write(request)

    async def headed(self) -> None:
        """Return when status and header fields have come. Raises Broken."""
        while not self._headed:
            await self._news()

    async def read(self) -> bytes:
        """What has come of the body since, b"" when that was all. Raises Broken, after what came before it."""
        while not self._parts:
            if self._done:
                return b""
            await self._news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def reusable(self) -> bool:
        return self._done and self._keep and not self.lost and not self._parts and self._broken is None

    def rest(self) -> None:
        """It is kept for another exchange: for as long as the server says in Keep-Alive, at most `_REST` seconds."""
        rest = _REST
        for name, value in self.headers:
            if name == b"keep-alive" and (said := _KEEP_ALIVE.search(value)):
                rest = min(rest, int(said[1]) - _MARGIN)
        self._until = asyncio.get_running_loop().time() + rest

    def usable(self) -> bool:
        """Whether the server will read what is sent now, as far as can be known: it has neither closed the connection
        nor is likely to. What it has sent already, and the event loop not read, is an end: it was asked nothing."""
        transport = self._transport
        if self.lost or transport is None or transport.is_closing():
            return False
        if asyncio.get_running_loop().time() >= self._until:
            return False
        waiting = select.poll()
        waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not waiting.poll(0)

    def close(self) -> None:
        """Now, whatever is under way: the server sees that nobody listens."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self.lost:
            raise ConnectionLost("the connection is closed", unheard=not self._heard)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---------------------------------------------------------------- for the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done or not self.exchanges:  # it speaks unasked
            self.close()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"it sent something that is not HTTP ({error})", "upstream_malformed")
        if self._size > _HIGH and not self._paused and self._transport is not None and not self.lost:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if not self._done and self._broken is None:
            if self._headed and self.until_closed and error is None:
                self._done = True
            else:
                when = "in the middle of its answer" if self._heard else "without an answer"
                self._broken = ConnectionLost(f"it closed the connection {when}", unheard=not self._heard)
        self._wake()

    def _break(self, why: str, code: str) -> None:
        if self._broken is None:
            self._broken = ConnectionLost(why, code=code)
        self.close()

    # ---------------------------------------------------------------- for the parser

    def on_message_begin(self) -> None:
        if self._done:  # more than was asked for
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:  # a trailer
            return
        self._fields += len(name) + len(value)
        if self._fields > _HEAD:
            self._break("its header fields are too long", "upstream_malformed")
        else:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._done or status < 200:
            return
        self.status, self._headed = status, True
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self.until_closed = not framed and status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        if not self._done:
            self._parts.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if not self._headed:  # 100 Continue and the like: the answer is still to come
            self.headers = []
            return
        if not self._done:
            self._done, self._keep = True, self._parser.should_keep_alive()


class Pool:
    """Connections to one server, the one used last first."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if origin.tls else None

    async def exchange(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Connection:
        """Ask, and return when status and headers are there. Raises Broken.

        A kept connection may be closed by the server just as it is used. Whether the server had read the request then,
        nothing tells: only a method that changes nothing is sent again, on a fresh connection.
        """
        lines = [f"{method} {self.origin.prefix}{path} HTTP/1.1\r\nhost: {self.origin.authority}\r\n".encode("latin-1")]
        lines += [b"%s: %s\r\n" % field for field in headers]
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(body))
        request = b"".join((*lines, b"\r\n", body))
        kept = self._kept()
        if kept is not None:
            try:
                return await _asked(kept, request)
            except ConnectionLost as error:
                if not error.retryable or method not in _SAFE:
                    raise
        return await _asked(await self._connect(), request)

    def give_back(self, connection: Connection) -> None:
        """An exchange is over, complete or not."""
        if connection.reusable and len(self._idle) < _IDLE:
            connection.rest()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop, origin = asyncio.get_running_loop(), self.origin
        try:
            async with asyncio.timeout(_CONNECT):
                _, connection = await loop.create_connection(Connection, origin.host, origin.port, ssl=self._tls)
        except TimeoutError as error:
            why = f"it took no connection within {_CONNECT:g} s"
            raise ConnectionLost(why, unheard=True, code="upstream_unreachable") from error
        except OSError as error:
            raise ConnectionLost(_reason(error), unheard=True, code="upstream_unreachable") from error
        return connection


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    return (error.strerror or str(error)).lower()


async def _asked(connection: Connection, request: bytes) -> Connection:
    try:
        connection.send(request)
        await connection.headed()
    except BaseException:
        connection.close()
        raise
    return connection
