"""Matrices in layouts that a CPU multiplies by faster than by plain ones: oneDNN's blocks, and panels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from quire.layers.quantization.base import (
    Matrix,
    MatrixPart,
    Plain,
    QuantizedWeight,
    WeightSlot,
    WeightStorage,
    bias_of,
    bias_slots,
    weight_slot,
)
from quire.layers.quantization.deferred import Deferred
from quire.ops.base import Ops
from quire.ops.matmul import pack, packed_linear
from quire.ops.operands import Gate, Projection
from quire.ops.panels import PANEL_ROWS

TILE = 16 << 20
"""Bytes of a tile: large enough that one more product costs nothing beside reading it, and small beside a model, since
loading takes as much memory in addition."""

SMALL = 1 << 16
"""Numbers in a float32 matrix below which MKL is faster at few rows: oneDNN takes 10 us to prepare, whatever the size.
[128, 80] at 1 and 8 rows: 1.8 and 3.4 us, packed 10.5; [512, 256]: 7 and 29 us, packed 15 and 20."""


def packed_if_large(
    matrix: Matrix, ops: Ops, shared: Tensor | None = None, *, spare: list[Tensor], least: int = 0
) -> Packed | Plain:
    """Packed storage, except for matrices of fewer than `least` numbers.

    oneDNN gives a row of a matrix of up to some thousand columns the same bits whatever rows are multiplied with it;
    MKL does not (a single row is another product there). So the threshold is for formats that need no such guarantee.
    """
    few = matrix.local_shape[0] * matrix.local_shape[1] < least
    return Plain(matrix, ops, shared) if few else Packed(matrix, ops, shared, spare=spare)


class Tile:
    """Some rows of a matrix of so many columns. Their memory is taken when the first numbers arrive, and reused once
    they are packed.

    spare: memory that other tiles no longer need. pack: what is done with the rows.
    """

    def __init__(
        self, rows: slice, columns: int, dtype: torch.dtype, spare: list[Tensor], pack: Callable[[Tensor], object]
    ) -> None:
        self.rows, self.spare, self.pack = rows, spare, pack
        self.outline = torch.empty(rows.stop - rows.start, columns, dtype=dtype, device="meta")
        self.left = self.outline.numel()
        self.memory: Tensor | None = None
        self._lock = Lock()

    def acquire(self, into: Tensor) -> Tensor:
        """Memory for a part of the tile."""
        with self._lock:
            if self.memory is None:
                self.memory = take(self.spare, self.outline.nbytes)
            whole = self.memory[: self.outline.nbytes].view(into.dtype)
        return whole.as_strided(into.size(), into.stride(), into.storage_offset())

    def release(self, into: Tensor) -> None:
        """Count what was written; pack the tile when it is complete."""
        with self._lock:
            self.left -= into.numel()
            filled, memory = self.left == 0, self.memory
        if filled and memory is not None:
            self.pack(memory[: self.outline.nbytes].view(into.dtype).view(self.outline.shape))
            self.memory = None
            self.spare.append(memory)


def take(spare: list[Tensor], size: int) -> Tensor:
    """A buffer of at least `size` bytes, from `spare` if there is one."""
    try:
        memory = spare.pop()
    except IndexError:
        memory = torch.empty(TILE, dtype=torch.uint8)
    return memory if memory.nbytes >= size else torch.empty(size, dtype=torch.uint8)


def tiles(
    count: int,
    columns: int,
    dtype: torch.dtype,
    unit: int,
    spare: list[Tensor],
    pack: Callable[[slice, Tensor], object],
) -> list[Tile]:
    """Tiles of `count` rows, of a multiple of `unit` rows each but for the last. pack: called with rows and their
    numbers."""
    step = max(unit, TILE // max(1, columns * dtype.itemsize) // unit * unit)
    cuts = [slice(*pair) for pair in pairwise((*range(0, count, step), count))]
    return [Tile(rows, columns, dtype, spare, partial(pack, rows)) for rows in cuts]


def tiled(parts: Sequence[MatrixPart], tiles: Sequence[Tile]) -> Iterator[tuple[MatrixPart, slice, Tensor, Tile]]:
    """Each part's rows in each tile: (part, its rows in the checkpoint, where they go, the tile)."""
    row = 0
    for part in parts:
        cut = part.shard
        stop = row + cut.stop - cut.start
        for tile in tiles:
            first, last = max(row, tile.rows.start), min(stop, tile.rows.stop)
            if first < last:
                kept = slice(cut.start + first - row, cut.start + last - row)
                yield part, kept, tile.outline[first - tile.rows.start : last - tile.rows.start], tile
        row = stop


