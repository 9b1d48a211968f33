"""How a matrix is stored. The loader hands named tensors to a format, which owns what is kept and multiplies by it.

`linear` says how a matrix is cut, a format how the cut is kept: the two never know of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.ops.base import Gate, Ops
from quire.ops.packed import pack, packed_linear


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor goes: `into` takes its `cut`, turned about when `transposed`.

    shape: of the whole tensor in the checkpoint. mean and std: of the random numbers that stand in for it. shift: is
    added on the way.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[slice, ...]
    into: Tensor
    transposed: bool = False
    mean: float = 0.0
    std: float = 0.02
    shift: float = 0.0

    def put(self, cut: Tensor) -> None:
        """Fill from the checkpoint's tensor, cut already; any floating dtype."""
        self.into.copy_(cut.t() if self.transposed else cut)
        if self.shift:
            self.into.add_(self.shift)


class Part(NamedTuple):
    """One checkpoint matrix of a stack: its name, its rows in the checkpoint, those this rank keeps."""

    name: str
    rows: int
    cut: slice


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's matrix as a format gets to see it: parts one above the other, [sum of rows, columns].

    cut: the columns this rank keeps. own_bias: whether this rank is the one that adds the bias. transposed: the
    checkpoint has [columns, rows] (GPT-2).
    """

    parts: tuple[Part, ...]
    columns: int
    cut: slice
    dtype: torch.dtype
    device: torch.device
    bias: bool = False
    own_bias: bool = True
    transposed: bool = False

    @property
    def kept(self) -> tuple[int, int]:
        """Rows and columns on this rank."""
        return sum(p.cut.stop - p.cut.start for p in self.parts), self.cut.stop - self.cut.start


class Stored(Protocol):
    """One matrix in its format."""

    def places(self) -> list[Place]:
        """Every checkpoint tensor it is made of."""

    def seal(self) -> None:
        """All places are filled: take the final form."""

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x [T, columns] -> [T, rows], or under a gate [T, rows / 2]."""


Format = Callable[[Matrix, Ops, Tensor | None], Stored]
"""Makes a matrix's storage. With a tensor given (a tied head), that is the matrix, filled by somebody else."""


class Plain:
    """The numbers as they are, one row an output. In a stack, parts follow each other."""

    def __init__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> None:
        rows, columns = matrix.kept
        self.matrix = matrix
        self.ops = ops
        self.shared = shared is not None
        empty = torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device) if shared is None else shared
        self.weight = empty
        self.bias = torch.zeros(rows, dtype=matrix.dtype, device=matrix.device) if matrix.bias else None

    def places(self) -> list[Place]:
        matrix, places, row = self.matrix, list[Place](), 0
        for name, rows, cut in matrix.parts:
            own = slice(row, row + cut.stop - cut.start)
            row = own.stop
            if not self.shared:
                shape, cuts = (rows, matrix.columns), (cut, matrix.cut)
                if matrix.transposed:
                    shape, cuts = shape[::-1], cuts[::-1]
                std = matrix.columns**-0.5
                places.append(Place(f"{name}.weight", shape, cuts, self.weight[own], matrix.transposed, std=std))
            if self.bias is not None:
                kept, into = (cut, self.bias[own]) if matrix.own_bias else (slice(0, 0), self.bias[:0])
                places.append(Place(f"{name}.bias", (rows,), (kept,), into, std=0.1))
        return places

    def seal(self) -> None:
        return

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        return self.ops.linear(x, self.weight, self.bias, gate)


class Packed(Plain):
    """Laid out in the CPU's blocks: up to three times as fast as plain. A tied head's is a copy of its own."""

    def seal(self) -> None:
        self.tiled = pack(self.weight)
        del self.weight

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        y = packed_linear(x, self.tiled, self.bias)
        return y if not gate else self.ops.silu_mul(y) if gate == "silu" else self.ops.gelu_mul(y)
