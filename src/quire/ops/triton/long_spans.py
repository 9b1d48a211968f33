"""Attention of long prompts by cuDNN, whose kernels reach two thirds more of a GPU's arithmetic than `attention`'s.

cuDNN reads contiguous K/V of one length, so this serves spans whose lengths the host knows, outside CUDA graphs. A
span's blocks are gathered (1 % of the time: each is read by thousands of queries). Its own tokens are a square, which
is causal; what was stored before is seen by all of its queries. The two results are merged by the sums of their weights
(Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import LayerKV, LongSpan, RaggedBatch
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, kernel, release, wait

MOST_DIM = 128
"""The largest head that cuDNN is used for."""

MERGED = 16
"""Tokens of a program that merges."""


class DenseAttention(Protocol):
    """Attention of queries [1, H, N, D] over keys and values [1, G, L, D]: the result like the queries, and the natural
    logarithm of each query's sum of weights, float32 [1, H, N] or [1, H, N, 1]. causal: N is L, and query i sees keys
    up to i."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]: ...


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`DenseAttention` by cuDNN, as torch ships it."""
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return made[0], made[1]


def dense_attention(card: DeviceInfo) -> DenseAttention | None:
    """cuDNN's on a Hopper GPU or a later one; None: there is none."""
    usable = card.capability >= HOPPER and torch.backends.cudnn.is_available()
    return cudnn_attention if usable else None


@kernel
def merge_kernel(
    own, past, own_sums, past_sums, out, tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (i, h): head h of TOKENS tokens. own, past and out [T, H, D]; sums [H, T]."""
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d, real = tl.arange(0, BLOCK_D), token < tokens
    wait(DEPENDENT)
    release(DEPENDENT)
    a = tl.load(own_sums + head * tokens + token, mask=real, other=0.0)
    b = tl.load(past_sums + head * tokens + token, mask=real, other=0.0)
    share = 1 / (1 + tl.exp(b - a))
    place = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    mask = real[:, None] & (d < DIM)[None, :]
    mine, theirs = (tl.load(own + place, mask=mask, other=0.0), tl.load(past + place, mask=mask, other=0.0))
    mixed = mine.to(tl.float32) * share[:, None] + theirs.to(tl.float32) * (1 - share)[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=mask)


def stored(data: Tensor, pages: Tensor, length: int, unit: float, dtype: torch.dtype) -> Tensor:
    """[1, G, length, D] of K/V blocks data [N, G, B, D], in which one stored unit is `unit`."""
    whole = torch.index_select(data.transpose(0, 1), 1, pages).flatten(1, 2)[None, :, :length]
    return whole if whole.dtype is dtype else whole.to(dtype) * unit


def attend_long(
    out: Tensor, q: Tensor, kv: LayerKV, batch: RaggedBatch, span: LongSpan, scale: float, dense: DenseAttention,
    card: DeviceInfo,
) -> None:  # fmt: skip
    """Write a span's rows of out [T, H, D]. q [T, H, D]."""
    _, heads, dim = q.shape
    past, length, rows = span.past, span.past + span.count, slice(span.start, span.start + span.count)
    pages = batch.page_table[span.index, : -(-length // batch.page_size)]
    queries = q[rows].transpose(0, 1)[None]
    k, v = stored(kv.k, pages, length, kv.k_scale, q.dtype), stored(kv.v, pages, length, kv.v_scale, q.dtype)
    own, sums = dense(queries, k[:, :, past:], v[:, :, past:], scale, True)
    mine = own[0].transpose(0, 1)
    if not past:
        out[rows] = mine
        return
    before, others = dense(queries, k[:, :, :past], v[:, :, :past], scale, False)
    merge_kernel[(-(-span.count // MERGED), heads)](
        *(mine.contiguous(), before[0].transpose(0, 1).contiguous(), sums.contiguous(), others.contiguous()),
        *(out[rows], span.count),
        HEADS=heads, DIM=dim, BLOCK_D=block(dim, 16), TOKENS=MERGED, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
