"""One tensor of a checkpoint, whatever file holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import InvalidModel


class TensorEntry(Protocol):
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

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """The cut of the tensor, on the CPU. Raises InvalidModel for a file that ends too soon."""

    def read_into(self, index: tuple[slice, ...], target: Tensor) -> None:
        """What `read` gives, into a tensor of its shape, of any dtype and on any device."""


class Readable(Protocol):
    def read(self, index: tuple[slice, ...]) -> Tensor: ...


class CopiedEntry:
    """An entry that is read first and copied then."""

    __slots__ = ()

    def read_into(self: Readable, index: tuple[slice, ...], target: Tensor) -> None:
        target.copy_(self.read(index))


@dataclass(frozen=True, slots=True)
class FileTensor:
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

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """Leading rows that are not wanted are not read."""
        rows = index[0] if index else slice(None)
        first, last, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        inner = math.prod(self.shape[1:])
        whole = torch.empty((max(0, last - first), *self.shape[1:]), dtype=self.dtype)
        if whole.numel():
            read_tensor(self.file, self.start + first * inner * self.dtype.itemsize, whole)
        return whole.view(self.shape) if not self.shape else whole[(slice(None), *index[1:])]

    def read_into(self, index: tuple[slice, ...], target: Tensor) -> None:
        """Without a copy between, where the bytes are the same there."""
        rows = (index[0] if index else slice(None)).indices(self.shape[0] if self.shape else 1)
        alike = target.dtype is self.dtype and target.shape[1:] == self.shape[1:] and target.is_contiguous()
        if alike and target.device.type == "cpu" and target.numel():
            read_tensor(self.file, self.start + rows[0] * target[0].nbytes, target)
        else:
            target.copy_(self.read(index))


@dataclass(frozen=True, slots=True)
class SliceEntry(CopiedEntry):
    """One of those that a tensor holds along its first dimension: an expert of a layer's, or the only one."""

    tensor: TensorEntry
    number: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[1:]

    @property
    def order(self) -> tuple[str, int]:
        return self.tensor.order

    @property
    def kind(self) -> str:
        return self.tensor.kind

    @property
    def size(self) -> int:
        return self.tensor.size // self.tensor.shape[0]

    def read(self, index: tuple[slice, ...]) -> Tensor:
        return self.tensor.read((slice(self.number, self.number + 1), *index))[0]


def read_tensor(file: Path, start: int, into: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from `start` on."""
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        read_exactly(into.view(-1).view(torch.uint8).numpy().data, opened, file)


def read_exactly(into: memoryview, file: Any, name: Path) -> None:
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            raise InvalidModel(f"{name.name} ends before its tensors do: it is truncated, download it again")
        done += count
