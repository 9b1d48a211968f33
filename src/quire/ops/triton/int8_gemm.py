"""Products of int8 activations with int8 weights (W8A8): each token of x is rounded by its own largest number, sums are
integers on the matrix units, and are scaled once. They are exact, and so the same in any batch and any tiling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Gate, num_parts
from quire.ops.triton.gemv import GemmConfig, given
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import GATES, warps

LARGEST = tl.constexpr(127.0)

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
"""The least that a token is scaled by."""

TO_EVEN = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small number and taken off again it leaves the nearest whole one, halves to even."""


@kernel
def quantize_kernel(x, out, steps, inputs, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """A row of x as int8, and what one step of it is, float32."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    value = tl.load(x + row * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
    step = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 0), TINY), LARGEST)
    rounded = (tl.div_rn(value, step) + TO_EVEN) - TO_EVEN
    rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
    tl.store(out + row * inputs + k, rounded.to(tl.int8), mask=k < inputs)
    tl.store(steps + row, step)


@triton.jit
def int8_tile(line, at, inputs, EVEN: tl.constexpr):
    """A tile of rows of the matrix."""
    if EVEN:
        return tl.load(line + at)
    else:
        return tl.load(line + at, mask=at < inputs, other=0)


@kernel(do_not_specialize=["rows"])
def int8_kernel(
    x, steps, weight, scale, bias, out, rows, outputs, inputs,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of ROWS rows. Programs of the same outputs are neighbours, so that the matrix is read from memory
    once."""
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    far = tl.cast(outputs, tl.int64) * inputs
    wait(DEPENDENT)
    release(DEPENDENT)
    source = x + r[:, None].to(tl.int64) * inputs
    y, z = tl.zeros([BLOCK_N, ROWS], tl.int32), tl.zeros([BLOCK_N, ROWS], tl.int32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        at = start + k
        held = (r < rows)[:, None]
        if not EVEN:
            held = held & (at < inputs)
        value = tl.trans(tl.load(source + at, mask=held, other=0))
        y = tl.dot(int8_tile(line, at, inputs, EVEN), value, y, out_dtype=tl.int32)
        if GATE:
            z = tl.dot(int8_tile(line + far, at, inputs, EVEN), value, z, out_dtype=tl.int32)
    step = tl.load(steps + r, mask=r < rows, other=0.0)[None, :]
    exact = y.to(tl.float32) * step * tl.load(scale + n, mask=n < outputs, other=0.0)[:, None]
    gated = exact
    if GATE:
        gated = z.to(tl.float32) * step * tl.load(scale + outputs + n, mask=n < outputs, other=0.0)[:, None]
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (r < rows)[None, :] & (n < outputs)[:, None]
    given(exact, gated, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)


def int8_gemm_config(rows: int, *, gated: bool) -> GemmConfig:
    """How a product is tiled; not measured yet."""
    if rows <= 16:
        return GemmConfig(block(rows, 8), 32, 256, 4, 4)
    if rows <= 64:
        return GemmConfig(block(rows), 64, 128, 4, 4)
    return GemmConfig(128, 64, 128, 8, 3) if gated else GemmConfig(128, 128, 128, 8, 3)


def quantize_rows(x: Tensor, card: DeviceInfo) -> tuple[Tensor, Tensor]:
    """x [T, in] -> int8 [T, in] and float32 [T], see `quantized.quantize_tokens`."""
    rows, inputs = x.shape
    out, steps = x.new_empty(rows, inputs, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    size = block(inputs)
    quantize_kernel[(rows,)](
        x, out, steps, inputs, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(size), **card.options
    )
    return out, steps


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, how: GemmConfig, card: DeviceInfo, gate: Gate = ""
) -> Tensor:
    """See `Ops.int8_linear`."""
    rounded, steps = quantize_rows(x.contiguous(), card)
    rows, inputs = x.shape
    outputs = len(weight) // num_parts(gate)
    out = x.new_empty(rows, outputs)
    how = how.fitted(card, num_parts(gate), 1)
    int8_kernel[(triton.cdiv(rows, how.rows), triton.cdiv(outputs, how.outputs))](
        *(rounded, steps, weight, scale, x if bias is None else bias, out, rows, outputs, inputs),
        GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None, EVEN=inputs % how.inputs == 0, ROWS=how.rows,
        BLOCK_N=how.outputs, BLOCK_K=how.inputs, STAGES=how.stages, DEPENDENT=card.dependent, num_warps=how.warps,
        **card.options,
    )  # fmt: skip
    return out
