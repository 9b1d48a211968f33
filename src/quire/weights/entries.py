"""One tensor of a checkpoint, whatever file holds it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import InvalidModel

Cut = tuple[slice, ...]
"""Part of a tensor: a slice for each of the first dimensions."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that can be read in part.

    dtype: of what `read` returns. order: (file, position); entries read in this order read their files from front to
    back. kind: how it is stored, as its format names it ('BF16', 'Q4_K'). size: bytes on disk. read: returns a cut of
    the tensor on the CPU, and raises InvalidModel for a file that ends too soon. copy: what `read_into` does, where
    there is a faster way than `read` and a copy. each: what `part` does, where there is a faster way. mapped: some rows
    where the file is mapped to memory, which must not be written to; None for a tensor that is not as in the file.
    stored: of quantized blocks, the bytes of the same rows, uint8 [.., rows, bytes of a row].
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[str, int]
    kind: str
    size: int
    read: Callable[[Cut], Tensor]
    copy: Callable[[Cut, Tensor], None] | None = None
    stored: TensorEntry | None = None
    each: Callable[[int], TensorEntry] | None = None
    mapped: Callable[[slice], Tensor] | None = None

    def read_into(self, cut: Cut, target: Tensor) -> None:
        """Read a cut into a tensor of its shape, of any dtype and on any device."""
        if self.copy is None:
            target.copy_(self.read(cut))
        else:
            self.copy(cut, target)

    def part(self, number: int = 0) -> TensorEntry:
        """Index `number` of the first dimension: an expert of those that one tensor holds."""
        if self.each is not None:
            return self.each(number)
        size = self.size // self.shape[0]

        def read(cut: Cut) -> Tensor:
            return self.read((slice(number, number + 1), *cut))[0]

        stored = self.stored and self.stored.part(number)
        return replace(self, shape=self.shape[1:], size=size, read=read, copy=None, mapped=None, stored=stored)

    def transformed(
        self, shape: tuple[int, ...], change: Callable[[Tensor], Tensor], *, rows_only: bool = False
    ) -> TensorEntry:
        """The tensor of `shape` that `change` makes of the whole one. rows_only: it only moves rows, and so those of
        `stored`."""
        stored = self.stored.transformed(self.stored.shape, change) if rows_only and self.stored else None
        return replace(
            self,
            shape=shape,
            read=lambda cut: change(self.read(()))[cut],
            copy=None,
            stored=stored,
            each=None,
            mapped=None,
        )


def rows_of(entry: TensorEntry, start: int, count: int) -> TensorEntry:
    """Some rows of a tensor, and of its blocks."""

    def read(cut: Cut) -> Tensor:
        first, last, _ = (cut[0] if cut else slice(None)).indices(count)
        return entry.read((slice(start + first, start + last), *cut[1:]))

    stored = None if entry.stored is None else rows_of(entry.stored, start, count)
    size = entry.size * count // max(1, entry.shape[0])
    return replace(
        entry,
        shape=(count, *entry.shape[1:]),
        size=size,
        read=read,
        copy=None,
        each=None,
        mapped=None,
        stored=stored,
    )


def file_entry(file: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...], kind: str = "") -> TensorEntry:
    """A tensor whose numbers are in a file in row-major order, from byte `start` on."""
    row = math.prod(shape[1:]) * dtype.itemsize

    def rows(cut: Cut) -> tuple[int, int]:
        first, last, _ = (cut[0] if cut else slice(None)).indices(shape[0] if shape else 1)
        return first, max(first, last)

    def read(cut: Cut) -> Tensor:
        first, last = rows(cut)
        whole = torch.empty((last - first, *shape[1:]), dtype=dtype)
        if whole.numel():
            read_tensor(file, start + first * row, whole)
        return whole[(slice(None), *cut[1:])] if shape else whole.view(shape)

    def copy(cut: Cut, target: Tensor) -> None:
        same = target.dtype is dtype and target.shape[1:] == shape[1:] and target.is_contiguous()
        if same and target.device.type == "cpu" and target.numel():
            read_tensor(file, start + rows(cut)[0] * target[0].nbytes, target)
        else:
            target.copy_(read(cut))

    def part(number: int) -> TensorEntry:
        return file_entry(file, start + number * row, dtype, shape[1:], kind)

    def mapped(kept: slice) -> Tensor:
        first, last = rows((kept,))
        return mapped_bytes(file, start + first * row, (last - first) * row).view(dtype).view(last - first, *shape[1:])

    size = math.prod(shape) * dtype.itemsize
    return TensorEntry(dtype, shape, (file.name, start), kind, size, read, copy, each=part, mapped=mapped)


def mapped_bytes(file: Path, start: int, size: int) -> Tensor:
    """Bytes of a file, uint8 [size], in the memory that the system keeps the file in, not in memory of their own. The
    system begins to read what it has not yet. Raises InvalidModel where the file ends before."""
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        if start + size > os.fstat(opened.fileno()).st_size:
            raise InvalidModel(f"{file.name} ends before its tensors do: it is truncated, download it again")
        # Private, not read-only: torch has no tensors that are.
        held = mmap.mmap(opened.fileno(), start + size - first, access=mmap.ACCESS_COPY, offset=first)
    if hasattr(mmap, "MADV_WILLNEED"):
        held.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(held, dtype=torch.uint8)[start - first :]


def read_tensor(file: Path, start: int, target: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from `start` on. Raises InvalidModel where the file ends before."""
    rest = target.view(-1).view(torch.uint8).numpy().data
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while rest:
            count = opened.readinto(rest)
            if not count:
                raise InvalidModel(f"{file.name} ends before its tensors do: it is truncated, download it again")
            rest = rest[count:]
