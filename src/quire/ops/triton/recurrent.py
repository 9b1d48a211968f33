"""Recurrent layers: the gated delta rule and the selective scan of Mamba 2, with states in slots.

Letters and formulas as in `ops/recurrent.py`. A layer is a convolution, whose windows are states, too; the recurrence,
token by token for short spans (`recurrence.py`), in chunks for long ones (`chunked.py`); and a norm with a gate.

A slot that one span reads must not be written by another in the same step: programs run at the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import DeltaInputs, DeltaWeights, ScanInputs, ScanWeights
from quire.ops.ragged import LayerState
from quire.ops.recurrent import slots_of
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.chunked import scan
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.recurrence import Rule, sigmoid, update


@kernel(do_not_specialize=["tokens", "spans"])
def spans_kernel(query_start, token_span, tokens, spans, BLOCK_S: tl.constexpr, ROWS: tl.constexpr):
    """ROWS tokens: the span of each; -1: padding."""
    t, s = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_S)
    ends = tl.load(query_start + 1 + s, mask=s < spans, other=2147483647)
    span = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    tl.store(token_span + t, tl.where(span < spans, span, -1), mask=t < tokens)


def spans_of(batch: AttentionPlan) -> Tensor:
    """The span of each token, int32 [T]: found once a forward."""
    if "token_span" not in batch.spans:
        tokens, spans = len(batch.positions), len(batch.kv_len)
        found = batch.query_start.new_empty(tokens)
        spans_kernel[(triton.cdiv(tokens, 32),)](
            batch.query_start, found, tokens, spans, BLOCK_S=block(spans, 16), ROWS=32, num_warps=4
        )
        batch.spans["token_span"] = found
    return batch.spans["token_span"]


@kernel(do_not_specialize=["tokens"])
def convolve_kernel(
    x, weight, bias, window, out, token_span, query_start, source, tokens, stride, channels,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS tokens and BLOCK_C channels: silu of the convolution, whose inputs begin in the span's window."""
    t, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < channels
    acc = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if BIAS:
        acc += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    span = tl.load(token_span + t, mask=t < tokens, other=-1)
    real = span >= 0
    begin = tl.load(query_start + span, mask=real, other=0)
    slot = tl.load(source + span, mask=real, other=0).to(tl.int64)
    for i in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + i
        fed, before = real & (at >= begin), real & (at < begin) & (slot > 0)
        line = x + at.to(tl.int64)[:, None] * stride + c[None, :]
        value = tl.load(line, mask=fed[:, None] & there[None, :], other=0.0).to(tl.float32)
        row = slot * (WIDTH - 1) + at - begin + WIDTH - 1
        kept = tl.load(window + row[:, None] * channels + c[None, :], mask=before[:, None] & there[None, :], other=0.0)
        tap = tl.load(weight + c * WIDTH + i, mask=there, other=0.0).to(tl.float32)
        acc += (value + kept.to(tl.float32)) * tap[None, :]
    place = out + t.to(tl.int64)[:, None] * channels + c[None, :]
    acc = acc * sigmoid(acc)
    tl.store(place, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & there[None, :])


@triton.jit
def put_window(window, slot, values, j, c, there, channels, KEPT: tl.constexpr):
    """Store some channels of a window, unless the slot is 0."""
    place = window + (slot * KEPT + j)[:, None] * channels + c[None, :]
    tl.store(place, values, mask=(j < tl.where(slot > 0, KEPT, 0))[:, None] & there[None, :])


