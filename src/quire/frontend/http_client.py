"""A minimal HTTP/1.1 client for a relay: keep-alive connections, responses read as they arrive.

Responses are parsed by httptools (llhttp); RFC 9112 defines when one is complete and a connection may be reused.
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
"""Seconds until a connection attempt fails."""
_IDLE = 64
"""The most idle connections."""
_REST = 4.0
"""Seconds that a connection is kept idle. Servers close theirs after 5 (uvicorn) or more, and a request that is sent at
that moment is lost, since it is unknown whether the server has read it."""
_KEEP_ALIVE = re.compile(rb"\btimeout\s*=\s*(\d{1,6})\b", re.IGNORECASE)
_MARGIN = 1.0
"""Seconds before the server's announced timeout at which an idle connection is closed."""
_SAFE = frozenset({"GET", "HEAD"})
"""Safe methods, which may be sent again where no response came (RFC 9110, 9.2.1 and 9.2.2)."""
_HIGH = 256 << 10
"""Bytes of a response that may wait for its reader before reading from the socket pauses."""
_HEAD = 64 << 10
"""The most bytes of a response's header fields."""


class ConnectionLost(Exception):
    """An exchange failed. retryable: nothing of a response had come, though the request may have been processed.

    code: of the error; `upstream_unreachable` means that no connection was made, so that nothing was sent.
    """

    def __init__(self, why: str, *, retryable: bool = False, code: str = "upstream_died") -> None:
        super().__init__(why)
        self.retryable = retryable
        self.code = code


class Origin(NamedTuple):
    """The address of a server. prefix: of all its paths."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Parse `http://HOST[:PORT][/PREFIX][/v1]`. Raises InvalidConfig."""
        try:
            parts = urlsplit(url if "://" in url else "http://" + url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidConfig(f"upstream: {url!r} is not an address: {error}", param="upstream") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            raise InvalidConfig(f"upstream: {url!r} must look like http://HOST:PORT", param="upstream")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        """HOST:PORT."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' * self.tls}://{self.authority}{self.prefix}"


class Connection(asyncio.Protocol):
    """A connection with one exchange at a time; also the callbacks of asyncio and httptools.

    `status` and `headers` are set once `headed` has returned; `read` returns the body, b"" at its end.
    """

    def __init__(self) -> None:
        self.lost = False
        self.exchanges = 0
        self._transport: asyncio.Transport | None = None
        self._news = asyncio.Event()
        self._parser = httptools.HttpResponseParser(self)
        self._until = math.inf
        self._begin()

    def _begin(self) -> None:
        self.headers: Headers = []
        self.status = 0
        self.until_closed = False
        self._parts: list[bytes] = []
        self._size = self._fields = 0
        self._received = self._headed = self._done = self._keep = self._paused = False
        self._broken: ConnectionLost | None = None

    # ---------------------------------------------------------------- called by users

    def send(self, request: bytes) -> None:
        """Begin an exchange."""
        assert self._transport is not None
        self._begin()
        self.exchanges += 1
        self._transport.write(request)

    async def headed(self) -> None:
        """Wait for status and header fields. Raises ConnectionLost."""
        while not self._headed:
            await self._wait()

    async def read(self) -> bytes:
        """The next part of the body, b"" at its end. Raises ConnectionLost, after the parts before the failure."""
        while not self._parts:
            if self._done:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def reusable(self) -> bool:
        """Whether the exchange is complete and the connection stays open."""
        return self._done and self._keep and not self.lost and not self._parts and self._broken is None

    def rest(self) -> None:
        """Keep it for another exchange: for the server's Keep-Alive timeout, at most `_REST` seconds."""
        rest = _REST
        for name, value in self.headers:
            if name == b"keep-alive" and (found := _KEEP_ALIVE.search(value)):
                rest = min(rest, int(found[1]) - _MARGIN)
        self._until = asyncio.get_running_loop().time() + rest

    def usable(self) -> bool:
        """Whether the server is likely to read another request: it has not closed the connection and will not soon.

        Unread data on an idle connection means that the server has closed it.
        """
        transport = self._transport
        if self.lost or transport is None or transport.is_closing():
            return False
        if asyncio.get_running_loop().time() >= self._until:
            return False
        waiting = select.poll()
        waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not waiting.poll(0)

    def close(self) -> None:
        """Close at once, even during an exchange."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self.lost:
            raise ConnectionLost("the connection is closed", retryable=not self._received)
        self._news.clear()
        await self._news.wait()

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        # Data without a request.
        if self._done or not self.exchanges:
            self.close()
            return
        self._received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"it sent something that is not HTTP ({error})")
        if self._size > _HIGH and not self._paused and self._transport is not None and not self.lost:
            self._paused = True
            self._transport.pause_reading()
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.lost = True
        if not self._done and self._broken is None:
            if self._headed and self.until_closed and error is None:
                self._done = True
            else:
                when = "in the middle of its answer" if self._received else "without an answer"
                self._broken = ConnectionLost(f"it closed the connection {when}", retryable=not self._received)
        self._news.set()

    def _break(self, why: str) -> None:
        if self._broken is None:
            self._broken = ConnectionLost(why, code="upstream_malformed")
        self.close()

    # ---------------------------------------------------------------- called by the parser

    def on_message_begin(self) -> None:
        """A second response to one request: the connection is not reused."""
        if self._done:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field; trailers are ignored."""
        if self._headed:
            return
        self._fields += len(name) + len(value)
        if self._fields > _HEAD:
            self._break("its header fields are too long")
        else:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The end of the header fields."""
        status = self._parser.get_status_code()
        if self._done or self._broken is not None or status < 200:
            return
        self.status = status
        self._headed = True
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self.until_closed = not framed and status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._done:
            self._parts.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        """The end of a response; after an interim one (100 Continue), the final one is still to come."""
        if not self._headed:
            self.headers = []
            return
        if not self._done:
            self._done = True
            self._keep = self._parser.should_keep_alive()


class Pool:
    """Connections to one server; the most recently used idle one is used first."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if origin.tls else None

    async def exchange(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Connection:
        """Send a request, and return when status and headers have come. Raises ConnectionLost.

        The server may close an idle connection just as it is used, and it is unknown whether it has read the request:
        only safe methods are sent again, on a new connection.
        """
        lines = [f"{method} {self.origin.prefix}{path} HTTP/1.1\r\nhost: {self.origin.authority}\r\n".encode("latin-1")]
        lines += [b"%s: %s\r\n" % field for field in headers]
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(body))
        request = b"".join((*lines, b"\r\n", body))
        kept = self._kept()
        if kept is not None:
            try:
                return await _send(kept, request)
            except ConnectionLost as error:
                if not error.retryable or method not in _SAFE:
                    raise
        return await _send(await self._connect(), request)

    def give_back(self, connection: Connection) -> None:
        """Return the connection after an exchange, complete or not."""
        if connection.reusable and len(self._idle) < _IDLE:
            connection.rest()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
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
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            async with asyncio.timeout(_CONNECT):
                _, connection = await loop.create_connection(Connection, origin.host, origin.port, ssl=self._tls)
        except TimeoutError as error:
            why = f"it took no connection within {_CONNECT:g} s"
            raise ConnectionLost(why, retryable=True, code="upstream_unreachable") from error
        except OSError as error:
            raise ConnectionLost(_reason(error), retryable=True, code="upstream_unreachable") from error
        return connection


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    return (error.strerror or str(error)).lower()


async def _send(connection: Connection, request: bytes) -> Connection:
    try:
        connection.send(request)
        await connection.headed()
    except BaseException:
        connection.close()
        raise
    return connection
