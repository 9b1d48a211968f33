"""Attention of long prompts by cuDNN, whose kernels reach half more of a GPU's arithmetic than `attention`'s.

cuDNN reads contiguous K/V, so this serves spans whose lengths the host knows, outside CUDA graphs. A span's blocks are
gathered, which takes a hundredth of the time: each is read by thousands of queries. Its own tokens, and what is left
over of those before, are a causal square; the others are seen by all of its queries, in pieces. The results are merged
by the sums of their weights (Flash-Decoding, Dao et al. 2023).

cuDNN takes 40 ms to plan for shapes that it has not met (measured, H200), so there are few: queries are padded to
multiples of STEP, and pieces of keys are powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import LayerKV, LongSpan, RaggedBatch
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, kernel, release, wait

MOST_DIM = 128
"""The largest head that cuDNN is used for."""

STEP = 512
"""Queries are padded to a multiple of this."""

MOST_QUERIES = 8192
"""Queries of a piece at most."""

PIECES = (65536, 32768, 16384, 8192, 4096, 2048)
"""Keys of a piece that all queries see."""

MERGED = 16
"""Tokens of a program that merges."""


class DenseAttention(Protocol):
    """Attention over contiguous keys and values."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Of queries [1, H, N, D] over keys and values [1, G, L, D]: the result like the queries, and the natural
        logarithm of each query's sum of weights, float32 [1, H, N] or [1, H, N, 1]. causal: N is L, and query i sees
        keys up to i."""


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`DenseAttention` by cuDNN, as torch ships it."""
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return made[0], made[1]


def dense_attention(card: DeviceInfo) -> DenseAttention | None:
    """cuDNN's on a Hopper GPU or a later one; None: there is none."""
    usable = card.capability >= HOPPER and torch.backends.cudnn.is_available()
    return cudnn_attention if usable else None


def serves(q: Tensor) -> bool:
    """Whether cuDNN attends for such queries [T, H, D]."""
    return q.dtype.itemsize == 2 and q.shape[2] <= MOST_DIM


