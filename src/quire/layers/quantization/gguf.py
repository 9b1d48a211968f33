"""GGUF's blocks: each part of a matrix is read as bytes and kept at its bits, in the layout of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    TableStorage,
    WeightBuffer,
    WeightSlot,
    WeightStorage,
    bias_of,
    bias_slots,
)
from quire.layers.quantization.mapped import MappedBlocks, Scratch
from quire.layers.quantization.packed import Tile, tiled, tiles
from quire.layers.quantization.scaled import OnlineQuantization
from quire.ops.base import Ops
from quire.ops.gguf_blocks import PACKED
from quire.ops.gguf_encode import encode
from quire.ops.operands import BlockPanels, Gate, IntegerMatrix, MixedMatrix
from quire.ops.panels import PANEL_ROWS, PanelMatrix

Mapped = Callable[[slice], Tensor]
"""Some rows of a tensor where its file is mapped to memory."""


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


def kept_bytes(kind: StoredBlocks, ops: Ops) -> float:
    """Bytes of a number with its share of scales, as the kernels of `ops` keep a matrix of this type."""
    rows, columns = PANEL_ROWS, 256
    panels = ops.empty_blocks(kind.kind, rows, columns)
    if panels is None:
        raw = torch.zeros(rows, kind.bytes_of(slice(0, columns)).stop, dtype=torch.uint8)
        return kind.packed(raw).nbytes / (rows * columns)
    return panels.matrix.nbytes / (rows * columns)


class BlockRows:
    """Parts of one type of blocks, one below the other, whose bytes are in memory until they are repacked all at once.

    columns: of the model's matrix that are kept.
    """

    def __init__(self, kind: StoredBlocks, parts: Sequence[MatrixPart], matrix: Matrix, ops: Ops) -> None:
        self.kind, self.parts, self.matrix, self.ops = kind, parts, matrix, ops
        self.count = sum(part.shard.stop - part.shard.start for part in parts)
        self.bytes = kind.bytes_of(matrix.shard)
        self.raw = torch.empty(0)
        self.allocate()

    def allocate(self) -> None:
        """Take the memory that is filled."""
        size = self.bytes.stop - self.bytes.start
        self.raw = torch.empty(self.count, size, dtype=torch.uint8, device=self.matrix.device)

    def slots(self) -> Iterator[WeightSlot]:
        """Slots of each part's bytes."""
        row = 0
        for part in self.parts:
            own = slice(row, row + part.shard.stop - part.shard.start)
            row = own.stop
            yield self.slot(part, part.shard, self.raw[own])

    def slot(self, part: MatrixPart, kept: slice, target: Tensor, buffer: WeightBuffer | None = None) -> WeightSlot:
        """The slot of rows `kept` of a part."""
        shape = part.rows, self.kind.bytes_of(slice(0, self.matrix.columns)).stop
        name, cut = f"{part.name}.weight", (kept, self.bytes)
        return WeightSlot(name, shape, cut, target, stored_dtype=torch.uint8, buffer=buffer)

    def finish(self) -> IntegerMatrix | PanelMatrix:
        """The matrix; the bytes are freed."""
        raw, self.raw = self.raw, torch.empty(0)
        made = self.ops.arranged(self.kind.packed(raw))
        assert isinstance(made, IntegerMatrix | PanelMatrix)
        return made


class BlockTiles(BlockRows):
    """The same, repacked tile by tile while the file is read. panels: where to. spare: see `Tile`."""

    def __init__(
        self,
        kind: StoredBlocks,
        parts: Sequence[MatrixPart],
        matrix: Matrix,
        ops: Ops,
        panels: BlockPanels,
        spare: list[Tensor],
    ) -> None:
        self.panels, self.spare = panels, spare
        self.tiles: list[Tile] = []
        self.mapped: Sequence[Tensor] = ()
        super().__init__(kind, parts, matrix, ops)

    def allocate(self) -> None:
        """See `BlockRows`: tiles have memory of their own."""
        size = self.bytes.stop - self.bytes.start
        self.tiles = tiles(self.count, size, torch.uint8, PANEL_ROWS, self.spare, self.pack)

    def map_file(self, stored: Sequence[Mapped | None]) -> bool:
        """Read from the file's mapping, see `MappedBlocks`. stored: of each part, what maps rows of it; None: nothing.
        False: that is not possible, and nothing has changed."""
        counts = [part.shard.stop - part.shard.start for part in self.parts]
        whole = self.matrix.shard == slice(0, self.matrix.columns)
        if not whole or None in stored or any(count % PANEL_ROWS for count in counts[:-1]):
            return False
        self.mapped = [each(part.shard) for each, part in zip(stored, self.parts, strict=True) if each is not None]
        return True

    def pack(self, rows: slice, raw: Tensor) -> None:
        """Repack the bytes of a tile."""
        self.panels.write(rows.start, raw)

    def slots(self) -> Iterator[WeightSlot]:
        """See `BlockRows`."""
        for part, own, into, tile in tiled(self.parts, self.tiles):
            yield self.slot(part, own, into, tile)

    def finish(self) -> PanelMatrix:
        """See `BlockRows`."""
        self.spare.clear()
        self.tiles.clear()  # each knows what packs it: the panels would wait for the garbage collector
        return self.panels.matrix


