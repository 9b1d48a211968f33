"""Matrices times a few rows: bound by reading the matrix once, at whatever bandwidth there is.

A library's kernels leave a third to three quarters of it unused at one row (measured, H200). Three things close the
gap: small programs, many at once; the matrix asked for before the kernel ahead has ended, which dependent launch
allows since nobody writes weights; and the gate behind the product done with it. (The norm before it was tried, too:
it gave 1 % at 1B and took 4 % at 8B.)
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Gate
from quire.ops.triton.launch import Card, block, release, wait
from quire.ops.triton.rows import activate


@triton.jit
def given(y, z, bias, out, place, n, outputs, inside, GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr):
    """y, the outputs n, and under GATE z, what y gates, to out + place."""
    if BIAS:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATE:
            z += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if GATE:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), GELU) * z.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def vector_kernel(
    x, weight, bias, out, outputs, inputs,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of each row by plain multiply-adds, in float32.

    The program's whole part of the matrix is in registers, asked for before the wait: what it waits for is short.
    EVEN: BLOCK_K is all there is of the inputs, and there is no output over.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    line = weight + n[:, None].to(tl.int64) * inputs + k[None, :]
    far = outputs.to(tl.int64) * inputs
    held = (n < outputs)[:, None] & (k < inputs)[None, :]
    if EVEN:
        tile = tl.load(line, eviction_policy="evict_first")
    else:
        tile = tl.load(line, mask=held, other=0.0, eviction_policy="evict_first")
    gated = tile
    if GATE:
        if EVEN:
            gated = tl.load(line + far, eviction_policy="evict_first")
        else:
            gated = tl.load(line + far, mask=held, other=0.0, eviction_policy="evict_first")
    wait(DEPENDENT)
    release(DEPENDENT)
    for r in tl.static_range(ROWS):
        value = tl.load(x + r * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(tile.to(tl.float32) * value, 1)
        z = y
        if GATE:
            z = tl.sum(gated.to(tl.float32) * value, 1)
        given(y, z, bias, out, r * outputs + n, n, outputs, n < outputs, GATE, GELU, BIAS)


@triton.jit
def matrix_kernel(
    x, weight, bias, out, rows, outputs, inputs,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs on the matrix units, whose narrow side takes the rows. EVEN: BLOCK_K divides the inputs."""
    n, k, r = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    line = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs + k[None, :]
    far = outputs.to(tl.int64) * inputs
    wait(DEPENDENT)
    release(DEPENDENT)
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        left = k < inputs - start
        if EVEN:
            tile = tl.load(line + start, eviction_policy="evict_first")
        else:
            tile = tl.load(line + start, mask=left[None, :], other=0.0)
        place = x + r[:, None] * inputs + start + k[None, :]
        if EVEN:
            value = tl.load(place, mask=(r < rows)[:, None], other=0.0)
        else:
            value = tl.load(place, mask=(r < rows)[:, None] & left[None, :], other=0.0)
        y = tl.dot(tile, tl.trans(value), y, input_precision=PRECISION)
        if GATE:
            if EVEN:
                gated = tl.load(line + far + start, eviction_policy="evict_first")
            else:
                gated = tl.load(line + far + start, mask=left[None, :], other=0.0)
            z = tl.dot(gated, tl.trans(value), z, input_precision=PRECISION)
    place = r[None, :] * outputs + n[:, None]
    inside = (r < rows)[None, :] & (n < outputs)[:, None]
    given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, GELU, BIAS)


class Recipe(NamedTuple):
    """How a product is cut. rows: the most at once, a power of two. stages 0: by multiply-adds, the inputs whole."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 0

    def fitted(self, card: Card, matrix: int, row: int) -> Recipe:
        """With as many stages as the card's shared memory has room for. matrix, row: bytes a number of them takes."""
        stage = (self.outputs * matrix + self.rows * row) * self.inputs
        return self._replace(stages=min(self.stages, max(2, card.shared // stage))) if self.stages else self


MOST = 16
"""Rows above which a library's kernels are as good."""


def recipe(rows: int, outputs: int, inputs: int, gated: bool = False) -> Recipe | None:
    """What was fastest of many, H200 (docs/benchmarks); None where a library's kernels were. outputs: of the result.

    One row, or few of a small matrix: by multiply-adds, about 8,192 numbers of the matrix a program. More: on the
    matrix units; long rows of the matrix are cut into few outputs, so that there are programs enough.
    """
    if rows > MOST:
        return None
    if rows <= vectors(outputs, inputs):
        whole = block(inputs)
        return Recipe(rows, max(1, min(8, 8192 // whole)), whole, 4 if whole <= 2048 else 8)
    if outputs <= 2048 or inputs >= 8192:
        return Recipe(MOST, 16, 512, 2, 4)
    if gated and outputs <= 4096:
        return Recipe(MOST, 32, 128, 2, 6)
    return Recipe(MOST, 64, 128, 4, 4 if gated or outputs > 8192 else 6)


def vectors(outputs: int, inputs: int) -> int:
    """Rows up to which multiply-adds win."""
    return 1 if inputs > 8192 else 4 if outputs <= 2048 and inputs <= 4096 else 2


def product(x: Tensor, weight: Tensor, bias: Tensor | None, how: Recipe, card: Card, gate: Gate = "") -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], or [T, out / 2] gated."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = x.new_empty(rows, outputs)
    args = (x, weight, x if bias is None else bias, out)
    same = {"GATE": gate != "", "GELU": gate == "gelu", "BIAS": bias is not None, "BLOCK_N": how.outputs,
            "BLOCK_K": how.inputs, "DEPENDENT": card.dependent, "num_warps": how.warps, **card.options}  # fmt: skip
    grid = (triton.cdiv(outputs, how.outputs),)
    how = how.fitted(card, weight.element_size() * (2 if gate else 1), x.element_size())
    if how.stages:
        matrix_kernel[grid](
            *(*args, rows, outputs, inputs),
            EVEN=inputs % how.inputs == 0, ROWS=how.rows, STAGES=how.stages, PRECISION=card.precision, **same,
        )  # fmt: skip
    else:
        even = inputs == how.inputs and outputs % how.outputs == 0
        vector_kernel[grid](*args, outputs, inputs, EVEN=even, ROWS=rows, **same)
    return out
