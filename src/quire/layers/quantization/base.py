"""How a matrix is stored. The loader hands named tensors to a format, which owns what is kept and multiplies by it.

`linear` says how a matrix is cut, a format how the cut is kept: the two never know of each other.

Numbers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.ops.base import Gate, Ops


class WeightBuffer(Protocol):
    """Whose memory a place is part of. Both are called from several threads."""

    def acquire(self, target: Tensor) -> Tensor:
        """Numbers are about to come: where those of `into` go."""

    def release(self, target: Tensor) -> None:
        """They have come."""


class AllocatedBuffer:
    """Memory that is there from the first."""

    def acquire(self, target: Tensor) -> Tensor:
        return target

    def release(self, target: Tensor) -> None:
        return


ALLOCATED = AllocatedBuffer()


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes: `into` takes its `cut`, turned about when `transposed`.

    shape: of the whole tensor in the checkpoint; where it is `loose`, dimensions of one do not count. stored: the one
    dtype it may have there; None for any floating one of two bytes or more. mean and std: of the random numbers that
    stand in for it. shift: is added on the way. room: whose memory that is; `into` may be
    its outline, without any of its own, until it is filled.
    """

    name: str
    shape: tuple[int, ...]
    shard: tuple[slice, ...]
    target: Tensor
    transposed: bool = False
    mean: float = 0.0
    std: float = 0.02
    shift: float = 0.0
    stored_dtype: torch.dtype | None = None
    ignore_unit_dims: bool = False
    buffer: WeightBuffer = ALLOCATED

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have this shape."""
        if not self.ignore_unit_dims:
            return shape == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether the checkpoint's tensor may be of this dtype."""
        return dtype is self.stored_dtype if self.stored_dtype else dtype.is_floating_point and dtype.itemsize > 1

    @property
    def is_direct_copy(self) -> bool:
        """Whether the cut's numbers are those kept, in their order."""
        return not (self.transposed or self.ignore_unit_dims or self.shift)

    def copy_from(self, cut: Tensor) -> None:
        """Fill from the checkpoint's tensor, cut already; any floating dtype."""
        if self.ignore_unit_dims:
            cut = cut.reshape(self.target.shape)

        def write(into: Tensor) -> None:
            into.copy_(cut.t() if self.transposed else cut)
            if self.shift:
                into.add_(self.shift)

        self.fill(write)

    def fill(self, write: Callable[[Tensor], object]) -> None:
        """Let `write` fill it."""
        write(self.buffer.acquire(self.target))
        self.buffer.release(self.target)

    def split(self, most: int) -> Iterator[WeightSlot]:
        """The same in places of about `most` numbers, cut along the checkpoint's first dimension."""
        if self.ignore_unit_dims or not self.shard or self.target.numel() <= most:
            yield self
            return
        rows, _, _ = self.shard[0].indices(self.shape[0])
        count = self.target.shape[-1 if self.transposed else 0]
        step = max(1, most * count // self.target.numel())
        for at in range(0, count, step):
            own = slice(at, min(count, at + step))
            into = self.target[:, own] if self.transposed else self.target[own]
            yield replace(self, shard=(slice(rows + own.start, rows + own.stop), *self.shard[1:]), target=into)


class MatrixPart(NamedTuple):
    """One checkpoint matrix of a stack: its name, its rows in the checkpoint, those this rank keeps."""

    name: str
    rows: int
    shard: slice


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's matrix as a format gets to see it: parts one above the other, [sum of rows, columns].

    cut: the columns this rank keeps. own_bias: whether this rank is the one that adds the bias. transposed: the
    checkpoint has [columns, rows] (GPT-2). delicate: small or decisive (a head, a router): never rounded unless the
    checkpoint has it so.
    """

    parts: tuple[MatrixPart, ...]
    columns: int
    shard: slice
    dtype: torch.dtype
    device: torch.device
    bias: bool = False
    adds_bias: bool = True
    transposed: bool = False
    keep_precision: bool = False

    @property
    def local_shape(self) -> tuple[int, int]:
        """Rows and columns on this rank."""
        return sum(p.shard.stop - p.shard.start for p in self.parts), self.shard.stop - self.shard.start


class WeightStorage(Protocol):
    """One matrix in its format."""

    matrix: Matrix

    def slots(self) -> list[WeightSlot]:
        """Every checkpoint tensor it is made of."""

    def finalize(self) -> None:
        """All places are filled: take the final form."""

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x [T, columns] -> [T, rows], or under a gate [T, rows / 2]."""

    @property
    def quantized(self) -> QuantizedWeight | None:
        """Once sealed, what is kept in place of plain numbers, if anything is."""


class QuantizedWeight(Protocol):
    """The final form of a quantised matrix.

    exact: multiply without rounding activations, where the format rounds them: what a canary compares with.
    """

    exact: bool

    @property
    def rows(self) -> int: ...

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `Stored.apply`."""

    def dequantize(self, rows: slice = slice(None)) -> Tensor:
        """The numbers it stands for, [rows, columns] float32."""


def bias_of(matrix: Matrix) -> Tensor | None:
    """Room for the biases of the parts, one after the other; zeros on ranks that add none."""
    return torch.zeros(matrix.local_shape[0], dtype=matrix.dtype, device=matrix.device) if matrix.bias else None


def bias_slots(matrix: Matrix, bias: Tensor | None) -> list[WeightSlot]:
    """Where the parts' biases go."""
    if bias is None:
        return []
    places, row = list[WeightSlot](), 0
    for name, rows, cut in matrix.parts:
        own = slice(row, row + cut.stop - cut.start)
        row = own.stop
        kept, into = (cut, bias[own]) if matrix.adds_bias else (slice(0, 0), bias[:0])
        places.append(WeightSlot(f"{name}.bias", (rows,), (kept,), into, std=0.1))
    return places


Format = Callable[[Matrix, Ops, Tensor | None], WeightStorage]
"""Makes a matrix's storage. With a tensor given (a tied head), that is the matrix, filled by somebody else."""


class Plain:
    """The numbers as they are, one row an output. In a stack, parts follow each other."""

    quantized: QuantizedWeight | None = None

    def __init__(self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None) -> None:
        rows, columns = matrix.local_shape
        self.matrix = matrix
        self.ops = ops
        self.tied_weight = tied_weight is not None
        empty = (
            torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device) if tied_weight is None else tied_weight
        )
        self.weight = empty
        self.bias = bias_of(matrix)

    def slots(self) -> list[WeightSlot]:
        matrix, places, row = self.matrix, list[WeightSlot](), 0
        biases = bias_slots(matrix, self.bias)
        for i, (name, rows, cut) in enumerate(matrix.parts):
            own = slice(row, row + cut.stop - cut.start)
            row = own.stop
            if not self.tied_weight:
                shape, cuts = (rows, matrix.columns), (cut, matrix.shard)
                if matrix.transposed:
                    shape, cuts = shape[::-1], cuts[::-1]
                std = matrix.columns**-0.5
                places.append(WeightSlot(f"{name}.weight", shape, cuts, self.weight[own], matrix.transposed, std=std))
            places += biases[i : i + 1]
        return places

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        return self.ops.linear(x, self.weight, self.bias, gate)