def block_rows(
    kind: StoredBlocks, parts: Sequence[MatrixPart], matrix: Matrix, ops: Ops, spare: list[Tensor]
) -> BlockRows:
    """Parts of one type, repacked as the kernels of `ops` want it."""
    count = sum(part.shard.stop - part.shard.start for part in parts)
    panels = ops.empty_blocks(kind.kind, count, matrix.local_shape[1])
    if panels is None:
        return BlockRows(kind, parts, matrix, ops)
    return BlockTiles(kind, parts, matrix, ops, panels, spare)


class GgufStorage:
    """Parts as the file has them, one below the other; neighbours of one type become one matrix."""

    def __init__(
        self, matrix: Matrix, ops: Ops, kinds: list[StoredBlocks], spare: list[Tensor], scratch: Scratch
    ) -> None:
        self.matrix, self.ops, self.scratch = matrix, ops, scratch
        self.bias = bias_of(matrix)
        self.runs = [
            block_rows(kind, [part for _, part in run], matrix, ops, spare)
            for kind, run in groupby(zip(kinds, matrix.parts, strict=True), lambda each: each[0])
        ]
        self.quantized: QuantizedWeight | None = None

    def slots(self) -> list[WeightSlot]:
        """Slots of each part's bytes, and of the biases."""
        return [place for run in self.runs for place in run.slots()] + bias_slots(self.matrix, self.bias)

    def map_file(self, stored: Mapping[str, Mapped | None]) -> Sequence[Tile]:
        """Read from the file's mapping where that is possible, until the matrix is packed. stored: what maps rows of a
        tensor, by name. Returns the tiles that are no longer to be filled."""
        run = self.runs[0]
        if len(self.runs) > 1 or not isinstance(run, BlockTiles):
            return ()
        own = [stored.get(f"{part.name}.weight") for part in run.parts]
        return tuple(run.tiles) if run.map_file(own) else ()

    def finalize(self) -> None:
        """Repack what is not repacked yet, but for what is read from the file's mapping."""
        run = self.runs[0]
        source = None
        if isinstance(run, BlockTiles) and run.mapped:
            source = MappedBlocks(run.kind.kind, run.mapped, run.panels, self.ops, self.scratch)
        made = tuple(run.finish() for run in self.runs)
        self.runs.clear()
        matrix = made[0] if len(made) == 1 else MixedMatrix(made)
        self.quantized = QuantizedWeight(self.ops, matrix, self.bias, source=source)

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        assert self.quantized is not None
        return self.quantized.apply(x, gate)

    def rows(self, tokens: Tensor) -> Tensor:
        """Rows number `tokens` [T], in the model's dtype: the embedding of a table of one part."""
        assert self.quantized is not None
        if (source := self.quantized.source) is not None:
            return self.ops.integer_embedding(torch.arange(len(tokens)), source.rows(tokens), self.matrix.dtype)
        assert isinstance(self.quantized.matrix, IntegerMatrix | PanelMatrix)
        return self.ops.integer_embedding(tokens, self.quantized.matrix, self.matrix.dtype)


class GgufFormat:
    """A format that keeps matrices whose parts are all stored in blocks as they are; others are `plain`.

    blocks: of tensors by name, those that may be kept. Not kept are shards that cut through blocks.
    """

    def __init__(self, plain: Format, blocks: Mapping[str, StoredBlocks]) -> None:
        self.plain, self.blocks = plain, blocks
        self.spare: list[Tensor] = []
        self.scratch = Scratch()

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> WeightStorage:
        """Storage of a matrix."""
        stored = self.table(matrix, ops) if shared is None else None
        return self.plain(matrix, ops, shared) if stored is None else stored

    def table(self, matrix: Matrix, ops: Ops) -> GgufStorage | None:
        """Storage of a matrix, or None where it cannot be kept as it is."""
        kinds = self.kinds(matrix.parts, matrix.shard)
        return GgufStorage(matrix, ops, kinds, self.spare, self.scratch) if kinds and not matrix.transposed else None

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


def numbers_at_once(device: torch.device) -> int:
    """Numbers that are quantized at a time: what stays in a core's cache, or, where each of the hundreds of operations
    that search a K-quant's scales is a launch, enough to be worth them."""
    return 1 << 17 if device.type == "cpu" else 1 << 23


class OnlineBlocks(Plain):
    """Plain until it is finalized."""

    def __init__(self, matrix: Matrix, ops: Ops, blocks: StoredBlocks) -> None:
        super().__init__(matrix, ops)
        self.blocks = blocks

    def finalize(self) -> None:
        """Quantize, some rows at a time."""
        kind, block = self.blocks.kind, self.blocks.block
        rows = torch.split(self.weight, max(1, numbers_at_once(self.weight.device) // self.weight.shape[1]))
        raw = torch.cat([encode(kind, each.float().view(-1, block)).view(len(each), -1) for each in rows])
        panels = self.ops.empty_blocks(kind, *self.weight.shape)
        if panels is not None:
            panels.write(0, raw)
        made = self.ops.arranged(self.blocks.packed(raw)) if panels is None else panels.matrix
        self.quantized = QuantizedWeight(self.ops, made, self.bias)
        del self.weight

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        return super().apply(x, gate) if self.quantized is None else self.quantized.apply(x, gate)


Tables = Callable[[Matrix, Ops], TableStorage | None]
"""Storage of an embedding that is kept as stored, `GgufFormat.table`, or in the head's panels; None for one in the
model's dtype, row by row."""


def no_table(matrix: Matrix, ops: Ops) -> None:
    """Every embedding is in the model's dtype."""
    return