@triton.jit
def keep_later(
    x, window, target, snapshot, stride, channels, begin, end, c, KEPT: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Windows after those of tokens begin to end that are kept, of inputs of this step alone."""
    there = c < channels
    i, j = tl.arange(0, AT_ONCE), tl.arange(0, ROWS)
    for first in range(begin, end, AT_ONCE):
        t = first + i
        wanted = tl.load(target + t, mask=t < end, other=0) + tl.load(snapshot + t, mask=t < end, other=0) > 0
        here = tl.min(tl.where(wanted, t, end), 0)
        while here < end:
            at = here - (KEPT - 1) + j
            line = x + at.to(tl.int64)[:, None] * stride + c[None, :]
            value = tl.load(line, mask=(j < KEPT)[:, None] & there[None, :], other=0.0)
            to, copy = tl.load(target + here).to(tl.int64), tl.load(snapshot + here).to(tl.int64)
            put_window(window, to, value, j, c, there, channels, KEPT)
            put_window(window, copy, value, j, c, there, channels, KEPT)
            here = tl.min(tl.where(wanted & (t > here), t, end), 0)


@kernel
def window_kernel(
    x, window, query_start, source, target, snapshot, stride, channels,
    KEPT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, BLOCK_C: tl.constexpr, AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One span and BLOCK_C channels: windows after its tokens, where they are kept. The first FIRST tokens may need
    what the span's window held, which is read before anything is written; row r of a tile is input r % ROWS of a
    window."""
    s, c = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    wait(DEPENDENT)
    release(DEPENDENT)
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    if begin == end:
        return
    slot = tl.load(source + s).to(tl.int64)
    r = tl.arange(0, FIRST * ROWS)
    t, j = begin + r // ROWS, r % ROWS
    inside, there = (t < end) & (j < KEPT), c < channels
    to = tl.load(target + t, mask=inside, other=0).to(tl.int64)
    copy = tl.load(snapshot + t, mask=inside, other=0).to(tl.int64)
    inside = inside & ((to > 0) | (copy > 0))
    at = t - (KEPT - 1) + j
    fed, before = inside & (at >= begin), inside & (at < begin) & (at >= begin - tl.where(slot > 0, KEPT, 0))
    value = tl.load(x + at.to(tl.int64)[:, None] * stride + c[None, :], mask=fed[:, None] & there[None, :], other=0.0)
    row = slot * KEPT + at - begin + KEPT
    kept = tl.load(window + row[:, None] * channels + c[None, :], mask=before[:, None] & there[None, :], other=0.0)
    value = tl.where(fed[:, None], value, kept)
    tl.debug_barrier()
    lines = window + (to * KEPT + j)[:, None] * channels + c[None, :]
    tl.store(lines, value, mask=(inside & (to > 0))[:, None] & there[None, :])
    lines = window + (copy * KEPT + j)[:, None] * channels + c[None, :]
    tl.store(lines, value, mask=(inside & (copy > 0))[:, None] & there[None, :])
    keep_later(x, window, target, snapshot, stride, channels, begin + FIRST, end, c, KEPT, ROWS, AT_ONCE)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, batch: AttentionPlan, card: DeviceInfo
) -> Tensor:
    """silu of the causal convolution of x [T, C], whose rows may lie apart; writes windows [M, W - 1, C]."""
    (tokens, channels), width = x.shape, weight.shape[1]
    states, out = slots_of(batch), x.new_empty(x.shape)
    rows, columns = (1 if tokens <= 16 else 4, 256) if tokens <= 256 else (16, 128)
    if not card.sms:
        rows, columns = 4, 256
    convolve_kernel[(triton.cdiv(tokens, rows), triton.cdiv(channels, columns))](
        *(x, weight, weight if bias is None else bias, window, out, spans_of(batch), batch.query_start),
        *(states.source, tokens, x.stride(0), channels),
        WIDTH=width, BIAS=bias is not None, ROWS=rows, BLOCK_C=columns, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
    first = block(min(batch.max_query, max(width, 8)))
    window_kernel[(len(batch.kv_len), triton.cdiv(channels, 256))](
        *(x, window, batch.query_start, *states, x.stride(0), channels),
        KEPT=width - 1, ROWS=block(width - 1), FIRST=first, BLOCK_C=256, AT_ONCE=256, DEPENDENT=card.dependent,
        num_warps=4, **card.options,
    )  # fmt: skip
    return out


@kernel
def delta_norm_kernel(
    made, gate, weight, out, token_span, eps, gate_stride,
    HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of a token: normed head by head, then gated. Padding becomes zeros."""
    t, h, v = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    inside = (h < HEADS)[:, None] & (v < VALUES)[None, :]
    gain = tl.load(weight + v, mask=v < VALUES, other=0.0).to(tl.float32)
    at = h[:, None] * VALUES + v[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    real = (h < tl.where(tl.load(token_span + t) >= 0, HEADS, 0))[:, None] & (v < VALUES)[None, :]
    x = tl.load(made + t * HEADS * VALUES + at, mask=real, other=0.0)
    z = tl.load(gate + t * gate_stride + at, mask=real, other=0.0).to(tl.float32)
    centred = x * tl.rsqrt(tl.sum(x * x, 1) / VALUES + eps)[:, None]
    normed = gain[None, :] * centred.to(out.dtype.element_ty).to(tl.float32)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + t * HEADS * VALUES + at, (normed * z * sigmoid(z)).to(out.dtype.element_ty), mask=inside)


@kernel
def scan_norm_kernel(
    made, mixed, gate, skip, weight, out, token_span, eps, stride, gate_stride,
    WIDTH: tl.constexpr, INNER: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A group of a token's heads, WIDTH numbers: what is skipped is added, all of it gated, then normed. Padding
    becomes zeros."""
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = tl.program_id(1) * WIDTH + i, i < WIDTH
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(skip + at // VALUES, mask=inside, other=0.0)
    wait(DEPENDENT)
    release(DEPENDENT)
    real = i < tl.where(tl.load(token_span + t) >= 0, WIDTH, 0)
    x = tl.load(made + t * INNER + at, mask=real, other=0.0)
    value = tl.load(mixed + t * stride + at, mask=real, other=0.0).to(tl.float32)
    z = tl.load(gate + t * gate_stride + at, mask=real, other=0.0).to(tl.float32)
    x = (x + value * share) * z * sigmoid(z)
    normed = gain * x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out + t * INNER + at, normed.to(out.dtype.element_ty), mask=inside)


def recur(rule: Rule, memory: Tensor, batch: AttentionPlan, few: int, card: DeviceInfo) -> Tensor:
    """Outputs of every span, float32 [T, H, V]; writes memories. few: tokens up to which a span goes token by token."""
    _, heads, _, values = memory.shape
    states = slots_of(batch)
    out = torch.empty(len(batch.positions), heads, values, dtype=torch.float32, device=memory.device)
    update(rule, memory, out, batch, states, few, card)
    if batch.max_query > few:
        scan(rule, memory, out, batch, states, few, card)
    return out


def gated_delta(
    x: DeltaInputs, weights: DeltaWeights, state: LayerState, batch: AttentionPlan, few: int, card: DeviceInfo
) -> Tensor:
    """See `Ops.gated_delta`."""
    mixed = convolve(x.mixed, weights.convolution, None, state.window, batch, card)
    heads, keys, values = state.memory.shape[1:]
    wide = (mixed.shape[1] - heads * values) // 2
    places = (0, wide, 2 * wide, wide // keys)
    limits = (0.0, float("inf"))
    rule = Rule(mixed, *places, x.rise, x.beta, weights.fading, weights.rise, *limits, delta=True)
    made = recur(rule, state.memory, batch, few, card)
    out, at_once = x.mixed.new_empty(len(mixed), heads * values), min(8, block(heads))
    delta_norm_kernel[(len(mixed), triton.cdiv(heads, at_once))](
        *(made, x.gate, weights.norm.weight, out, spans_of(batch), weights.norm.eps, x.gate.stride(0)),
        HEADS=heads, VALUES=values, BLOCK_H=at_once, BLOCK_V=block(values, 16), DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
    return out


def selective_scan(
    x: ScanInputs, weights: ScanWeights, state: LayerState, batch: AttentionPlan, few: int, card: DeviceInfo
) -> Tensor:
    """See `Ops.selective_scan`."""
    mixed = convolve(x.mixed, weights.convolution, weights.bias, state.window, batch, card)
    heads, keys, values = state.memory.shape[1:]
    inner = heads * values
    wide = (mixed.shape[1] - inner) // 2
    places = (inner + wide, inner, 0, wide // keys)
    rule = Rule(mixed, *places, x.step, x.step, weights.fading, weights.rise, *weights.step_limit, delta=False)
    made = recur(rule, state.memory, batch, few, card)
    out, width = x.mixed.new_empty(len(mixed), inner), inner // rule.groups
    scan_norm_kernel[(len(mixed), rule.groups)](
        *(made, mixed, x.gate, weights.skip, weights.norm.weight, out, spans_of(batch), weights.norm.eps),
        *(mixed.stride(0), x.gate.stride(0)),
        WIDTH=width, INNER=inner, VALUES=values, BLOCK=block(width, 16), DEPENDENT=card.dependent,
        num_warps=4 if width <= 2048 else 8, **card.options,
    )  # fmt: skip
    return out
