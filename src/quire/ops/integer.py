"""Matrices of integers of 4 and 8 bits, and floats of 4, with scales for groups of columns: into the layout of the
kernels, and back.

The layout is `IntegerMatrix`. What it cannot hold stays a `QuantizedMatrix`: groups of other sizes than 32 or multiples
of 64, and scales of groups that neither float16 nor bfloat16 holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.operands import IntegerKind, IntegerMatrix, QuantizedMatrix

WIDE = 32
"""Columns of a group, at least, but for those of 16; and bytes of a row that lie together."""

UNIT = 128
"""What columns are padded to a multiple of."""

LARGEST_FACTOR = 128
"""Largest exponent of scales that numbers of 4 bits are multiplied with in bfloat16: see `IntegerKind`."""

PRECISE = 2.0**-11
"""Relative error of scales that count as held."""


def integers_of(matrix: QuantizedMatrix) -> IntegerMatrix | None:
    """A matrix of integers in the layout of the kernels; None where it cannot be."""
    if matrix.weight.dtype not in (torch.int8, torch.uint8):
        return None
    if matrix.groups is None and matrix.scale.shape[1] == 1:
        return pack_rows(matrix.weight, matrix.scale)
    inputs, groups = matrix.weight.shape[1], matrix.groups
    if groups is None:
        groups = (torch.arange(inputs, device=matrix.weight.device) + matrix.offset) // matrix.width
    order, group, first, count = regular(groups)
    half = held_by(matrix.scale)
    if group == 0 or half is None:
        return None
    numbers, zero = signed(matrix)
    if order is not None:
        numbers = numbers.index_select(1, order)
    kept, scale, zero = in_groups(matrix.scale[:, first : first + count], zero, group, first)
    return pack_integers(numbers, kept, scale, zero=zero, half=half)._replace(order=order)


def outline_of(matrix: QuantizedMatrix) -> IntegerMatrix | None:
    """What `integers_of` makes of a matrix of 4 bits, without its numbers, all of which are 0 and take no memory; None
    of others, and where columns are moved."""
    if not matrix.is_int4 or matrix.groups is None:
        return None
    order, group, first, count = regular(matrix.groups)
    half, inputs = held_by(matrix.scale), len(matrix.groups)
    if order is not None or group == 0 or half is None:
        return None
    kept, scale, zero = in_groups(matrix.scale[:, first : first + count], matrix.zero, group, first)
    padded = -(-inputs // UNIT) * UNIT
    kind, words = words_of(scale, zero, kept, half, padded, 4)
    nothing = torch.zeros(1, 1, 1, dtype=torch.uint8).expand(padded // (2 * WIDE), matrix.outputs, WIDE)
    return IntegerMatrix(nothing, words, inputs, 4, kept, kind, half)


def in_groups(scale: Tensor, zero: Tensor | None, group: int, first: int) -> tuple[int, Tensor, Tensor | None]:
    """(columns of a group of the kernels, their scales, their zero points) of groups of any regular size. scale: of
    the groups from number `first` on; zero: of all."""
    kept = min(group, UNIT)
    times = group // kept
    scale = scale.repeat_interleave(times, 1)
    if zero is not None:
        zero = zero[:, first : first + scale.shape[1] // times].repeat_interleave(times, 1)
    elif kept > WIDE:
        zero = torch.zeros_like(scale)
    return kept, scale, zero


def signed(matrix: QuantizedMatrix) -> tuple[Tensor, Tensor | None]:
    """Numbers [out, in] as `pack_integers` wants them, and their zero points."""
    weight, zero = matrix.weight, matrix.zero
    if matrix.is_int4:
        return torch.stack((weight & 15, weight >> 4), -1).flatten(1), zero
    if zero is None:
        return weight, None
    return (weight ^ 128).view(torch.int8), zero.float() - 128


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
    numbers: Tensor, group: int, scale: Tensor, *, zero: Tensor | None = None, half: bool = True
) -> IntegerMatrix:
    """numbers [out, in], 0 to 15 in uint8 or signed in int8, less `zero` [out, G], times scale [out, G] of groups of so
    many columns: 32, 64, 128. Without zero points, zero is 8 of 4 bits and 0 of 8, and groups are of 32."""
    padded, bits = filled(numbers)
    kind, words = words_of(scale, zero, group, half, padded.shape[1], bits)
    return IntegerMatrix(blocks_of(padded, bits), words, numbers.shape[1], bits, group, kind, half)


def words_of(
    scale: Tensor, zero: Tensor | None, group: int, half: bool, padded: int, bits: int
) -> tuple[IntegerKind, Tensor]:
    """Scales and zero points as `IntegerMatrix.words`, of so many columns. See `pack_integers`."""
    count = padded // group
    scale = F.pad(scale, (0, count - scale.shape[1]))
    if zero is not None:
        kind, exact = IntegerKind.ZEROS, F.pad(zero.float(), (0, count - zero.shape[1]))
        lower = bits_of(-128.0 - exact if bits == 4 else exact, False)
    else:
        kind, lower, scale = IntegerKind.PAIRS, bits_of(scale[:, ::2], half), scale[:, 1::2]
    return kind, both(bits_of(scale, half), lower)


def pack_rows(numbers: Tensor, scale: Tensor) -> IntegerMatrix:
    """numbers int8 [out, in] times scale float32 [out, 1]."""
    padded, bits = filled(numbers)
    held = scale.float().view(torch.int32).t().contiguous()
    return IntegerMatrix(blocks_of(padded, bits), held, numbers.shape[1], bits, UNIT, IntegerKind.ROWS)


def pack_floats(codes: Tensor, exponents: Tensor) -> IntegerMatrix:
    """codes uint8 [out, in], e2m1 numbers, and exponents uint8 [out, in / 32] of their groups, see `IntegerKind`."""
    padded, bits = filled(codes)
    held = F.pad(exponents, (0, padded.shape[1] // WIDE - exponents.shape[1])).contiguous()
    words, large = held.view(torch.int32).t().contiguous(), bool((exponents > LARGEST_FACTOR).any())
    return IntegerMatrix(blocks_of(padded, bits), words, codes.shape[1], bits, WIDE, IntegerKind.FLOATS, large)


def pack_superblocks(numbers: Tensor, group: int, scales: Tensor, supers: Tensor) -> IntegerMatrix:
    """Blocks of 256 columns as in GGUF's K types. numbers [out, in], 0 to 15 in uint8 or signed in int8; scales uint8
    [out, in / 16], scale and minimum of each group of 32 in turn, or signed scales of groups of 16; supers float16
    [out, in / 256, 2], what scales and minima are multiplied with."""
    inputs, bits = numbers.shape[1], 8 if numbers.dtype is torch.int8 else 4
    about = supers.contiguous().view(torch.int16)
    words = scales.contiguous().view(torch.int32).t().contiguous()
    blocks = blocks_of(numbers.view(torch.uint8), bits)
    held = both(about[..., 0], about[..., 1])
    return IntegerMatrix(blocks, words, inputs, bits, group, IntegerKind.SUPERBLOCKS, supers=held)


def filled(numbers: Tensor) -> tuple[Tensor, int]:
    """(numbers with columns of zeros up to a multiple of UNIT, as bytes; their bits)."""
    missing = -numbers.shape[1] % UNIT
    return F.pad(numbers.contiguous().view(torch.uint8), (0, missing)), 8 if numbers.dtype is torch.int8 else 4


def bits_of(values: Tensor, half: bool) -> Tensor:
    """Values as float16 or bfloat16, as int16."""
    return values.to(HALVES[not half]).contiguous().view(torch.int16)


def both(upper: Tensor, lower: Tensor) -> Tensor:
    """int16 [out, W], twice -> int32 [W, out]."""
    return ((upper.int() << 16) | (lower.int() & 0xFFFF)).t().contiguous()


def blocks_of(numbers: Tensor, bits: int) -> Tensor:
    """numbers uint8 [out, in] -> uint8 [B, out, 32]."""
    outputs = len(numbers)
    if bits == 4:
        halves = numbers.view(outputs, -1, 2, WIDE)
        numbers = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return numbers.reshape(outputs, -1, WIDE).transpose(0, 1).contiguous()


def stack_integers(matrices: Sequence[IntegerMatrix]) -> IntegerMatrix | None:
    """Matrices of experts in one, see `IntegerMatrix`; None where they differ in layout, or some alone have columns
    moved."""
    if len({each.half for each in matrices}) > 1:
        floats = matrices[0].kind is IntegerKind.FLOATS
        matrices = [each._replace(half=True) if floats else in_bfloat16(each) for each in matrices]
    layouts = {
        (
            each.weight.shape,
            each.words.shape,
            each.inputs,
            each.bits,
            each.group,
            each.kind,
            each.half,
            each.order is None,
        )
        for each in matrices
    }
    if len(layouts) > 1:
        return None
    supers = [each.supers for each in matrices if each.supers is not None]
    orders = [each.order for each in matrices if each.order is not None]
    return matrices[0]._replace(
        weight=torch.stack([each.weight for each in matrices]),
        words=torch.stack([each.words for each in matrices]),
        supers=torch.stack(supers) if supers else None,
        order=torch.stack(orders) if orders else None,
    )


def in_bfloat16(matrix: IntegerMatrix) -> IntegerMatrix:
    """A matrix of ZEROS or PAIRS with scales in bfloat16, where that holds them: of those of a checkpoint in bfloat16,
    float16 holds some."""
    upper, lower = halves_of(matrix.words.t(), matrix.half)
    scales = (upper,) if matrix.kind is IntegerKind.ZEROS else (upper, lower)
    if any(not torch.equal(scale.bfloat16().float(), scale) for scale in scales):
        return matrix
    if matrix.kind is IntegerKind.ZEROS:
        lower = halves_of(matrix.words.t(), False)[1]
    return matrix._replace(words=both(bits_of(upper, False), bits_of(lower, False)), half=False)


def dequantize_integers(matrix: IntegerMatrix) -> Tensor:
    """The numbers of a matrix, float32 [out, in], in the order of x."""
    stored = matrix.weight.transpose(0, 1)
    if matrix.bits == 8:
        exact = stored.view(torch.int8).float().flatten(1)
    else:
        codes = torch.stack((stored & 15, stored >> 4), 2).flatten(1)
        exact = floats_of(codes) if matrix.kind is IntegerKind.FLOATS else codes.float()
    scale, zero, minimum = scales_of(matrix)
    if zero is not None:
        exact -= spread(zero, matrix)
    exact *= spread(scale, matrix)
    if minimum is not None:
        exact -= spread(minimum, matrix)
    ordered = exact[:, : matrix.inputs]
    return ordered if matrix.order is None else torch.empty_like(ordered).index_copy_(1, matrix.order, ordered)


def floats_of(codes: Tensor) -> Tensor:
    """The e2m1 numbers that codes of 4 bits stand for, float32."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat((magnitudes, -magnitudes))[codes.int()]


