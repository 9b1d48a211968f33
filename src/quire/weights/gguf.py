"""GGUF, llama.cpp's file of metadata and tensors. Reads headers only, without torch.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quire.checks import instead
from quire.errors import InvalidModel

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MANY_ITEMS = 1 << 26


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
    8: Kind("Q8_0", 32, 34),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    39: Kind("MXFP4", 32, 17),
}
"""Storage types that can be read, by their number in the file."""

OTHERS: Mapping[int, str] = {
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    20: "IQ4_NL",
    23: "IQ4_XS",
}


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """A tensor of the file. start: byte of its first number. shape: outermost dimension first."""

    kind: Kind
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.kind.block * self.kind.size


@dataclass(frozen=True, slots=True)
class Gguf:
    """A file: its metadata by their own names ("llama.block_count"), and its tensors."""

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


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path: the path itself, or the only one in a folder without config.json.

    Raises InvalidModel where there are several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise InvalidModel(f"{path.name} holds {len(found)} GGUF files: name the one to load, such as {found[0].name}")
    return found[0] if found else None


def read_gguf(path: Path) -> Gguf:
    """Metadata and headers. Raises InvalidModel for a file that is not GGUF, is truncated, or cannot be read."""
    with path.open("rb") as file:
        reader = Reader(file, path.name)
        if file.read(4) != MAGIC:
            raise InvalidModel(instead(path, "a GGUF file"))
        version = reader.scalar("I")
        if version not in (2, 3):
            raise InvalidModel(f"{path.name} is GGUF version {version}: only 2 and 3 are read")
        tensors, count = reader.scalar("Q"), reader.scalar("Q")
        if max(tensors, count) > MANY_ITEMS:
            raise InvalidModel(f"{path.name} is not a GGUF file: its header is invalid")
        facts = {reader.string(): reader.value(reader.scalar("I")) for _ in range(count)}
        if facts.get("split.count", 1) != 1:
            raise InvalidModel(
                f"{path.name} is one of {facts['split.count']} parts: merge them (llama-gguf-split --merge)"
            )
        held = dict(reader.tensor() for _ in range(tensors))
        align = facts.get("general.alignment", 32)
        data = -(-file.tell() // align) * align
    end = path.stat().st_size
    placed = {name: GgufTensorInfo(each.kind, each.shape, data + each.start) for name, each in held.items()}
    for name, each in placed.items():
        if each.start + each.size > end:
            raise InvalidModel(
                f"{path.name} is truncated: {name} ends at byte {each.start + each.size:,} of {end:,}; download it "
                "again"
            )
    return Gguf(path, facts, placed)


class Reader:
    """Reads a header value by value. Raises InvalidModel where the file ends or makes no sense."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name

    def bytes(self, count: int) -> bytes:
        """The next bytes."""
        data = self.file.read(count) if count <= MANY_ITEMS else b""
        if len(data) < count:
            raise InvalidModel(f"{self.name} ends within its header: it is truncated, download it again")
        return data

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
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise InvalidModel(f"{self.name} is not a GGUF file: there is no value of type {kind}")
        return self.scalar(SCALARS[kind])

    def tensor(self) -> tuple[str, GgufTensorInfo]:
        """The next tensor's name and description."""
        name, rank = self.string(), self.scalar("I")
        shape = tuple(self.scalar("Q") for _ in range(min(rank, 8)))[::-1]
        number, start = self.scalar("I"), self.scalar("Q")
        kind = KINDS.get(number)
        if kind is None:
            known = ", ".join(each.name for each in KINDS.values())
            other = OTHERS.get(number, f"type {number}")
            raise InvalidModel(f"{self.name}: {name} is stored as {other}: not supported (known: {known})")
        if not shape or shape[-1] % kind.block:
            raise InvalidModel(f"{self.name}: {name} of shape {list(shape)} cannot be {kind.name}")
        return name, GgufTensorInfo(kind, shape, start)
