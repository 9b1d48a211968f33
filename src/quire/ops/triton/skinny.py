"""Matrices times a few rows: bound by reading the matrix once, at whatever bandwidth there is.

A library's kernels leave a third to three quarters of it unused at one row (measured, H200). Three things close the
gap: small programs, many at once; the next program's part of the matrix fetched into L2 before the kernel ahead has
ended, which dependent launch allows since nobody writes weights; and what stands around the product done with it: the
sum and the norm before, the gate behind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import Card, block, release, wait
from quire.ops.triton.rows import activate


@triton.jit
def fetch(start, offsets):
    """Ask for the lines at start + offsets to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(start + offsets).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def taken(
    x, residual, gamma, stream, r, k, rows, inputs, keeps,
    NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Columns k of the input rows r, float32, and under NORM their sum with the residual, which is kept in `stream`.

    Second, the same as it enters the product: scaled by gamma. The norm's root is one number a row, and waits.
    """
    inside = (r < rows)[:, None] & (k < inputs)[None, :]
    if EVEN:
        inside = (r < rows)[:, None]
    place = r[:, None] * inputs + k[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    exact = value.to(tl.float32)
    scaled = exact
    if NORM:
        exact += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = exact.to(value.dtype)
        exact = rounded.to(tl.float32)
        if keeps:
            tl.store(stream + place, rounded, mask=inside)
        scaled = exact * tl.load(gamma + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
    return exact, scaled


@triton.jit
def given(y, z, bias, out, r, n, rows, outputs, GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr):
    """y [rows, outputs of this program], and under GATE z, what y gates, to `out`."""
    if BIAS:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        if GATE:
            z += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if GATE:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), GELU) * z.to(out.dtype.element_ty).to(tl.float32)
    inside = (r < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out + r[:, None] * outputs + n[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def vector_kernel(
    x, residual, gamma, weight, bias, out, stream, rows, outputs, inputs, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs by plain multiply-adds, in float32: for a row or a few. The sum over k is made once, at the end.

    EVEN: BLOCK_K divides the inputs. LINES: of 64 numbers in a row of the matrix, a power of two.
    """
    first = tl.program_id(0)
    n, k, r = first * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    row = tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    line = weight + row + k[None, :]
    far = outputs.to(tl.int64) * inputs
    inside = (k < inputs)[None, :]
    tile = tl.load(line, mask=inside, other=0.0, eviction_policy="evict_first")
    gated = tile
    if GATE:
        gated = tl.load(line + far, mask=inside, other=0.0, eviction_policy="evict_first")
    if LINES > 0 and DEPENDENT:
        ahead = tl.minimum(BLOCK_K + 64 * tl.arange(0, LINES), inputs - 1)[None, :]
        fetch(weight, row + ahead)
        if GATE:
            fetch(weight, row + far + ahead)
    wait(DEPENDENT)
    release(DEPENDENT)
    y = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    z = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        inside = (start + BLOCK_K + k < inputs)[None, :]
        later = tl.load(line + start + BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
        later_gated = later
        if GATE:
            later_gated = tl.load(line + far + start + BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
        exact, scaled = taken(x, residual, gamma, stream, r, start + k, rows, inputs, first == 0, NORM, EVEN)
        y += tile.to(tl.float32)[None, :, :] * scaled[:, None, :]
        if GATE:
            z += gated.to(tl.float32)[None, :, :] * scaled[:, None, :]
            gated = later_gated
        if NORM:
            squares += exact * exact
        tile = later
    y, z = tl.sum(y, 2), tl.sum(z, 2)
    if NORM:
        root = tl.rsqrt(tl.sum(squares, 1) / inputs + eps)[:, None]
        y, z = y * root, z * root
    given(y, z, bias, out, r, n, rows, outputs, GATE, GELU, BIAS)


@triton.jit
def matrix_kernel(
    x, residual, gamma, weight, bias, out, stream, rows, outputs, inputs, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs on the matrix units, whose narrow side takes the rows."""
    first = tl.program_id(0)
    n, k, r = first * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    row = tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    far = outputs.to(tl.int64) * inputs
    if LINES > 0 and DEPENDENT:
        ahead = tl.minimum(64 * tl.arange(0, LINES), inputs - 1)[None, :]
        fetch(weight, row + ahead)
        if GATE:
            fetch(weight, row + far + ahead)
    wait(DEPENDENT)
    release(DEPENDENT)
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        line = weight + row + start + k[None, :]
        if EVEN:
            tile = tl.load(line, eviction_policy="evict_first")
        else:
            tile = tl.load(line, mask=(start + k < inputs)[None, :], other=0.0)
        exact, scaled = taken(x, residual, gamma, stream, r, start + k, rows, inputs, first == 0, NORM, EVEN)
        right = tl.trans(scaled.to(x.dtype.element_ty))
        y = tl.dot(tile, right, y, input_precision=PRECISION)
        if GATE:
            if EVEN:
                gated = tl.load(line + far, eviction_policy="evict_first")
            else:
                gated = tl.load(line + far, mask=(start + k < inputs)[None, :], other=0.0)
            z = tl.dot(gated, right, z, input_precision=PRECISION)
        if NORM:
            squares += tl.sum(exact * exact, 1)
    y, z = tl.trans(y), tl.trans(z)
    if NORM:
        root = tl.rsqrt(squares / inputs + eps)[:, None]
        y, z = y * root, z * root
    given(y, z, bias, out, r, n, rows, outputs, GATE, GELU, BIAS)


class Recipe(NamedTuple):
    """How a product is cut. rows: the most at once, a power of two. stages 0: by multiply-adds. ahead: fetch ahead."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 0
    ahead: bool = True


MOST = 16
"""Rows above which a library's kernels are as good."""


def recipe(rows: int, outputs: int, inputs: int) -> Recipe | None:
    """What was fastest, H200; None where the library was."""
    if rows > MOST:
        return None
    if rows == 1:
        return Recipe(1, 4, 512, 2) if inputs <= 1024 else Recipe(1, 4, 1024, 4)
    return Recipe(16, 16 if outputs <= 8192 else 32, 256 if outputs <= 8192 else 128, 4, 4)


class Norm(NamedTuple):
    """What is to be done to x first: add `residual`, norm by `weight` and `eps`."""

    residual: Tensor
    weight: Tensor
    eps: float


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: Recipe, card: Card, norm: Norm | None = None, gate: str = ""
) -> tuple[Tensor, Tensor]:
    """x [T, in], weight [out, in] -> ([T, out], or [T, out / 2] gated by "silu" or "gelu"; the sum under a norm)."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = x.new_empty(rows, outputs)
    stream = torch.empty_like(x) if norm else x
    residual, gamma, eps = norm or (x, x, 0.0)
    kernel = matrix_kernel if how.stages else vector_kernel
    own = {"STAGES": how.stages, "PRECISION": card.precision} if how.stages else {}
    kernel[(triton.cdiv(outputs, how.outputs),)](
        *(x, residual, gamma, weight, x if bias is None else bias, out, stream, rows, outputs, inputs, eps),
        NORM=norm is not None, GATE=gate != "", GELU=gate == "gelu", BIAS=bias is not None,
        EVEN=inputs % how.inputs == 0, ROWS=how.rows, BLOCK_N=how.outputs, BLOCK_K=how.inputs,
        LINES=block(triton.cdiv(inputs, 64)) if how.ahead else 0, DEPENDENT=card.dependent, num_warps=how.warps,
        **own, **card.options,
    )  # fmt: skip
    return out, stream
