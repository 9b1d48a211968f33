"""Messages between the frontend and the engine process: msgpack frames, one a step each way. No pickle."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.engine.executor import Description
from quire.types import FinishReason, Request, RequestStepOutput


class Configure(msgspec.Struct, tag=True, frozen=True):
    """The first message: the settings to build from, by option name."""

    settings: dict[str, Any]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Requests. (id, choice) stands for one that differs from the one before it in these alone, as the answers to
    one prompt do: a prompt of 100,000 tokens is not sent 128 times. Made by `submission`, read by `submitted`."""

    requests: list[Request | tuple[str, int]]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End these requests. reason: recorded as the reason of their end."""

    ids: list[str]
    reason: FinishReason = "abort"


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Empty the prefix cache."""


class WatchLive(msgspec.Struct, tag=True, frozen=True):
    """Start sending live frames, a whole one first; or stop."""

    on: bool


class Explain(msgspec.Struct, tag=True, frozen=True):
    """What happened to a request; to all known, if `id` is empty. Answered by an Explanation with the same call_id."""

    call_id: int
    id: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is built and takes requests."""

    about: Description


class BuildFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot be built. kind: name of the error's class."""

    kind: str
    message: str


class Update(msgspec.Struct, tag=True, frozen=True):
    """Sent after a step. stats and metrics are in some, and always when the engine becomes idle.

    num_steps: steps tried so far. idle: there is nothing to step. num_submits: Submit messages taken so far; without it
    an idle engine could be one that has not read its last. step_timeout: seconds within which the next step must be
    over.
    """

    num_steps: int
    events: list[RequestStepOutput]
    idle: bool
    num_submits: int
    step_timeout: float
    stats: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


def submission(requests: Iterable[Request]) -> Submit:
    """The message for these requests."""
    sent: list[Request | tuple[str, int]] = []
    before: Request | None = None
    for request in requests:
        same = before is not None and replace(request, id=before.id, choice=before.choice) == before
        sent.append((request.id, request.choice) if same else request)
        before = request
    return Submit(sent)


def submitted(message: Submit) -> Iterator[Request]:
    """The requests of a message. Raises ValueError if the first one is not whole."""
    before: Request | None = None
    for one in message.requests:
        if isinstance(one, Request):
            before = one
        elif before is not None:
            before = replace(before, id=one[0], choice=one[1])
        else:
            raise ValueError("the first of several requests has nothing but its id")
        yield before


REPORT_SIGNAL = signal.SIGUSR1
"""The signal that makes the engine process report where it is stuck. A person may send it too."""


class LiveFrame(msgspec.Struct, tag=True, frozen=True):
    """A frame for viewers of the live page, as JSON. whole: a viewer can begin with it."""

    frame: bytes
    whole: bool


class Explanation(msgspec.Struct, tag=True, frozen=True):
    """The answer to Explain, as JSON."""

    call_id: int
    body: bytes


ToEngine = Configure | Submit | Abort | ResetPrefixCache | WatchLive | Explain
ToFront = Ready | BuildFailed | Update | LiveFrame | Explanation

_HEAD = struct.Struct("<I")


class FrameReader:
    """Cuts a byte stream into messages: each a little-endian length (4 bytes), then msgpack."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            (length,) = _HEAD.unpack_from(buffer, at)
            if len(buffer) - at - 4 < length:
                break
            yield self._decode(memoryview(buffer)[at + 4 : at + 4 + length])
            at += 4 + length
        del buffer[:at]


def _as_list(value: Any) -> list[Any]:
    """What msgspec does not know: sequences whose items are made when they are read."""
    if isinstance(value, Sequence):
        return [*value]
    raise NotImplementedError(f"a message with a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_list)


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as bytes: for a `FrameReader` of its kind."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body
