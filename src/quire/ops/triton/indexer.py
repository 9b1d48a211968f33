"""An indexer's choice of what queries attend to: see `layers/latent.py`.

Each query scores every key of its sequence, which are written out, SCORED_AT_ONCE queries at a time. A program reads a
query's scores once and keeps them in registers, finds the bits of the last one that is chosen one after the other, by
counting those above, and writes down the slots of these and of the first that equal it. Where there are more scores
than registers, each program does so with a part of them, and another one chooses among what these have chosen. The
slots are a block table, of blocks of one token each, and every query a span of its own, so that `attention` attends to
what is chosen as it does to anything else. Nothing depends on other queries, nor on how many parts there are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Angles, Norm, Scores
from quire.ops.quantized import FLOAT8_MAX
from quire.ops.ragged import SCORED_AT_ONCE, LayerKV, RaggedBatch
from quire.ops.triton.attention import attention
from quire.ops.triton.attention_schedule import AttentionPlan, TokenSpans
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import normalize, stored, warps

LEAST_CHUNK, MOST_CHUNK = 512, 2048
"""Keys that a program scores: as many as keep all multiprocessors busy several times, of these."""

KEYS = 128
"""Keys that are multiplied at once, of 16 bits; of float32 a quarter."""

HELD = 8192
"""Scores that a program has in registers at most."""

EACH = 1024
"""Scores of a warp."""

UNKNOWN_SMS = 132
"""Multiprocessors that are kept busy where nothing depends on those of the card."""

LEAST = tl.constexpr(-3.4028234663852886e38)
"""What becomes of scores that are not numbers."""


@kernel
def index_store_kernel(
    key, cos, sin, weight, bias, pool, slots, eps, page_size, stride,
    DIM: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token. The null block stays as it is."""
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    held, turned = d < DIM, d < 2 * HALF
    other = tl.where(d < HALF, d + HALF, tl.where(turned, d - HALF, d))
    gain, shift = tl.load(weight + d, mask=held, other=0.0), tl.load(bias + d, mask=held, other=0.0)
    gain_of, shift_of = tl.load(weight + other, mask=held, other=0.0), tl.load(bias + other, mask=held, other=0.0)
    wait(DEPENDENT)
    release(DEPENDENT)
    c = tl.load(cos + token * HALF + d % HALF, mask=turned, other=1.0)
    s = tl.load(sin + token * HALF + d % HALF, mask=turned, other=0.0)
    slot, start = tl.load(slots + token), key + token * stride
    a = tl.load(start + d, mask=held, other=0.0).to(tl.float32)
    b = tl.load(start + other, mask=held, other=0.0).to(tl.float32)
    a = normalize(a, gain.to(tl.float32), shift.to(tl.float32), held, DIM, eps, True)
    b = normalize(b, gain_of.to(tl.float32), shift_of.to(tl.float32), held, DIM, eps, True)
    made = tl.fma(a, c, tl.where(d < HALF, -b, b) * s)
    tl.store(
        pool + slot * DIM + d, stored(made, 1.0, LARGEST).to(pool.dtype.element_ty),
        mask=(slot + 0 * d >= page_size) & held,
    )  # fmt: skip


def store_index_key(
    key: Tensor, kv: LayerKV, batch: RaggedBatch, angles: Angles, norm: Norm, card: DeviceInfo
) -> None:  # fmt: skip
    """See `Ops.store_index_key`."""
    assert kv.index is not None
    assert norm.bias is not None
    dim = key.shape[-1]
    index_store_kernel[(len(key),)](
        *(key, angles.cos, angles.sin, norm.weight, norm.bias, kv.index, batch.slots, norm.eps, batch.page_size),
        key.stride(0),
        DIM=dim, HALF=angles.cos.shape[-1], LARGEST=FLOAT8_MAX.get(kv.index.dtype, 0.0), BLOCK_D=block(dim),
        DEPENDENT=card.dependent, num_warps=warps(dim), **card.options,
    )  # fmt: skip


@triton.jit
def turned_queries(q, cos, sin, token, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, h, d):
    """A token's queries, rotated, [numbers d, heads h]."""
    real, turned = (h < HEADS)[None, :] & (d < DIM)[:, None], d < 2 * HALF
    other = tl.where(d < HALF, d + HALF, tl.where(turned, d - HALF, d))
    line = q + (token * HEADS + h)[None, :] * DIM
    own = tl.load(line + d[:, None], mask=real, other=0.0)
    beside = tl.load(line + other[:, None], mask=real, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + d % HALF, mask=turned, other=1.0)[:, None]
    s = tl.load(sin + token * HALF + d % HALF, mask=turned, other=0.0)[:, None]
    across = tl.where((d < HALF)[:, None], -(beside * s), beside * s)
    made = tl.fma(own.to(tl.float32), c + tl.zeros_like(across), across)
    return tl.where(turned[:, None], made.to(own.dtype), own)


