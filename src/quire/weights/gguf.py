"""GGUF, llama.cpp's file of metadata and tensors. Reads headers only, without torch.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. A model may be split
into files `NAME-00001-of-0000N.gguf`, of which the first has all metadata.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, overload

from quire.checks import instead
from quire.errors import InvalidModel

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MANY_ITEMS = 1 << 26
MOST_DIMENSIONS, LARGEST_ALIGNMENT, MOST_PARTS = 4, 1 << 20, 1 << 10
LENGTH = struct.Struct("<Q")

SETTLED = 2.0
"""Seconds after its last change from which a file is known by its time: clocks of file systems are coarse."""


class Kind(NamedTuple):
    """How numbers are stored: `size` bytes for `block` of them."""

    name: str
    block: int
    size: int


KINDS: Mapping[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    30: Kind("BF16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    20: Kind("IQ4_NL", 32, 18),
    23: Kind("IQ4_XS", 256, 136),
    39: Kind("MXFP4", 32, 17),
}
"""Storage types that can be read, by their number in the file."""

OTHERS: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """A tensor of the file. start: byte of its first number. shape: outermost dimension first. path: of its file."""

    kind: Kind
    shape: tuple[int, ...]
    start: int
    path: Path = Path()

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.kind.block * self.kind.size


@dataclass(frozen=True, slots=True)
class StoredStrings(Sequence[str]):
    """An array of `length` strings in a file, read each time that it is iterated: a vocabulary is most of a header, and
    most readers of headers have no use for it.

    start, stop: its bytes. Raises InvalidModel where they are no longer what they were.
    """

    path: Path
    start: int
    stop: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if string_end(data, 0, self.length) != len(data):
            raise InvalidModel(f"{self.path.name} has changed since its header was read: start again")
        unpack, end = LENGTH.unpack_from, 0
        for _ in range(self.length):
            first = end + LENGTH.size
            end = first + unpack(data, end)[0]
            yield data[first:end].decode("utf-8", "replace")

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return list(self)[index]


def string_end(data: bytes | mmap.mmap, at: int, count: int) -> int:
    """Where `count` strings end, the first of which begins at `at`: behind the end of the data where that is too
    short."""
    length, size = LENGTH.unpack_from, LENGTH.size
    try:
        for _ in range(count):
            at += size + length(data, at)[0]
    except (struct.error, OverflowError):
        return len(data) + 1
    return at


@dataclass(frozen=True, slots=True)
class Gguf:
    """A file: its metadata by their own names ("llama.block_count"), and its tensors, those of all its parts.

    path: of the first part.
    """

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, GgufTensorInfo]

    def get(self, name: str, default: Any = None) -> Any:
        """A value of this architecture's metadata, named without it ("block_count")."""
        return self.facts.get(f"{self.architecture}.{name}", default)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, '' where there is none."""
        return str(self.facts.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, whatever its name: Ollama's have no suffix."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path: the path itself, or the only model in a folder without config.json, its first part
    where it is split.

    Raises InvalidModel where there are several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" or is_gguf(path) else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    models: dict[str, Path] = {}
    for file in sorted(path.glob("*.gguf")):
        if "mmproj" not in file.name.lower():
            models.setdefault(SPLIT.sub("", file.name), file)
    found = list(models.values())
    if len(found) > 1:
        raise InvalidModel(f"{path} holds {len(found)} GGUF files: name the one to load, such as {found[0].name}")
    return found[0] if found else None


def parts_of(path: Path, count: Any) -> list[Path]:
    """The `count` files that a model is split into, by the name of one. Raises InvalidModel where one is missing."""
    if not isinstance(count, int) or not 1 <= count <= MOST_PARTS:
        raise InvalidModel(f"{path.name} is not a GGUF file: it says that it is one of {count!r:.40} parts")
    # Links of the hub's cache keep their names, files that they lead to do not.
    name = SPLIT.search(path.name)
    if name is None or int(name[2]) != count:
        raise InvalidModel(
            f"{path.name} is one of {count} parts, which are found by their names: NAME-00001-of-{count:05}.gguf"
        )
    stem = path.name[: name.start()]
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidModel(f"{path.name} is one of {count} parts: {', '.join(missing[:3])}{more} is not beside it")
    return parts


def read_gguf(path: Path) -> Gguf:
    """Metadata and headers of a file, and of the others that its model is split into.

    Raises InvalidModel for a file that is not GGUF, is truncated, or cannot be read.
    """
    first = read_file(path)
    count = first.facts.get("split.count") or 1
    if count == 1:
        return first
    files = [first if part == path else read_file(part) for part in parts_of(path, count)]
    for i, file in enumerate(files):
        if (file.facts.get("split.no"), file.facts.get("split.count")) != (i, count):
            raise InvalidModel(f"{file.path.name} is not part {i + 1} of {count}: it has been renamed, or is another's")
    tensors = {name: each for file in files for name, each in file.tensors.items()}
    wanted = files[0].facts.get("split.tensors.count", len(tensors))
    if len(tensors) != wanted:
        raise InvalidModel(
            f"{files[0].path.name}: its parts hold {len(tensors)} tensors of {wanted}: download them again"
        )
    return replace(files[0], tensors=tensors)


def read_file(path: Path) -> Gguf:
    """Metadata and headers of one file. Raises as `read_gguf`.

    A start asks for them several times, and a vocabulary of 128,000 takes a tenth of a second.
    """
    found = path.stat()
    settled = time.time() - found.st_mtime > SETTLED
    return _remembered(path, found.st_ino, found.st_size, found.st_mtime_ns) if settled else _read_file(path)


@lru_cache(maxsize=64)
def _remembered(path: Path, *version: int) -> Gguf:
    """The file as it is. version: differs where it is another."""
    return _read_file(path)


def _read_file(path: Path) -> Gguf:
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise InvalidModel(instead(path, "a GGUF file"))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        reader = Reader(data, path)
        check_version(path, reader.scalar("I"))
        tensors, count = reader.scalar("Q"), reader.scalar("Q")
        if max(tensors, count) > MANY_ITEMS:
            raise InvalidModel(f"{path.name} is not a GGUF file: its header is invalid")
        facts = {reader.string(): reader.value(reader.scalar("I")) for _ in range(count)}
        held: dict[str, GgufTensorInfo] = {}
        for _ in range(tensors):
            name, info = reader.tensor()
            if name in held:
                raise InvalidModel(f"{path} holds {name} twice")
            held[name] = info
        align = facts.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= LARGEST_ALIGNMENT or align & (align - 1):
            raise InvalidModel(f"{path.name}: general.alignment is {align!r:.40}, which is no power of two")
        first, end = -(-reader.at // align) * align, len(data)
    placed = {name: replace(each, start=first + each.start, path=path) for name, each in held.items()}
    for name, each in placed.items():
        if each.start + each.size > end:
            raise InvalidModel(
                f"{path.name} is truncated: {name} ends at byte {each.start + each.size:,} of {end:,}; download it "
                "again"
            )
    return Gguf(path, facts, placed)


def check_version(path: Path, version: int) -> None:
    """Raises InvalidModel for versions that are not read."""
    if version in (2 << 24, 3 << 24):
        raise InvalidModel(
            f"{path.name} is a big-endian GGUF file, and this machine's numbers are little-endian: download the usual "
            "file, or convert it (gguf-convert-endian FILE little)"
        )
    if version not in (2, 3):
        raise InvalidModel(f"{path.name} is GGUF version {version}: only 2 and 3 are read; convert the model again")


class Reader:
    """Reads a header value by value, behind its first four bytes. Raises InvalidModel where the file ends or makes no
    sense."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.name, self.at = data, path, path.name, len(MAGIC)

    def bytes(self, count: int) -> bytes:
        """The next bytes."""
        first, self.at = self.at, self.at + count
        if count > MANY_ITEMS or self.at > len(self.data):
            raise self._ended()
        return self.data[first : self.at]

    def strings(self, count: int) -> StoredStrings:
        """The next array of strings, which is not read yet."""
        first, self.at = self.at, string_end(self.data, self.at, count)
        if self.at > len(self.data):
            raise self._ended()
        return StoredStrings(self.path, first, self.at, count)

    def _ended(self) -> InvalidModel:
        return InvalidModel(f"{self.name} ends within its header: it is truncated, download it again")

    def scalar(self, code: str) -> Any:
        """The next number, by its code of `struct`."""
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """The next string."""
        return self.bytes(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """The next value of a type by its number."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if count > MANY_ITEMS or inner == ARRAY:
                raise InvalidModel(f"{self.name} is not a GGUF file: its header is invalid")
            if inner in SCALARS:
                code = f"<{count}{SCALARS[inner]}"
                return list(struct.unpack(code, self.bytes(struct.calcsize(code))))
            if inner == STRING:
                return self.strings(count)
            kind = inner
        if kind not in SCALARS:
            raise InvalidModel(f"{self.name} is not a GGUF file: there is no value of type {kind}")
        return self.scalar(SCALARS[kind])

    def tensor(self) -> tuple[str, GgufTensorInfo]:
        """The next tensor's name and description."""
        name, rank = self.string(), self.scalar("I")
        if not 1 <= rank <= MOST_DIMENSIONS:
            raise InvalidModel(f"{self.name}: {name[:80]} has {rank} dimensions: 1 to {MOST_DIMENSIONS} are possible")
        shape = tuple(self.scalar("Q") for _ in range(rank))[::-1]
        number, start = self.scalar("I"), self.scalar("Q")
        kind = KINDS.get(number)
        if kind is None:
            known = ", ".join(each.name for each in KINDS.values())
            other = OTHERS.get(number, f"type {number}")
            raise InvalidModel(
                f"{self.name}: {name} is stored as {other}: not supported (known: {known}); choose another type of the "
                "same model, such as Q4_K_M"
            )
        if 0 in shape or shape[-1] % kind.block:
            raise InvalidModel(f"{self.name}: {name} of shape {list(shape)} cannot be {kind.name}")
        return name, GgufTensorInfo(kind, shape, start)
