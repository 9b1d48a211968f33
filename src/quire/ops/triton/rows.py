"""Kernels that pass once over each row: norms, activations, rotary angles, and norm, rotation and storing of q, k and
v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import CLAMP_ALPHA, CLAMP_LIMIT, XIELU, Angles, Norm, Norms
from quire.ops.quantized import FLOAT8_MAX
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, release_and_wait, wait


@triton.jit
def normalize(x, weight, bias, inside, columns, eps, CENTRED: tl.constexpr):
    """A row, its weight and its bias, float32, zero outside."""
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / columns, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps) * weight + bias


@kernel
def norm_kernel(
    x, residual, weight, bias, second_weight, third_weight, first_weight, first_bias, beside_weight, gain_of_sum, out,
    second_out, third_out, columns, eps, second_eps, third_eps, first_eps, beside_eps, scale,
    NORMS: tl.constexpr, ADD: tl.constexpr, FIRST: tl.constexpr, BESIDE: tl.constexpr, GAINED: tl.constexpr,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program. With ADD the sum is rounded, stored in `residual`, then normed, NORMS times, each time from
    the sum; with FIRST x is normed before, scaled and rounded, with BESIDE the residual is normed before and rounded;
    with GAINED the rounded sum is multiplied. All norms are of one kind; second, third and BESIDE have no bias."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    gain, shift = row_of(weight, bias, at, inside, BIAS)
    first_gain, first_shift, beside_gain, second_gain, third_gain = gain, shift, gain, gain, gain
    if FIRST:
        first_gain, first_shift = row_of(first_weight, first_bias, at, inside, BIAS)
    if BESIDE:
        beside_gain = row_of(beside_weight, bias, at, inside, False)[0]
    if NORMS > 1:
        second_gain = row_of(second_weight, bias, at, inside, False)[0]
    if NORMS > 2:
        third_gain = row_of(third_weight, bias, at, inside, False)[0]
    place = tl.program_id(0).to(tl.int64) * columns + at
    release_and_wait(DEPENDENT)
    value = tl.load(x + place, mask=inside, other=0.0)
    if FIRST:
        exact = normalize(value.to(tl.float32), first_gain, first_shift, inside, columns, first_eps, CENTRED)
        value = exact.to(value.dtype)
    if ADD:
        added = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        if BESIDE:
            exact = normalize(added, beside_gain, 0.0, inside, columns, beside_eps, CENTRED)
            added = exact.to(value.dtype).to(tl.float32)
        value = add_scaled(value, added, scale, gain_of_sum, GAINED)
        tl.store(residual + place, value, mask=inside)
    exact = value.to(tl.float32)
    if NORMS > 0:
        made = normalize(exact, gain, shift, inside, columns, eps, CENTRED)
        tl.store(out + place, made.to(value.dtype), mask=inside)
    if NORMS > 1:
        made = normalize(exact, second_gain, 0.0, inside, columns, second_eps, CENTRED)
        tl.store(second_out + place, made.to(value.dtype), mask=inside)
    if NORMS > 2:
        made = normalize(exact, third_gain, 0.0, inside, columns, third_eps, CENTRED)
        tl.store(third_out + place, made.to(value.dtype), mask=inside)


@triton.jit
def add_scaled(x, added, scale, gain, GAINED: tl.constexpr):
    """x * scale + added, which is float32, rounded to x's dtype; with GAINED that times gain, rounded."""
    total = x.to(tl.float32) * scale + added
    if GAINED:
        total = total.to(x.dtype).to(tl.float32) * tl.load(gain).to(tl.float32)
    return total.to(x.dtype)


@triton.jit
def row_of(weight, bias, at, inside, BIAS: tl.constexpr):
    """A norm's weight and bias, float32; without BIAS zeros."""
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.zeros_like(gain)
    if BIAS:
        shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return gain, shift


@triton.jit
def tanh(x):
    """1 above 20, in float32; NaN stays NaN."""
    return 1.0 - 2.0 / (tl.exp2(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL) * 2.885390081777927) + 1.0)


SILU, GELU, RELU2, CLAMPED, GELU_ERF, RELU = range(6)
"""Activations."""

