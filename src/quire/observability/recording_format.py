"""The format of recordings: frames of msgpack, each with length and checksum, in segments that begin with a state.

A recording has everything that an engine's decisions depend on: its state at the beginning of a segment, requests,
times of its clock, and results of steps. It also has the plans, for comparison. It has no token ids.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from quire.errors import InvalidConfig, reason
from quire.scheduler.kv_offload import Copy
from quire.scheduler.plan import Span
from quire.scheduler.sequence import Decision
from quire.types import FinishReason, Pin, Pooling

MAGIC = b"quire\x00rec"
VERSION = 2
SUFFIX = ".quirerec"
LARGEST = 1 << 28
"""Bytes of the largest frame that is read."""
MAX_PROMPT_TOKENS = 1 << 24
"""Most tokens of a prompt that is read."""
HEAD = struct.Struct("<II")

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)]


class RecordFrame(msgspec.Struct, array_like=True, frozen=True):
    """at: times that the engine read from its clock since the previous frame, in seconds."""

    at: list[float]


class Began(RecordFrame, tag=0, frozen=True):
    """The beginning of segment `number` of recording `run`. version: of the format; quire: of the engine.

    unix: wall-clock seconds at `clock`, the engine's. about: vocab_size, max_model_len, page_size, pages and rows of
    the executor; of K/V tiers slots, files, block_bytes and min_tokens. state: see `quire.observability.checkpoint`.
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
    """A plan, written before it is launched. opened: (id, row, tokens, computed, prompt length, max length) each.

    grown: (row, new blocks). spans: None if they are the last plan's. why: the scheduler's decisions.
    """

    opened: list[tuple[str, int, int, int, int, int]]
    grown: tuple[tuple[int, tuple[int, ...]], ...]
    spans: tuple[Span, ...] | None
    masked: tuple[int, ...]
    drafts: tuple[int, ...]
    why: list[Decision]


class Landed(RecordFrame, tag=2, frozen=True):
    """The result of the oldest step in flight. counts: tokens by span. errors: spans that failed.

    pages: (arrival number, position, name) of each block that was filled. stops: (id, position) of tokens that ended
    their request. prompt_logprobs: number of positions with log-probabilities, by span.
    """

    counts: list[_Count]
    pages: list[tuple[int, int, int]] = []
    stops: list[tuple[str, int]] = []
    errors: list[int] = []
    prompt_logprobs: dict[int, _Count] = {}


class Reset(RecordFrame, tag=3, frozen=True):
    """All steps in flight failed. where: launch, masks or result. kind: class of the error."""

    where: str
    kind: str
    lost: bool


class Idled(RecordFrame, tag=4, frozen=True):
    """A call of `Engine.step` that launched nothing and committed nothing."""


class Arrived(RecordFrame, tag=5, frozen=True):
    """A request. tokens: number of prompt tokens; begun: of those that its answer begins with, see
    `Constraint.beginning`; pages: names of the full blocks of both.

    asks: whether it wants prompt log-probabilities. stops: whether any token ends it. pins, owner: of `Request`.
    constraint: index into `checkpoint.CONSTRAINTS` (0 none, 1 one, 2 pending).
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
    pins: tuple[Pin, ...] = ()
    owner: str = ""
    begun: _Count = 0


class ConstraintSet(RecordFrame, tag=6, frozen=True):
    """A request got the constraint that it waited for. begun, pages: as in `Arrived`."""

    id: str
    begun: _Count = 0
    pages: list[int] = []


class Left(RecordFrame, tag=7, frozen=True):
    """A request was aborted, or failed outside a step."""

    id: str
    why: FinishReason


class LookaheadChanged(RecordFrame, tag=8, frozen=True):
    """The engine's lookahead from now on."""

    lookahead: int


class Crashed(RecordFrame, tag=9, frozen=True):
    """The engine's own code raised. kind: class of the error."""

    kind: str


class PrefixCacheReset(RecordFrame, tag=10, frozen=True):
    """The prefix cache was reset."""


