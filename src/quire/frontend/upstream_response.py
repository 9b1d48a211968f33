"""An answer of somebody else's on its way to a client: bytes pass as they came, and what they say is counted.

Events are told from bytes by looking for marks that JSON cannot contain inside a string, so nothing is parsed but the
one object with the usage.
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
"""Bytes of an unfinished event that are held back; a longer one passes in pieces."""

_ENDS = re.compile(rb'"(?:finish_reason|stop_reason)":\s?"(\w+)"')
_USAGE = re.compile(rb'"usage":\s?\{')
_NO_CHOICE = re.compile(rb'"choices":\s?\[\]')
_ID = re.compile(rb'"id":\s?"([\w.:\-]{1,128})"')
_EVENT = b"data:"
_DONE = b"[DONE]"
_TAIL = 64
"""Bytes at the end of a stream in which its last mark stands."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _UsageEnvelope(msgspec.Struct):
    """Where usage stands: in chat and completions, in Responses' last event, in Messages' first."""

    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None


_decoder = msgspec.json.Decoder(_UsageEnvelope)


class Listener(Protocol):
    """Who hears what passes."""

    def on_tokens(self, tokens: int) -> None:
        """So many more events came, a token each as a rule."""

    def on_end(self, passage: UpstreamResponse, error: str | None) -> None:
        """The answer ended; broken off because of `error`, or by the client when that is ''."""


class UpstreamResponse:
    """One answer. status and headers are the upstream's; `streams`: it is made of server-sent events.

    num_events: so far. reported_tokens: the answer's, None until a usage says it. prompt_tokens: 0 if untold.
    finish: why it ended, '' if untold. id: what the upstream calls it.
    """

    def __init__(
        self, connection: Connection, done: Callable[[Connection], None], listener: Listener, name: str
    ) -> None:
        self.status, self.headers = connection.status, connection.headers
        self.streams = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers)
        self.num_events = self.prompt_tokens = 0
        self.reported_tokens: int | None = None
        self.finish = self.id = ""
        self._connection, self._give_back, self._listener, self._name = connection, done, listener, name
        self._rest = self._tail = b""
        self._whole: list[bytes] = []
        self._closed = False

    async def read(self) -> bytes:
        """The next bytes, whole events where it streams; b"" at the end. Raises Unavailable when it breaks off."""
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
            if self._closed:  # it was closed while somebody waited for more of it
                raise Unavailable("the server is shutting down") from error
            why = f"{self._name} broke off this answer: {error}"
            self.close(why)
            raise Unavailable(why, code=error.code) from error

    def close(self, error: str | None = "") -> None:
        """Nobody reads on; the upstream notices, unless it had finished."""
        if self._closed:
            return
        self._closed = True
        self._listener.on_end(self, error)
        self._give_back(self._connection)

    async def _end(self) -> bytes:
        rest, self._rest = self._rest, b""
        if self.streams and self._connection.until_closed and _DONE not in self._tail + rest:
            raise ConnectionLost("it closed the connection in the middle of its answer")
        if rest:
            self._count(rest)
            return rest
        if self._whole:
            whole = b"".join(self._whole)
            await offload(len(whole), partial(self._sum_up, whole))
        self.close(None)
        return b""

    def _sum_up(self, whole: bytes) -> None:
        self._learn(whole)
        self._used(whole)

    # ---------------------------------------------------------------- what a stream says

    def _events(self, data: bytes) -> bytes:
        """What of `data` can go on: up to the end of an event. The rest waits, so that a death cuts no event."""
        if self._rest:
            data, self._rest = self._rest + data, b""
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
        if not self.id:
            self._learn(data)
        fresh = data.count(b"\n" + _EVENT) + data.startswith(_EVENT)
        if _DONE in self._tail:
            fresh -= 1
        if _USAGE.search(data):
            for line in data.splitlines():
                if line.startswith(_EVENT) and _USAGE.search(line):
                    self._used(line[len(_EVENT) :])
                    fresh -= _NO_CHOICE.search(line) is not None
        ended = _ENDS.search(data)
        if ended:
            self.finish = ended[1].decode()
        if fresh > 0:
            self.num_events += fresh
            self._listener.on_tokens(fresh)

    def _learn(self, data: bytes) -> None:
        found, ended = _ID.search(data[:512]), _ENDS.search(data)
        if found:
            self.id = found[1].decode()
        if ended:
            self.finish = ended[1].decode()

    def _used(self, text: bytes) -> None:
        try:
            said = _decoder.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return
        inner = said.response or said.message
        usage = said.usage or (inner and inner.usage)
        if usage:
            self.prompt_tokens = usage.prompt_tokens or usage.input_tokens or self.prompt_tokens
            self.reported_tokens = usage.completion_tokens or usage.output_tokens

    @property
    def tokens(self) -> int:
        return self.num_events if self.reported_tokens is None else self.reported_tokens
