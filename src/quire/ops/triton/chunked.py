"""Recurrent layers over long spans, CHUNK tokens at a time: products in place of a loop over tokens.

Letters and formulas as in `recurrence.py`. With G the sum of g up to a token of its chunk, the memory M before the
chunk and the changes c that its tokens make, outputs are exp(G) M^T q + sum up to the token of (q k) exp(G - G') c, and
the memory after token t is exp(G_t) M + sum up to t of exp(G_t - G) k c^T. In Mamba 2 the changes are known. In the
delta rule they are (I + A)^-1 (beta v - beta exp(G) k M), with A the strictly lower triangle of
beta (k k^T) exp(G - G') (the WY representation, Yang et al. 2024 and 2025). The inverse and its products, u with the
first term and w with the second less M, depend on no memory: `solve_kernel` makes them for all chunks at once, and
(q k) exp(G - G'). `scan_kernel` then goes from chunk to chunk of each span, with some columns of a memory: as rows, so
that what one product makes is the first factor of the next, in registers.

The inverse is made by blocks of twice the size each time: of [[P, 0], [Q, R]] it is [[P', 0], [-R' Q P', R']], with P'
and R' the inverses of P and R. A series of powers of A would lose all digits where keys are alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import StateSlots
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.recurrence import UNIT_EPS, Rule, gates_of, load_state, put_state

CHUNK, DELTA_CHUNK, EXACT_CHUNK = 64, 32, 16
"""Tokens of a chunk: of Mamba 2; of the delta rule, since Triton 3.6 makes of its chunks of 64 asynchronous products
(wgmma) with wrong results on an H100; and in float32, which takes more registers and shared memory."""

COLUMNS = 32
"""Columns of a memory that a program has."""


class Solved(NamedTuple):
    """What `solve_kernel` makes. u [T, H, V] and w [T, H, K]: see above. near [T, H, SIZE]: (q k) exp(G - G') of each
    token and those of its chunk, queries being unit, over the root of K. factors [3, H, T] float32: G, what makes a
    key unit, and exp(G) times what makes a query so."""

    u: Tensor
    w: Tensor
    near: Tensor
    factors: Tensor


class Chunks(NamedTuple):
    """tokens [bound, 2] int32: the first token of each chunk, and its end; total [1] int32: chunks."""

    tokens: Tensor
    total: Tensor


@kernel(do_not_specialize=["spans", "few"])
def chunks_kernel(query_start, tokens, count, spans, few, SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """One program: the chunks of all spans of more than `few` tokens, one of each at a time."""
    s = tl.arange(0, BLOCK_S)
    begin = tl.load(query_start + s, mask=s < spans, other=0)
    end = tl.load(query_start + s + 1, mask=s < spans, other=0)
    own = tl.where(end - begin > few, (end - begin + SIZE - 1) // SIZE, 0)
    first = tl.cumsum(own, 0) - own
    tl.store(count, tl.sum(own, 0))
    for j in range(tl.max(own, 0)):
        to, at = tokens + 2 * (first + j), begin + j * SIZE
        tl.store(to, at, mask=j < own)
        tl.store(to + 1, tl.minimum(at + SIZE, end), mask=j < own)


def chunks_of(batch: AttentionPlan, size: int, few: int) -> Chunks:
    """The chunks of `size` tokens of a batch: found once a forward."""
    if "chunks" not in batch.spans:
        tokens, spans = len(batch.positions), len(batch.kv_len)
        bound = tokens // size + min(spans, tokens // (few + 1))
        batch.spans["chunks"] = batch.query_start.new_empty(max(1, bound), 2)
        batch.spans["chunk_count"] = batch.query_start.new_empty(1)
        chunks_kernel[(1,)](
            *(batch.query_start, batch.spans["chunks"], batch.spans["chunk_count"], spans, few),
            SIZE=size, BLOCK_S=block(spans, 16), num_warps=4,
        )  # fmt: skip
    return Chunks(batch.spans["chunks"], batch.spans["chunk_count"])


@triton.jit
def unit(x):
    """Rows of length 1, in the dtype of x."""
    exact = x.to(tl.float32)
    return (exact * tl.rsqrt(tl.sum(exact * exact, 1) + UNIT_EPS)[:, None]).to(x.dtype)


@triton.jit
def inverse(lower, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangle [SIZE, SIZE], float32; SIZE is 2^LEVELS."""
    i = tl.arange(0, SIZE)
    row, column = i[:, None], i[None, :]
    made = tl.where(row == column, 1.0, tl.where((row >> 1) == (column >> 1), -lower, 0.0))
    for level in range(1, LEVELS):
        pair = ((row >> level) != (column >> level)) & ((row >> (level + 1)) == (column >> (level + 1)))
        below = tl.dot(made, tl.where(pair, lower, 0.0), input_precision=PRECISION)
        made -= tl.dot(below, made, input_precision=PRECISION)
    return made


@triton.jit
def strengths(
    a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside,
    SHARE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The sum of g up to each token of a chunk, and the amounts."""
    decay, amount = gates_of(
        a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside, SHARE, DELTA)  # fmt: skip
    return tl.cumsum(decay, 0), amount


@triton.jit
def until(total, STRICTLY: tl.constexpr):
    """exp(G - G') of each token and those up to it, or before it; 0 of later ones."""
    i = tl.arange(0, total.shape[0])
    seen = i[:, None] > i[None, :] if STRICTLY else i[:, None] >= i[None, :]
    return tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))


@kernel(do_not_specialize=["tokens"])
def solve_kernel(
    mixed, a, b, fading, rise, least, most, stride, a_stride, b_stride, apart, q_at, k_at, v_at, chunks, count, u, w,
    near, factors, tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: u [T, H, V], w [T, H, K], near [T, H, SIZE] and factors [3, H, T], see `Solved`."""
    mine, head = tl.program_id(0), tl.program_id(1)
    wait(DEPENDENT)
    release(DEPENDENT)
    if mine >= tl.load(count):
        return
    i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    begin, end = tl.load(chunks + 2 * mine), tl.load(chunks + 2 * mine + 1)
    t, inside = (begin + i).to(tl.int64), begin + i < end
    share: tl.constexpr = HEADS // GROUPS
    total, beta = strengths(
        a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside, share, True)  # fmt: skip
    part = inside[:, None] & (k < KEYS)[None, :]
    line = mixed + t[:, None] * stride + head // share * KEYS + k[None, :]
    raw = tl.load(line + k_at, mask=part, other=0.0).to(tl.float32)
    asked = tl.load(line + q_at, mask=part, other=0.0)
    length = tl.rsqrt(tl.sum(raw * raw, 1) + UNIT_EPS)
    exact = asked.to(tl.float32)
    gain = tl.rsqrt(tl.sum(exact * exact, 1) + UNIT_EPS) * tl.rsqrt(KEYS * 1.0)
    place = factors + head * tokens + t
    tl.store(place, total, mask=inside)
    tl.store(place + HEADS * tokens, length, mask=inside)
    tl.store(place + 2 * HEADS * tokens, gain * tl.exp(total), mask=inside)
    key = (raw * length[:, None]).to(asked.dtype)
    scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * until(total, False) * gain[:, None]
    tl.store(
        near + (t * HEADS + head)[:, None] * SIZE + i[None, :], scores.to(near.dtype.element_ty), mask=inside[:, None]
    )
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * until(total, True) * beta[:, None]
    solved = inverse(system, SIZE, LEVELS, PRECISION if key.dtype == tl.float32 else "tf32").to(key.dtype)
    scaled = (key.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(key.dtype)
    made = tl.dot(solved, scaled, input_precision=PRECISION)
    tl.store(w + (t * HEADS + head)[:, None] * KEYS + k[None, :], made.to(w.dtype.element_ty), mask=part)
    line = mixed + t[:, None] * stride + v_at + head * VALUES
    for first in range(0, VALUES, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        shape = inside[:, None] & (v < VALUES)[None, :]
        value = tl.load(line + v[None, :], mask=shape, other=0.0)
        wanted = (value.to(tl.float32) * beta[:, None]).to(value.dtype)
        change = tl.dot(solved, wanted, input_precision=PRECISION)
        tl.store(u + (t * HEADS + head)[:, None] * VALUES + v[None, :], change.to(u.dtype.element_ty), mask=shape)


@triton.jit
def factors_of(
    a, b, fading, rise, least, most, a_stride, b_stride, apart, factors, tokens, t, inside, head,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Of a chunk's tokens: G, what keys and what queries are multiplied by, and values."""
    if DELTA:
        place = factors + head * tokens + t
        total = tl.load(place, mask=inside, other=0.0)
        length = tl.load(place + HEADS * tokens, mask=inside, other=0.0)
        return total, length, tl.load(place + 2 * HEADS * tokens, mask=inside, other=0.0), total
    else:
        total, amount = strengths(
            a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside, SHARE, False)  # fmt: skip
        return total, tl.where(inside, 1.0, 0.0), tl.exp(total), amount


@triton.jit
def pass_chunk(
    state, total, gain, amount, mixed, stride, q_at, k_at, v_at, u, w, near, out, first, end, head, v,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a chunk's tokens; the changes that they make, and their keys. state: columns v of the memory
    before it, as rows."""
    i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    t, inside = (first + i).to(tl.int64), first + i < end
    share: tl.constexpr = HEADS // GROUPS
    part, shape = inside[:, None] & (k < KEYS)[None, :], inside[:, None] & (v < VALUES)[None, :]
    line = mixed + t[:, None] * stride + head // share * KEYS + k[None, :]
    key = tl.load(line + k_at, mask=part, other=0.0)
    query = tl.load(line + q_at, mask=part, other=0.0)
    old, row = state.to(key.dtype), (t * HEADS + head)[:, None]
    if DELTA:
        change = tl.trans(tl.load(u + row * VALUES + v[None, :], mask=shape, other=0.0)).to(tl.float32)
        wide = tl.load(w + row * KEYS + k[None, :], mask=part, other=0.0)
        change -= tl.dot(old, tl.trans(wide), input_precision=PRECISION)
        scores = tl.load(near + row * SIZE + i[None, :], mask=inside[:, None], other=0.0)
    else:
        value = tl.load(mixed + t[:, None] * stride + v_at + head * VALUES + v[None, :], mask=shape, other=0.0)
        change = tl.trans(value).to(tl.float32) * amount[None, :]
        scores = (tl.dot(query, tl.trans(key), input_precision=PRECISION) * until(total, False)).to(key.dtype)
    made = tl.dot(old, tl.trans(query), input_precision=PRECISION) * gain[None, :]
    made = tl.dot(change.to(key.dtype), tl.trans(scores), made, input_precision=PRECISION)
    tl.store(out + row * VALUES + v[None, :], tl.trans(made), mask=shape)
    return change, key


@triton.jit
def changed(state, change, key, total, length, upto, i, last, PRECISION: tl.constexpr):
    """The memory after a chunk's token `last`, up to which G is `upto`."""
    left = length * tl.exp(tl.where(i <= last, upto - total, float("-inf")))
    kept = (change * left[None, :]).to(key.dtype)
    return tl.dot(kept, key, state * tl.exp(upto), input_precision=PRECISION)


@kernel(do_not_specialize=["few", "tokens"])
def scan_kernel(
    mixed, a, b, fading, rise, least, most, stride, a_stride, b_stride, apart, q_at, k_at, v_at, u, w, near, factors,
    memory, out, query_start, source, target, snapshot, few, tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of a head's memory, through the chunks of a span of more than `few` tokens. Chunks after which
    nothing is kept are a loop without branches, so that what the next ones read is on its way."""
    head, s = tl.program_id(1), tl.program_id(2)
    wait(DEPENDENT)
    release(DEPENDENT)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    if end - begin <= few:
        return
    i, k, n = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), tl.arange(0, AT_ONCE)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.trans(load_state(memory, tl.load(source + s).to(tl.int64), head, k, v, HEADS, KEYS, VALUES))
    share: tl.constexpr = HEADS // GROUPS
    first = begin
    while first < end:
        here = end
        for start in range(first, end, AT_ONCE):
            t = start + n
            wanted = tl.load(target + t, mask=t < end, other=0) + tl.load(snapshot + t, mask=t < end, other=0) > 0
            here = tl.minimum(here, tl.min(tl.where(wanted, t, end), 0))
        stop = first + (here - first) // SIZE * SIZE
        total, length, gain, amount = factors_of(
            a, b, fading, rise, least, most, a_stride, b_stride, apart, factors, tokens, (first + i).to(tl.int64),
            first + i < end, head, HEADS, share, DELTA)  # fmt: skip
        for at in range(first, stop, SIZE):
            after = at + SIZE + i
            next_total, next_length, next_gain, next_amount = factors_of(
                a, b, fading, rise, least, most, a_stride, b_stride, apart, factors, tokens, after.to(tl.int64),
                after < end, head, HEADS, share, DELTA)  # fmt: skip
            change, key = pass_chunk(
                state, total, gain, amount, mixed, stride, q_at, k_at, v_at, u, w, near, out, at, end, head, v,
                HEADS, GROUPS, KEYS, VALUES, SIZE, BLOCK_K, DELTA, PRECISION)  # fmt: skip
            upto = tl.min(total, 0)
            state = changed(state, change, key, total, length, upto, i, SIZE, PRECISION)
            total, length, gain, amount = next_total, next_length, next_gain, next_amount
        if stop < end:
            change, key = pass_chunk(
                state, total, gain, amount, mixed, stride, q_at, k_at, v_at, u, w, near, out, stop, end, head, v,
                HEADS, GROUPS, KEYS, VALUES, SIZE, BLOCK_K, DELTA, PRECISION)  # fmt: skip
            t = stop + i
            wanted = tl.load(target + t, mask=t < end, other=0) + tl.load(snapshot + t, mask=t < end, other=0) > 0
            last = tl.min(tl.where(wanted, i, SIZE), 0)
            while last < SIZE:
                upto = tl.sum(tl.where(i == last, total, 0.0), 0)
                kept = tl.trans(changed(state, change, key, total, length, upto, i, last, PRECISION))
                to, copy = tl.load(target + stop + last).to(tl.int64), tl.load(snapshot + stop + last).to(tl.int64)
                put_state(memory, to, head, kept, k, v, HEADS, KEYS, VALUES)
                put_state(memory, copy, head, kept, k, v, HEADS, KEYS, VALUES)
                last = tl.min(tl.where(wanted & (i > last), i, SIZE), 0)
            upto = tl.sum(tl.where(t == tl.minimum(stop + SIZE, end) - 1, total, 0.0), 0)
            state = changed(state, change, key, total, length, upto, i, SIZE, PRECISION)
        first = stop + SIZE


def scan(
    rule: Rule, memory: Tensor, out: Tensor, batch: AttentionPlan, states: StateSlots, few: int, card: DeviceInfo
) -> None:
    """Spans of more than `few` tokens: out [T, H, V] float32; writes memories [M, H, K, V]."""
    (_, heads, keys, values), tokens = memory.shape, len(out)
    exact = rule.mixed.dtype is torch.float32
    size = EXACT_CHUNK if exact else DELTA_CHUNK if rule.delta else CHUNK
    columns = min(COLUMNS, block(values, 16))
    same = {
        "HEADS": heads, "GROUPS": rule.groups, "KEYS": keys, "VALUES": values, "SIZE": size,
        "BLOCK_K": block(keys, 16), "PRECISION": card.precision, "DEPENDENT": card.dependent, **card.options,
    }  # fmt: skip
    solved = Solved(out, out, out, out)
    if rule.delta:
        u, w, near = (rule.mixed.new_empty(tokens, heads, each) for each in (values, keys, size))
        solved = Solved(u, w, near, out.new_empty(3, heads, tokens))
        chunks = chunks_of(batch, size, few)
        solve_kernel[(len(chunks.tokens), heads)](
            *(*rule.arguments, *chunks, *solved, tokens),
            LEVELS=size.bit_length() - 1, BLOCK_V=min(64, block(values, 16)), num_warps=4, **same,
        )  # fmt: skip
    scan_kernel[(triton.cdiv(values, columns), heads, len(batch.kv_len))](
        *(*rule.arguments, *solved, memory, out, batch.query_start, *states, few, tokens),
        BLOCK_V=columns, AT_ONCE=256, DELTA=rule.delta, num_warps=8 if exact else 4, num_stages=3, **same,
    )  # fmt: skip