class TiledStorage(ABC):
    """A matrix that is assembled tile by tile, each of which is packed when it is complete.

    spare: buffers in which the matrices of one model are assembled, one after the other. tied_weight: the table of a
    tied head, which is packed when the embedding is loaded. unit: rows that a tile has a multiple of.
    """

    quantized: QuantizedWeight | None = None
    unit = 1

    def __init__(
        self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None, *, spare: list[Tensor] | None = None
    ) -> None:
        rows, columns = matrix.local_shape
        self.matrix, self.ops, self.tied_weight = matrix, ops, tied_weight
        self.bias = bias_of(matrix)
        self.spare: list[Tensor] = [] if spare is None else spare
        self.tiles = tiles(rows, columns, matrix.dtype, self.unit, self.spare, self.pack)
        self.cuts = [tile.rows for tile in self.tiles]

    @abstractmethod
    def pack(self, rows: slice, weight: Tensor) -> None:
        """Pack rows of the matrix, which lie in weight."""

    @abstractmethod
    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""

    def slots(self) -> list[WeightSlot]:
        """Slots of each part's rows in each tile, and of the biases."""
        cut = tiled(self.matrix.parts, self.tiles if self.tied_weight is None else ())
        places = [weight_slot(self.matrix, part, kept, into, tile) for part, kept, into, tile in cut]
        return places + bias_slots(self.matrix, self.bias)

    def finalize(self) -> None:
        """Free the buffers; pack a tied head."""
        self.spare.clear()
        self.tiles.clear()  # each knows what packs it: the matrix would wait for the garbage collector
        if self.tied_weight is not None:
            for rows in self.cuts:
                self.pack(rows, self.tied_weight[rows])


class Packed(TiledStorage):
    """Tiles of rows in oneDNN's layout, one below the other."""

    def __init__(
        self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None, *, spare: list[Tensor] | None = None
    ) -> None:
        super().__init__(matrix, ops, tied_weight, spare=spare)
        self.packed: dict[int, Tensor] = {}

    def pack(self, rows: slice, weight: Tensor) -> None:
        """See `TiledStorage`."""
        self.packed[rows.start] = pack(weight)

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        parts = []
        for rows in self.cuts:
            bias, held = None if self.bias is None else self.bias[rows], self.packed.get(rows.start)
            if held is None:
                assert self.tied_weight is not None, "a matrix is multiplied by before it is filled"
                parts.append(self.ops.linear(x, self.tied_weight[rows], bias))
            else:
                parts.append(self.ops.multiply(partial(packed_linear, weight=held, bias=bias), x))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return self.ops.apply_gate(y, gate)


class Panels(TiledStorage):
    """One matrix in panels, which `NativeOps` multiplies by."""

    unit = PANEL_ROWS

    def __init__(
        self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None, *, spare: list[Tensor] | None = None
    ) -> None:
        super().__init__(matrix, ops, tied_weight, spare=spare)
        self.panels = ops.empty_panels(*matrix.local_shape, matrix.dtype)

    def pack(self, rows: slice, weight: Tensor) -> None:
        """See `TiledStorage`."""
        self.panels.write(rows.start, weight)

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        return self.ops.quantized_linear(x, self.panels, self.bias, gate)

    def rows(self, tokens: Tensor) -> Tensor:
        """See `TableStorage`."""
        return self.ops.integer_embedding(tokens, self.panels, self.matrix.dtype)


def projection_of(stored: WeightStorage) -> Projection | None:
    """A matrix as a `Decoder` reads it, once it is filled; None: it cannot."""
    if isinstance(stored, Deferred):
        return projection_of(stored.stored) if stored.packed else None
    if isinstance(stored, Panels):
        return Projection(stored.panels, stored.bias)
    return None if stored.quantized is None else stored.quantized.projection
