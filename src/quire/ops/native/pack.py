"""From `IntegerMatrix`, which every format can be brought into, to `PanelMatrix`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.base import IntegerKind, IntegerMatrix
from quire.ops.integer import WIDE, floats_of, halves_of, scales_of
from quire.ops.panels import PanelKind, PanelMatrix, ScaleKind, pack_numbers, panels_of


def in_panels(matrix: IntegerMatrix) -> PanelMatrix:
    """The same matrix in panels."""
    numbers = codes_of(matrix)
    kind = PanelKind.INT8 if matrix.bits == 8 else PanelKind.INT4
    values = values_of(matrix) if kind is PanelKind.INT4 else None
    made = PanelMatrix(
        kind, matrix.outputs, matrix.inputs, matrix.padded, pack_numbers(numbers), values=values, order=matrix.order
    )
    scale_into(made, matrix)
    return made


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


def scale_into(made: PanelMatrix, matrix: IntegerMatrix) -> None:
    """Set the scales, zero points and minima of a matrix in panels."""
    if matrix.kind is IntegerKind.SUPERBLOCKS:
        assert matrix.supers is not None
        words = matrix.words.t().contiguous().view(torch.uint8).view(matrix.outputs, -1, 16)
        both = torch.stack(halves_of(matrix.supers.t().contiguous(), True), -1).half()
        made.supers = panels_of(both.flatten(1)).view(-1, both.shape[1], 2, 16)
        if matrix.group < WIDE:
            made.scale_kind, made.scale = ScaleKind.I8, panels_of(words.flatten(1)).view(torch.int8)
        else:
            made.scale_kind = ScaleKind.U8
            made.scale, made.zero = (panels_of(words[..., i::2].flatten(1)) for i in (0, 1))
    else:
        scale, zero, _ = scales_of(matrix)
        exact = matrix.kind is IntegerKind.ROWS
        half = matrix.half and matrix.kind is not IntegerKind.FLOATS
        made.scale_kind = ScaleKind.F32 if exact else ScaleKind.F16 if half else ScaleKind.BF16
        dtype = {ScaleKind.F32: torch.float32, ScaleKind.F16: torch.float16}.get(made.scale_kind, torch.bfloat16)
        made.scale = panels_of(scale.to(dtype))
        if zero is not None and matrix.kind is IntegerKind.ZEROS and bool(zero.any()):
            made.zero = panels_of(zero.bfloat16())
    assert made.scale is not None
    made.group = matrix.padded // made.scale.shape[1]
