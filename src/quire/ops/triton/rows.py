"""Norms and activations, one pass over each row: what would be several kernels of plain torch is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Norm
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait


@kernel
def rms_kernel(
    x, residual, weight, before, out, columns, eps, before_eps,
    ADD: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row a program. With ADD the sum is rounded, stored over `residual`, then normed; with BEFORE x is normed and
    rounded first."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * columns + at
    first = scale
    if BEFORE:
        first = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    value = tl.load(x + place, mask=inside, other=0.0)
    if BEFORE:
        wide = value.to(tl.float32)
        value = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / columns + before_eps) * first).to(value.dtype)
    if ADD:
        total = value.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        value = total.to(value.dtype)
        tl.store(residual + place, value, mask=inside)
    exact = value.to(tl.float32)
    exact = exact * tl.rsqrt(tl.sum(exact * exact, 0) / columns + eps) * scale
    tl.store(out + place, exact.to(value.dtype), mask=inside)


@kernel
def layer_norm_kernel(
    x, weight, bias, out, columns, eps, BIAS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    inside = at < columns
    place = tl.program_id(0).to(tl.int64) * columns + at
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    value = tl.load(x + place, mask=inside, other=0.0)
    exact = value.to(tl.float32)
    centred = tl.where(inside, exact - tl.sum(exact, 0) / columns, 0.0)
    exact = centred * tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps) * scale
    if BIAS:
        exact += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, exact.to(value.dtype), mask=inside)


@triton.jit
def tanh(x):
    """1 above 20, in float32; NaN stays NaN."""
    return 1.0 - 2.0 / (tl.exp2(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL) * 2.885390081777927) + 1.0)


@triton.jit
def activate(x, GELU: tl.constexpr):
    """gelu by its tanh approximation, or silu; x float32."""
    if GELU:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return x / (1.0 + tl.exp2(-1.4426950408889634 * tl.maximum(x, -80.0)))


@kernel
def activation_kernel(
    x, out, width, stride, GELU: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """x [T, stride], the gate first and, GATED, `width` numbers later what it gates; out [T, width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait(DEPENDENT)
    release(DEPENDENT)
    gate = tl.load(x + row * stride + at, mask=inside, other=0.0)
    value = activate(gate.to(tl.float32), GELU)
    if GATED:
        value = value * tl.load(x + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, value.to(gate.dtype), mask=inside)


def warps(size: int) -> int:
    """For a row of `size` numbers: up to 16 a thread."""
    return min(16, max(1, size // 512))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, card: DeviceInfo, residual: Tensor | None = None, before: Norm | None = None
) -> Tensor:
    """See `Ops.rms_norm`; with `residual`, `Ops.add_rms_norm`, the sum left in `residual`."""
    x = x.contiguous()
    columns = weight.numel()
    size = block(columns)
    out = torch.empty_like(x)
    first, first_eps = before or (weight, eps)
    rms_kernel[(x.numel() // columns,)](
        *(x, x if residual is None else residual, weight, first, out, columns, eps, first_eps),
        ADD=residual is not None, BEFORE=before is not None, BLOCK=size, DEPENDENT=card.dependent,
        num_warps=warps(size), **card.options,
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, card: DeviceInfo) -> Tensor:
    """See `Ops.layer_norm`."""
    x = x.contiguous()
    columns = weight.numel()
    size = block(columns)
    out = torch.empty_like(x)
    layer_norm_kernel[(x.numel() // columns,)](
        *(x, weight, weight if bias is None else bias, out, columns, eps),
        BIAS=bias is not None, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(size), **card.options,
    )  # fmt: skip
    return out


def activation(x: Tensor, card: DeviceInfo, *, gelu: bool, gated: bool) -> Tensor:
    """x [T, F], or [T, 2F] with the gate first if `gated` -> [T, F]."""
    x = x.contiguous()
    stride = x.shape[-1]
    width = stride // 2 if gated else stride
    rows = x.numel() // stride
    size = min(1024, block(width))
    out = x.new_empty((*x.shape[:-1], width))
    activation_kernel[(rows, triton.cdiv(width, size))](
        *(x, out, width, stride),
        GELU=gelu, GATED=gated, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(2 * size), **card.options,
    )  # fmt: skip
    return out
