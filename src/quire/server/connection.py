"""Clients' connections: uvicorn's, with bounds on everything that a client could delay or pile up.

A head has a size and a timeout; bodies and answers must make progress; requests that are sent ahead of their turn stay
bytes; a client can read the refusal of a request that it is still sending; and a client that disconnects is noticed
whatever it has pipelined (uvicorn notifies only the last request of a connection).
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.errors import InvalidConfig, InvalidRequest, TooLarge, Unavailable
from quire.server import error_responses
from quire.server.access import UNLIMITED_PATHS

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

if sys.platform != "win32":
    import resource

# Bytes that make progress within a timeout, in either direction.
_PROGRESS = 1 << 10

# Bytes of a refused body that are still read, so that its sender can read the answer.
_MAX_DISCARDED = 64 << 20

# Bytes parsed at once: some hundreds of requests, if each has forty.
_SLICE = 16 << 10

# Connections beyond the limit that are read all the same, so that health probes are answered; the paths that they may
# ask for; and the seconds that such a connection has for a request.
_RESERVED = 16
_RESERVED_PATHS = frozenset(path.encode() for path in (*UNLIMITED_PATHS, "/metrics"))
_RESERVED_READ = 2.0

# Descriptors kept for reserved connections and for what is not a connection: the engine's socket, logs, recordings,
# idle upstream connections; of a large limit this share, so that connections beyond it can be accepted and refused.
_SPARE = 64 + _RESERVED
_SPARE_SHARE = 1 / 8

# The address of clients of a Unix socket, which have none: they are on this machine.
_ON_UNIX_SOCKET = ("127.0.0.1", 0)

# Connections that may wait to be accepted, at most.
_BACKLOG = 2048

# Descriptors that a server with one client takes: its own, the engine's and the event loop's.
_LEAST = 24

# Limits to try where a process may not have its hard limit: macOS calls it infinite, and grants OPEN_MAX.
_USUAL_LIMITS = (1 << 20, 1 << 16, 10240)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds on connections. Times are seconds.

    connections: open at the same time; on a few more health and metrics are answered, and all else is refused with 503.
    descriptors: that one connection may take, with files and upstream connections opened for it. header_bytes,
    headers: of one request, its first line included. keep_alive: between two requests. read: for a whole head, and for
    each KiB of a body. write: for each KiB of an answer. linger: for reading a refusal that came before the request was
    complete.
    """

    connections: int = 4096
    descriptors: int = 1
    header_bytes: int = 32 << 10
    headers: int = 128
    keep_alive: float = 5.0
    read: float = 20.0
    write: float = 60.0
    linger: float = 2.0


class ConnectionLimits(NamedTuple):
    """connections: that may be open at the same time. backlog: that may wait to be accepted. The server accepts all of
    these at once, so as many descriptors have to be free."""

    connections: int
    backlog: int


