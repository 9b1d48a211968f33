"""One tensor of a checkpoint, whatever file holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import InvalidModel


class Entry(Protocol):
    """A tensor that can be read in part."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what `read` gives."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def order(self) -> tuple[str, int]:
        """Where it lies; entries read in this order read their files from front to back."""

    @property
    def kind(self) -> str:
        """How it is stored, as its format calls that: 'BF16', 'Q4_K'."""

    @property
    def size(self) -> int:
        """Bytes it takes on disk."""

    def read(self, cut: tuple[slice, ...]) -> Tensor:
        """The cut of the tensor, on the CPU. Raises InvalidModel for a file that ends too soon."""

    def pour(self, cut: tuple[slice, ...], into: Tensor) -> None:
        """What `read` gives, into a tensor of its shape, of any dtype and on any device."""


class Readable(Protocol):
    def read(self, cut: tuple[slice, ...]) -> Tensor: ...


class Poured:
    """An entry that is read first and copied then."""

    __slots__ = ()

    def pour(self: Readable, cut: tuple[slice, ...], into: Tensor) -> None:
        into.copy_(self.read(cut))


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor whose bytes lie in a file one after the other, from `start`."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str = ""

    @property
    def order(self) -> tuple[str, int]:
        return self.file.name, self.start

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, cut: tuple[slice, ...]) -> Tensor:
        """Leading rows that are not wanted are not read."""
        rows = cut[0] if cut else slice(None)
        first, last, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        inner = math.prod(self.shape[1:])
        whole = torch.empty((max(0, last - first), *self.shape[1:]), dtype=self.dtype)
        if whole.numel():
            take(self.file, self.start + first * inner * self.dtype.itemsize, whole)
        return whole.view(self.shape) if not self.shape else whole[(slice(None), *cut[1:])]

    def pour(self, cut: tuple[slice, ...], into: Tensor) -> None:
        """Without a copy between, where the bytes are the same there."""
        rows = (cut[0] if cut else slice(None)).indices(self.shape[0] if self.shape else 1)
        alike = into.dtype is self.dtype and into.shape[1:] == self.shape[1:] and into.is_contiguous()
        if alike and into.device.type == "cpu" and into.numel():
            take(self.file, self.start + rows[0] * into[0].nbytes, into)
        else:
            into.copy_(self.read(cut))


@dataclass(frozen=True, slots=True)
class Part(Poured):
    """One of those that a tensor holds along its first dimension: an expert of a layer's, or the only one."""

    whole: Entry
    number: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[1:]

    @property
    def order(self) -> tuple[str, int]:
        return self.whole.order

    @property
    def kind(self) -> str:
        return self.whole.kind

    @property
    def size(self) -> int:
        return self.whole.size // self.whole.shape[0]

    def read(self, cut: tuple[slice, ...]) -> Tensor:
        return self.whole.read((slice(self.number, self.number + 1), *cut))[0]


def take(file: Path, start: int, into: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from `start` on."""
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        fill(into.view(-1).view(torch.uint8).numpy().data, opened, file)


def fill(into: memoryview, file: Any, name: Path) -> None:
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            raise InvalidModel(f"{name.name} ends before its tensors do: it is truncated, download it again")
        done += count
