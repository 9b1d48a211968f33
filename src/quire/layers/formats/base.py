"""How a matrix is stored. The loader hands named tensors to a format, which owns what is kept and multiplies by it.

`linear` says how a matrix is cut, a format how the cut is kept: the two never know of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.ops.base import Gate, Ops


class Room(Protocol):
    """Whose memory a place is part of. Both are called from several threads."""

    def open(self, into: Tensor) -> Tensor:
        """Numbers are about to come: where those of `into` go."""

    def close(self, into: Tensor) -> None:
        """They have come."""


class Standing:
    """Memory that is there from the first."""

    def open(self, into: Tensor) -> Tensor:
        return into

    def close(self, into: Tensor) -> None:
        return


STANDING = Standing()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor goes: `into` takes its `cut`, turned about when `transposed`.

    shape: of the whole tensor in the checkpoint; where it is `loose`, dimensions of one do not count. stored: the one
    dtype it may have there; None for any floating one of two bytes or more. mean and std: of the random numbers that
    stand in for it. shift: is added on the way. room: whose memory that is; `into` may be
    its outline, without any of its own, until it is filled.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[slice, ...]
    into: Tensor
    transposed: bool = False
    mean: float = 0.0
    std: float = 0.02
    shift: float = 0.0
    stored: torch.dtype | None = None
    loose: bool = False
    room: Room = STANDING

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the checkpoint's tensor may have this shape."""
        if not self.loose:
            return shape == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the checkpoint's tensor may be of this dtype."""
        return dtype is self.stored if self.stored else dtype.is_floating_point and dtype.itemsize > 1

    @property
    def straight(self) -> bool:
        """Whether the cut's numbers are those kept, in their order."""
        return not (self.transposed or self.loose or self.shift)

    def put(self, cut: Tensor) -> None:
        """Fill from the checkpoint's tensor, cut already; any floating dtype."""
        if self.loose:
            cut = cut.reshape(self.into.shape)

        def write(into: Tensor) -> None:
            into.copy_(cut.t() if self.transposed else cut)
            if self.shift:
                into.add_(self.shift)

        self.fill(write)

    def fill(self, write: Callable[[Tensor], object]) -> None:
        """Let `write` fill it."""
        write(self.room.open(self.into))
        self.room.close(self.into)

    def pieces(self, most: int) -> Iterator[Place]:
        """The same in places of about `most` numbers, cut along the checkpoint's first dimension."""
        if self.loose or not self.cut or self.into.numel() <= most:
            yield self
            return
        rows, _, _ = self.cut[0].indices(self.shape[0])
        count = self.into.shape[-1 if self.transposed else 0]
        step = max(1, most * count // self.into.numel())
        for at in range(0, count, step):
            own = slice(at, min(count, at + step))
            into = self.into[:, own] if self.transposed else self.into[own]
            yield replace(self, cut=(slice(rows + own.start, rows + own.stop), *self.cut[1:]), into=into)


class Part(NamedTuple):
    """One checkpoint matrix of a stack: its name, its rows in the checkpoint, those this rank keeps."""

    name: str
    rows: int
    cut: slice


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's matrix as a format gets to see it: parts one above the other, [sum of rows, columns].

    cut: the columns this rank keeps. own_bias: whether this rank is the one that adds the bias. transposed: the
    checkpoint has [columns, rows] (GPT-2). delicate: small or decisive (a head, a router): never rounded unless the
    checkpoint has it so.
    """

    parts: tuple[Part, ...]
    columns: int
    cut: slice
    dtype: torch.dtype
    device: torch.device
    bias: bool = False
    own_bias: bool = True
    transposed: bool = False
    delicate: bool = False

    @property
    def kept(self) -> tuple[int, int]:
        """Rows and columns on this rank."""
        return sum(p.cut.stop - p.cut.start for p in self.parts), self.cut.stop - self.cut.start


class Stored(Protocol):
    """One matrix in its format."""

    matrix: Matrix

    def places(self) -> list[Place]:
        """Every checkpoint tensor it is made of."""

    def seal(self) -> None:
        """All places are filled: take the final form."""

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x [T, columns] -> [T, rows], or under a gate [T, rows / 2]."""

    @property
    def quantised(self) -> Quantised | None:
        """Once sealed, what is kept in place of plain numbers, if anything is."""


class Quantised(Protocol):
    """The final form of a quantised matrix.

    exact: multiply without rounding activations, where the format rounds them: what a canary compares with.
    """

    exact: bool

    @property
    def rows(self) -> int: ...

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `Stored.apply`."""

    def restored(self, rows: slice = slice(None)) -> Tensor:
        """The numbers it stands for, [rows, columns] float32."""


def bias_of(matrix: Matrix) -> Tensor | None:
    """Room for the biases of the parts, one after the other; zeros on ranks that add none."""
    return torch.zeros(matrix.kept[0], dtype=matrix.dtype, device=matrix.device) if matrix.bias else None


def bias_places(matrix: Matrix, bias: Tensor | None) -> list[Place]:
    """Where the parts' biases go."""
    if bias is None:
        return []
    places, row = list[Place](), 0
    for name, rows, cut in matrix.parts:
        own = slice(row, row + cut.stop - cut.start)
        row = own.stop
        kept, into = (cut, bias[own]) if matrix.own_bias else (slice(0, 0), bias[:0])
        places.append(Place(f"{name}.bias", (rows,), (kept,), into, std=0.1))
    return places


Format = Callable[[Matrix, Ops, Tensor | None], Stored]
"""Makes a matrix's storage. With a tensor given (a tied head), that is the matrix, filled by somebody else."""