def scales_of(matrix: IntegerMatrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales, zero points and minima, float32 [out, G] of as many groups as there are; None: zero."""
    words = matrix.words.t().contiguous()
    if matrix.kind is IntegerKind.ROWS:
        return words.view(torch.float32), None, None
    if matrix.kind is IntegerKind.FLOATS:
        exponent = torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(1)
        return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32), None, None
    upper, lower = halves_of(words, matrix.half)
    if matrix.kind is IntegerKind.ZEROS:
        zero = halves_of(words, False)[1]
        return upper, -128.0 - zero if matrix.bits == 4 else zero, None
    if matrix.kind is IntegerKind.PAIRS:
        scale = torch.stack((lower, upper), -1).flatten(1)
        return scale, torch.full_like(scale, 8.0) if matrix.bits == 4 else None, None
    assert matrix.supers is not None
    scale, minimum = halves_of(matrix.supers.t().contiguous(), True)
    parts = words.view(torch.uint8).view(len(words), -1, 16)
    if matrix.group < WIDE:
        return (parts.view(torch.int8).float() * scale[..., None]).flatten(1), None, None
    scale, minimum = (parts[..., i::2].float() * each[..., None] for i, each in enumerate((scale, minimum)))
    return scale.flatten(1), None, minimum.flatten(1)


def halves_of(words: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """The numbers in the upper and lower 16 bits of words, float32."""
    upper, lower = ((words >> shift).to(torch.int16).view(HALVES[not half]).float() for shift in (16, 0))
    return upper, lower


def spread(values: Tensor, matrix: IntegerMatrix) -> Tensor:
    """[out, G] -> [out, padded columns], or [out, 1]."""
    return values if values.shape[1] == 1 else values.repeat_interleave(matrix.padded // values.shape[1], 1)
