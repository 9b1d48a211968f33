"""A bounded recording on disk: segments of one size in a folder, the oldest removed for the newest.

A segment is mapped memory whose place on disk is taken beforehand: writing is a copy, what is written survives the
process, and a full disk is noticed when a segment begins.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import zlib
from pathlib import Path

from quire.errors import InvalidConfig
from quire.observability.recording_format import HEAD, MAGIC, SUFFIX

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