class CopyStarted(RecordFrame, tag=11, frozen=True):
    """A copy of blocks between K/V tiers, or engines, before it begins. blocks: (name, places that it uses) each."""

    kind: Copy
    ticket: int
    blocks: list[tuple[int, ...]]


class CopiesEnded(RecordFrame, tag=12, frozen=True):
    """Copies that have ended: (kind, ticket, (name, reason) of each block that failed, seconds, peer) each."""

    copies: list[tuple[Copy, int, list[tuple[int, str]], float, str]]


class PrefillAsked(RecordFrame, tag=13, frozen=True):
    """Whether a prefill engine could be asked. reason: why none; empty if one could."""

    reason: str


class PrefillsArrived(RecordFrame, tag=14, frozen=True):
    """What decode engines ask of this one: (id, tokens, names of their full blocks, first, salt, priority) each.

    first: number of the first block that is wanted; -1: they no longer want it. names: None if a token is none of the
    vocabulary, so that it was refused.
    """

    prefills: list[tuple[str, _Count, list[int] | None, int, str, int]]


StepFrame: TypeAlias = Launched | Landed | Reset | Idled | Crashed | CopyStarted | CopiesEnded | PrefillAsked
InputFrame: TypeAlias = Arrived | ConstraintSet | Left | LookaheadChanged | PrefixCacheReset | PrefillsArrived
AnyFrame: TypeAlias = Began | StepFrame | InputFrame

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyFrame).decode


class RecordingReader:
    """Reads the frames of recordings one by one.

    paths: files, and folders whose files are read oldest first. next: the frame that `take` will return, None at the
    end. notes: warnings about recordings that end early. Raises InvalidConfig on reaching a file that is no recording,
    or damage that is not at its end.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.notes: list[str] = []
        self._frames = (frame for path in _files(paths) for frame in _read(path))
        self.next: AnyFrame | None = None
        self.take()

    def take(self) -> AnyFrame | None:
        """Return the next frame, None at the end."""
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
            raise InvalidConfig(f"{path}: this folder holds no recording (files end in {SUFFIX})")
        yield from inside


def recording_folder(recording_dir: str | None) -> Path | None:
    """The folder that the option names; None: nothing is recorded."""
    return None if recording_dir is None else Path(recording_dir).expanduser()


def written_bytes(path: Path) -> bytes:
    """The part of a segment's file that has been written; the rest is preallocated. Raises OSError."""
    data = path.read_bytes()
    place = len(MAGIC)
    while place + HEAD.size <= len(data):
        length, _ = HEAD.unpack_from(data, place)
        if length == 0 or place + HEAD.size + length > len(data):
            break
        place += HEAD.size + length
    return data[:place]


def _read(path: Path) -> Iterator[AnyFrame | str]:
    """The frames of one file of one or more segments; and warnings, as text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        why = "it begins with other bytes" if data else "it is empty"
        raise InvalidConfig(f"{path} is not a Quire recording: {why}")
    place, fresh = 0, False
    while place < len(data):
        if data.startswith(MAGIC, place):
            place, fresh = place + len(MAGIC), True
        length, check = HEAD.unpack_from(data, place) if place + HEAD.size <= len(data) else (0, 0)
        payload = data[place + HEAD.size : place + HEAD.size + length]
        if length == 0 or len(payload) < length:
            if fresh:
                raise InvalidConfig(f"{path} is damaged or truncated: a segment without a header at byte {place}")
            yield f"{path.name} " + (
                "ends in the middle of a frame" if length else "was not closed: the process was killed, or still runs"
            )
            behind = data.find(MAGIC, place)
            place = len(data) if behind < 0 else behind
            continue
        if length > LARGEST or zlib.crc32(payload) != check:
            raise InvalidConfig(f"{path} is damaged: the frame at byte {place} does not match its checksum")
        yield _frame(path, place, payload, fresh)
        place, fresh = place + HEAD.size + length, False


def _frame(path: Path, place: int, payload: bytes, fresh: bool) -> AnyFrame:
    try:
        frame: AnyFrame = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{path} is damaged: the frame at byte {place}: {error}") from error
    if isinstance(frame, Began) is not fresh:
        raise InvalidConfig(f"{path} is damaged: at byte {place} is an unexpected {type(frame).__name__}")
    if isinstance(frame, Began) and frame.version != VERSION:
        raise InvalidConfig(f"{path}: its format is {frame.version}, and this version of Quire reads format {VERSION}")
    return frame


MIN_SEGMENT_BYTES = 1 << 16
_NEW = ".new"
"""Suffix of a segment's file until its first frame is written."""

