"""A response of an upstream server on its way to a client: bytes are forwarded unchanged, and tokens are counted.

Events are found by searching for byte sequences that cannot occur inside a JSON string; only the object with the usage
is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from quire.errors import Unavailable
from quire.frontend.http_client import Connection, ConnectionLost
from quire.frontend.offload import offload

MAX_HELD_BYTES = 1 << 20
"""The most bytes of an incomplete event that are held back; a longer event is forwarded in pieces."""

_ENDS = re.compile(rb'"(?:finish_reason|stop_reason)":\s?"(\w+)"')
_USAGE = re.compile(rb'"usage":\s?\{')
_NO_CHOICE = re.compile(rb'"choices":\s?\[\]')
_ID = re.compile(rb'"id":\s?"([\w.:\-]{1,128})"')
_EVENT = b"data:"
_DONE = b"[DONE]"
_TAIL = 64
"""Bytes at the end of a stream that contain its last event."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _UsageEnvelope(msgspec.Struct):
    """The places of usage: chat and completions; the last event of Responses; the first event of Messages."""

    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None


_decoder = msgspec.json.Decoder(_UsageEnvelope)


class Listener(Protocol):
    """Callbacks of an UpstreamResponse."""

    def on_tokens(self, tokens: int) -> None:
        """`tokens` more events came, usually of one token each."""

    def on_end(self, response: UpstreamResponse, error: str | None) -> None:
        """The response ended; early because of `error`, or because the client disconnected if that is ''."""


class UpstreamResponse:
    """One response. status, headers: the upstream's. streams: whether it consists of server-sent events.

    num_events: so far. reported_tokens: of the answer, None until a usage reports it. prompt_tokens: 0 if unknown.
    finish: the finish reason, '' if unknown. id: the upstream's.
    """

    def __init__(
        self, connection: Connection, done: Callable[[Connection], None], listener: Listener, name: str
    ) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self.streams = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers)
        self.num_events = self.prompt_tokens = 0
        self.reported_tokens: int | None = None
        self.finish = self.id = ""
        self._connection = connection
        self._give_back = done
        self._listener = listener
        self._name = name
        self._rest = self._tail = b""
        self._whole: list[bytes] = []
        self._closed = False

    async def read(self) -> bytes:
        """The next bytes, complete events if it streams; b"" at the end. Raises Unavailable where it is cut short."""
        try:
            while True:
                data = await self._connection.read()
                if not data:
                    return await self._end()
                if not self.streams:
                    self._whole.append(data)
                    return data
                data = self._events(data)
                if data:
                    return data
        except ConnectionLost as error:
            # Closed while this call was waiting.
            if self._closed:
                raise Unavailable("the server is shutting down") from error
            why = f"{self._name} broke off this answer: {error}"
            self.close(why)
            raise Unavailable(why, code=error.code) from error

    def close(self, error: str | None = "") -> None:
        """Stop reading; the connection is closed unless the response was complete."""
        if self._closed:
            return
        self._closed = True
        self._listener.on_end(self, error)
        self._give_back(self._connection)

    async def _end(self) -> bytes:
        rest = self._rest
        self._rest = b""
        if self.streams and self._connection.until_closed and _DONE not in self._tail + rest:
            raise ConnectionLost("it closed the connection in the middle of its answer")
        if rest:
            self._count(rest)
            return rest
        if self._whole:
            whole = b"".join(self._whole)
            await offload(len(whole), partial(self._read_whole, whole))
        self.close(None)
        return b""

    def _read_whole(self, whole: bytes) -> None:
        self._read_fields(whole)
        self._read_usage(whole)

    # ---------------------------------------------------------------- events

    def _events(self, data: bytes) -> bytes:
        """`data` up to the end of an event. The rest is held back, so that a failure cuts no event."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith(b"\n\n"):
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4, data.rfind(b"\r\r") + 2)
            if cut < 5 and len(data) < MAX_HELD_BYTES:
                self._rest = data
                return b""
            if cut >= 5:
                data, self._rest = data[:cut], data[cut:]
        self._count(data)
        return data

    def _count(self, data: bytes) -> None:
        self._tail = data[-_TAIL:]
        self._read_fields(data)
        fresh = data.count(b"\n" + _EVENT) + data.startswith(_EVENT)
        if _DONE in self._tail:
            fresh -= 1
        if _USAGE.search(data):
            for line in data.splitlines():
                if line.startswith(_EVENT) and _USAGE.search(line):
                    self._read_usage(line[len(_EVENT) :])
                    fresh -= _NO_CHOICE.search(line) is not None
        if fresh > 0:
            self.num_events += fresh
            self._listener.on_tokens(fresh)

    def _read_fields(self, data: bytes) -> None:
        if not self.id and (found := _ID.search(data[:512])):
            self.id = found[1].decode()
        if ended := _ENDS.search(data):
            self.finish = ended[1].decode()

    def _read_usage(self, text: bytes) -> None:
        try:
            envelope = _decoder.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return
        inner = envelope.response or envelope.message
        usage = envelope.usage or (inner and inner.usage)
        if usage:
            self.prompt_tokens = usage.prompt_tokens or usage.input_tokens or self.prompt_tokens
            self.reported_tokens = usage.completion_tokens or usage.output_tokens

    @property
    def tokens(self) -> int:
        """Of the answer: reported by the upstream, or else counted."""
        return self.num_events if self.reported_tokens is None else self.reported_tokens
