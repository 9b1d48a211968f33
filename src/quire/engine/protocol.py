"""What the front and the engine process say to each other: msgpack frames, one message a step each way. No pickle."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from quire.engine.executor import Description
from quire.types import FinishReason, Request, RequestStepOutput


class Configure(msgspec.Struct, tag=True, frozen=True):
    """The first word: the settings to build from, by option name."""

    settings: dict[str, Any]


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Requests. (id, choice) stands for one that differs from the one before it in nothing else, as the answers to one
    prompt do: a prompt of 100,000 tokens is not sent 128 times. Made by `submission`, read by `submitted`."""

    requests: list[Request | tuple[str, int]]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End these. why: what the front calls their end, so that the engine's records say the same."""

    ids: list[str]
    reason: FinishReason = "abort"


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Empty the prefix cache."""


class WatchLive(msgspec.Struct, tag=True, frozen=True):
    """Somebody watches and begins with a whole picture; or nobody does any more."""

    on: bool


class Explain(msgspec.Struct, tag=True, frozen=True):
    """What happened to a request; to all that are known, if `id` is empty. Answered by a Told of the same number."""

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
    """After a step. stats and metrics come now and then, and always when the engine falls idle.

    step: steps tried so far. idle: there is nothing to step. taken: Submits taken so far, without which an idle engine
    may be one that has not heard yet. due: seconds within which the next step must be over.
    """

    num_steps: int
    events: list[RequestStepOutput]
    idle: bool
    num_submits: int
    step_timeout: float
    stats: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


def submission(requests: Iterable[Request]) -> Submit:
    sent: list[Request | tuple[str, int]] = []
    before: Request | None = None
    for request in requests:
        same = before is not None and replace(request, id=before.id, choice=before.choice) == before
        sent.append((request.id, request.choice) if same else request)
        before = request
    return Submit(sent)


def submitted(message: Submit) -> Iterator[Request]:
    before: Request | None = None
    for one in message.requests:
        if isinstance(one, Request):
            before = one
        elif before is not None:
            before = replace(before, id=one[0], choice=one[1])
        else:
            raise ValueError("the first of several requests says nothing but its id")
        yield before


REPORT_SIGNAL = signal.SIGUSR1
"""The signal that makes the engine's process say where it is stuck. A person may send it too."""


class LiveFrame(msgspec.Struct, tag=True, frozen=True):
    """What those who watch are told: JSON that nobody here reads. whole: a viewer can begin with it."""

    frame: bytes
    whole: bool


class Explanation(msgspec.Struct, tag=True, frozen=True):
    """The answer to an Ask, as JSON."""

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
        """Messages that `data` completes."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= 4:
            (length,) = _HEAD.unpack_from(buffer, at)
            if len(buffer) - at - 4 < length:
                break
            yield self._decode(memoryview(buffer)[at + 4 : at + 4 + length])
            at += 4 + length
        del buffer[:at]


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | ToFront) -> bytes:
    """One message as bytes."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body
