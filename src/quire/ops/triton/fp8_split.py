"""Products of a matrix in eight bits with many rows, by the library's float8 kernels, and exact all the same.

bfloat16 has eight significant bits, e4m3 four. So a token's x, in units of a power of two of its own, is the sum of two
e4m3 numbers: what its first four bits say, and a sixteenth of what the others say. Multiplied as two rows of a float8
product, twice as many at twice the speed of bfloat16, nothing is rounded that would not be in bfloat16, and the matrix
is read as it is stored. (The peer rounds x to eight bits: one row, and another answer.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType

from quire.ops.base import Gate
from quire.ops.triton.gemv import given
from quire.ops.triton.launch import ADA, DeviceInfo, block, kernel, release, wait

AT_ONCE = 1024
"""Rows multiplied at a time: their sums, twice as many in float32, are not to take more memory than a step's own."""

TENSOR = ScalingType.TensorWise


@kernel
def fp8_split_kernel(x, out, unit, inputs, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """A row of x as two: out is [T, 2, in], unit [T].

    The largest lands between 128 and 256: e4m3 reaches 448, and sixteen times what its first four bits leave over is
    below 256. Below 2**-6 e4m3 counts in steps of 2**-9, so there the first bits are those above that step: x is then
    off by 2**-20 of the largest at most. (What is left over comes from the bits, not from e4m3 read back, which the
    assembler of CUDA 12.8 reads from a register that nothing has written yet.)
    """
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    value = tl.load(x + row * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
    exponent = tl.maximum((tl.max(tl.abs(value), 0).to(tl.int32, bitcast=True) >> 23) - 7, 1)
    value *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high = (value.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    high = tl.where(tl.abs(value) < 0.015625, (value + 24576.0) - 24576.0, high)
    low = (value - high) * 16.0
    line = out + row * 2 * inputs + k
    tl.store(line, high.to(tl.float8e4nv), mask=k < inputs)
    tl.store(line + inputs, low.to(tl.float8e4nv), mask=k < inputs)
    tl.store(unit + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def whole(y, unit, scale, n, wide, row, outputs):
    """Outputs n of a row of the product from its two, y [T, 2, wide]."""
    line = y + row * 2 * wide + n
    high = tl.load(line, mask=n < outputs, other=0.0).to(tl.float32)
    low = tl.load(line + wide, mask=n < outputs, other=0.0).to(tl.float32)
    return (high + low * 0.0625) * unit * tl.load(scale + n, mask=n < outputs, other=0.0)


@kernel
def fp8_join_kernel(
    y, unit, scale, bias, out, outputs, wide,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of a row: out is [T, outputs], of `wide` numbers those that gate come first."""
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    one = tl.load(unit + row)
    value = whole(y, one, scale, n, wide, row, outputs)
    gated = value
    if GATE:
        gated = whole(y + outputs, one, scale + outputs, n, wide, row, outputs)
    given(value, gated, bias, out, row * outputs + n, n, outputs, n < outputs, GATE, GELU, BIAS)


def fp8_split(x: Tensor, card: DeviceInfo) -> tuple[Tensor, Tensor]:
    """x [T, in] -> e4m3 [2 T, in], a row's first bits and its last, and the rows' units [T]."""
    rows, inputs = x.shape
    out, unit = x.new_empty(2 * rows, inputs, dtype=torch.float8_e4m3fn), x.new_empty(rows, dtype=torch.float32)
    fp8_split_kernel[(rows,)](
        x, out, unit, inputs, BLOCK=block(inputs), DEPENDENT=card.dependent, num_warps=4 if inputs <= 4096 else 8,
        **card.options,
    )  # fmt: skip
    return out, unit


def fits(weight: Tensor, card: DeviceInfo) -> bool:
    """Whether the library multiplies a matrix [out, in] of e4m3 here."""
    return card.capability >= ADA and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, one: Tensor, card: DeviceInfo, gate: Gate = ""
) -> Tensor:
    """x [T, in], weight e4m3 [out, in], scale [out, 1] -> [T, out], or [T, out / 2] gated. one: 1, float32."""
    x = x.contiguous()
    outputs = len(weight) // 2 if gate else len(weight)
    out = x.new_empty(len(x), outputs)
    for some, into in zip(x.split(AT_ONCE), out.split(AT_ONCE), strict=True):
        halves, unit = fp8_split(some, card)
        y = F.scaled_mm(halves, weight.t(), one, TENSOR, one, TENSOR, output_dtype=torch.float32)
        fp8_join_kernel[(triton.cdiv(outputs, 1024), len(some))](
            y, unit, scale, x if bias is None else bias, into, outputs, len(weight), GATE=gate != "",
            GELU=gate == "gelu", BIAS=bias is not None, BLOCK=1024, DEPENDENT=card.dependent, num_warps=4,
            **card.options,
        )  # fmt: skip
    return out
