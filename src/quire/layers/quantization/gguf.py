"""GGUF's blocks on a GPU: each part of a matrix is read as bytes and kept at its bits, in the layout of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quire.layers.quantization.base import (
    Format,
    Matrix,
    MatrixPart,
    Plain,
    QuantizedWeight,
    WeightSlot,
    WeightStorage,
    bias_of,
    bias_slots,
)
from quire.layers.quantization.scaled import OnlineQuantization
from quire.ops.base import Gate, IntegerMatrix, MixedMatrix, Ops
from quire.ops.gguf_blocks import PACKED
from quire.ops.gguf_encode import encode
from quire.ops.panels import PanelMatrix


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """How a tensor is stored: `size` bytes for `block` numbers of a row, of the type `kind`."""

    kind: str
    block: int
    size: int

    def bytes_of(self, columns: slice) -> slice:
        """The bytes of columns that are whole blocks."""
        return slice(columns.start // self.block * self.size, columns.stop // self.block * self.size)

    def packed(self, raw: Tensor) -> IntegerMatrix:
        """raw uint8 [out, bytes of a row] -> the matrix [out, in]."""
        return PACKED[self.kind](raw.view(-1, self.size)).matrix(len(raw))


class GgufStorage:
    """Parts as the file has them, one below the other; neighbours of one type become one matrix."""

    def __init__(self, matrix: Matrix, ops: Ops, kinds: list[StoredBlocks]) -> None:
        self.matrix, self.ops, self.kinds = matrix, ops, kinds
        self.bias = bias_of(matrix)
        self.raw = [self._room(part, kind) for part, kind in zip(matrix.parts, kinds, strict=True)]
        self.quantized: QuantizedWeight | None = None

    def _room(self, part: MatrixPart, kind: StoredBlocks) -> Tensor:
        kept = kind.bytes_of(self.matrix.shard)
        shape = part.shard.stop - part.shard.start, kept.stop - kept.start
        return torch.empty(shape, dtype=torch.uint8, device=self.matrix.device)

    def slots(self) -> list[WeightSlot]:
        """Slots of each part's bytes, and of the biases."""
        whole = slice(0, self.matrix.columns)
        places = [
            WeightSlot(
                f"{part.name}.weight",
                (part.rows, kind.bytes_of(whole).stop),
                (part.shard, kind.bytes_of(self.matrix.shard)),
                raw,
                stored_dtype=torch.uint8,
            )
            for part, kind, raw in zip(self.matrix.parts, self.kinds, self.raw, strict=True)
        ]
        return places + bias_slots(self.matrix, self.bias)

    def finalize(self) -> None:
        """Repack each run of parts of one type."""
        made = list[IntegerMatrix]()
        for kind, run in groupby(zip(self.kinds, self.raw, strict=True), lambda each: each[0]):
            made.append(kind.packed(torch.cat([raw for _, raw in run])))
        self.raw.clear()
        matrix = made[0] if len(made) == 1 else MixedMatrix(tuple(made))
        self.quantized = QuantizedWeight(self.ops, self.ops.arranged(matrix), self.bias)

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        assert self.quantized is not None
        return self.quantized.apply(x, gate)

    def rows(self, tokens: Tensor) -> Tensor:
        """Rows number `tokens` [T], in the model's dtype: the embedding of a table of one part."""
        assert self.quantized is not None
        assert isinstance(self.quantized.matrix, IntegerMatrix | PanelMatrix)
        return self.ops.integer_embedding(tokens, self.quantized.matrix, self.matrix.dtype)


class GgufFormat:
    """A format that keeps matrices whose parts are all stored in blocks as they are; others are `plain`.

    blocks: of tensors by name, those that may be kept. Not kept are shards that cut through blocks.
    """

    def __init__(self, plain: Format, blocks: Mapping[str, StoredBlocks]) -> None:
        self.plain, self.blocks = plain, blocks

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> WeightStorage:
        """Storage of a matrix."""
        stored = self.table(matrix, ops) if shared is None else None
        return self.plain(matrix, ops, shared) if stored is None else stored

    def table(self, matrix: Matrix, ops: Ops) -> GgufStorage | None:
        """Storage of a matrix, or None where it cannot be kept as it is."""
        kinds = self.kinds(matrix.parts, matrix.shard)
        return GgufStorage(matrix, ops, kinds) if kinds and not matrix.transposed else None

    @property
    def unit(self) -> int:
        """See `StoredFormat`: the largest block of numbers."""
        return max((kind.block for kind in self.blocks.values()), default=1)

    def keeps(self, experts: Sequence[Sequence[MatrixPart]], cut: slice) -> bool:
        """Whether matrices of experts, each of these parts, are stored in blocks of one type, as their kernels want."""
        kinds = [self.kinds(parts, cut) for parts in experts]
        return len({kind for each in kinds for kind in each}) == 1 and all(kinds)

    def renamed(self, prefixes: Mapping[str, str]) -> GgufFormat:
        """Itself: tensors of a file are read under the model's names."""
        return self

    def kinds(self, parts: Sequence[MatrixPart], cut: slice) -> list[StoredBlocks]:
        """How parts are stored; none if any is not in blocks, or the columns kept cut through them."""
        found = [self.blocks.get(f"{part.name}.weight") for part in parts]
        held = [kind for kind in found if kind and cut.start % kind.block == cut.stop % kind.block == 0]
        return held if len(held) == len(found) else []


class BlockQuantization(OnlineQuantization):
    """As `OnlineQuantization`, into blocks of one of GGUF's types. Matrices whose rows are no whole blocks stay
    `plain`."""

    def __init__(self, blocks: StoredBlocks, plain: Format) -> None:
        self.blocks, self.plain = blocks, plain

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> WeightStorage:
        """Storage that quantizes while the matrix is loaded; plain where it is shared or keeps its precision."""
        if shared is not None or matrix.keep_precision or matrix.local_shape[1] % self.blocks.block:
            return self.plain(matrix, ops, shared)
        return OnlineBlocks(matrix, ops, self.blocks)


ROWS = 1 << 17
"""Numbers that are quantized at a time."""


class OnlineBlocks(Plain):
    """Plain until it is finalized."""

    def __init__(self, matrix: Matrix, ops: Ops, blocks: StoredBlocks) -> None:
        super().__init__(matrix, ops)
        self.blocks = blocks

    def finalize(self) -> None:
        """Quantize, some rows at a time."""
        kind, block = self.blocks.kind, self.blocks.block
        rows = torch.split(self.weight, max(1, ROWS // self.weight.shape[1]))
        raw = torch.cat([encode(kind, each.float().view(-1, block)).view(len(each), -1) for each in rows])
        self.quantized = QuantizedWeight(self.ops, self.ops.arranged(self.blocks.packed(raw)), self.bias)
        del self.weight

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        return super().apply(x, gate) if self.quantized is None else self.quantized.apply(x, gate)


Tables = Callable[[Matrix, Ops], GgufStorage | None]
"""Storage of an embedding that is kept as stored, `GgufFormat.table`; None for one in the model's dtype."""


def no_table(matrix: Matrix, ops: Ops) -> None:
    """Every embedding is in the model's dtype."""
    return
