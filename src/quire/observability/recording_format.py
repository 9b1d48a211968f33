"""A recording's format: frames of msgpack, each with its length and checksum, in segments that each begin with a state.

Everything the engine decides follows from what is in it: the state a segment begins with, requests as they came and
went, what the clock said, what steps brought home. The plans are there too, to be compared with. No token ids.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from quire.errors import InvalidConfig
from quire.scheduler.plan import Span
from quire.scheduler.sequence import Decision
from quire.types import FinishReason, Pooling

MAGIC = b"quire\x00rec"
VERSION = 2
SUFFIX = ".quirerec"
LARGEST = 1 << 28
"""Bytes of the largest frame that is read: states are large, all else is small."""
LONGEST = 1 << 24
"""Tokens of the longest prompt that is read."""
HEAD = struct.Struct("<II")

_Count = Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]


class RecordFrame(msgspec.Struct, array_like=True, frozen=True):
    """at: what the clock said since the frame before, seconds of the engine's clock."""

    at: list[float]


class Began(RecordFrame, tag=0, frozen=True):
    """A segment. version: of this format. quire: whose engine. run: of which recording; number: which segment of it.

    unix: wall-clock seconds at `clock` of the engine's. vocab_size, max_model_len, page_size, pages, rows: the
    executor's. state: see `quire.observability.checkpoint`.
    """

    version: int
    quire: str
    run: str
    number: int
    unix: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    clock: float
    about: dict[str, int]
    state: Any


class Launched(RecordFrame, tag=1, frozen=True):
    """A plan, written before the executor is given it. opened: (id, row, tokens, start, prompt, limit) each.

    spans: None if they are the last plan's.
    """

    opened: list[tuple[str, int, int, int, int, int]]
    grown: tuple[tuple[int, tuple[int, ...]], ...]
    spans: tuple[Span, ...] | None
    masked: tuple[int, ...]
    drafts: tuple[int, ...]
    why: list[Decision]


class Landed(RecordFrame, tag=2, frozen=True):
    """The oldest step came home. counts: tokens by span. pages: (arrival number, position, name) where a page of tokens
    was filled. stops: (id, position) of tokens that ended their request. errors: spans without an answer. told:
    positions whose log-probabilities came, by span.
    """

    counts: list[_Count]
    pages: list[tuple[int, int, int]] = []
    stops: list[tuple[str, int]] = []
    errors: list[int] = []
    told: dict[int, _Count] = {}


class Reset(RecordFrame, tag=3, frozen=True):
    """All steps in flight failed. where: launch, masks or result. kind: of the error at the bottom of it."""

    where: str
    kind: str
    lost: bool


class Idled(RecordFrame, tag=4, frozen=True):
    """A step in which nothing was launched and nothing came home."""


class Arrived(RecordFrame, tag=5, frozen=True):
    """A request. tokens: of its prompt; pages: names of the full pages of them. asks: it wants log-probabilities of its
    prompt. constraint: 0 none, 1 one, 2 one in the making. stops: whether any token ends it.
    """

    id: str
    tokens: _Count
    pages: list[int]
    max_new: _Count
    priority: int
    deadline: float
    salt: str
    choice: int
    stops: bool
    asks: bool
    pooling: Pooling | None
    constraint: int


class Provided(RecordFrame, tag=6, frozen=True):
    """The constraint that a request waited for was made."""

    id: str


class Left(RecordFrame, tag=7, frozen=True):
    """A request was ended from outside."""

    id: str
    why: FinishReason


class Deepened(RecordFrame, tag=8, frozen=True):
    """From now on so many steps run ahead."""

    depth: int


class Crashed(RecordFrame, tag=9, frozen=True):
    """The engine itself broke. kind: of the error."""

    kind: str


class Emptied(RecordFrame, tag=10, frozen=True):
    """Nothing in the prefix cache is found from now on."""


AnyFrame: TypeAlias = (
    Began | Launched | Landed | Reset | Idled | Arrived | Provided | Left | Deepened | Crashed | Emptied
)

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyFrame).decode


class RecordingReader:
    """The frames of recordings, one after another, read as they are asked for.

    paths: files, and folders of them, whose files are read oldest first. next: the frame that `take` will return, None
    at the end. notes: what was amiss, in words. Raises InvalidConfig, when it gets there, for what is no recording or
    damaged elsewhere than at its end.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.notes: list[str] = []
        self._frames = (frame for path in _files(paths) for frame in _read(path))
        self.next: AnyFrame | None = None
        self.take()

    def take(self) -> AnyFrame | None:
        taken, found = self.next, next(self._frames, None)
        while isinstance(found, str):
            self.notes.append(found)
            found = next(self._frames, None)
        self.next = found
        return taken


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        inside = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not inside:
            raise InvalidConfig(f"{path}: no recording is in this folder (files end in {SUFFIX})")
        yield from inside


def written(path: Path) -> bytes:
    """What has been written of a segment, without the place it still has on disk. Raises OSError."""
    data = path.read_bytes()
    place = len(MAGIC)
    while place + HEAD.size <= len(data):
        length, _ = HEAD.unpack_from(data, place)
        if length == 0 or place + HEAD.size + length > len(data):
            break
        place += HEAD.size + length
    return data[:place]


def _read(path: Path) -> Iterator[AnyFrame | str]:
    """The frames of one file, which may hold several segments, one behind the other; and what is amiss."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise InvalidConfig(f"{path} is no recording of quire's: it begins with other bytes")
    place, fresh = 0, False
    while place < len(data):
        if data.startswith(MAGIC, place):
            place, fresh = place + len(MAGIC), True
        length, check = HEAD.unpack_from(data, place) if place + HEAD.size <= len(data) else (0, 0)
        payload = data[place + HEAD.size : place + HEAD.size + length]
        if length == 0 or len(payload) < length:
            if fresh:
                raise InvalidConfig(f"{path}: a segment without a beginning at byte {place}")
            yield f"{path.name} " + (
                "ends in the middle of a frame" if length else "was not closed: the process was killed, or still runs"
            )
            behind = data.find(MAGIC, place)
            place = len(data) if behind < 0 else behind
            continue
        if length > LARGEST or zlib.crc32(payload) != check:
            raise InvalidConfig(f"{path} is damaged: the frame at byte {place} is not what was written")
        yield _frame(path, place, payload, fresh)
        place, fresh = place + HEAD.size + length, False


def _frame(path: Path, place: int, payload: bytes, fresh: bool) -> AnyFrame:
    try:
        frame: AnyFrame = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{path} is damaged: the frame at byte {place}: {error}") from error
    if isinstance(frame, Began) is not fresh:
        raise InvalidConfig(f"{path} is damaged: byte {place} is no place for a {type(frame).__name__}")
    if isinstance(frame, Began) and frame.version != VERSION:
        raise InvalidConfig(f"{path}: its format is {frame.version}, and this quire ({VERSION}) cannot read it")
    return frame
