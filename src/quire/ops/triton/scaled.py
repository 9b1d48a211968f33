"""Products with quantised matrices: numbers are restored on the way from memory to the multiplier, never in memory.

A byte or half a byte is read for each number, so what is bound by reading gains two or four times. Activations stay as
they are. See `Ops.scaled_linear` and `Ops.halved_linear`, and `skinny` for how few rows are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Gate
from quire.ops.triton.launch import Card, block, release, wait
from quire.ops.triton.skinny import Recipe, given


@triton.jit
def restored(
    weight, scale, zero, groups, n, k, outputs, inputs, count, width, offset,
    HALVED: tl.constexpr, SCALES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [n, k] of the matrix, float32; when SCALES is 0 yet without their row's scale. k: BLOCK_K in a run.

    SCALES: how many a row has in such a run: 0, one for all of the row; 1; 2, any number.
    """
    inside = (n < outputs)[:, None]
    row = n[:, None].to(tl.int64)
    if HALVED:
        pair = tl.min(k, 0) // 2 + tl.arange(0, BLOCK_K // 2)
        here = inside & (pair < inputs // 2)[None, :]
        both = tl.load(weight + row * (inputs // 2) + pair[None, :], mask=here, other=0)
        numbers = tl.interleave((both & 15).to(tl.float32), (both >> 4).to(tl.float32))
        group = tl.load(groups + k, mask=k < inputs, other=0)[None, :]
    else:
        held = inside & (k < inputs)[None, :]
        numbers = tl.load(weight + row * inputs + k[None, :], mask=held, other=0.0).to(tl.float32)
        group = ((k + offset) // width)[None, :]
    if SCALES == 1:
        one = (tl.min(k, 0) + offset) // width
        numbers *= tl.load(scale + n * count + one, mask=n < outputs, other=0.0)[:, None]
    if SCALES == 2:
        held = inside & (k < inputs)[None, :]
        place = row * count + group
        if HALVED:
            numbers -= tl.load(zero + place, mask=held, other=0.0).to(tl.float32)
        numbers *= tl.load(scale + place, mask=held, other=0.0)
    return numbers


@triton.jit
def few_kernel(
    x, weight, scale, zero, groups, bias, out, outputs, inputs, count, width, offset,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, HALVED: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of each row by multiply-adds; what is read of the matrix is asked for before the wait."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    whole = outputs * 2 if GATE else outputs
    tile = restored(
        weight, scale, zero, groups, n, k, whole, inputs, count, width, offset, HALVED, SCALES, BLOCK_K)  # fmt: skip
    gated = tile
    if GATE:
        gated = restored(
            weight, scale, zero, groups, n + outputs, k, whole, inputs, count, width, offset, HALVED, SCALES,
            BLOCK_K)  # fmt: skip
    wait(DEPENDENT)
    release(DEPENDENT)
    for r in tl.static_range(ROWS):
        value = tl.load(x + r * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(tile * value, 1)
        z = y
        if GATE:
            z = tl.sum(gated * value, 1)
        if SCALES == 0:
            y *= tl.load(scale + n, mask=n < outputs, other=0.0)
            if GATE:
                z *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)
        given(y, z, bias, out, r * outputs + n, n, outputs, n < outputs, GATE, GELU, BIAS)


@triton.jit
def many_kernel(
    x, weight, scale, zero, groups, bias, out, rows, outputs, inputs, count, width, offset,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, HALVED: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of ROWS rows on the matrix units, in the dtype of x. Programs of the same outputs follow each
    other, so that the matrix comes from memory once."""
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    whole = outputs * 2 if GATE else outputs
    wait(DEPENDENT)
    release(DEPENDENT)
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        at = start + k
        tile = restored(
            weight, scale, zero, groups, n, at, whole, inputs, count, width, offset, HALVED, SCALES,
            BLOCK_K)  # fmt: skip
        held = (r < rows)[:, None] & (at < inputs)[None, :]
        value = tl.trans(tl.load(x + r[:, None].to(tl.int64) * inputs + at[None, :], mask=held, other=0.0))
        y = tl.dot(tile.to(value.dtype), value, y, input_precision=PRECISION)
        if GATE:
            gated = restored(
                weight, scale, zero, groups, n + outputs, at, whole, inputs, count, width, offset, HALVED, SCALES,
                BLOCK_K)  # fmt: skip
            z = tl.dot(gated.to(value.dtype), value, z, input_precision=PRECISION)
    if SCALES == 0:
        y *= tl.load(scale + n, mask=n < outputs, other=0.0)[:, None]
        if GATE:
            z *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)[:, None]
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (r < rows)[None, :] & (n < outputs)[:, None]
    given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, GELU, BIAS)


MOST = 256
"""Rows up to which the matrix is restored on the way. Above, it is cheaper restored once for all of them."""


class Quantised(NamedTuple):
    """A matrix as `Ops.scaled_linear` (zero and groups None) or `Ops.halved_linear` has it."""

    weight: Tensor
    scale: Tensor
    width: int = 1
    offset: int = 0
    zero: Tensor | None = None
    groups: Tensor | None = None


def recipe(rows: int, outputs: int, inputs: int, halved: bool = False) -> Recipe | None:
    """As `skinny.recipe`, by the bytes a program reads; None where to restore the matrix whole."""
    if rows > MOST:
        return None
    if rows <= 2 and inputs <= 16384:
        whole = block(inputs)
        return Recipe(rows, max(1, min(8, 16384 // whole)), whole, 8)
    small = outputs <= 2048
    return Recipe(block(min(rows, 64), 16), 16 if small else 32 if halved else 64, 256 if small else 128, 4, 4)


def scales(matrix: Quantised, run: int) -> int:
    """What `restored` calls SCALES, for runs of so many columns."""
    if matrix.groups is None and matrix.scale.shape[1] == 1:
        return 0
    return 1 if matrix.groups is None and matrix.width % run == 0 and matrix.offset % run == 0 else 2


def product(x: Tensor, matrix: Quantised, bias: Tensor | None, how: Recipe, card: Card, gate: Gate = "") -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] gated."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = len(matrix.weight) // 2 if gate else len(matrix.weight)
    out = x.new_empty(rows, outputs)
    scale = matrix.scale
    halved = matrix.groups is not None
    zero, groups = (scale, scale) if matrix.zero is None or matrix.groups is None else (matrix.zero, matrix.groups)
    kind = scales(matrix, how.inputs)
    # What waits in shared memory for a number of the matrix, its scale and zero point included, and for one of x.
    how = how.fitted(card, (2 if gate else 1) * (1 + 4 * (kind == 2) + 8 * halved), x.element_size())
    same = {"GATE": gate != "", "GELU": gate == "gelu", "BIAS": bias is not None, "HALVED": halved, "SCALES": kind,
            "ROWS": how.rows, "BLOCK_N": how.outputs, "BLOCK_K": how.inputs, "DEPENDENT": card.dependent,
            "num_warps": how.warps, **card.options}  # fmt: skip
    tensors = (x, matrix.weight, scale, zero, groups, x if bias is None else bias, out)
    sizes = (outputs, inputs, scale.shape[1], matrix.width, matrix.offset)
    columns = triton.cdiv(outputs, how.outputs)
    if how.stages:
        grid = (triton.cdiv(rows, how.rows), columns)
        many_kernel[grid](*tensors, rows, *sizes, STAGES=how.stages, PRECISION=card.precision, **same)
    else:
        few_kernel[(columns,)](*tensors, *sizes, **same)
    return out
