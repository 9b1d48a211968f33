"""What latent attention needs beside attention itself: see `layers/latent.py` for the letters.

Latents and what is rotated of keys are written in one pass, in which queries are rotated, too; products by head are
made in one launch, whatever the number of heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Angles, Norm
from quire.ops.quantized import FLOAT8_MAX
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.triton.gemv import GemmConfig
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import normalize, stored, warps


@triton.jit
def rotate(x, to, first, second, c, s, mask, held, unit, LARGEST: tl.constexpr):
    """Rotate the pairs at x + first and x + second, and store them, in units, at to + first and to + second where
    `held`."""
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=mask, other=0.0).to(tl.float32)
    # As products and sums are fused here, they are in each variant of the kernel.
    tl.store(to + first, stored(tl.fma(a, c, -(b * s)), unit, LARGEST).to(to.dtype.element_ty), mask=held)
    tl.store(to + second, stored(tl.fma(b, c, a * s), unit, LARGEST).to(to.dtype.element_ty), mask=held)


@kernel
def norm_rope_store_latent_kernel(
    q, compressed, cos, sin, weight, rotated, k_pool, v_pool, slots, eps, k_scale, v_scale, page_size, q_stride,
    head_stride, stride,
    HEADS: tl.constexpr, LATENTS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token: program 0 has its latent and its key, the others BLOCK_H heads of its query each. LARGEST, and the
    null block, which stays as it is: see `rows.qk_norm_rope_store_kv_kernel`."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    first, second, mask = p, p + HALF, p < HALF
    if INTERLEAVED:
        first, second = 2 * p, 2 * p + 1
    wait(DEPENDENT)
    release(DEPENDENT)
    c = tl.load(cos + token * HALF + p, mask=mask, other=1.0)
    s = tl.load(sin + token * HALF + p, mask=mask, other=0.0)
    if part == 0:
        at = tl.arange(0, BLOCK_C)
        slot = tl.load(slots + token)
        x = tl.load(compressed + token * stride + at, mask=at < LATENTS, other=0.0).to(tl.float32)
        gain = tl.load(weight + at, mask=at < LATENTS, other=0.0).to(tl.float32)
        latent = normalize(x, gain, 0.0, at < LATENTS, LATENTS, eps, False)
        held = (slot + 0 * at >= page_size) & (at < LATENTS)
        latent = stored(latent, v_scale, LARGEST)
        tl.store(v_pool + slot * LATENTS + at, latent.to(v_pool.dtype.element_ty), mask=held)
        key = compressed + token * stride + LATENTS
        rotate(key, k_pool + slot * (2 * HALF), first, second, c, s, mask, (slot + 0 * p >= page_size) & mask,
               k_scale, LARGEST)  # fmt: skip
    else:
        head = ((part - 1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        inside = (head < HEADS) & mask[None, :]
        start, to = q + token * q_stride + head * head_stride, rotated + (token * HEADS + head) * (2 * HALF)
        rotate(start, to, first[None, :], second[None, :], c[None, :], s[None, :], inside, inside, 1.0, 0.0)


def norm_rope_store_latent(
    q: Tensor, compressed: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm, card: DeviceInfo
) -> Tensor:
    """See `Ops.norm_rope_store_latent`."""
    tokens, heads, _ = q.shape
    latents, half = kv.v.shape[3], angles.cos.shape[-1]
    rotated = q.new_empty(tokens, heads, 2 * half)
    at_once = min(16, block(heads))
    norm_rope_store_latent_kernel[(tokens, 1 + triton.cdiv(heads, at_once))](
        *(q[..., -2 * half :], compressed, angles.cos, angles.sin, norm.weight, rotated, kv.k, kv.v, batch.slots),
        *(norm.eps, kv.k_scale, kv.v_scale, batch.page_size, q.stride(0), q.stride(1), compressed.stride(0)),
        HEADS=heads, LATENTS=latents, HALF=half, INTERLEAVED=angles.interleaved,
        LARGEST=FLOAT8_MAX.get(kv.v.dtype, 0.0), BLOCK_C=block(latents), BLOCK_P=block(half), BLOCK_H=at_once,
        DEPENDENT=card.dependent, num_warps=max(2, warps(latents)), **card.options,
    )  # fmt: skip
    return rotated


@kernel(do_not_specialize=["tokens"])
def heads_linear_kernel(
    x, weight, out, tokens, x_stride, x_head, w_head, w_in, w_out, inputs, outputs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS tokens by BLOCK_N outputs of one head."""
    head, heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    left = x + t.to(tl.int64)[:, None] * x_stride + head * x_head
    right = weight + head * w_head + n[None, :] * w_out
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    for begin in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        at = begin + k
        a = tl.load(left + at[None, :], mask=(t < tokens)[:, None] & (at < inputs)[None, :], other=0.0)
        b = tl.load(right + at[:, None] * w_in, mask=(at < inputs)[:, None] & (n < outputs)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    place = (t.to(tl.int64)[:, None] * heads + head) * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < outputs)[None, :])


HEAD_TILE, EXACT_HEAD_TILE = GemmConfig(64, 64, 64, 4, 3), GemmConfig(16, 32, 32, 4, 2)
"""Of products that may not depend on the batch, and of float32, which takes more registers."""


def heads_config(tokens: int, outputs: int) -> GemmConfig:
    """Few tokens: programs enough to read the matrices at once. Many: tiles for the matrix units."""
    if tokens <= 64:
        return GemmConfig(block(tokens, 16), 64 if outputs >= 256 else 32, 128, 4, 3)
    return GemmConfig(128, 128, 64, 8, 3)


def heads_linear(x: Tensor, weight: Tensor, how: GemmConfig, card: DeviceInfo) -> Tensor:
    """See `Ops.heads_linear`."""
    (tokens, heads, inputs), outputs = x.shape, weight.shape[2]
    out = x.new_empty(tokens, heads, outputs)
    heads_linear_kernel[(triton.cdiv(tokens, how.rows), triton.cdiv(outputs, how.outputs), heads)](
        *(x, weight, out, tokens, x.stride(0), x.stride(1), *weight.stride(), inputs, outputs),
        ROWS=how.rows, BLOCK_N=how.outputs, BLOCK_K=how.inputs, STAGES=how.stages, PRECISION=card.precision,
        DEPENDENT=card.dependent, num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out
