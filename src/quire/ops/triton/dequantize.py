"""A quantised matrix restored whole, for so many rows that this is cheaper than on the way of each of their tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import DeviceInfo, kernel, release, wait
from quire.ops.triton.quantized_gemm import QuantizedMatrix, restored, scales


@kernel
def dequantize_kernel(
    weight, scale, zero, groups, out, outputs, inputs, count, width, offset,
    HALVED: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_K] of out [outputs, inputs]."""
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = restored(
        weight, scale, zero, groups, n, k, outputs, inputs, count, width, offset, HALVED, SCALES, BLOCK_K)  # fmt: skip
    if SCALES == 0:
        tile *= tl.load(scale + n, mask=n < outputs, other=0.0)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    inside = (n < outputs)[:, None] & (k < inputs)[None, :]
    tl.store(out + n[:, None].to(tl.int64) * inputs + k[None, :], tile.to(out.dtype.element_ty), mask=inside)


def dequantize(matrix: QuantizedMatrix, inputs: int, dtype: torch.dtype, card: DeviceInfo) -> Tensor:
    """The matrix [out, inputs] in dtype."""
    outputs = len(matrix.weight)
    out = matrix.scale.new_empty(outputs, inputs, dtype=dtype)
    zero, groups = matrix.beside
    grid = (triton.cdiv(inputs, 512), triton.cdiv(outputs, 8))
    dequantize_kernel[grid](
        *(matrix.weight, matrix.scale, zero, groups, out, outputs, inputs),
        *(matrix.scale.shape[1], matrix.width, matrix.offset), HALVED=matrix.is_int4,
        SCALES=2 * (scales(matrix, 1) > 0), BLOCK_N=8, BLOCK_K=512, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
    return out
