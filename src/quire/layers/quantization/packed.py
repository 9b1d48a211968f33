"""Matrices in oneDNN's blocked layout: up to three times as fast on a CPU as a plain one."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from quire.layers.quantization.base import Matrix, Plain, QuantizedWeight, WeightSlot, bias_of, bias_slots, weight_slot
from quire.ops.base import Gate, Ops
from quire.ops.matmul import pack, packed_linear

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
    """Some rows of a matrix. Their memory is taken when the first numbers arrive, and reused once they are packed.

    spare: memory that other tiles no longer need.
    """

    def __init__(self, rows: slice, matrix: Matrix, spare: list[Tensor]) -> None:
        self.rows, self.spare = rows, spare
        self.outline = torch.empty(rows.stop - rows.start, matrix.local_shape[1], dtype=matrix.dtype, device="meta")
        self.left = self.outline.numel()
        self.memory: Tensor | None = None
        self.packed: Tensor | None = None
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
            self.packed = pack(memory[: self.outline.nbytes].view(into.dtype).view(self.outline.shape))
            self.memory = None
            self.spare.append(memory)


def take(spare: list[Tensor], size: int) -> Tensor:
    """A buffer of at least `size` bytes, from `spare` if there is one."""
    try:
        memory = spare.pop()
    except IndexError:
        memory = torch.empty(TILE, dtype=torch.uint8)
    return memory if memory.nbytes >= size else torch.empty(size, dtype=torch.uint8)


class Packed:
    """Tiles of rows, one below the other. Those of a tied head are copies, made when the embedding is loaded.

    spare: buffers in which the matrices of one model are assembled, one after the other.
    """

    quantized: QuantizedWeight | None = None

    def __init__(
        self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None, *, spare: list[Tensor] | None = None
    ) -> None:
        rows, columns = matrix.local_shape
        step = max(1, TILE // max(1, columns * matrix.dtype.itemsize))
        self.matrix, self.ops, self.tied_weight = matrix, ops, tied_weight
        self.bias = bias_of(matrix)
        self.spare: list[Tensor] = [] if spare is None else spare
        edges = (*range(0, rows, step), rows)
        self.tiles = [Tile(slice(*pair), matrix, self.spare) for pair in pairwise(edges)]

    def slots(self) -> list[WeightSlot]:
        """Slots of each part's rows in each tile, and of the biases."""
        matrix, places, row = self.matrix, list[WeightSlot](), 0
        biases = bias_slots(matrix, self.bias)
        for i, part in enumerate(matrix.parts):
            cut = part.shard
            stop = row + cut.stop - cut.start
            for tile in self.tiles if self.tied_weight is None else ():
                first, last = max(row, tile.rows.start), min(stop, tile.rows.stop)
                if first < last:
                    kept = slice(cut.start + first - row, cut.start + last - row)
                    into = tile.outline[first - tile.rows.start : last - tile.rows.start]
                    places.append(weight_slot(matrix, part, kept, into, tile))
            row = stop
            places += biases[i : i + 1]
        return places

    def finalize(self) -> None:
        """Free the buffers; pack a tied head."""
        self.spare.clear()
        if self.tied_weight is not None:
            for tile in self.tiles:
                tile.packed = pack(self.tied_weight[tile.rows])

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        parts = []
        for tile in self.tiles:
            bias = None if self.bias is None else self.bias[tile.rows]
            if tile.packed is None:
                assert self.tied_weight is not None, "a matrix is multiplied by before it is filled"
                parts.append(self.ops.linear(x, self.tied_weight[tile.rows], bias))
            else:
                parts.append(self.ops.multiply(partial(packed_linear, weight=tile.packed, bias=bias), x))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return self.ops.apply_gate(y, gate)