# pages is a row of a table, which begins where the rows before end: one kernel for every row.
@kernel(do_not_specialize=["length"], do_not_specialize_on_alignment=["pages"])
def gather_kv_kernel(
    k, v, pages, keys, values, length, k_unit, v_unit,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, BLOCK_P: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BY_PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (p, g): block p of a sequence, K/V head g: k and v [N, G, B, D] -> keys and values [L, G, D], which are 0
    from `length` on; BY_PAGE: [L / B, G, B, D]. k_unit, v_unit: what one stored unit is."""
    p, group = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    at = p * PAGE + i
    inside = (i < PAGE)[:, None] & (d < DIM)[None, :]
    real = inside & (at < length)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    page = tl.load(pages + p, mask=p * PAGE < length, other=0).to(tl.int64)
    place = ((page * GROUPS + group) * PAGE + i)[:, None] * DIM + d[None, :]
    row = (p.to(tl.int64) * GROUPS + group) * PAGE + i if BY_PAGE else at.to(tl.int64) * GROUPS + group
    to = row[:, None] * DIM + d[None, :]
    kind = keys.dtype.element_ty
    tl.store(keys + to, (tl.load(k + place, mask=real, other=0.0).to(tl.float32) * k_unit).to(kind), mask=inside)
    tl.store(values + to, (tl.load(v + place, mask=real, other=0.0).to(tl.float32) * v_unit).to(kind), mask=inside)


def gather_kv(
    kv: LayerKV, pages: Tensor, length: int, padded: int, dtype: torch.dtype, card: DeviceInfo, by_page: bool = False
) -> tuple[Tensor, Tensor]:
    """Keys and values [padded rounded up to whole blocks, G, D] of the first `length` tokens of a sequence whose blocks
    are pages [P] int32, in `dtype`; zeros behind them. by_page: as pools [P, G, B, D]."""
    _, groups, page, dim = kv.k.shape
    count = -(-padded // page)
    shape = (count, groups, page, dim) if by_page else (count * page, groups, dim)
    keys, values = (kv.k.new_empty(shape, dtype=dtype) for _ in "kv")
    gather_kv_kernel[(count, groups)](
        *(kv.k, kv.v, pages, keys, values, length, float(kv.k_scale), float(kv.v_scale)),
        GROUPS=groups, PAGE=page, BLOCK_P=block(page), DIM=dim, BLOCK_D=block(dim, 16), BY_PAGE=by_page,
        DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    return keys, values


@kernel(do_not_specialize=["tokens", "skipped", "one_stride", "two_stride"])
def merge_kernel(
    one, two, one_sums, two_sums, out, sums, tokens, skipped, one_stride, two_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (i, h): head h of TOKENS tokens. out [T, H, D] of one [.., H, D], from its row `skipped` on, and two [..,
    H, D]; sums [H, T] of one_sums [H, one_stride] and two_sums [H, two_stride], natural logarithms."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d, real = tl.arange(0, BLOCK_D), token < tokens
    wait(DEPENDENT)
    release(DEPENDENT)
    a = tl.load(one_sums + head * one_stride + skipped + token, mask=real, other=0.0)
    b = tl.load(two_sums + head * two_stride + token, mask=real, other=0.0)
    top = tl.maximum(a, b)
    total = tl.exp(a - top) + tl.exp(b - top)
    share = (tl.exp(a - top) / total)[:, None]
    place = (token.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    mask = real[:, None] & (d < DIM)[None, :]
    mine = tl.load(one + skipped.to(tl.int64) * HEADS * DIM + place, mask=mask, other=0.0).to(tl.float32)
    theirs = tl.load(two + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (mine * share + theirs * (1 - share)).to(out.dtype.element_ty), mask=mask)
    tl.store(sums + head * tokens + token, top + tl.log(total), mask=real)


def merged(
    one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor], out: Tensor, skipped: int, card: DeviceInfo
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] of two partial results (rows [.., H, D], sums [H, ..]), and its sums [H, T]. skipped: rows of the
    first that are left out."""
    tokens, heads, dim = out.shape
    sums = one[1].new_empty(heads, tokens)
    merge_kernel[(-(-tokens // MERGED), heads)](
        *(one[0], two[0], one[1], two[1], out, sums, tokens, skipped, one[1].shape[1], two[1].shape[1]),
        HEADS=heads, DIM=dim, BLOCK_D=block(dim, 16), TOKENS=MERGED, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
    return out, sums


def pieces(past: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of `past` keys that all queries see; fewer than the shortest piece are left over."""
    begin = 0
    for size in PIECES:
        for _ in range((past - begin) // size):
            yield begin, begin + size
            begin += size


def round_up(count: int) -> int:
    """To a multiple of STEP."""
    return -(-count // STEP) * STEP


def attend_long(
    out: Tensor, q: Tensor, kv: LayerKV, batch: RaggedBatch, span: LongSpan, scale: float, dense: DenseAttention,
    card: DeviceInfo,
) -> None:  # fmt: skip
    """Write a span's rows of out [T, H, D], whose queries are those rows of q [T, H, D]."""
    length = span.past + span.queries
    pages = batch.page_table[span.span]
    keys, values = gather_kv(kv, pages, length, length + STEP, q.dtype, card)
    for begin in range(0, span.queries, MOST_QUERIES):
        count = min(MOST_QUERIES, span.queries - begin)
        rows = slice(span.first + begin, span.first + begin + count)
        attend_piece(out[rows], q[rows], keys, values, span.past + begin, scale, dense, card)


def attend_piece(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, past: int, scale: float, dense: DenseAttention,
    card: DeviceInfo,
) -> None:  # fmt: skip
    """Write out [n, H, D] for queries q [n, H, D] after `past` of keys and values [L, G, D], which are zeros, or keys
    that no query sees, for STEP tokens behind the last query."""
    count, heads, dim = q.shape
    seen = list(pieces(past))
    over = past - (seen[-1][1] if seen else 0)
    square, wide = round_up(over + count), round_up(count)
    queries = q
    if over or square > count:
        # Rows that are not queries attend too, and their results are not read.
        queries = q.new_zeros(max(square, over + wide), heads, dim)
        queries[over : over + count] = q

    def attend(first: int, rows: int, begin: int, end: int, causal: bool) -> tuple[Tensor, Tensor]:
        x, k, v = (
            part.transpose(0, 1)[None] for part in (queries[first : first + rows], keys[begin:end], values[begin:end])
        )
        made, sums = dense(x, k, v, scale, causal)
        return made[0].transpose(0, 1).contiguous(), sums.reshape(heads, rows)

    result, skipped = attend(0, square, past - over, past - over + square, True), over
    if not seen:
        out.copy_(result[0][over : over + count])
    for index, (begin, end) in enumerate(seen):
        into = out if index + 1 == len(seen) else out.new_empty(out.shape, dtype=torch.float32)
        result, skipped = merged(result, attend(over, wide, begin, end, False), into, skipped, card), 0