def connection_limits(wanted: int, limit: int | None, each: int) -> ConnectionLimits:
    """The limits for `wanted` connections that take up to `each` of `limit` descriptors; at least one connection."""
    if limit is None:
        return ConnectionLimits(wanted, _BACKLOG)
    spare = max(_SPARE, int(limit * _SPARE_SHARE))
    connections = min(wanted, max(1, (limit - spare) // each))
    return ConnectionLimits(connections, max(1, min(_BACKLOG, (limit - connections * each) // 2)))


def raise_descriptor_limit() -> int | None:
    """Raise this process's limit on descriptors (RLIMIT_NOFILE) as far as it goes, also for its children.

    Returns the limit; None: there is none. Raises InvalidConfig where no server could run.
    """
    if sys.platform == "win32":
        return None
    infinity = resource.RLIM_INFINITY
    soft, hard = (math.inf if limit == infinity else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    for wanted in (hard, *_USUAL_LIMITS):
        if soft < wanted <= hard:
            with suppress(ValueError, OSError):
                limits = [infinity if limit == math.inf else int(limit) for limit in (wanted, hard)]
                resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], limits[1]))
                soft = wanted
    if soft < _LEAST:
        raise InvalidConfig(
            f"this process may have {soft} descriptors open, and a server takes {_LEAST}: raise the limit (ulimit -n)"
        )
    return None if soft == math.inf else int(soft)


class ResponseTransport:
    """A transport that counts what was written, and calls `on_close` instead of closing."""

    def __init__(self, inner: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self.inner = inner
        self._on_close: Callable[[], None] | None = on_close
        self._written = 0
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def sent(self) -> int:
        """Bytes that the operating system has taken."""
        return self._written - self.inner.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data."""
        self._written += len(data)
        self.inner.write(data)

    def close(self) -> None:
        """Call `on_close`, once."""
        if not self.is_closing():
            self._closed = True
            if self._on_close is not None:
                self._on_close()

    def lost(self) -> None:
        """The connection is closed: drop the reference to `on_close`."""
        self._closed = True
        self._on_close = None

    def is_closing(self) -> bool:
        """Whether `close` or `abort` was called."""
        return self._closed or self.inner.is_closing()

    def abort(self) -> None:
        """Close at once, without sending what is buffered."""
        self._closed = True
        self.inner.abort()


def _too_many() -> Unavailable:
    return Unavailable("this server has reached its limit of connections: try again in a moment")


class _Refused(Exception):
    """Raised within the parser: the server refuses this head with `error`."""

    def __init__(self, error: InvalidRequest | Unavailable, status: int | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.status = status


# A Host field (RFC 9110, 7.2), which may be empty. Names that are not ASCII come in Punycode.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[\w.~%!$&'()*+;=-]*)(?::\d{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)


def _check_head(version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a head that the parser accepts and that a proxy in front may understand otherwise than this server.

    Where the target names a host, as requests to proxies do, that is the host (RFC 9112, 3.2.2): it replaces the
    field. Raises _Refused.
    """
    if version not in ("1.0", "1.1"):
        raise _Refused(InvalidRequest(f"this server speaks HTTP/1.1, not HTTP/{version}"))
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]):
        raise _Refused(InvalidRequest("a body may have one Transfer-Encoding, chunked, in HTTP/1.1 only"))
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _Refused(InvalidRequest(f"a request in HTTP/1.1 has one Host field, not {len(hosts) or 'none'}"))
    if not target.startswith((b"/", b"*")):
        absolute = _ABSOLUTE.match(target)
        hosts = [b"/" if absolute is None else absolute[1]]
        headers[:] = [*((name, value) for name, value in headers if name != b"host"), (b"host", hosts[0])]
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise _Refused(InvalidRequest("the Host field, or the target of this request, does not name a host and a port"))


class _CycleWithoutChunks(RequestResponseCycle):
    """A request in HTTP/1.0, whose client knows no chunks: an answer without a length ends with the connection."""

    has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = None if self.has_length else False
        elif message["type"] == "http.response.body" and not self.has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """One client's connection. `check_timeouts` is to be called about once a second."""

    def __init__(self, *args: Any, timeouts: Timeouts, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._timeouts = timeouts
        # Received and not yet parsed.
        self._unparsed = bytearray()
        # The part of a request that is being read, "" between requests, and since when it makes no progress.
        self._reading: Literal["", "head", "body"] = "head"
        self._reading_since = self.loop.time()
        # Of the current request: bytes of its head, its header fields, and bytes of its body since the last progress.
        self._head_bytes = 0
        self._num_fields = 0
        self._body_bytes = 0
        # Whether a new part began in the bytes that are being parsed.
        self._part_began = False
        # Bytes sent at the last progress of writing, and its time.
        self._sent = 0
        self._writing_since = self.loop.time()
        # Whether what comes is discarded, and how much was.
        self._discarding = False
        self._num_discarded = 0
        self._upgrading = False
        # Whether it is beyond the limit of connections.
        self._reserved = False
        # The request that is being answered.
        self._running: RequestResponseCycle | None = None

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request whose head came last; None before the first."""
        return self.cycle

    @property
    def _out(self) -> ResponseTransport:
        return cast(ResponseTransport, self.transport)

    # ---------------------------------------------------------------- the transport's events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(cast(asyncio.Transport, ResponseTransport(transport, self._close)))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            self.client = _ON_UNIX_SOCKET
        excess = len(self.connections) - self._timeouts.connections
        self._reserved = excess > 0
        if excess > _RESERVED:
            self._refuse(_too_many())

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: cancel its requests."""
        for cycle in (self._running, self._newest):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._unparsed.clear()
        super().connection_lost(exc)
        # Reference cycles would keep it until a full garbage collection, which comes after tens of thousands of
        # connections.
        self._out.lost()
        self._running = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """The client has sent data."""
        if self._discarding:
            self._discard(len(data))
        else:
            self._unparsed += data
            self._parse()

    def _discard(self, size: int) -> None:
        self._num_discarded += size
        if self._num_discarded > _MAX_DISCARDED:
            self._out.abort()

    def _parse(self) -> None:
        """Parse what has come, until a request has to wait for the one before."""
        while self._unparsed and not self.pipeline and not self._discarding and not self._out.is_closing():
            part = bytes(self._unparsed[:_SLICE])
            del self._unparsed[:_SLICE]
            self._unset_keepalive_if_required()
            if not self._reading:
                self._begin("head")
            in_head = self._reading == "head"
            self._part_began = False
            try:
                self.parser.feed_data(part)
                if in_head and not self._part_began:
                    self._count_head(len(part))
            except httptools.HttpParserUpgrade as stopped:
                if self._upgrading:
                    self._unparsed[:0] = self._head_without_upgrade() + part[stopped.args[0] :]
                    # A new parser: the other one accepts nothing after "Connection: close".
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                else:
                    # CONNECT: what follows is not a request.
                    self._end_requests()
            except (httptools.HttpParserError, _Refused) as error:
                self._invalid(error)

    def _head_without_upgrade(self) -> bytes:
        """The head at which the parser stopped, to be parsed again without its Upgrade field.

        A server may ignore the protocols that a client offers (RFC 9110, 7.8): the request is one like any other.
        """
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([line, *fields, b"", b""])

    def _begin(self, part: Literal["", "head", "body"]) -> None:
        self._reading = part
        self._reading_since = self.loop.time()
        self._part_began = True
        self._body_bytes = 0
        if part == "head":
            self._head_bytes = 0
            self._num_fields = 0

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._timeouts.header_bytes or self._num_fields > self._timeouts.headers:
            most = f"{self._timeouts.header_bytes} bytes and {self._timeouts.headers} fields"
            why = f"the head of this request is larger than this server takes ({most})"
            raise _Refused(TooLarge(why, code="head_too_large"), 431)

    # ---------------------------------------------------------------- the parser's callbacks

    def on_message_begin(self) -> None:
        """A request begins."""
        self._begin("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the request's target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or one of the trailer, which is ignored."""
        self._num_fields += 1
        self._count_head(len(name) + len(value))
        if self._reading == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._upgrading = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._upgrading:
            return
        _check_head(self.parser.get_http_version(), self.url, self.headers)
        self._reserved = self._reserved and len(self.connections) > self._timeouts.connections
        if self._reserved and httptools.parse_url(self.url).path not in _RESERVED_PATHS:
            raise _Refused(_too_many())
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _CycleWithoutChunks
        if self._reserved:
            self.cycle.keep_alive = False
        self._begin("body")
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        super().on_body(body)
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discard(len(body))

    def on_message_complete(self) -> None:
        """The request is complete."""
        # The parser skips the body of a request with an Upgrade field, which is parsed again.
        if self._upgrading:
            return
        super().on_message_complete()
        self._begin("")

    def on_response_complete(self) -> None:
        """A request is answered: go on with the next one."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._running = following
        self._parse()

    # ---------------------------------------------------------------- refusals

    def _invalid(self, error: Exception) -> None:
        cause = error if isinstance(error, _Refused) else error.__context__
        if isinstance(cause, _Refused):
            self._refuse(cause.error, cause.status)
        else:
            self._refuse(InvalidRequest("this is not a request in HTTP/1.1"))

    def _end_requests(self) -> None:
        """Answer the requests that are complete, then close."""
        cycle = self.pipeline[0][0] if self.pipeline else self._running
        if cycle is not None:
            cycle.keep_alive = False
        self._discarding = True
        self._unparsed.clear()

    def _refuse(self, error: InvalidRequest | Unavailable, status: int | None = None) -> None:
        """Answer a request that is not complete, or none. An answer in progress is completed first."""
        cycle = self._newest
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline:
                self.pipeline.popleft()
            elif cycle.response_started:
                self._out.abort()
                return
            else:
                self._running = None
        if self._running is not None:
            self._end_requests()
            return
        code = HTTPStatus(status or error.status)
        body = error_responses.of(error)
        fields = {"content-type": "application/json", "content-length": len(body)}
        fields |= error_responses.headers(error) | {"connection": "close"}
        head = f"HTTP/1.1 {code.value} {code.phrase}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        self._out.write(head.encode() + b"\r\n" + body)
        self._out.close()

    def _close(self) -> None:
        """Close; while the client is still sending, only our side, so that it can read its answer."""
        transport = self._out.inner
        self._discarding = True
        self._unparsed.clear()
        if self._reading == "body" or (self._reading == "head" and self._head_bytes):
            if transport.can_write_eof():
                transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(self._timeouts.linger, transport.close)
        else:
            transport.close()

    # ---------------------------------------------------------------- timeouts

    def check_timeouts(self, now: float) -> None:
        """Close the connection if reading or writing makes no progress. now: the event loop's time."""
        out = self._out
        sent = out.sent
        if not out.get_write_buffer_size() or sent - self._sent >= _PROGRESS:
            self._sent = sent
            self._writing_since = now
        elif now - self._writing_since > self._timeouts.write:
            out.abort()
        if self._reading == "body" and (self._body_bytes >= _PROGRESS or self.flow.read_paused):
            self._body_bytes = 0
            self._reading_since = now
        waited = now - self._reading_since
        timeout = min(self._timeouts.read, _RESERVED_READ) if self._reserved else self._timeouts.read
        if self._reading and waited > timeout and not out.is_closing():
            if self._reserved:
                self._refuse(_too_many())
            elif self._reading == "head" and not self._head_bytes:
                out.close()
            else:
                self._refuse(InvalidRequest(f"no data of the request arrived for {self._timeouts.read:g} s"), 408)
