"""To `PanelMatrix`: from `IntegerMatrix`, which every format can be brought into, and from GGUF's blocks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.gguf_blocks import IQ4_VALUES
from quire.ops.integer import WIDE, floats_of, halves_of, outline_of, scales_of
from quire.ops.native.library import CBlocks
from quire.ops.operands import IntegerKind, IntegerMatrix, QuantizedMatrix
from quire.ops.panels import (
    PANEL_ROWS,
    SUPERBLOCK,
    PanelKind,
    PanelMatrix,
    ScaleKind,
    Zeros,
    pack_numbers,
    panels_of,
    superblock_panels,
)


def in_panels(matrix: IntegerMatrix, unit: int) -> PanelMatrix:
    """The same matrix in panels. unit: what columns are padded to a multiple of."""
    kept = columns_of(matrix, unit)
    numbers = codes_of(matrix)[:, :kept]
    kind = PanelKind.INT8 if matrix.bits == 8 else PanelKind.INT4
    values = values_of(matrix) if kind is PanelKind.INT4 else None
    made = PanelMatrix(
        kind, matrix.outputs, matrix.inputs, kept, pack_numbers(numbers), values=values, order=matrix.order
    )
    if matrix.kind is IntegerKind.SUPERBLOCKS:
        superblocks_into(made, matrix)
    else:
        scale_into(made, matrix)
    return made


def int8_panels(weight: Tensor, scale: Tensor, unit: int, zeros: Zeros) -> PanelMatrix:
    """weight int8 [out, in] times scale [out, 1] in panels. unit: what columns are padded to a multiple of. zeros:
    allocates."""
    outputs, inputs = weight.shape
    padded, panels = -(-inputs // unit) * unit, -(-outputs // PANEL_ROWS)
    numbers = zeros(panels, padded * PANEL_ROWS, dtype=torch.uint8)
    made = PanelMatrix(PanelKind.INT8, outputs, inputs, padded, numbers, padded, ScaleKind.F32)
    made.write(0, weight)
    made.scale = zeros(panels, 1, PANEL_ROWS, dtype=torch.float32).copy_(panels_of(scale.float()))
    return made


def int4_panels(matrix: QuantizedMatrix, unit: int, zeros: Zeros) -> PanelMatrix | None:
    """A matrix of 4 bits in panels, whose words have the checkpoint's bits; see `in_panels`, which unpacks them. None
    where columns have to be moved, or are not in groups that the kernels read. zeros: allocates."""
    outline = outline_of(matrix)
    if outline is None:
        return None
    kept, panels = columns_of(outline, unit), -(-outline.outputs // PANEL_ROWS)
    numbers = zeros(panels, kept * PANEL_ROWS // 2, dtype=torch.uint8)
    made = PanelMatrix(PanelKind.INT4, outline.outputs, outline.inputs, kept, numbers, values=values_of(outline))
    made.write(0, matrix.weight)
    scale_into(made, outline)
    return made


RUN = 128
"""Columns of a matrix of float8 that are decoded at a time: no group begins within."""


def float8_panels(matrix: QuantizedMatrix, unit: int) -> PanelMatrix | None:
    """A matrix of float8_e4m3fn in panels. unit: what columns are padded to a multiple of. None for what the kernels do
    not read: NaN, and other groups than of a multiple of RUN columns from the first on."""
    weight, outputs, inputs = matrix.weight.view(torch.int8), *matrix.weight.shape
    whole = matrix.scale.shape[1] == 1
    regular = whole or (matrix.width % RUN == 0 and matrix.offset == 0)
    if not regular or bool(((weight & 127) == 127).any()):
        return None
    step = unit if whole else math.lcm(unit, matrix.width)
    padded = -(-inputs // step) * step
    numbers = pack_numbers(F.pad(weight, (0, padded - inputs)))
    made = PanelMatrix(PanelKind.FLOAT8, outputs, inputs, padded, numbers, scale_kind=ScaleKind.F32)
    made.group, made.scale = padded if whole else matrix.width, panels_of(matrix.scale)
    return made


def columns_of(matrix: IntegerMatrix, unit: int) -> int:
    """Columns with those of zeros that are kept: whole groups, in a multiple of `unit`."""
    groups = {IntegerKind.ROWS: 1, IntegerKind.ZEROS: matrix.group, IntegerKind.SUPERBLOCKS: 256}
    step = math.lcm(unit, groups.get(matrix.kind, WIDE))
    return min(matrix.padded, -(-matrix.inputs // step) * step)


def codes_of(matrix: IntegerMatrix) -> Tensor:
    """int8 [out, padded], or of 4 bits in uint8."""
    stored = matrix.weight.transpose(0, 1)
    if matrix.bits == 8:
        return stored.reshape(len(stored), -1).view(torch.int8)
    return torch.stack((stored & 15, stored >> 4), 2).flatten(1)


def values_of(matrix: IntegerMatrix) -> Tensor:
    """What the 16 numbers of 4 bits stand for, before scales and zero points."""
    codes = torch.arange(16, dtype=torch.uint8)
    if matrix.kind is IntegerKind.FLOATS:
        return floats_of(codes)
    return codes.float() - (8.0 if matrix.kind is IntegerKind.PAIRS else 0.0)


def superblocks_into(made: PanelMatrix, matrix: IntegerMatrix) -> None:
    """Put the scales and minima of superblocks into their panels."""
    assert matrix.supers is not None
    count = made.padded // SUPERBLOCK
    factors = torch.stack(halves_of(matrix.supers[:count].t().contiguous(), True), -1).half()
    scales = matrix.words.t().contiguous().view(torch.uint8).view(matrix.outputs, -1, 16)[:, :count]
    made.weight = superblock_panels(made.weight, factors.flatten(1), scales.flatten(1))
    made.group, made.scale_kind = matrix.group, ScaleKind.I8 if matrix.group < WIDE else ScaleKind.U8


def scale_into(made: PanelMatrix, matrix: IntegerMatrix) -> None:
    """Set the scales and zero points of a matrix in panels."""
    scale, zero, _ = scales_of(matrix)
    exact = matrix.kind is IntegerKind.ROWS
    half = matrix.half and matrix.kind is not IntegerKind.FLOATS
    made.scale_kind = ScaleKind.F32 if exact else ScaleKind.F16 if half else ScaleKind.BF16
    made.scale = panels_of(scale.to(SCALE_DTYPES[made.scale_kind]))
    if zero is not None and matrix.kind is IntegerKind.ZEROS and bool(zero.any()):
        made.zero = panels_of(zero.bfloat16())
    if matrix.kind is IntegerKind.ROWS:
        made.group = made.padded
        return
    made.group = matrix.padded // made.scale.shape[1]
    kept = made.padded // made.group
    made.scale, made.zero = (None if each is None else each[:, :kept] for each in (made.scale, made.zero))


class BlockType(NamedTuple):
    """How a type of GGUF's blocks lies in panels. number: in `native/blocks.c`. numbers: of a block. group: columns of
    a scale. values: what the 16 numbers of 4 bits stand for, None for others. kind: of the panels."""

    number: int
    numbers: int
    group: int
    scale_kind: ScaleKind
    values: tuple[float, ...] | None = None
    kind: PanelKind = PanelKind.INT8


def counted(first: int) -> tuple[float, ...]:
    """16 whole numbers."""
    return tuple(float(first + i) for i in range(16))


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "Q8_0": BlockType(0, 32, 32, ScaleKind.F16),
        "Q4_0": BlockType(1, 32, 32, ScaleKind.F16, counted(-8), PanelKind.INT4),
        "Q5_0": BlockType(2, 32, 32, ScaleKind.F16),
        "IQ4_NL": BlockType(3, 32, 32, ScaleKind.F16, tuple(map(float, IQ4_VALUES)), PanelKind.INT4),
        "MXFP4": BlockType(4, 32, 32, ScaleKind.BF16, tuple(floats_of(torch.arange(16)).tolist()), PanelKind.INT4),
        "Q3_K": BlockType(5, 256, 16, ScaleKind.I8, counted(-4), PanelKind.INT4),
        "Q4_K": BlockType(6, 256, 32, ScaleKind.U8, counted(0), PanelKind.INT4),
        "Q5_K": BlockType(7, 256, 32, ScaleKind.U8),
        "Q6_K": BlockType(10, 256, 16, ScaleKind.I8, kind=PanelKind.INT6),
        "IQ4_XS": BlockType(9, 256, 32, ScaleKind.I8, tuple(map(float, IQ4_VALUES)), PanelKind.INT4),
    }
)
"""Types that the library packs: those of `gguf_blocks.PACKED`."""

TILED_BLOCK_TYPES = MappingProxyType({**BLOCK_TYPES, "Q6_K": BlockType(8, 256, 16, ScaleKind.I8)})
"""The same where tiles of AMX multiply them, which have no way for numbers of 6 bits."""


BITS = MappingProxyType({PanelKind.INT8: 8, PanelKind.INT4: 4, PanelKind.INT6: 6})


def empty_blocks(stored: BlockType, outputs: int, inputs: int, zeros: Zeros, unit: int) -> PanelMatrix:
    """A matrix whose rows `write_blocks` fills. zeros: allocates. unit: what columns are padded to a multiple of."""
    padded, panels = -(-inputs // unit) * unit, -(-outputs // PANEL_ROWS)
    within = stored.scale_kind.in_superblocks
    size = padded * PANEL_ROWS * BITS[stored.kind] // 8 + padded // SUPERBLOCK * stored.scale_kind.head(stored.group)
    groups = panels, padded // stored.group, PANEL_ROWS
    return PanelMatrix(
        stored.kind,
        outputs,
        inputs,
        padded,
        zeros(panels, size, dtype=torch.uint8),
        stored.group,
        stored.scale_kind,
        None if within else zeros(*groups, dtype=SCALE_DTYPES[stored.scale_kind]),
        values=None if stored.values is None else torch.tensor(stored.values),
    )


SCALE_DTYPES: Mapping[ScaleKind, torch.dtype] = MappingProxyType(
    {ScaleKind.F16: torch.float16, ScaleKind.BF16: torch.bfloat16, ScaleKind.F32: torch.float32}
)


def write_blocks(library: ctypes.CDLL, made: PanelMatrix, stored: BlockType, first: int, raw: Tensor) -> None:
    """Fill rows from number `first` on, a multiple of 16, of a matrix of `empty_blocks`. raw uint8 [rows, bytes]."""
    scale = None if made.scale is None else made.scale.data_ptr()
    where = CBlocks(made.inputs, made.padded, stored.number, made.weight.data_ptr(), scale)
    raw = raw.contiguous()
    library.quire_pack_blocks(ctypes.byref(where), raw.data_ptr(), first, len(raw))
