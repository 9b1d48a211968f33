"""A recording's format: frames of msgpack, each with its length and checksum, in segments that each begin with a state.

Everything the engine decides follows from what is in it: the state a segment begins with, requests as they came and
went, what the clock said, what steps brought home. The plans are there too, to be compared with. No token ids.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
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
MAX_PROMPT_TOKENS = 1 << 24
"""Tokens of the longest prompt that is read."""
HEAD = struct.Struct("<II")

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)]


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
    prompt_logprobs: dict[int, _Count] = {}


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


class ConstraintSet(RecordFrame, tag=6, frozen=True):
    """The constraint that a request waited for was made."""

    id: str


class Left(RecordFrame, tag=7, frozen=True):
    """A request was ended from outside."""

    id: str
    why: FinishReason


class LookaheadChanged(RecordFrame, tag=8, frozen=True):
    """From now on so many steps run ahead."""

    lookahead: int


class Crashed(RecordFrame, tag=9, frozen=True):
    """The engine itself broke. kind: of the error."""

    kind: str


class PrefixCacheReset(RecordFrame, tag=10, frozen=True):
    """Nothing in the prefix cache is found from now on."""


AnyFrame: TypeAlias = (
    Began
    | Launched
    | Landed
    | Reset
    | Idled
    | Arrived
    | ConstraintSet
    | Left
    | LookaheadChanged
    | Crashed
    | PrefixCacheReset
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


def recording_folder(recording_dir: str | None) -> Path | None:
    """The folder that the option names; None: nothing is recorded."""
    return None if recording_dir is None else Path(recording_dir).expanduser()


def written_bytes(path: Path) -> bytes:
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


LEAST = 1 << 16
_NEW = ".new"
"""What a segment's file ends in until it can be read."""

SHARES = 8
"""Segments that the limit is divided into."""


class Ring:
    """Segments in `folder`, which hold `limit` bytes together, those of earlier processes included.

    Raises InvalidConfig if the folder cannot be written to.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.size = max(LEAST, limit // SHARES)
        self.segments = 0
        self.path = folder
        self._name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self._map: mmap.mmap | None = None
        self._file = -1
        self._used = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in folder.glob(f"*{_NEW}"):
                left.unlink(missing_ok=True)
            tried = folder / f"{self._name}{_NEW}"
            os.close(os.open(tried, os.O_CREAT | os.O_WRONLY, 0o600))
            tried.unlink()
        except OSError as error:
            raise InvalidConfig(
                f"recording_dir: {folder} cannot be written to ({error.strerror})", param="recording_dir"
            ) from error

    @property
    def full(self) -> bool:
        """Whether it is time for the next segment: an eighth is left for what cannot wait."""
        return self._map is not None and self._used > len(self._map) * 7 // 8

    def begin(self, first: bytes) -> None:
        """A new segment with this frame, large enough for three times as much to follow.

        Raises OSError if there is no room on the disk, InvalidConfig if the limit is too small for that.
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
            _take(self._file, size)
        except OSError:
            os.close(self._file)
            new.unlink()
            raise
        self._map = mmap.mmap(self._file, size)
        self._map[: len(MAGIC)] = MAGIC
        self._used = len(MAGIC)
        self.write(first)
        new.rename(path)  # it is a recording now, and was none before
        self.path = path
        self.segments += 1

    def write(self, frame: bytes) -> None:
        """One frame; its head comes last, so that a frame is there whole or not at all. Raises OSError."""
        space, start = self._map, self._used
        assert space is not None
        body = start + HEAD.size
        end = body + len(frame)
        if end > len(space):
            _take(self._file, 2 * end)
            space.resize(2 * end)
        space[body:end] = frame
        space[start:body] = HEAD.pack(len(frame), zlib.crc32(frame))
        self._used = end

    def close(self) -> None:
        """Give back what the last segment has not used."""
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


def _take(file: int, size: int) -> None:
    """A file's place on disk, where the system can promise it. Raises OSError."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)
