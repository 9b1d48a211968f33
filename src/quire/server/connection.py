"""One client's connection: uvicorn's, with an end to everything that a client could drag out or pile up.

A head has a size and a time; a body and an answer have to get on; what a client sends ahead of its turn stays bytes; a
refusal can be read before the door closes; and whoever leaves is noticed whatever was sent behind (uvicorn tells only
the last request of a connection that it is gone).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.errors import InvalidRequest, TooLarge, Unavailable
from quire.server import error_responses

_SOME = 1 << 10
"""Bytes that have to get through in the time given, in either direction."""

_LEFTOVERS = 64 << 20
"""Bytes of a body that nobody wants which are still read, so that its sender can read the answer."""

_SLICE = 16 << 10
"""Bytes parsed at once: with requests of forty bytes in a row, some hundreds of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """What one connection may cost. Times are seconds.

    connections: at once; one more hears 503. descriptors: that a connection may take, with what is opened for it.
    header_bytes, headers: of one request, its first line included.
    keep_alive: between two requests. read: for a whole head, and for every KiB of a body. write: for every KiB of an
    answer. linger: for reading a refusal that came before the request was whole.
    """

    connections: int = 4096
    descriptors: int = 1
    header_bytes: int = 32 << 10
    headers: int = 128
    keep_alive: float = 5.0
    read: float = 20.0
    write: float = 60.0
    linger: float = 2.0


def _nothing() -> None:
    """For what is closed already."""


