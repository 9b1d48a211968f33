"""Files of KV blocks: one block a file, with a header that says whose it is and a checksum of its contents.

A file holds K/V alone, no token and no text; its name is a hash of the prefix. It is written beside its place and then
renamed, so that a process that dies leaves whole files, and parts under names that are never read.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from quire.errors import QuireError

MAGIC = b"quire\0kv"
VERSION = 1
HEADER = struct.Struct("<8sHxxxxxxQ32s32s32s")
"""Magic, version, bytes of the block, fingerprint, key, SHA-256 of all of the header before it and of the block."""
SUFFIX, PART = ".kv", ".part"


class BadBlock(QuireError):
    """A file that is not the block it should be. reason: missing, truncated, format, fingerprint, checksum or io."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a file of a KV block is of no use: {reason}")
        self.reason = reason


class BlockFiles:
    """A folder of blocks, 256 folders in it.

    fingerprint: 32 bytes that say which model, dtype, block size and format the blocks are of; others are refused.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int) -> None:
        self.folder, self.fingerprint, self.block_bytes = folder, fingerprint, block_bytes
        self.file_bytes = HEADER.size + block_bytes

    def path(self, key: bytes) -> Path:
        """Where a block is kept."""
        name = key.hex()
        return self.folder / name[:2] / (name + SUFFIX)

    def scan(self) -> list[bytes]:
        """Keys of all files of the right size, least recently used first. Parts, and files of other sizes, are
        removed."""
        found: list[tuple[int, bytes]] = []
        for entry in _files(self.folder):
            stem, suffix = os.path.splitext(entry.name)
            info = entry.stat(follow_symlinks=False)
            if suffix == SUFFIX and len(stem) == 64 and info.st_size == self.file_bytes:
                with suppress(ValueError):
                    found.append((info.st_mtime_ns, bytes.fromhex(stem)))
                    continue
            if suffix in (SUFFIX, PART):
                with suppress(OSError):
                    os.unlink(entry.path)
        return [key for _, key in sorted(found)]

    def write(self, key: bytes, block: memoryview) -> None:
        """Write a block, for this user only. Raises BadBlock where that is not possible."""
        path = self.path(key)
        part = path.with_suffix(PART)
        begin = HEADER.pack(MAGIC, VERSION, self.block_bytes, self.fingerprint, key, bytes(32))[:-32]
        checksum = hashlib.sha256(begin)
        checksum.update(block)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, begin + checksum.digest())
                _write_all(fd, block)
            finally:
                os.close(fd)
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise BadBlock("io") from error

    def read(self, key: bytes, block: memoryview) -> None:
        """Read a block into `block`. Raises BadBlock, and removes the file, unless it is whole and of this model."""
        path = self.path(key)
        try:
            self._read(path, key, block)
        except FileNotFoundError as error:
            raise BadBlock("missing") from error
        except OSError as error:
            raise BadBlock("io") from error
        except BadBlock:
            with suppress(OSError):
                path.unlink()
            raise
        with suppress(OSError):
            os.utime(path)

    def _read(self, path: Path, key: bytes, block: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            header = memoryview(bytearray(HEADER.size))
            if _read_all(fd, header) < HEADER.size or _read_all(fd, block) < len(block) or os.read(fd, 1):
                raise BadBlock("truncated")
        finally:
            os.close(fd)
        magic, version, size, fingerprint, named, checksum = HEADER.unpack(header)
        if (magic, version, size) != (MAGIC, VERSION, self.block_bytes):
            raise BadBlock("format")
        if fingerprint != self.fingerprint:
            raise BadBlock("fingerprint")
        found = hashlib.sha256(header[:-32])
        found.update(block)
        if named != key or found.digest() != checksum:
            raise BadBlock("checksum")

    def remove(self, key: bytes) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            self.path(key).unlink(missing_ok=True)


def _files(folder: Path) -> Iterable[os.DirEntry[str]]:
    for each in os.scandir(folder):
        if each.is_dir(follow_symlinks=False) and len(each.name) == 2:
            yield from (file for file in os.scandir(each.path) if file.is_file(follow_symlinks=False))


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, into: memoryview) -> int:
    """Bytes read: fewer than fit at the end of the file."""
    done = 0
    while done < len(into) and (got := os.readv(fd, [into[done:]])):
        done += got
    return done
