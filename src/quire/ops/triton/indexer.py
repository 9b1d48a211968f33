"""An indexer's choice of what queries attend to: see `layers/latent.py`.

Each query scores every key of its sequence, which are written out, SCORED_AT_ONCE queries at a time. The bits of the
last score that is chosen are then found by counting, eight at a time: a query's scores are cut into parts, whose
programs each count for all of it to read. At last they write down the slots of those above it and of the first that
equal it, each part behind what the parts before it have chosen. These are a block table, of blocks of one token each,
and every query a span of its own, so that `attention` attends to what is chosen as it does to anything else. Nothing
depends on other queries, nor on how many parts there are.
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

BLOCK, MOST_PARTS = 2048, 32
"""Scores that a program counts at once, and into how many parts those of a query are cut at most."""

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
def narrowed(counts, last, left, number: tl.constexpr, PARTS: tl.constexpr):
    """The last score that is chosen, and how many of those alike are, by one digit more; counts: of this digit."""
    digits, p = tl.arange(0, 256), tl.arange(0, PARTS)
    found = tl.sum(tl.load(counts + (number * PARTS + p)[:, None] * 256 + digits[None, :]), 0)
    since = tl.sum(found, 0) - tl.cumsum(found, 0) + found
    digit = tl.sum((since >= left).to(tl.int32), 0) - 1
    left -= tl.sum(tl.where(digits > digit, found, 0), 0)
    return last | (digit.to(tl.uint32) << (24 - 8 * number)), left


@triton.jit
def part_of(length, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The scores of this program: from, to."""
    each = ((length + BLOCK - 1) // BLOCK + PARTS - 1) // PARTS * BLOCK
    begin = tl.program_id(1) * each
    return begin, tl.minimum(begin + each, length)


@kernel(do_not_specialize=["first", "width"])
def index_count_kernel(
    scores, lengths, counts, first, width,
    COUNT: tl.constexpr, NUMBER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of one query and a part of its scores: how many have which digit number NUMBER, of those that begin like the last
    one that is chosen."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    length, own = tl.load(lengths + first + row), scores + row * width
    counts += row * 4 * PARTS * 256
    if length > COUNT:
        last, left = (length * 0).to(tl.uint32), length * 0 + COUNT
        for number in tl.static_range(NUMBER):
            last, left = narrowed(counts, last, left, number, PARTS)
        begin, end = part_of(length, PARTS, BLOCK)
        found = tl.zeros([256], tl.int32)
        for start in range(begin, end, BLOCK):
            at = start + i
            key = ordered(own, at, end)
            alike = at < end
            if NUMBER > 0:
                alike &= (key >> (32 - 8 * NUMBER)) == (last >> (32 - 8 * NUMBER))
            found += tl.histogram(((key >> (24 - 8 * NUMBER)) & 255).to(tl.int32), 256, mask=alike)
        tl.store(counts + (NUMBER * PARTS + tl.program_id(1)) * 256 + tl.arange(0, 256), found)


@kernel(do_not_specialize=["first", "width"])
def index_choice_kernel(
    scores, table, spans, lengths, chosen, counts, first, columns, width,
    COUNT: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One query and a part of its scores: the slots of what it attends to, in ascending order of position."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    token = first + row
    wait(DEPENDENT)
    release(DEPENDENT)
    length, own = tl.load(lengths + token), scores + row * width
    pages, to = table + tl.load(spans + token).to(tl.int64) * columns, chosen + token * COUNT
    begin, end = part_of(length, PARTS, BLOCK)
    if length <= COUNT:
        for start in range(begin, end, BLOCK):
            at = start + i
            tl.store(to + at, slots_of(pages, at, at < end, PAGE), mask=at < end)
    else:
        counts += row * 4 * PARTS * 256
        digits, p = tl.arange(0, 256), tl.arange(0, PARTS)
        before = (p < tl.program_id(1))[:, None]
        last, left = (length * 0).to(tl.uint32), length * 0 + COUNT
        above, equals = length * 0, length * 0
        for number in tl.static_range(4):
            last, left = narrowed(counts, last, left, number, PARTS)
            digit = ((last >> (24 - 8 * number)) & 255).to(tl.int32)
            found = tl.load(counts + (number * PARTS + p)[:, None] * 256 + digits[None, :])
            above += tl.sum(tl.sum(tl.where(before & (digits > digit)[None, :], found, 0), 1), 0)
            if number == 3:
                equals += tl.sum(tl.sum(tl.where(before & (digits == digit)[None, :], found, 0), 1), 0)
        taken = above + tl.minimum(equals, left)
        for start in range(begin, end, BLOCK):
            at = start + i
            key = ordered(own, at, end)
            equal = (at < end) & (key == last)
            kept = equal & (equals + tl.cumsum(equal.to(tl.int32), 0) <= left)
            kept |= (at < end) & (key > last)
            place = taken + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(to + place, slots_of(pages, at, kept, PAGE), mask=kept)
            taken += tl.sum(kept.to(tl.int32), 0)
            equals += tl.sum(equal.to(tl.int32), 0)


def parts_of(queries: int, keys: int, sms: int) -> int:
    """Into how many parts scores are cut, a power of two: two programs a multiprocessor, of a block each at least."""
    wanted = min(MOST_PARTS, 2 * sms // queries, -(-keys // BLOCK))
    return 1 << (max(1, wanted).bit_length() - 1)


def choose_positions(
    q: Tensor, weights: Tensor, kv: LayerKV, batch: AttentionPlan, angles: Angles, count: int, card: DeviceInfo
) -> Tensor:  # fmt: skip
    """See `Ops.choose_positions`. Queries that see no more than `count` positions have the slots of all of them."""
    assert kv.index is not None
    (tokens, heads, dim), half, pool = q.shape, angles.cos.shape[-1], kv.index
    spans, lengths, _ = spans_by_token(batch, count)
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=q.device)
    at_most = min(tokens, SCORED_AT_ONCE)
    scores = torch.empty(at_most, batch.max_kv, dtype=torch.float32, device=q.device)
    about = batch.page_table, spans, lengths
    # Their numbers change no bits.
    sms = card.sms or UNKNOWN_SMS
    parts, chunk = parts_of(at_most, batch.max_kv, sms), block(at_most * batch.max_kv // (4 * sms))
    chunk = max(LEAST_CHUNK, min(MOST_CHUNK, chunk))
    counts = torch.empty(at_most, 4, parts, 256, dtype=torch.int32, device=q.device)
    same = {"COUNT": count, "DEPENDENT": card.dependent, **card.options}
    counting = {"PARTS": parts, "BLOCK": BLOCK, "num_warps": 8, **same}
    for first in range(0, tokens, SCORED_AT_ONCE):
        rows, sizes = min(SCORED_AT_ONCE, tokens - first), (first, batch.page_table.stride(0), scores.stride(0))
        index_scores_kernel[(rows, triton.cdiv(batch.max_kv, chunk))](
            *(q, angles.cos, angles.sin, weights, pool, *about, scores, *sizes, weights.stride(0), chunk),
            HEADS=heads, DIM=dim, HALF=half, PAGE=pool.shape[2], ROWS=KEYS if q.element_size() <= 2 else KEYS // 4,
            BLOCK_H=block(heads, 16), BLOCK_D=block(dim, 16), PRECISION=card.precision, STAGES=3, num_warps=4, **same,
        )  # fmt: skip
        for number in range(4):
            index_count_kernel[(rows, parts)](
                *(scores, lengths, counts, first, scores.stride(0)), NUMBER=number, **counting
            )
        index_choice_kernel[(rows, parts)](scores, *about, chosen, counts, *sizes, PAGE=pool.shape[2], **counting)
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