class ResponseTransport(asyncio.Transport):
    """A transport that counts what was written, and whose closing can be put off."""

    def __init__(self, inner: asyncio.Transport, on_close: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self._on_close = inner, on_close
        self._written = 0
        self._closed = False

    @property
    def taken(self) -> int:
        """Bytes that have left for the client."""
        return self._written - self.inner.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written += len(data)
        self.inner.write(data)

    def close(self) -> None:
        if not self.is_closing():
            self._closed = True
            self._on_close()

    def lost(self) -> None:
        """The client is gone: closing has nothing left to do."""
        self._closed, self._on_close = True, _nothing

    def is_closing(self) -> bool:
        return self._closed or self.inner.is_closing()

    def abort(self) -> None:
        self._closed = True
        self.inner.abort()

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.inner.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self.inner.get_write_buffer_size()


class _Refused(Exception):
    """Raised within the parser: a head that this server does not take, and why."""

    def __init__(self, error: InvalidRequest, status: int | None = None) -> None:
        super().__init__(error)
        self.error, self.status = error, status


_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[\w.~%!$&'()*+;=-]*)(?::\d{0,5})?")
"""A Host field (RFC 9110, 7.2), which may be empty. Names that are not ASCII come in Punycode."""

_ABSOLUTE = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)


def _checked(version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a head that the parser takes and that a proxy in front may understand otherwise than this server.

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


class Connection(HttpToolsProtocol):
    """`look` is to be called about once a second."""

    def __init__(self, *args: Any, timeouts: Timeouts, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._timeouts = timeouts
        self._reading: Literal["", "head", "body"] = "head"
        self._since = self._moved = self.loop.time()
        self._head = self._fields = self._body = self._taken = self._left = 0
        self._later = bytearray()
        self._fresh = self._discarding = self._upgrading = False
        self._running: RequestResponseCycle | None = None

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request whose head came last; None before the first."""
        return self.cycle

    @property
    def _line(self) -> ResponseTransport:
        return cast(ResponseTransport, self.transport)

    # ---------------------------------------------------------------- what comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(ResponseTransport(transport, self._close))
        if len(self.connections) > self._timeouts.connections:
            self._refuse(Unavailable("this server has as many connections as it takes: try again in a moment"))

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self._running, self._newest):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._later.clear()
        super().connection_lost(exc)
        # What refers to it and what it refers to, both ways, would keep it until a full garbage collection, which comes
        # after tens of thousands of connections.
        self._line.lost()
        self._running = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._discard(len(data))
        else:
            self._later += data
            self._feed()

    def _discard(self, size: int) -> None:
        self._left += size
        if self._left > _LEFTOVERS:
            self._line.abort()

    def _feed(self) -> None:
        """Parse what has come, until a request has to wait for the one before."""
        while self._later and not self.pipeline and not self._discarding and not self._line.is_closing():
            part = bytes(self._later[:_SLICE])
            del self._later[:_SLICE]
            self._unset_keepalive_if_required()
            if not self._reading:
                self._begin("head")
            within = self._reading == "head"
            self._fresh = False
            try:
                self.parser.feed_data(part)
                if within and not self._fresh:
                    self._count_body(len(part))
            except httptools.HttpParserUpgrade as stopped:
                if self._upgrading:
                    self._later[:0] = self._without_upgrade() + part[stopped.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)  # the other takes no more after "close"
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                else:  # CONNECT: what follows is no request
                    self._last()
            except (httptools.HttpParserError, _Refused) as error:
                self._invalid(error)

    def _without_upgrade(self) -> bytes:
        """The head that the parser stopped behind, to be parsed again: a server may ignore what the client offers to
        change to (RFC 9110, 7.8), and its request, body and all, is one like any other."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([line, *fields, b"", b""])

    def _begin(self, part: Literal["", "head", "body"]) -> None:
        self._reading, self._since, self._fresh = part, self.loop.time(), True
        self._body = 0
        if part == "head":
            self._head = self._fields = 0

    def _count_body(self, size: int) -> None:
        self._head += size
        if self._head > self._timeouts.header_bytes or self._fields > self._timeouts.headers:
            most = f"{self._timeouts.header_bytes} bytes and {self._timeouts.headers} fields"
            why = f"the head of this request is larger than this server takes ({most})"
            raise _Refused(TooLarge(why, code="head_too_large"), 431)

    # ---------------------------------------------------------------- what the parser says

    def on_message_begin(self) -> None:
        self._begin("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_body(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count_body(len(name) + len(value))
        if self._reading == "head":  # a trailer is nothing that was asked for
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._upgrading = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._upgrading:
            return
        _checked(self.parser.get_http_version(), self.url, self.headers)
        super().on_headers_complete()
        self._begin("body")
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body += len(body)
        if self.cycle.response_complete:
            self._discard(len(body))

    def on_message_complete(self) -> None:
        if self._upgrading:  # the parser skips the body
            return
        super().on_message_complete()
        self._begin("")

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._running = following
        self._feed()

    # ---------------------------------------------------------------- refusals

    def _invalid(self, error: Exception) -> None:
        cause = error if isinstance(error, _Refused) else error.__context__
        if isinstance(cause, _Refused):
            self._refuse(cause.error, cause.status)
        else:
            self._refuse(InvalidRequest("this is not a request in HTTP/1.1"))

    def _last(self) -> None:
        """What is being answered, or waits for it, is the last that this connection asks."""
        cycle = self.pipeline[0][0] if self.pipeline else self._running
        if cycle is not None:
            cycle.keep_alive = False
        self._discarding = True
        self._later.clear()

    def _refuse(self, error: InvalidRequest | Unavailable, status: int | None = None) -> None:
        """Answer what never became a request, unless another is being answered: that one ends first."""
        cycle = self._newest
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline:
                self.pipeline.popleft()
            elif cycle.response_started:
                self._line.abort()
                return
            else:
                self._running = None
        if self._running is not None:
            self._last()
            return
        code = HTTPStatus(status or error.status)
        said = error_responses.of(error)
        head = (
            f"HTTP/1.1 {code.value} {code.phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(said)}\r\n"
        )
        fields = error_responses.headers(error) | {"connection": "close"}
        head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._line.write(head.encode() + b"\r\n" + said)
        self._line.close()

    def _close(self) -> None:
        """Close; but while the client is still sending, only our half, so that it can read what it was told."""
        line = self._line.inner
        self._discarding = True
        self._later.clear()
        if self._reading == "body" or (self._reading == "head" and self._head):
            if line.can_write_eof():
                line.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(self._timeouts.linger, line.close)
        else:
            line.close()

    # ---------------------------------------------------------------- time

    def check_timeouts(self, now: float) -> None:
        """End what does not get on. now: seconds, the loop's."""
        line = self._line
        taken = line.taken
        if not line.get_write_buffer_size() or taken - self._taken >= _SOME:
            self._taken, self._moved = taken, now
        elif now - self._moved > self._timeouts.write:
            line.abort()
        if self._reading == "body" and (self._body >= _SOME or self.flow.read_paused):
            self._body, self._since = 0, now
        if self._reading and now - self._since > self._timeouts.read and not line.is_closing():
            if self._reading == "head" and not self._head:
                line.close()
            else:
                self._refuse(InvalidRequest(f"the request did not get on for {self._timeouts.read:g} s"), 408)
