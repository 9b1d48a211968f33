"""A response of an upstream server on its way to a client: bytes are forwarded unchanged, and tokens are counted.

Events are found by searching for byte sequences that cannot occur inside a JSON string; only the object with the usage
is parsed. Ollama's streams are lines of JSON: a line is an event.
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

_ENDS = re.compile(rb'"(?:finish_reason|stop_reason|done_reason)":\s?"(\w+)"')
_USAGE = re.compile(rb'"usage":\s?\{')
_NO_CHOICE = re.compile(rb'"choices":\s?\[\]')
_ID = re.compile(rb'"id":\s?"([\w.:\-]{1,128})"')
_EVENT = b"data:"
_DONE = b"[DONE]"
_LAST_LINE = re.compile(rb'"done":\s?true')
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LINE_ENDS = (b"\n",)
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
    """The places of usage: chat and completions; the last event of Responses; the first event of Messages; Ollama's
    counts. `response` is a text where it is Ollama's."""

    usage: _Usage | None = None
    response: _Inner | str | None = None
    message: _Inner | None = None
    prompt_eval_count: int = 0
    eval_count: int | None = None


_decoder = msgspec.json.Decoder(_UsageEnvelope)


class Listener(Protocol):
    """Callbacks of an UpstreamResponse."""

    def on_tokens(self, tokens: int) -> None:
        """`tokens` more events came, usually of one token each."""

    def on_end(self, response: UpstreamResponse, error: str | None) -> None:
        """The response ended; early because of `error`, or because the client disconnected if that is ''."""


class UpstreamResponse:
    """One response. status, headers: the upstream's. streams: whether it consists of events. lines: whether each event
    is a line of JSON, as Ollama's are, and none is server-sent.

    num_events: so far. reported_tokens: of the answer, None until a usage reports it. prompt_tokens: 0 if unknown.
    finish: the finish reason, '' if unknown. id: the upstream's.
    """

    def __init__(
        self, connection: Connection, done: Callable[[Connection], None], listener: Listener, name: str
    ) -> None:
        self.status = connection.status
        self.headers = connection.headers
        kind = next((value for name, value in self.headers if name == b"content-type"), b"")
        self.lines = kind.startswith(b"application/x-ndjson")
        self.streams = self.lines or kind.startswith(b"text/event-stream")
        self.num_events = self.prompt_tokens = 0
        self.reported_tokens: int | None = None
        self.finish = self.id = ""
        self._connection = connection
        self._give_back = done
        self._listener = listener
        self._name = name
        self._rest = self._tail = b""
        self._complete = False
        self._whole: list[bytes] = []
        self._closed = False

    async def read(self) -> bytes:
        """The next bytes, complete events if it streams; b"" at the end. Raises Unavailable where it is cut short."""
        try:
            while True:
                data = await self._connection.read()
                if self._closed:
                    # While this call was waiting, with data that had come already: the request has been reported.
                    raise Unavailable("the server is shutting down")
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
        complete = _LAST_LINE.search(rest) or self._complete if self.lines else _DONE in self._tail + rest
        if self.streams and self._connection.until_closed and not complete:
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
        ends = _LINE_ENDS if self.lines else _EVENT_ENDS
        if not data.endswith(ends[0]):
            cut = max((found + len(end) for end in ends if (found := data.rfind(end)) >= 0), default=0)
            if not cut and len(data) < MAX_HELD_BYTES:
                self._rest = data
                return b""
            if cut:
                data, self._rest = data[:cut], data[cut:]
        self._count(data)
        return data

    def _count(self, data: bytes) -> None:
        self._tail = data[-_TAIL:]
        self._read_fields(data)
        if self.lines:
            self._count_lines(data)
            return
        fresh = data.count(b"\n" + _EVENT) + data.startswith(_EVENT)
        if _DONE in self._tail:
            fresh -= 1
        if _USAGE.search(data):
            for line in data.splitlines():
                if line.startswith(_EVENT) and _USAGE.search(line):
                    self._read_usage(line[len(_EVENT) :])
                    fresh -= _NO_CHOICE.search(line) is not None
        self._add(fresh)

    def _count_lines(self, data: bytes) -> None:
        fresh = data.count(b"\n")
        if _LAST_LINE.search(data):
            self._complete = True
            fresh -= 1
            self._read_usage(data.splitlines()[-1])
        self._add(fresh)

    def _add(self, fresh: int) -> None:
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
        if envelope.eval_count is not None:
            self.prompt_tokens, self.reported_tokens = envelope.prompt_eval_count, envelope.eval_count
        inner = envelope.message if isinstance(envelope.response, str) else envelope.response or envelope.message
        usage = envelope.usage or (inner and inner.usage)
        if usage:
            self.prompt_tokens = usage.prompt_tokens or usage.input_tokens or self.prompt_tokens
            self.reported_tokens = usage.completion_tokens or usage.output_tokens

    @property
    def tokens(self) -> int:
        """Of the answer: reported by the upstream, or else counted."""
        return self.num_events if self.reported_tokens is None else self.reported_tokens
