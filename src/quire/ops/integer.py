"""Matrices of integers of 4 and 8 bits with scales for groups of columns: into the layout of the kernels, and back.

The layout is `IntegerMatrix`. What it cannot hold stays a `QuantizedMatrix`: groups of other sizes than 32 or multiples
of 64, and scales that neither float16 nor bfloat16 holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.base import IntegerKind, IntegerMatrix, QuantizedMatrix

WIDE = 32
"""Bytes of a row that lie together."""

UNIT = 128
"""What columns are padded to a multiple of."""

PRECISE = 2.0**-11
"""Relative error of scales that count as held."""


def integers_of(matrix: QuantizedMatrix) -> IntegerMatrix | None:
    """An INT4 matrix in the layout of the kernels; None where it cannot be."""
    if matrix.zero is None or matrix.groups is None:
        return None
    order, group, first, count = regular(matrix.groups)
    half = held_by(matrix.scale)
    if group == 0 or half is None:
        return None
    numbers = torch.stack((matrix.weight & 15, matrix.weight >> 4), -1).flatten(1)
    if order is not None:
        numbers = numbers.index_select(1, order)
    scale, zero = (each[:, first : first + count] for each in (matrix.scale, matrix.zero))
    kept = min(group, UNIT)
    scale, zero = (each.repeat_interleave(group // kept, 1) for each in (scale, zero))
    return pack_integers(numbers, kept, scale, zero=zero, half=half)._replace(order=order)


def regular(groups: Tensor) -> tuple[Tensor | None, int, int, int]:
    """(order, size, first, count) of the groups of columns [in], if in that order `size` columns after another have
    one, the last one fewer; size 0 if they have not. order: None if columns need not be moved."""
    ordered, order = torch.sort(groups, stable=True)
    first, last = int(ordered[0]), int(ordered[-1])
    size = int((ordered == first).sum())
    if last == first:
        size = -(-len(groups) // UNIT) * UNIT
    expected = first + torch.arange(len(groups), device=groups.device) // size
    fits = (size == WIDE or size == 2 * WIDE or size % UNIT == 0) and torch.equal(ordered, expected)
    moved = not torch.equal(ordered, groups)
    return order if moved else None, size if fits else 0, first, last - first + 1


def held_by(scale: Tensor) -> bool | None:
    """Whether float16 holds scales, as well as bfloat16 at least; False where only bfloat16 does; None: neither."""
    off = [((scale.to(dtype).float() - scale).abs() - PRECISE * scale.abs()).max() for dtype in HALVES]
    if float((scale.half().float() - scale).abs().max()) == 0.0:
        return True
    if float((scale.bfloat16().float() - scale).abs().max()) == 0.0:
        return False
    return True if float(off[0]) <= 0.0 else None


HALVES = (torch.float16, torch.bfloat16)


def pack_integers(
    numbers: Tensor,
    group: int,
    scale: Tensor,
    *,
    zero: Tensor | None = None,
    minimum: Tensor | None = None,
    half: bool = True,
) -> IntegerMatrix:
    """numbers [out, in], 0 to 15 in uint8 or signed in int8, scale [out, G] of groups of so many columns: 32, 64, 128.

    4 bits are less `zero` [out, G], or times the scale less `minimum` [out, G], of which only groups of 32 have one;
    without either zero is 8, and groups are of 32, as those of 8 bits are.
    """
    inputs = numbers.shape[1]
    bits = 8 if numbers.dtype is torch.int8 else 4
    missing = -inputs % UNIT
    padded = F.pad(numbers.view(torch.uint8), (0, missing))
    words = -(-(inputs + missing) // group)
    scale = F.pad(scale, (0, words - scale.shape[1]))
    if zero is not None:
        kind, lower = IntegerKind.ZEROS, F.pad(-128.0 - zero.float(), (0, words - zero.shape[1]))
        lower = lower.bfloat16().view(torch.int16)
    elif minimum is not None:
        kind, lower = IntegerKind.MINIMA, bits_of(F.pad(minimum, (0, words - minimum.shape[1])), half)
    else:
        kind, lower, scale = IntegerKind.PAIRS, bits_of(scale[:, ::2], half), scale[:, 1::2]
    held = (bits_of(scale, half).int() << 16) | (lower.int() & 0xFFFF)
    return IntegerMatrix(blocks_of(padded, bits), held.t().contiguous(), inputs, bits, group, kind, half)


def bits_of(values: Tensor, half: bool) -> Tensor:
    """Values as float16 or bfloat16, as int16."""
    return values.to(HALVES[not half]).contiguous().view(torch.int16)


def blocks_of(numbers: Tensor, bits: int) -> Tensor:
    """numbers uint8 [out, in] -> uint8 [B, out, 32]."""
    outputs = len(numbers)
    if bits == 4:
        halves = numbers.view(outputs, -1, 2, WIDE)
        numbers = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return numbers.reshape(outputs, -1, WIDE).transpose(0, 1).contiguous()


def dequantize_integers(matrix: IntegerMatrix) -> Tensor:
    """The numbers of a matrix, float32 [out, in], in the order of x."""
    stored = matrix.weight.transpose(0, 1)
    words = matrix.words.t().contiguous()
    upper, lower = ((words >> shift).to(torch.int16) for shift in (16, 0))
    scale = upper.view(HALVES[not matrix.half]).float()
    if matrix.bits == 8:
        exact = stored.view(torch.int8).float().flatten(1)
    else:
        exact = torch.stack((stored & 15, stored >> 4), 2).flatten(1).float()
    minimum: Tensor | float = 0.0
    if matrix.kind is IntegerKind.ZEROS:
        exact += spread(128.0 + lower.view(torch.bfloat16).float(), matrix)
    elif matrix.kind is IntegerKind.MINIMA:
        minimum = spread(lower.view(HALVES[not matrix.half]).float(), matrix)
    else:
        scale = torch.stack((lower.view(HALVES[not matrix.half]).float(), scale), -1).flatten(1)
        exact -= 8.0 if matrix.bits == 4 else 0.0
    ordered = exact.mul_(spread(scale, matrix)).sub_(minimum)[:, : matrix.inputs]
    return ordered if matrix.order is None else torch.empty_like(ordered).index_copy_(1, matrix.order, ordered)


def spread(values: Tensor, matrix: IntegerMatrix) -> Tensor:
    """[out, G] -> [out, padded columns]."""
    return values.repeat_interleave(matrix.group, 1)
