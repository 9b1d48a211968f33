"""Kernels that pass once over each row: norms, activations, rotary angles, and norm, rotation and storing of q, k and
v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Angles, Norm, Norms
from quire.ops.quantized import E4M3, E4M3_MAX
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait


@kernel
def rms_kernel(
    x, residual, weight, before, out, columns, eps, before_eps,
    ADD: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program. With ADD the sum is rounded, stored in `residual`, then normed; with BEFORE x is normed and
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
    """One row per program."""
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
    """x [T, stride], the gate first and, if GATED, what it gates after `width` numbers; out [T, width]."""
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
    """Warps for a row of `size` numbers: up to 16 numbers per thread."""
    return min(16, max(1, size // 512))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, card: DeviceInfo, residual: Tensor | None = None, before: Norm | None = None
) -> Tensor:
    """See `Ops.rms_norm`; with `residual`, `Ops.add_rms_norm`, with the sum stored in `residual`."""
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


@kernel
def qk_norm_rope_store_kv_kernel(
    qkv, cos, sin, q_weight, k_weight, q_out, k_pool, v_pool, slots, q_eps, k_eps, k_scale, v_scale, page_size,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Heads of one token: first those of q, then of k, then of v. Sums and angles in float32, rounded once.

    LARGEST: the largest number of an 8-bit pool, 0 for wider ones, which have no scale. The null block stays zero:
    padding may compute NaN, and drafts after a sequence's last block read there.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    inside = (head < HEADS + 2 * GROUPS)[:, None] & (d < DIM)[None, :]
    is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + GROUPS)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    base = qkv + (token * (HEADS + 2 * GROUPS) + head[:, None]) * DIM
    raw = tl.load(base + d[None, :], mask=inside, other=0.0)
    x = raw.to(tl.float32)
    if HALF > 0 or NORMED:
        y = tl.load(base + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            eps = tl.where(is_q, q_eps, k_eps)
            root = tl.where(is_v, 1.0, tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + eps))
            x = x * root * scale_of(q_weight, k_weight, d, is_q, is_v, DIM)
            y = y * root * scale_of(q_weight, k_weight, other, is_q, is_v, DIM)
        turns = d < 2 * HALF
        angle = token * HALF + tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=turns, other=1.0)[None, :]
        s = tl.load(sin + angle, mask=turns, other=0.0)[None, :]
        x = tl.where(is_v, x, x * c + tl.where(d < HALF, -s, s) * y)
    slot = tl.load(slots + token)
    group = head - tl.where(head < HEADS + GROUPS, HEADS, HEADS + GROUPS)
    row = ((slot // page_size) * GROUPS + group) * page_size + slot % page_size
    place = row[:, None] * DIM + d[None, :]
    tl.store(q_out + (token * HEADS + head[:, None]) * DIM + d[None, :], x.to(raw.dtype), mask=inside & is_q)
    held = inside & (row >= GROUPS * page_size)[:, None]
    k_mask = held & (head >= HEADS)[:, None] & (head < HEADS + GROUPS)[:, None]
    if LARGEST > 0:
        x = tl.minimum(tl.maximum(tl.where(is_v, x / v_scale, x / k_scale), -LARGEST), LARGEST)
    tl.store(k_pool + place, x.to(k_pool.dtype.element_ty), mask=k_mask)
    tl.store(v_pool + place, x.to(v_pool.dtype.element_ty), mask=held & is_v)


@triton.jit
def scale_of(q_weight, k_weight, at, is_q, is_v, DIM: tl.constexpr):
    """The norms' weights at `at`, 1 for v: [heads, len(at)] float32."""
    q = tl.load(q_weight + at, mask=at < DIM, other=0.0).to(tl.float32)
    k = tl.load(k_weight + at, mask=at < DIM, other=0.0).to(tl.float32)
    return tl.where(is_v, 1.0, tl.where(is_q, q[None, :], k[None, :]))


def qk_norm_rope_store_kv(
    qkv: Tensor,
    heads: int,
    kv: LayerKV,
    batch: RaggedBatch,
    angles: Angles,
    norms: Norms | None,
    card: DeviceInfo,
) -> Tensor:
    """See `Ops.qk_norm_rope_store_kv`."""
    cos, sin = angles
    _, groups, page_size, dim = kv.k.shape
    tokens = qkv.shape[0]
    (q_weight, q_eps), (k_weight, k_eps) = norms or ((cos, 0.0), (cos, 0.0))
    out = qkv.new_empty(tokens, heads, dim)
    total = heads + 2 * groups
    # Few tokens: as many programs as there are heads. Many: longer ones, so that starting them is not the cost.
    at_once = 1 if tokens * total <= 16 * card.sms else min(16, block(total))
    qk_norm_rope_store_kv_kernel[(tokens, triton.cdiv(total, at_once))](
        *(qkv.contiguous(), cos, sin, q_weight, k_weight, out, kv.k, kv.v, batch.slots, q_eps, k_eps),
        *(kv.k_scale, kv.v_scale, page_size),
        HEADS=heads, GROUPS=groups, DIM=dim, HALF=cos.shape[-1], NORMED=norms is not None,
        LARGEST=E4M3_MAX if kv.k.dtype is E4M3 else 0.0,
        BLOCK_H=at_once, BLOCK_D=block(dim), DEPENDENT=card.dependent, num_warps=1 if at_once < 8 else 4,
        **card.options,
    )  # fmt: skip
    return out


@kernel(do_not_specialize=["total"])
def angles_kernel(
    positions, frequencies, cos, sin, total, half, gain,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """By the library's cosine and sine: the hardware's approximations are off by too much at large angles."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    pace = tl.load(frequencies + i % half, mask=inside, other=0.0)
    wait(DEPENDENT)
    release(DEPENDENT)
    angle = tl.load(positions + i // half, mask=inside, other=0).to(tl.float32) * pace
    if INTERPRETED:
        x, y = tl.cos(angle), tl.sin(angle)
    else:
        x, y = tl.extra.cuda.libdevice.cos(angle), tl.extra.cuda.libdevice.sin(angle)
    tl.store(cos + i, x * gain, mask=inside)
    tl.store(sin + i, y * gain, mask=inside)


def angles(positions: Tensor, frequencies: Tensor, gain: float, card: DeviceInfo) -> Angles:
    """See `Ops.angles`."""
    half = len(frequencies)
    cos, sin = frequencies.new_empty(2, len(positions), half).unbind()
    if half:
        total = cos.numel()
        angles_kernel[(triton.cdiv(total, 256),)](
            *(positions, frequencies, cos, sin, total, half, gain),
            BLOCK=256, INTERPRETED=not positions.is_cuda, DEPENDENT=card.dependent, num_warps=2, **card.options,
        )  # fmt: skip
    return cos, sin
