"""FP8 and INT8: one byte per number, and a scale per row or per block of columns of a row; read or quantized at
load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import (
    Format,
    Matrix,
    Plain,
    QuantizedWeight,
    WeightSlot,
    WeightStorage,
    bias_of,
    bias_slots,
)
from quire.ops.base import Ops
from quire.ops.operands import Gate, QuantizedMatrix
from quire.ops.quantized import E4M3, E4M3_MAX, INT8_MAX
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True)
class ScaleScheme:
    """How a checkpoint stores such a matrix.

    dtype: int8 or float8_e4m3fn. block: (rows, columns) that share a scale, UNLIMITED for all. suffix: of the scales'
    name. packed: four int8 numbers are stored in an int32, 128 added to each, and `suffix` goes with `weight_packed`.
    activations: rounded to int8 too.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    suffix: str = "weight_scale"
    packed: bool = False
    activations: bool = False

    @property
    def unit(self) -> int:
        """See `Layout`: blocks of scales stay whole."""
        return max((size for size in self.block if size != UNLIMITED), default=1) if max(self.block) > 1 else 4

    def store(self, matrix: Matrix, ops: Ops) -> ScaledStorage:
        """See `Layout`."""
        return ScaledStorage(matrix, ops, self)


def weight_of(matrix: QuantizedMatrix, ops: Ops, bias: Tensor | None, scaling: ScaleScheme) -> QuantizedWeight:
    """The final form."""
    held = ops.arranged_int8(matrix) if scaling.activations else ops.arranged(matrix)
    return QuantizedWeight(ops, held, bias, scaling.activations)


ENOUGH, FAR = 8, 1e4
"""Of ENOUGH scales or more, none is FAR times the median."""


