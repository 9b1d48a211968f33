"""What the server and its replicas tell each other, and what the router reads of a request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.engine.protocol import Submit, submission, submitted
from quire.scheduler.routing import Chunks
from quire.types import Request, RequestStepOutput


class Prompt:
    """A request's prompt for the router, in chunks of one KV block. It stays in the server's process: what is pickled
    is empty.

    num_blocks: how many a replica's cache holds.
    """

    def __init__(self, chunks: Chunks = (), num_blocks: int = 0) -> None:
        self.chunks, self.num_blocks = chunks, num_blocks

    def __reduce__(self) -> tuple[type[Prompt], tuple[()]]:
        return Prompt, ()


def prompt_blocks(request: Request, block_size: int) -> Chunks:
    """The full blocks of a prompt as the prefix cache compares them: tokens, or images' digests, under a salt."""
    tokens = request.prefix_tokens()
    starts = range(0, len(tokens) - block_size + 1, block_size)
    return [(request.cache_salt, tokens[start : start + block_size]) for start in starts]


class Addressed:
    """For the router: a call that this replica alone is to answer; another one does where it is gone."""

    def __init__(self, replica: str) -> None:
        self.replica = replica


class Asked(msgspec.Struct, frozen=True):
    """Requests on their way to a replica. now: the server's clock, in which their deadlines are."""

    now: float
    submit: Submit


class Report(msgspec.Struct, frozen=True):
    """A replica's state. rank: its number among those that run, from 0. queued_tokens: of prompts that it was sent and
    that are not computed. stats, metrics: of its engine, see `engine.protocol.Update`."""

    replica: str
    rank: int
    node: str
    pid: int
    engine_pid: int
    alive: bool
    queued_tokens: int
    stats: dict[str, Any]
    metrics: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_read_asked = msgspec.msgpack.Decoder(Asked).decode
_read_outputs = msgspec.msgpack.Decoder(list[RequestStepOutput]).decode


def encode(message: Any) -> bytes:
    """Any of these messages as msgpack."""
    return _encode(message)


def ask(requests: Sequence[Request]) -> bytes:
    """The message that asks a replica to answer these."""
    return encode(Asked(time.monotonic(), submission(requests)))


def asked(message: bytes) -> Iterator[Request]:
    """The requests of a message, with deadlines on this machine's clock."""
    read = _read_asked(message)
    behind = time.monotonic() - read.now
    for request in submitted(read.submit):
        yield replace(request, deadline=request.deadline + behind)


def outputs(message: bytes) -> list[RequestStepOutput]:
    """What requests got, as a replica sent it."""
    return _read_outputs(message)