SHARES = 8
"""A segment has this share of the limit."""


class Ring:
    """A bounded recording on disk: segments in `folder` of at most `limit` bytes together, earlier processes' included.

    The oldest segment is removed for the newest. A segment is mapped memory whose disk space is allocated beforehand:
    writing is a copy, what is written survives the process, and a full disk is noticed when a segment begins. Raises
    InvalidConfig if the folder cannot be written to.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.size = max(MIN_SEGMENT_BYTES, limit // SHARES)
        self.segments = 0
        self.path = folder
        # A process may begin several in one second.
        self._name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}"
        self._map: mmap.mmap | None = None
        self._file = -1
        self._used = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in folder.glob(f"*{_NEW}"):
                leftover.unlink(missing_ok=True)
            probe = folder / f"{self._name}{_NEW}"
            os.close(os.open(probe, os.O_CREAT | os.O_WRONLY, 0o600))
            probe.unlink()
        except OSError as error:
            raise InvalidConfig(
                f"recording_dir: {folder} cannot be written to ({reason(error)}): name a folder that may be",
                param="recording_dir",
            ) from error

    @property
    def full(self) -> bool:
        """Whether to begin the next segment: an eighth is left for frames that come before it can begin."""
        return self._map is not None and self._used > len(self._map) * 7 // 8

    def begin(self, first: bytes) -> None:
        """Begin a segment with this frame, at least four times its size.

        Raises OSError if the disk is full, InvalidConfig if the limit is too small.
        """
        self.close()
        size = max(self.size, 4 * len(first))
        if size > self.limit:
            raise InvalidConfig(
                f"recording_max_bytes: the engine's state takes {len(first)} bytes: give it {size} at least",
                param="recording_max_bytes",
            )
        self._make_room(size)
        path = self.folder / f"{self._name}-{self.segments:06}{SUFFIX}"
        new = path.with_suffix(_NEW)
        self._file = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        try:
            _preallocate(self._file, size)
        except OSError:
            os.close(self._file)
            new.unlink()
            raise
        self._map = mmap.mmap(self._file, size)
        self._map[: len(MAGIC)] = MAGIC
        self._used = len(MAGIC)
        self.write(first)
        # From here on it can be read.
        new.rename(path)
        self.path = path
        self.segments += 1

    def write(self, frame: bytes) -> None:
        """Append a frame. Its head is written last, so that a frame is whole or absent. Raises OSError."""
        memory, start = self._map, self._used
        assert memory is not None
        body = start + HEAD.size
        end = body + len(frame)
        if end > len(memory):
            _preallocate(self._file, 2 * end)
            memory.resize(2 * end)
        memory[body:end] = frame
        memory[start:body] = HEAD.pack(len(frame), zlib.crc32(frame))
        self._used = end

    def close(self) -> None:
        """Close the last segment, and cut its file to what is used."""
        if self._map is not None:
            self._map.close()
            self._map = None
            os.ftruncate(self._file, self._used)
            os.close(self._file)

    def _make_room(self, size: int) -> None:
        kept = [(path, path.stat().st_size) for path in sorted(self.folder.glob(f"*{SUFFIX}"))]
        total = sum(bytes for _, bytes in kept)
        for path, bytes in kept:
            if total + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= bytes


def _preallocate(file: int, size: int) -> None:
    """Allocate a file's disk space, where the system can. Raises OSError."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)