@triton.jit
def slots_of(table, position, seen, PAGE: tl.constexpr):
    """The slots of a sequence's positions, those that are `seen`."""
    page = tl.load(table + position // PAGE, mask=seen, other=0)
    return page * PAGE + position % PAGE


@kernel(do_not_specialize=["first", "width", "chunk"])
def index_scores_kernel(
    q, cos, sin, weights, pool, table, spans, lengths, scores, first, columns, width, weight_stride, chunk,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The scores of one query for `chunk` keys, ROWS at a time, unless it sees no more than is chosen."""
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * chunk
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    token = first + row
    wait(DEPENDENT)
    release(DEPENDENT)
    length = tl.load(lengths + token)
    if (length > COUNT) & (begin < length):
        pages = table + tl.load(spans + token).to(tl.int64) * columns
        queries = turned_queries(q, cos, sin, token, HEADS, DIM, HALF, h, d)
        gain = tl.load(weights + token * weight_stride + h, mask=h < HEADS, other=0.0).to(tl.float32)
        for start in tl.range(begin, tl.minimum(begin + chunk, length), ROWS, num_stages=STAGES):
            at = start + tl.arange(0, ROWS)
            seen = at < length
            line = slots_of(pages, at, seen, PAGE).to(tl.int64)
            keys = tl.load(pool + line[:, None] * DIM + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
            x = tl.dot(keys.to(q.dtype.element_ty), queries, input_precision=PRECISION)
            x = tl.sum(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * gain[None, :], 1)
            x = tl.where(x > LEAST, x, LEAST)
            tl.store(scores + row * width + at, tl.where(x == 0.0, 0.0, x), mask=seen)


@triton.jit
def ordered(scores, at, length):
    """Scores as integers in the same order; those from `length` on are not read."""
    bits = tl.load(scores + at, mask=at < length, other=0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def last_chosen(key, COUNT: tl.constexpr):
    """The largest number that COUNT of `key` reach, or another one that no more of them reach."""
    last = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << 31, tl.uint32)
    while bit != 0:
        reach = tl.sum((key >= (last | bit)).to(tl.int32), 0)
        last |= bit * (reach >= COUNT).to(tl.uint32)
        bit = (bit >> 1) * (reach != COUNT).to(tl.uint32)
    return last


@triton.jit
def choose_among(
    scores, positions, table, kept_scores, to, begin, count, known,
    COUNT: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Of up to SIZE scores from `begin` on the COUNT highest, in ascending order of position. known: whether there are
    scores, or all are chosen. FIRST, LAST: see `index_choice_kernel`."""
    i = tl.arange(0, SIZE)
    at = begin + i
    key = ordered(scores, at, tl.where(known, begin + count, 0))
    last = tl.full([], 0, tl.uint32)
    if count > COUNT:
        last = last_chosen(tl.where(i < count, key, 0), COUNT)
    equal = (i < count) & (key == last)
    above = (i < count) & ((key > last) | (count <= COUNT))
    # Two numbers in one word.
    WORD: tl.constexpr = tl.uint32 if SIZE <= 1 << 15 else tl.uint64
    HALF: tl.constexpr = 16 if SIZE <= 1 << 15 else 32
    both = tl.cumsum(above.to(WORD) + (equal.to(WORD) << HALF), 0)
    more, alike = (both & ((1 << HALF) - 1)).to(tl.int32), (both >> HALF).to(tl.int32)
    left = COUNT - tl.sum(above.to(tl.int32), 0)
    kept = above | (equal & (alike <= left))
    place = more + tl.minimum(alike, left) - 1
    position = at
    if not FIRST:
        position = tl.load(positions + at, mask=kept, other=0)
    if LAST:
        tl.store(to + place, slots_of(table, position, kept, PAGE), mask=kept)
    else:
        tl.store(to + place, position, mask=kept)
        tl.store(kept_scores + place, tl.load(scores + at, mask=kept & known, other=0.0), mask=kept)


@kernel(do_not_specialize=["first", "width", "kept_width"])
def index_choice_kernel(
    scores, positions, table, spans, lengths, kept_scores, chosen, first, columns, width, kept_width,
    COUNT: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, STAGE: tl.constexpr,
    LAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One query and a part of up to WIDE scores: what it attends to of them, in ascending order of position.

    The first STAGE has scores of all positions, later ones those that parts have chosen. LAST: there is one part, and
    slots are written; before, positions and their scores.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first + row
    wait(DEPENDENT)
    release(DEPENDENT)
    length = tl.load(lengths + token)
    known = length > COUNT
    for _ in tl.static_range(STAGE):
        length = length // WIDE * COUNT + tl.minimum(length % WIDE, COUNT)
    pages, begin = table + tl.load(spans + token).to(tl.int64) * columns, part * WIDE
    count = tl.minimum(length - begin, WIDE)
    to, kept = chosen + (row * kept_width + part * COUNT), kept_scores + (row * kept_width + part * COUNT)
    if LAST:
        to = chosen + token * COUNT
    scores, positions = scores + row * width, positions + row * width
    if (count > 0) & (count <= SIZE // 4):
        choose_among(scores, positions, pages, kept, to, begin, count, known, COUNT, PAGE, SIZE // 4, STAGE == 0, LAST)
    elif count > 0:
        choose_among(scores, positions, pages, kept, to, begin, count, known, COUNT, PAGE, SIZE, STAGE == 0, LAST)


def choose_scored(
    scores: Tensor, batch: AttentionPlan, tokens: TokenSpans, chosen: Tensor, first: int, card: DeviceInfo
) -> None:
    """Write to `chosen` [T, COUNT] what the queries from `first` on choose by `scores` [queries, positions]."""
    queries, bound = scores.shape
    count, stage = chosen.shape[1], 0
    wide, positions, last = max(HELD, block(2 * count)), chosen, False
    while not last:
        parts, last = triton.cdiv(bound, wide), bound <= wide
        size = min(wide, block(bound, 16))
        kept_scores = scores if last else scores.new_empty(queries, parts * count)
        kept = chosen if last else chosen.new_empty(queries, parts * count)
        index_choice_kernel[(queries, parts)](
            *(scores, positions, batch.page_table, tokens.spans, tokens.lengths, kept_scores, kept, first),
            *(batch.page_table.stride(0), scores.stride(0), kept.stride(0)),
            COUNT=count, PAGE=batch.page_size, WIDE=wide, SIZE=size, STAGE=stage, LAST=last,
            DEPENDENT=card.dependent, num_warps=max(4, min(32, size // EACH)), **card.options,
        )  # fmt: skip
        bound, stage = bound // wide * count + min(bound % wide, count), stage + 1
        scores, positions = kept_scores, kept


def choose_positions(
    q: Tensor, weights: Tensor, kv: LayerKV, batch: AttentionPlan, angles: Angles, count: int, card: DeviceInfo
) -> Tensor:  # fmt: skip
    """See `Ops.choose_positions`. Queries that see no more than `count` positions have the slots of all of them."""
    assert kv.index is not None
    (tokens, heads, dim), half, pool = q.shape, angles.cos.shape[-1], kv.index
    spans = spans_by_token(batch, count)
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=q.device)
    at_most = min(tokens, SCORED_AT_ONCE)
    scores = torch.empty(at_most, batch.max_kv, dtype=torch.float32, device=q.device)
    # Their number changes no bits.
    chunk = block(at_most * batch.max_kv // (4 * (card.sms or UNKNOWN_SMS)))
    chunk = max(LEAST_CHUNK, min(MOST_CHUNK, chunk))
    for first in range(0, tokens, SCORED_AT_ONCE):
        some = scores[: tokens - first]
        index_scores_kernel[(len(some), triton.cdiv(batch.max_kv, chunk))](
            *(q, angles.cos, angles.sin, weights, pool, batch.page_table, spans.spans, spans.lengths, some, first),
            *(batch.page_table.stride(0), scores.stride(0), weights.stride(0), chunk),
            HEADS=heads, DIM=dim, HALF=half, PAGE=pool.shape[2], COUNT=count,
            ROWS=KEYS if q.element_size() <= 2 else KEYS // 4, BLOCK_H=block(heads, 16), BLOCK_D=block(dim, 16),
            PRECISION=card.precision, STAGES=3, DEPENDENT=card.dependent, num_warps=4, **card.options,
        )  # fmt: skip
        choose_scored(some, batch, spans, chosen, first, card)
    return chosen


def spans_by_token(batch: AttentionPlan, count: int) -> TokenSpans:
    """A batch's tokens as spans of their own, which see at most `count` positions: made for the first layer."""
    if count not in batch.by_token:
        rows = torch.arange(len(batch.positions), device=batch.positions.device)
        ends = batch.query_start[1:].long()
        spans = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1).int()
        lengths = torch.where(rows < ends[-1], batch.positions + 1, 0).int()
        plans = []
        for some, length in zip(
            rows.split(SCORED_AT_ONCE), lengths.clamp(max=count).split(SCORED_AT_ONCE), strict=True
        ):
            starts = torch.arange(len(some) + 1, dtype=torch.int32, device=rows.device)
            plans.append(AttentionPlan(some, some, some, starts, length, batch.page_table, 1, 1, count))
        batch.by_token[count] = TokenSpans(spans, lengths, plans)
    return batch.by_token[count]


def attend_chosen(
    q: Tensor, rotated: Tensor, kv: LayerKV, batch: AttentionPlan, chosen: Tensor, scale: float, card: DeviceInfo
) -> Tensor:
    """`Ops.latent_attention` to what is chosen."""
    tokens = kv.by_token()
    parts, start = list[Tensor](), 0
    for plan in spans_by_token(batch, chosen.shape[1]).plans:
        rows = slice(start, start + len(plan.kv_len))
        own = replace(plan, page_table=chosen[rows])
        parts.append(attention(q[rows], tokens, own, Scores(scale), card, rotated=rotated[rows], late=True))
        start = rows.stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)
