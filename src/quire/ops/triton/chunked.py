"""Recurrent layers over long spans, CHUNK tokens at a time: products in place of a loop over tokens.

Letters and formulas as in `recurrence.py`. With G the sum of g up to a token of its chunk, the memory M before the
chunk and the changes c that its tokens make, outputs are exp(G) M^T q + sum up to the token of (q k) exp(G - G') c, and
the memory after token t is exp(G_t) M + sum up to t of exp(G_t - G) k c^T. In Mamba 2 the changes are known. In the
delta rule they are (I + A)^-1 (beta v - beta exp(G) k M), with A the strictly lower triangle of
beta (k k^T) exp(G - G') (the WY representation, Yang et al. 2024 and 2025). The inverse and its products, u with the
first term and w with the second less M, depend on no memory: `solve_kernel` makes them for all chunks at once.
`scan_kernel` then goes from chunk to chunk of each span, with some columns of a memory.

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
from quire.ops.triton.recurrence import COLUMNS, UNIT_EPS, Rule, gates_of, load_state, put_state

CHUNK, DELTA_CHUNK, EXACT_CHUNK = 64, 32, 16
"""Tokens of a chunk: of Mamba 2; of the delta rule, since Triton 3.6 makes of its chunks of 64 asynchronous products
(wgmma) with wrong results on an H100; and in float32, which takes more registers and shared memory."""


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


@kernel
def solve_kernel(
    mixed, a, b, fading, rise, least, most, stride, a_stride, b_stride, apart, q_at, k_at, v_at, chunks, count, u, w,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: u [T, H, V] and w [T, H, K]."""
    mine, head = tl.program_id(0), tl.program_id(1)
    wait(DEPENDENT)
    release(DEPENDENT)
    if mine >= tl.load(count):
        return
    i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    begin, end = tl.load(chunks + 2 * mine), tl.load(chunks + 2 * mine + 1)
    t, inside = (begin + i).to(tl.int64), begin + i < end
    share: tl.constexpr = HEADS // GROUPS
    decay, beta = gates_of(
        a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside, share, True)  # fmt: skip
    total = tl.cumsum(decay, 0)
    part = inside[:, None] & (k < KEYS)[None, :]
    line = mixed + t[:, None] * stride
    key = unit(tl.load(line + k_at + head // share * KEYS + k[None, :], mask=part, other=0.0))
    between = tl.exp(tl.where(i[:, None] > i[None, :], total[:, None] - total[None, :], float("-inf")))
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between * beta[:, None]
    solved = inverse(system, SIZE, LEVELS, PRECISION).to(key.dtype)
    scaled = (key.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(key.dtype)
    made = tl.dot(solved, scaled, input_precision=PRECISION)
    tl.store(w + (t * HEADS + head)[:, None] * KEYS + k[None, :], made.to(w.dtype.element_ty), mask=part)
    for first in range(0, VALUES, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        shape = inside[:, None] & (v < VALUES)[None, :]
        value = tl.load(line + v_at + head * VALUES + v[None, :], mask=shape, other=0.0)
        wanted = (value.to(tl.float32) * beta[:, None]).to(value.dtype)
        change = tl.dot(solved, wanted, input_precision=PRECISION)
        tl.store(u + (t * HEADS + head)[:, None] * VALUES + v[None, :], change.to(u.dtype.element_ty), mask=shape)


@kernel(do_not_specialize=["few"])
def scan_kernel(
    mixed, a, b, fading, rise, least, most, stride, a_stride, b_stride, apart, q_at, k_at, v_at, u, w,
    memory, out, query_start, source, target, snapshot, few,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of a head's memory, through the chunks of a span of more than `few` tokens."""
    head, s = tl.program_id(1), tl.program_id(2)
    wait(DEPENDENT)
    release(DEPENDENT)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    if end - begin <= few:
        return
    i, k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys, values = k < KEYS, v < VALUES
    state = load_state(memory, tl.load(source + s).to(tl.int64), head, k, v, HEADS, KEYS, VALUES)
    share: tl.constexpr = HEADS // GROUPS
    group = head // share
    for first in range(begin, end, SIZE):
        t, inside = (first + i).to(tl.int64), first + i < end
        line, part = mixed + t[:, None] * stride, inside[:, None] & keys[None, :]
        key = tl.load(line + k_at + group * KEYS + k[None, :], mask=part, other=0.0)
        query = tl.load(line + q_at + group * KEYS + k[None, :], mask=part, other=0.0)
        decay, amount = gates_of(
            a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside, share, DELTA)  # fmt: skip
        total = tl.cumsum(decay, 0)
        shape = inside[:, None] & values[None, :]
        old = state.to(mixed.dtype.element_ty)
        gain = 1.0
        if DELTA:
            key, query, gain = unit(key), unit(query), tl.rsqrt(KEYS * 1.0)
            row = (t * HEADS + head)[:, None]
            wide = tl.load(w + row * KEYS + k[None, :], mask=part, other=0.0)
            change = tl.load(u + row * VALUES + v[None, :], mask=shape, other=0.0).to(tl.float32)
            change -= tl.dot(wide, old, input_precision=PRECISION)
        else:
            value = tl.load(line + v_at + head * VALUES + v[None, :], mask=shape, other=0.0)
            change = value.to(tl.float32) * amount[:, None]
        changes = change.to(mixed.dtype.element_ty)
        between = tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
        made = tl.dot(query, old, input_precision=PRECISION) * tl.exp(total)[:, None]
        made = tl.dot(scores.to(mixed.dtype.element_ty), changes, made, input_precision=PRECISION) * gain
        tl.store(out + (t * HEADS + head)[:, None] * VALUES + v[None, :], made, mask=shape)
        wanted = tl.load(target + t, mask=inside, other=0) + tl.load(snapshot + t, mask=inside, other=0) > 0
        here = tl.min(tl.where(wanted, i, SIZE), 0)
        while here < SIZE:
            upto = tl.sum(tl.where(i == here, total, 0.0), 0)
            left = tl.exp(tl.where(i <= here, upto - total, float("-inf")))
            kept = tl.trans((key.to(tl.float32) * left[:, None]).to(mixed.dtype.element_ty))
            after = tl.dot(kept, changes, state * tl.exp(upto), input_precision=PRECISION)
            to, copy = tl.load(target + first + here).to(tl.int64), tl.load(snapshot + first + here).to(tl.int64)
            put_state(memory, to, head, after, k, v, HEADS, KEYS, VALUES)
            put_state(memory, copy, head, after, k, v, HEADS, KEYS, VALUES)
            here = tl.min(tl.where(wanted & (i > here), i, SIZE), 0)
        upto = tl.sum(decay, 0)
        kept = tl.trans((key.to(tl.float32) * tl.exp(upto - total)[:, None]).to(mixed.dtype.element_ty))
        state = tl.dot(kept, changes, state * tl.exp(upto), input_precision=PRECISION)


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
    u = w = out
    if rule.delta:
        u, w = (rule.mixed.new_empty(tokens, heads, each) for each in (values, keys))
        chunks = chunks_of(batch, size, few)
        solve_kernel[(len(chunks.tokens), heads)](
            *(*rule.arguments, *chunks, u, w),
            LEVELS=size.bit_length() - 1, BLOCK_V=min(64, block(values, 16)), num_warps=8, **same,
        )  # fmt: skip
    scan_kernel[(triton.cdiv(values, columns), heads, len(batch.kv_len))](
        *(*rule.arguments, u, w, memory, out, batch.query_start, *states, few),
        BLOCK_V=columns, DELTA=rule.delta, num_warps=8 if exact else 4, **same,
    )  # fmt: skip
