"""The recurrence of recurrent layers token by token, which is how decoding and verification go on from a state.

Letters and formulas as in `ops/recurrent.py`. Both rules are one here: `rate` is softplus(a + rise) within limits, g is
-exp(fading) rate, and what is added for a key is `amount` times the value, less, for the delta rule, what the memory
holds for the key. amount: sigmoid(b) for the delta rule, rate for Mamba 2.

Each program has its columns of a memory in registers: it reads them once and writes them once. Lengths, slots and which
tokens' states are kept are read on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import StateSlots
from quire.ops.recurrent import KEY_EPS
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait

FEW = 16
"""Tokens of a span up to which it is computed token by token."""

UNIT_EPS = tl.constexpr(KEY_EPS)

NUMBERS = 4096
"""Of a memory, that a program of two warps has."""


class Rule(NamedTuple):
    """What a recurrence reads. mixed [T, C]: of the convolution; q_at, k_at, v_at: where queries, keys and values begin
    among its columns. a, b: see above, [T, H / G] for each head of keys, `apart` from one to the next; fading, rise
    [H]. least, most: of the rate. delta: which rule it is."""

    mixed: Tensor
    q_at: int
    k_at: int
    v_at: int
    groups: int
    a: Tensor
    b: Tensor
    apart: int
    fading: Tensor
    rise: Tensor
    least: float
    most: float
    delta: bool

    @property
    def arguments(self) -> tuple[Tensor | int | float, ...]:
        """Of kernels that read all of it."""
        return (
            *(self.mixed, self.a, self.b, self.fading, self.rise, self.least, self.most, self.mixed.stride(0)),
            *(self.a.stride(0), self.b.stride(0), self.apart, self.q_at, self.k_at, self.v_at),
        )


@triton.jit
def sigmoid(x):
    """Of float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gates_of(
    a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, inside, SHARE: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """g and the amount of tokens t, 0 outside. SHARE: heads of a head of keys."""
    at = head // SHARE * apart + head % SHARE
    x = tl.load(a + t * a_stride + at, mask=inside, other=0.0).to(tl.float32) + tl.load(rise + head)
    e = tl.exp(-tl.abs(x))
    rate = tl.maximum(x, 0.0) + tl.where(e < 1e-4, e, tl.log(1.0 + e))
    rate = tl.minimum(tl.maximum(rate, least), most)
    decay = -tl.exp(tl.load(fading + head)) * rate
    amount = rate
    if DELTA:
        amount = sigmoid(tl.load(b + t * b_stride + at, mask=inside, other=0.0).to(tl.float32))
    return tl.where(inside, decay, 0.0), tl.where(inside, amount, 0.0)


@triton.jit
def put_state(memory, slot, head, values, k, v, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Store some columns of a memory, unless the slot is 0."""
    place = memory + ((slot * HEADS + head) * KEYS + k)[:, None] * VALUES + v[None, :]
    tl.store(place, values, mask=(k < tl.where(slot > 0, KEYS, 0))[:, None] & (v < VALUES)[None, :])


@triton.jit
def load_state(memory, slot, head, k, v, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Some columns of a memory; zeros of slot 0."""
    place = memory + ((slot * HEADS + head) * KEYS + k)[:, None] * VALUES + v[None, :]
    inside = (k < tl.where(slot > 0, KEYS, 0))[:, None] & (v < VALUES)[None, :]
    return tl.load(place, mask=inside, other=0.0)


@kernel(do_not_specialize=["most_tokens"])
def update_kernel(
    mixed, a, b, fading, rise, least, most, stride, a_stride, b_stride, apart, q_at, k_at, v_at,
    memory, out, query_start, source, target, snapshot, most_tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DELTA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of a head's memory, through the tokens of a span that has at most `most_tokens`."""
    head, s = tl.program_id(1), tl.program_id(2)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys, values = k < KEYS, v < VALUES
    share: tl.constexpr = HEADS // GROUPS
    group = head // share
    both = tl.where(tl.arange(0, 2) == 0, q_at, k_at)[None, :] + group * KEYS + k[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    slot = tl.load(source + s).to(tl.int64)
    # No slot is negative: it is asked for here, so that it is read together with the others, not after them.
    if (begin == end) | (end - begin > most_tokens) | (slot < 0):
        return
    state = load_state(memory, slot, head, k, v, HEADS, KEYS, VALUES)
    for i in range(begin, end):
        t = s.to(tl.int64) * 0 + i
        line = mixed + t * stride
        pair = tl.load(line + both, mask=keys[:, None], other=0.0)
        value = tl.load(line + v_at + head * VALUES + v, mask=values, other=0.0).to(tl.float32)
        to, copy = tl.load(target + t).to(tl.int64), tl.load(snapshot + t).to(tl.int64)
        decay, amount = gates_of(
            a, b, fading, rise, least, most, a_stride, b_stride, apart, t, head, t < end, share, DELTA)  # fmt: skip
        query, key = tl.split(pair.to(tl.float32))
        state *= tl.exp(decay)
        if DELTA:
            query *= tl.rsqrt(tl.sum(query * query, 0) + UNIT_EPS) * tl.rsqrt(KEYS * 1.0)
            key *= tl.rsqrt(tl.sum(key * key, 0) + UNIT_EPS)
            value -= tl.sum(state * key[:, None], 0)
        state += key[:, None] * (value * amount)[None, :]
        place = out + (t * HEADS + head) * VALUES + v
        tl.store(place, tl.sum(state * query[:, None], 0), mask=values)
        put_state(memory, to, head, state, k, v, HEADS, KEYS, VALUES)
        put_state(memory, copy, head, state, k, v, HEADS, KEYS, VALUES)


def update(
    rule: Rule, memory: Tensor, out: Tensor, batch: AttentionPlan, states: StateSlots, few: int, card: DeviceInfo
) -> None:
    """Spans of up to `few` tokens, token by token: out [T, H, V] float32; writes memories [M, H, K, V]."""
    _, heads, keys, values = memory.shape
    columns = min(NUMBERS // block(keys, 16), block(values, 16))
    update_kernel[(triton.cdiv(values, columns), heads, len(batch.kv_len))](
        *rule.arguments, memory, out, batch.query_start, *states, few,
        HEADS=heads, GROUPS=rule.groups, KEYS=keys, VALUES=values, BLOCK_K=block(keys, 16), BLOCK_V=columns,
        DELTA=rule.delta, DEPENDENT=card.dependent, num_warps=2, **card.options,
    )  # fmt: skip
