"""From the projection to attention in one kernel: norm q and k, turn them by their angles, put k and v into pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Angles, Norms
from quire.ops.float8 import E4M3, E4M3_MAX
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait


@kernel
def qk_norm_rope_store_kv_kernel(
    qkv, cos, sin, q_weight, k_weight, q_out, k_pool, v_pool, slots, q_eps, k_eps, k_scale, v_scale, page_size,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Heads of one token: first those of q, then of k, then of v. Sums and angles in float32, rounded once.

    LARGEST: what pages of eight bits can hold at most, 0 for wider ones, which take no scale. The spare page stays
    zeros: what padding computes may be no number, and drafts that reach past a sequence's last page read there.
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
    """See `Ops.turn_and_write`."""
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
    """The library's cosine and sine: what the hardware approximates is off by too much at large angles."""
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