GATES: Mapping[str, int] = MappingProxyType(
    {"": -1, "silu": SILU, "gelu": GELU, "gelu_erf": GELU_ERF, "clamped": CLAMPED, "relu": RELU, "relu2": RELU2}
)
"""Those of gates, see `Gate`; negative: none."""

ALPHA, LIMIT = tl.constexpr(CLAMP_ALPHA), tl.constexpr(CLAMP_LIMIT)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """silu, gelu by its tanh approximation or exactly, max(x, 0) or its square, as numbered above; x float32."""
    if KIND == 1:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == 2:
        rest = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return rest * rest
    elif KIND == 4:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 5:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return x / (1.0 + tl.exp2(-1.4426950408889634 * tl.maximum(x, -80.0)))


@triton.jit
def apply_gate(y, z, KIND: tl.constexpr):
    """What a gate makes of its halves y and z, or of y alone if it has one part, float32: see `Gate`."""
    if KIND == 2:
        return activate(y, KIND)
    elif KIND == 3:
        y = tl.minimum(y, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        z = tl.minimum(tl.maximum(z, -LIMIT, propagate_nan=tl.PropagateNan.ALL), LIMIT, tl.PropagateNan.ALL)
        return activate(y * ALPHA, 0) / ALPHA * (z + 1.0)
    else:
        return activate(y, KIND) * z


@kernel
def activation_kernel(
    x, out, width, stride, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """x [T, stride], the gate first and, if GATED, what it gates after `width` numbers; out [T, width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait(DEPENDENT)
    release(DEPENDENT)
    gate = tl.load(x + row * stride + at, mask=inside, other=0.0)
    if GATED:
        other = tl.load(x + row * stride + width + at, mask=inside, other=0.0)
        value = apply_gate(gate.to(tl.float32), other.to(tl.float32), KIND)
    else:
        value = activate(gate.to(tl.float32), KIND)
    tl.store(out + row * width + at, value.to(gate.dtype), mask=inside)


@kernel
def add_shared_kernel(
    routed, shared, logits, out, columns, GATED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """BLOCK columns of a row of routed + shared, which GATED multiplies by the sigmoid of the row's logit."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = at < columns, row * columns + at
    wait(DEPENDENT)
    release(DEPENDENT)
    value = tl.load(shared + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        logit = tl.load(logits + row).to(tl.float32)
        value /= 1.0 + tl.exp2(-1.4426950408889634 * tl.maximum(logit, -80.0))
    total = tl.load(routed + place, mask=inside, other=0.0).to(tl.float32) + value
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def warps(size: int) -> int:
    """Warps for a row of `size` numbers: up to 16 numbers per thread."""
    return min(16, max(1, size // 512))


def norm_warps(size: int, tokens: int, card: DeviceInfo) -> int:
    """Warps for each of so many norms at once. What comes before may fill all but a few multiprocessors, so that many
    rows share one: fewer do with twice as many warps (measured with 64, H200). Sums depend on that."""
    return min(16, warps(size) * (2 if MIN_SPREAD <= tokens <= card.sms else 1))


MIN_SPREAD = 33
"""Rows from which on many share one."""

MOST_NORMS = 3
"""Norms of one sum that `norm_kernel` computes at once."""


def computes_norms(norms: Sequence[Norm]) -> bool:
    """Whether `norms` takes these of one sum: a few RMS norms."""
    return len(norms) <= MOST_NORMS and not any(each.centred or each.bias is not None for each in norms)


def norms(
    x: Tensor,
    of_sum: Sequence[Norm],
    card: DeviceInfo,
    residual: Tensor | None = None,
    before: Norm | None = None,
    scale: float = 1.0,
    gain: Tensor | None = None,
    beside: Norm | None = None,
) -> list[Tensor]:
    """Each of `of_sum`: see `Ops.add_norms`; without `residual`, norms of x. The sum is stored in `residual`.

    beside: a norm that the residual passes before x is added. More norms than one, and `beside`, are as
    `computes_norms` says.
    """
    x = x.contiguous()
    columns = x.shape[-1]
    size = block(columns)
    given = [each for each in (*of_sum, before, beside) if each is not None] or [Norm(x, 0.0)]
    last, second, third = (of_sum[i] if i < len(of_sum) else given[0] for i in range(MOST_NORMS))
    first, side = before or last, beside or last
    outs = [torch.empty_like(x) for _ in of_sum]
    norm_kernel[(x.numel() // columns,)](
        *(x, x if residual is None else residual, last.weight, last.weight if last.bias is None else last.bias),
        *(second.weight, third.weight, first.weight, first.weight if first.bias is None else first.bias),
        *(side.weight, x if gain is None else gain, *outs, *[x] * (MOST_NORMS - len(outs)), columns),
        *(last.eps, second.eps, third.eps, first.eps, side.eps, scale),
        NORMS=len(outs), ADD=residual is not None, FIRST=before is not None, BESIDE=beside is not None,
        GAINED=gain is not None, CENTRED=last.centred, BIAS=last.bias is not None, BLOCK=size,
        DEPENDENT=card.dependent, num_warps=norm_warps(size, x.numel() // columns, card), **card.options,
    )  # fmt: skip
    return outs


def add_shared(routed: Tensor, shared: Tensor, logits: Tensor | None, card: DeviceInfo) -> Tensor:
    """See `Ops.add_shared`."""
    routed, shared = routed.contiguous(), shared.contiguous()
    tokens, columns = routed.shape
    out, size = torch.empty_like(routed), block(min(columns, 2048))
    add_shared_kernel[(tokens, triton.cdiv(columns, size))](
        *(routed, shared, routed if logits is None else logits.contiguous(), out, columns),
        GATED=logits is not None, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(size), **card.options,
    )  # fmt: skip
    return out


@kernel
def sigmoid_mul_kernel(
    x, gate, out, stride, apart, columns, DIM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """BLOCK columns of a row of x times the sigmoid of its gate, whose heads lie `apart`."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    wait(DEPENDENT)
    release(DEPENDENT)
    z = tl.load(gate + row * stride + at // DIM * apart + at % DIM, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (y / (1.0 + tl.exp(-z))).to(out.dtype.element_ty), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor, card: DeviceInfo) -> Tensor:
    """See `Ops.sigmoid_mul`."""
    x, (tokens, heads, dim) = x.contiguous(), gate.shape
    out, size = torch.empty_like(x), block(min(heads * dim, 1024))
    sigmoid_mul_kernel[(tokens, triton.cdiv(heads * dim, size))](
        *(x, gate, out, gate.stride(0), gate.stride(1), heads * dim),
        DIM=dim, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(2 * size), **card.options,
    )  # fmt: skip
    return out


def activation(x: Tensor, card: DeviceInfo, kind: int, *, gated: bool) -> Tensor:
    """x [T, F], or [T, 2F] with the gate first if `gated` -> [T, F]. kind: of `GATES`."""
    x = x.contiguous()
    stride = x.shape[-1]
    width = stride // 2 if gated else stride
    rows = x.numel() // stride
    size = min(1024, block(width))
    out = x.new_empty((*x.shape[:-1], width))
    activation_kernel[(rows, triton.cdiv(width, size))](
        *(x, out, width, stride),
        KIND=kind, GATED=gated, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(2 * size), **card.options,
    )  # fmt: skip
    return out


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@kernel
def xielu_kernel(x, positive, negative, slope, out, count, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """BLOCK numbers of `Ops.xielu`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(slope)
    p, n = softplus(tl.load(positive)), b + softplus(tl.load(negative))
    wait(DEPENDENT)
    release(DEPENDENT)
    given = tl.load(x + at, mask=at < count, other=0.0)
    value = given.to(tl.float32)
    below = n * (tl.exp(tl.minimum(value, 0.0)) - 1.0 - value)
    made = tl.where(value > 0, p * value * value, below) + b * value
    tl.store(out + at, made.to(given.dtype), mask=at < count)


def xielu(x: Tensor, how: XIELU, card: DeviceInfo) -> Tensor:
    """See `Ops.xielu`."""
    x, size = x.contiguous(), 1024
    out = torch.empty_like(x)
    xielu_kernel[(triton.cdiv(x.numel(), size),)](
        *(x, *how, out, x.numel()), BLOCK=size, DEPENDENT=card.dependent, num_warps=4, **card.options
    )
    return out


FEW_HEADS = 2048
"""Heads up to which each is a program, if they are not normed."""


@kernel
def qk_norm_rope_store_kv_kernel(
    qkv, cos, sin, query_gain, q_weight, k_weight, q_out, k_pool, v_pool, slots, q_eps, k_eps, v_eps, k_scale,
    v_scale, page_size,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    GAINED: tl.constexpr, NORMED: tl.constexpr, AFTER: tl.constexpr, V_NORMED: tl.constexpr, WHOLE: tl.constexpr,
    STRIDE: tl.constexpr, APART: tl.constexpr, LARGEST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Heads of one token: first those of q, APART each, then of k, then of v. Sums and angles in float32, rounded once.

    NORMED, AFTER: q and k are normed before they are rotated, or after; V_NORMED: so is v, before. WHOLE: a power of
    two that holds all heads of q, if they are normed together; 0: head by head. STRIDE: between the weights of one head
    and the next. LARGEST: the largest number of an 8-bit pool, 0 for wider ones, which have no scale. The null block
    stays zero: padding may compute NaN, and drafts after a sequence's last block read there.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    turns = d < 2 * HALF
    first, pair = d < HALF, tl.where(d < HALF, d, d - HALF)
    other = tl.where(turns, tl.where(first, d + HALF, pair), d)
    if INTERLEAVED:
        first, pair, other = d % 2 == 0, d // 2, tl.where(turns, d ^ 1, d)
    inside = (head < HEADS + 2 * GROUPS)[:, None] & (d < DIM)[None, :]
    is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + GROUPS)[:, None]
    release_and_wait(DEPENDENT)
    start = qkv + token * (HEADS * APART + 2 * GROUPS * DIM)
    base = start + tl.where(is_q, head[:, None] * APART, HEADS * APART + (head[:, None] - HEADS) * DIM)
    raw = tl.load(base + d[None, :], mask=inside, other=0.0)
    x = raw.to(tl.float32)
    if HALF > 0 or NORMED:
        y = tl.load(base + other[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            if WHOLE > 0:
                squares = tl.where(
                    is_q,
                    mean_square(start, HEADS * DIM, WHOLE),
                    mean_square(start + HEADS * DIM, GROUPS * DIM, WHOLE),
                )
            else:
                squares = tl.sum(x * x, 1)[:, None] / DIM
            root = tl.rsqrt(squares + tl.where(is_q, q_eps, k_eps))
            root = tl.where(is_v, tl.rsqrt(squares + v_eps) if V_NORMED else 1.0, root)
            x = x * root * weight_of(q_weight, k_weight, head, d, HEADS, GROUPS, DIM, STRIDE)
            y = y * root * weight_of(q_weight, k_weight, head, other, HEADS, GROUPS, DIM, STRIDE)
        c = tl.load(cos + token * HALF + pair, mask=turns, other=1.0)[None, :]
        s = tl.load(sin + token * HALF + pair, mask=turns, other=0.0)[None, :]
        x = tl.where(is_v, x, tl.fma(x, c, tl.where(first, -s, s) * y))  # which of both is rounded must not vary
    if AFTER:
        root = tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + tl.where(is_q, q_eps, k_eps))
        x = x * tl.where(is_v, 1.0, root) * weight_of(q_weight, k_weight, head, d, HEADS, GROUPS, DIM, 0)
    slot = tl.load(slots + token)
    group = head - tl.where(head < HEADS + GROUPS, HEADS, HEADS + GROUPS)
    row = ((slot // page_size) * GROUPS + group) * page_size + slot % page_size
    place = row[:, None] * DIM + d[None, :]
    query = x * tl.load(query_gain + token) if GAINED else x
    tl.store(q_out + (token * HEADS + head[:, None]) * DIM + d[None, :], query.to(raw.dtype), mask=inside & is_q)
    held = inside & (row >= GROUPS * page_size)[:, None]
    k_mask = held & (head >= HEADS)[:, None] & (head < HEADS + GROUPS)[:, None]
    x = stored(x, tl.where(is_v, v_scale, k_scale), LARGEST)
    tl.store(k_pool + place, x.to(k_pool.dtype.element_ty), mask=k_mask)
    tl.store(v_pool + place, x.to(v_pool.dtype.element_ty), mask=held & is_v)


@triton.jit
def stored(x, unit, LARGEST: tl.constexpr):
    """x in units of an 8-bit pool, whose largest number is LARGEST; 0: as it is."""
    if LARGEST > 0:
        x = tl.minimum(tl.maximum(x / unit, -LARGEST), LARGEST)
    return x


@triton.jit
def mean_square(start, count: tl.constexpr, BLOCK: tl.constexpr):
    """Of `count` numbers, at most BLOCK."""
    i = tl.arange(0, BLOCK)
    x = tl.load(start + i, mask=i < count, other=0.0).to(tl.float32)
    return tl.sum(x * x, 0) / count


@triton.jit
def weight_of(
    q_weight, k_weight, head, at, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """The norms' weights at dimensions `at` of the heads, 1 for v: [heads, len(at)] float32."""
    inside = (at < DIM)[None, :]
    q_head, k_head = head[:, None] * STRIDE, (head - HEADS)[:, None] * STRIDE
    is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + GROUPS)[:, None]
    q = tl.load(q_weight + q_head + at[None, :], mask=inside & is_q, other=0.0).to(tl.float32)
    k = tl.load(k_weight + k_head + at[None, :], mask=inside & ~is_q & ~is_v, other=0.0).to(tl.float32)
    return tl.where(is_v, 1.0, q + k)


@kernel
def turn_kernel(
    qkv, cos, sin, q_weight, k_weight, q_out, k_pool, v_pool, slots, q_eps, k_eps, k_scale, v_scale, page_size,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_H: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `qk_norm_rope_store_kv_kernel`, where heads are whole, by halves that are rotated together, HALF numbers each,
    and where q and k are normed head by head before or not at all: each number is read once, with its neighbours."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, HALF)
    DIM: tl.constexpr = 2 * HALF
    inside = (h < HEADS + 2 * GROUPS)[:, None]
    is_q, is_v = (h < HEADS)[:, None], (h >= HEADS + GROUPS)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    line = qkv + token * ((HEADS + 2 * GROUPS) * DIM) + h[:, None] * DIM + d[None, :]
    raw = tl.load(line, mask=inside, other=0.0)
    x, y = raw.to(tl.float32), tl.load(line + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        root = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1))[:, None] / DIM + tl.where(is_q, q_eps, k_eps))
        root = tl.where(is_v, 1.0, root)
        q_gain, k_gain = tl.load(q_weight + d).to(tl.float32), tl.load(k_weight + d).to(tl.float32)
        x *= root * tl.where(is_v, 1.0, tl.where(is_q, q_gain[None, :], k_gain[None, :]))
        q_gain, k_gain = tl.load(q_weight + HALF + d).to(tl.float32), tl.load(k_weight + HALF + d).to(tl.float32)
        y *= root * tl.where(is_v, 1.0, tl.where(is_q, q_gain[None, :], k_gain[None, :]))
    c, s = tl.load(cos + token * HALF + d)[None, :], tl.load(sin + token * HALF + d)[None, :]
    # As there, which of both is rounded must not vary.
    x, y = tl.where(is_v, x, tl.fma(x, c, -s * y)), tl.where(is_v, y, tl.fma(y, c, s * x))
    place = q_out + (token * HEADS + h[:, None]) * DIM + d[None, :]
    tl.store(place, x.to(raw.dtype), mask=inside & is_q)
    tl.store(place + HALF, y.to(raw.dtype), mask=inside & is_q)
    slot = tl.load(slots + token)
    group = h - tl.where(h < HEADS + GROUPS, HEADS, HEADS + GROUPS)
    row = ((slot // page_size) * GROUPS + group) * page_size + slot % page_size
    held = inside & (row >= GROUPS * page_size)[:, None] & (h >= HEADS)[:, None]
    unit = tl.where(is_v, v_scale, k_scale)
    x, y, at = stored(x, unit, LARGEST), stored(y, unit, LARGEST), row[:, None] * DIM + d[None, :]
    kind = k_pool.dtype.element_ty
    tl.store(k_pool + at, x.to(kind), mask=held & (h < HEADS + GROUPS)[:, None])
    tl.store(k_pool + at + HALF, y.to(kind), mask=held & (h < HEADS + GROUPS)[:, None])
    tl.store(v_pool + at, x.to(kind), mask=held & is_v)
    tl.store(v_pool + at + HALF, y.to(kind), mask=held & is_v)


def turns_halves(angles: Angles, dim: int, norms: Norms | None) -> bool:
    """Whether `turn_kernel` knows such heads."""
    plain = norms is None or (not norms.after_rope and norms.v_eps is None and len(norms.q.weight) == dim)
    half = angles.cos.shape[-1]
    return plain and not angles.interleaved and angles.query_gain is None and 2 * half == dim and half == block(half)


def qk_norm_rope_store_kv(
    qkv: Tensor,
    heads: int,
    kv: LayerKV,
    batch: RaggedBatch,
    angles: Angles,
    norms: Norms | None,
    card: DeviceInfo,
    *,
    gated: bool = False,
) -> Tensor:
    """See `Ops.qk_norm_rope_store_kv`."""
    cos, sin, interleaved, gain = angles
    page_size, dim = kv.k.shape[2:]
    whole_norm = norms is not None and len(norms.q.weight) > dim
    assert not (gated and whole_norm), "queries that are normed together lie side by side"
    tokens, groups = len(qkv), (qkv.shape[-1] // dim - heads * (1 + gated)) // 2
    q_norm, k_norm, after, v_eps = norms or (Norm(cos, 0.0), Norm(cos, 0.0), False, None)
    whole = block(heads * dim) if whole_norm else 0
    out = qkv.new_empty(tokens, heads, dim)
    total = heads + 2 * groups
    # Few tokens: as many programs as there are heads. Many: longer ones, so that starting them is not the cost. Sums of
    # norms depend on that; rotations, whose order of rounding is fixed in this kernel, do not.
    at_once = 1 if tokens * total <= (16 * card.sms if norms else FEW_HEADS) else min(16, block(total))
    if card.sms and at_once > 1 and not gated and turns_halves(angles, dim, norms):
        turn_kernel[(tokens, triton.cdiv(total, at_once))](
            *(qkv.contiguous(), cos, sin, q_norm.weight, k_norm.weight, out, kv.k, kv.v),
            *(batch.slots, q_norm.eps, k_norm.eps, kv.k_scale, kv.v_scale, page_size),
            HEADS=heads, GROUPS=groups, HALF=cos.shape[-1], NORMED=norms is not None,
            LARGEST=FLOAT8_MAX.get(kv.k.dtype, 0.0), BLOCK_H=at_once, DEPENDENT=card.dependent, num_warps=4,
            **card.options,
        )  # fmt: skip
        return out
    qk_norm_rope_store_kv_kernel[(tokens, triton.cdiv(total, at_once))](
        *(qkv.contiguous(), cos, sin, cos if gain is None else gain, q_norm.weight, k_norm.weight, out, kv.k, kv.v),
        *(batch.slots, q_norm.eps, k_norm.eps, v_eps or 0.0, kv.k_scale, kv.v_scale, page_size),
        HEADS=heads, GROUPS=groups, DIM=dim, HALF=cos.shape[-1], INTERLEAVED=interleaved, GAINED=gain is not None,
        NORMED=norms is not None and not after, AFTER=after, V_NORMED=v_eps is not None, WHOLE=whole,
        STRIDE=dim if whole else 0, APART=dim * (1 + gated),
        LARGEST=FLOAT8_MAX.get(kv.k.dtype, 0.0),
        BLOCK_H=at_once, BLOCK_D=block(dim), DEPENDENT=card.dependent,
        num_warps=max(1 if at_once < 8 else 4, warps(whole)), **card.options,
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


def angles(positions: Tensor, frequencies: Tensor, gain: float, card: DeviceInfo) -> tuple[Tensor, Tensor]:
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