class ScaledStorage:
    """Read from a checkpoint: numbers as they are, scales expanded to one per row and block of columns.

    Expanded, any part of the matrix has its own scales, wherever it cuts through blocks.
    """

    def __init__(self, matrix: Matrix, ops: Ops, scaling: ScaleScheme) -> None:
        if matrix.transposed and (scaling.packed or scaling.block[1] != UNLIMITED):
            raise InvalidModel(f"{matrix.parts[0].name}: a quantised matrix stored [in, out] is not supported")
        rows, columns = matrix.local_shape
        self.matrix, self.ops, self.scheme = matrix, ops, scaling
        self.bias = bias_of(matrix)
        if scaling.packed:
            check_aligned(matrix.shard, 4, matrix.parts[0].name)
            self.raw = torch.empty(rows, columns // 4, dtype=torch.int32, device=matrix.device)
        else:
            self.raw = torch.empty(rows, columns, dtype=scaling.dtype, device=matrix.device)
        down, across = scaling.block
        self.scales = [
            torch.empty(-(-part.rows // down), -(-matrix.columns // across), dtype=torch.float32, device=matrix.device)
            for part in matrix.parts
        ]
        self.quantized: QuantizedWeight | None = None

    def slots(self) -> list[WeightSlot]:
        """Slots of numbers, scales and biases."""
        matrix, packed, places, row = self.matrix, self.scheme.packed, list[WeightSlot](), 0
        each = 4 if packed else 1
        stored = torch.int32 if packed else self.scheme.dtype
        cut = slice(matrix.shard.start // each, matrix.shard.stop // each)
        std = float(1 << 29) if packed else 42.0
        for part, scale in zip(matrix.parts, self.scales, strict=True):
            into = self.raw[row : row + part.shard.stop - part.shard.start]
            row += len(into)
            name = f"{part.name}.weight{'_packed' * packed}"
            shape, cuts = (part.rows, matrix.columns // each), (part.shard, cut)
            if matrix.transposed:
                shape, cuts = shape[::-1], cuts[::-1]
            places.append(WeightSlot(name, shape, cuts, into, matrix.transposed, std=std, stored_dtype=stored))
            about, size = f"{part.name}.{self.scheme.suffix}", matrix.columns**-0.5 / 42.0
            places.append(WeightSlot(about, tuple(scale.shape), (), scale, mean=size, std=0.0, ignore_unit_dims=True))
        return places + bias_slots(matrix, self.bias)

    def finalize(self) -> None:
        """Unpack the numbers, expand the scales."""
        down, across = self.scheme.block
        cut = self.matrix.shard
        first = cut.start // across
        spread = []
        for part, scale in zip(self.matrix.parts, self.scales, strict=True):
            check_scale(scale, f"{part.name}.{self.scheme.suffix}")
            row = torch.arange(part.shard.start, part.shard.stop, device=scale.device) // down
            spread.append(scale[row, first : -(-cut.stop // across)])
        weight = unpack(self.raw, 8, 1).to(torch.int16).sub_(128).to(torch.int8) if self.scheme.packed else self.raw
        scale, offset = torch.cat(spread).contiguous(), cut.start - first * across
        cuts = [at for part in self.matrix.parts for at in (part.shard.start, part.shard.stop)]
        height = common_height(down, cuts)
        matrix = QuantizedMatrix(weight, scale, across, offset, height=height)
        self.quantized = weight_of(matrix, self.ops, self.bias, self.scheme)
        self.scales.clear()
        del self.raw

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        assert self.quantized is not None
        return self.quantized.apply(x, gate)


def common_height(down: int, cuts: Sequence[int]) -> int:
    """Rows that share scales in all of a matrix whose parts begin and end at `cuts`; down: as in `ScaleScheme`."""
    return 1 if down == UNLIMITED or any(cut % down for cut in cuts) else down


def check_aligned(cut: slice, unit: int, name: str) -> None:
    """Raises InvalidModel if a shard begins or ends inside of packed numbers."""
    if cut.start % unit or cut.stop % unit:
        raise InvalidModel(f"{name} cannot be cut at {cut.start}:{cut.stop}: {unit} numbers are packed in one")


def check_scale(scale: Tensor, name: str) -> None:
    """Raises InvalidModel for scales that no quantizer makes: not finite, below 0, or one far above all others."""
    lone = scale.numel() >= ENOUGH and float(scale.max()) > FAR * float(scale.median())
    if not bool(scale.isfinite().all()) or bool((scale < 0).any()) or lone:
        raise InvalidModel(f"{name} holds numbers that cannot be scales: the checkpoint is corrupt")


def unpack(packed: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Numbers of `bits` bits from int32, low bits first (or in `order`), expanded along `dim` -> uint8."""
    count = 32 // bits
    shifts = torch.tensor([i * bits for i in (order or range(count))], dtype=torch.int32, device=packed.device)
    numbers = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - 1 - dim))) & ((1 << bits) - 1)
    return numbers.to(torch.uint8).flatten(dim, dim + 1)


def quantize(weight: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> (numbers in `dtype`, scale [blocks down, blocks across] float32), by the largest of a
    block."""
    rows, columns = weight.shape
    down, across = min(block[0], rows), min(block[1], columns)
    exact = weight.float()
    if columns % across or rows % down:
        exact = torch.nn.functional.pad(exact, (0, -columns % across, 0, -rows % down))
    tiles = exact.view(exact.shape[0] // down, down, exact.shape[1] // across, across)
    most = E4M3_MAX if dtype is E4M3 else INT8_MAX
    scale = tiles.abs().amax(3).amax(1).clamp(min=torch.finfo(torch.float32).tiny) / most
    numbers = (tiles / scale[:, None, :, None]).view_as(exact)[:rows, :columns]
    return (numbers if dtype is E4M3 else numbers.round_()).clamp_(-most, most).to(dtype), scale


AT_ONCE = 1 << 17
"""Numbers that a CPU quantizes at a time: what is computed with them fits a core's cache, and takes no fresh memory."""


def quantize_into(numbers: Tensor, weight: Tensor, block: tuple[int, int]) -> Tensor:
    """As `quantize`, into `numbers`, some rows at a time on a CPU -> scale [out, blocks across], of each row."""
    rows, columns = weight.shape
    down = min(block[0], rows)
    some = max(1, AT_ONCE // (columns * down)) * down if weight.device.type == "cpu" else rows
    scales = list[Tensor]()
    for own, into in zip(torch.split(weight, some), torch.split(numbers, some), strict=True):
        rounded, scale = quantize(own, numbers.dtype, block)
        into.copy_(rounded)
        scales.append(scale[torch.arange(len(own), device=own.device) // down])
    return torch.cat(scales)


ROW = (1, UNLIMITED)
TILE = (128, 128)


class OnlineQuantization:
    """A format: matrices of layers are quantized by `scaling` once loaded; embeddings, heads and routers are
    `plain`."""

    def __init__(self, scaling: ScaleScheme, plain: Format) -> None:
        self.scheme, self.plain = scaling, plain

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> WeightStorage:
        """Storage that quantizes while the matrix is loaded; plain where it is shared or keeps its precision."""
        if shared is not None or matrix.keep_precision:
            return self.plain(matrix, ops, shared)
        return OnlineQuantized(matrix, ops, self.scheme)


class OnlineQuantized(Plain):
    """Plain until it is finalized. Each part has its own blocks."""

    def __init__(self, matrix: Matrix, ops: Ops, scaling: ScaleScheme) -> None:
        super().__init__(matrix, ops)
        self.scheme = scaling

    def finalize(self) -> None:
        """Quantize, part by part."""
        down, across = self.scheme.block
        numbers, scales, row = torch.empty_like(self.weight, dtype=self.scheme.dtype), list[torch.Tensor](), 0
        for part in self.matrix.parts:
            own = self.weight[row : row + part.shard.stop - part.shard.start]
            scales.append(quantize_into(numbers[row : row + len(own)], own, self.scheme.block))
            row += len(own)
        scale = torch.cat(scales).contiguous()
        height = common_height(down, [part.shard.stop - part.shard.start for part in self.matrix.parts])
        matrix = QuantizedMatrix(numbers, scale, across, height=height)
        self.quantized = weight_of(matrix, self.ops, self.bias, self.scheme)
        del self.weight

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        return super().apply(x, gate) if self.quantized is None else self.quantized.apply(x, gate)
