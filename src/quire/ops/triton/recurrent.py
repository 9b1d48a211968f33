"""Recurrent layers: the gated delta rule and the selective scan of Mamba 2, with states in slots.

Letters and formulas as in `ops/recurrent.py`. A layer is a convolution, whose windows are states, too; the recurrence,
token by token for short spans (`recurrence.py`), in chunks for long ones (`chunked.py`); and a norm with a gate, whose
kernel also writes windows, since nothing reads them any more; those after later tokens of a span, which are inputs of
the step alone, have a kernel of their own. What a projection makes is read where it lies.

A slot that one span reads must not be written by another in the same step: programs run at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import DeltaInputs, DeltaWeights, ScanInputs, ScanWeights
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


class Places(NamedTuple):
    """Where the queries, keys and values of the first head of keys begin in a row of a projection, and how far apart
    those of the next ones lie."""

    q: int = 0
    k: int = 0
    v: int = 0
    q_apart: int = 0
    k_apart: int = 0
    v_apart: int = 0


class Kinds(NamedTuple):
    """WIDE: channels of all queries, as many of all keys, and then those of values; 0: channels lie in a row as they
    are. KEYS, EACH: channels of a query and of the values of one head of keys."""

    WIDE: int = 0
    KEYS: int = 1
    EACH: int = 1


@triton.jit
def column_of(
    c, q_at, k_at, v_at, q_apart, k_apart, v_apart, WIDE: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Where channel c of a convolution lies in a row: see `Places`."""
    if WIDE == 0:
        return c
    query = q_at + c // KEYS * q_apart + c % KEYS
    key = k_at + (c - WIDE) // KEYS * k_apart + (c - WIDE) % KEYS
    value = v_at + (c - 2 * WIDE) // EACH * v_apart + (c - 2 * WIDE) % EACH
    return tl.where(c < WIDE, query, tl.where(c < 2 * WIDE, key, value))


@kernel(do_not_specialize=["tokens"])
def convolve_kernel(
    x, weight, bias, window, out, token_span, query_start, source, tokens, stride, channels,
    q_at, k_at, v_at, q_apart, k_apart, v_apart,
    WIDE: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr, ALIKE: tl.constexpr, WIDTH: tl.constexpr,
    BIAS: tl.constexpr, RUNS: tl.constexpr, LONG: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """RUNS runs of LONG tokens and BLOCK_C channels: silu of the convolution, whose inputs begin in the span's window.
    A run's inputs are read once, all at the same time, before it is known which span they are of; windows only where
    a span begins. ALIKE: a program's channels are of one head and kind, and so lie together."""
    start, i = tl.program_id(1) * BLOCK_C, tl.arange(0, BLOCK_C)
    first, c = (tl.program_id(0) * RUNS + tl.arange(0, RUNS)) * LONG, start + i
    there, taps, values = c < channels, (), ()
    if ALIKE:
        column = column_of(start, q_at, k_at, v_at, q_apart, k_apart, v_apart, WIDE, KEYS, EACH) + i
    else:
        column = column_of(c, q_at, k_at, v_at, q_apart, k_apart, v_apart, WIDE, KEYS, EACH)
    for j in tl.static_range(WIDTH):
        taps += (tl.load(weight + c * WIDTH + j, mask=there, other=0.0).to(tl.float32)[None, :],)  # type: ignore[assignment]
    wait(DEPENDENT)
    release(DEPENDENT)
    for k in tl.static_range(LONG + WIDTH - 1):
        at = first + k - (WIDTH - 1)
        line = x + at.to(tl.int64)[:, None] * stride + column[None, :]
        values += (tl.load(line, mask=((at >= 0) & (at < tokens))[:, None] & there[None, :], other=0.0),)  # type: ignore[assignment]
    every = first[:, None] + tl.arange(0, LONG)[None, :]
    spans = tl.load(token_span + every, mask=every < tokens, other=-1)
    starts = tl.load(query_start + spans, mask=spans >= 0, other=-WIDTH)
    near = tl.min(tl.min(every - starts, 1), 0) < WIDTH - 1
    for k in tl.static_range(LONG):
        t = first + k
        acc = tl.zeros([RUNS, BLOCK_C], tl.float32)
        if BIAS:
            acc += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)[None, :]
        span = tl.load(token_span + t, mask=t < tokens, other=-1)
        real = span >= 0
        if near:
            begin = tl.load(query_start + span, mask=real, other=0)
            slot = tl.load(source + span, mask=real, other=0).to(tl.int64)
            for j in tl.static_range(WIDTH):
                at = t - (WIDTH - 1) + j
                fed, before = real & (at >= begin), real & (at < begin) & (slot > 0)
                row = slot * (WIDTH - 1) + at - begin + WIDTH - 1
                line = window + row[:, None] * channels + c[None, :]
                kept = tl.load(line, mask=before[:, None] & there[None, :], other=0.0)
                acc += tl.where(fed[:, None], values[k + j], kept).to(tl.float32) * taps[j]
        else:
            for j in tl.static_range(WIDTH):
                acc += tl.where(real[:, None], values[k + j], 0.0).to(tl.float32) * taps[j]
        place = out + t.to(tl.int64)[:, None] * channels + c[None, :]
        acc = acc * sigmoid(acc)
        tl.store(place, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & there[None, :])


@triton.jit
def put_window(window, slot, values, j, c, there, channels, KEPT: tl.constexpr):
    """Store some channels of a window, unless the slot is 0."""
    place = window + (slot * KEPT + j)[:, None] * channels + c[None, :]
    tl.store(place, values, mask=(j < tl.where(slot > 0, KEPT, 0))[:, None] & there[None, :])


@kernel(do_not_specialize=["tokens"])
def later_windows_kernel(
    x, window, token_span, query_start, target, snapshot, tokens, stride, channels,
    q_at, k_at, v_at, q_apart, k_apart, v_apart,
    WIDE: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """AT_ONCE tokens and BLOCK_C channels: windows after those that are kept, of inputs of this step alone. Those after
    the first FIRST of a span are `keep_windows`'."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = column_of(c, q_at, k_at, v_at, q_apart, k_apart, v_apart, WIDE, KEYS, EACH)
    t, j = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, ROWS)
    there = c < channels
    wait(DEPENDENT)
    release(DEPENDENT)
    span = tl.load(token_span + t, mask=t < tokens, other=-1)
    real = t >= tl.load(query_start + span, mask=span >= 0, other=tokens) + FIRST
    wanted = tl.load(target + t, mask=real, other=0) + tl.load(snapshot + t, mask=real, other=0) > 0
    here = tl.min(tl.where(wanted, t, tokens), 0)
    while here < tokens:
        at = here - (KEPT - 1) + j
        line = x + at.to(tl.int64)[:, None] * stride + column[None, :]
        value = tl.load(line, mask=(j < KEPT)[:, None] & there[None, :], other=0.0)
        to, copy = tl.load(target + here).to(tl.int64), tl.load(snapshot + here).to(tl.int64)
        put_window(window, to, value, j, c, there, channels, KEPT)
        put_window(window, copy, value, j, c, there, channels, KEPT)
        here = tl.min(tl.where(wanted & (t > here), t, tokens), 0)


@triton.jit
def keep_windows(
    x, window, query_start, source, target, snapshot, s, c, column, stride, channels,
    KEPT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Windows of channels c after the first FIRST tokens of span s, where they are kept. They may need what the span's
    window held, which is read before anything is written; row r of a tile is input r % ROWS of a window."""
    begin, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    slot = tl.load(source + s).to(tl.int64)
    r = tl.arange(0, FIRST * ROWS)
    t, j = begin + r // ROWS, r % ROWS
    inside, there = (t < end) & (j < KEPT), c < channels
    to = tl.load(target + t, mask=inside, other=0).to(tl.int64)
    copy = tl.load(snapshot + t, mask=inside, other=0).to(tl.int64)
    inside = inside & ((to > 0) | (copy > 0))
    at = t - (KEPT - 1) + j
    fed, before = inside & (at >= begin), inside & (at < begin) & (at >= begin - tl.where(slot > 0, KEPT, 0))
    line = x + at.to(tl.int64)[:, None] * stride + column[None, :]
    value = tl.load(line, mask=fed[:, None] & there[None, :], other=0.0)
    row = slot * KEPT + at - begin + KEPT
    kept = tl.load(window + row[:, None] * channels + c[None, :], mask=before[:, None] & there[None, :], other=0.0)
    value = tl.where(fed[:, None], value, kept)
    tl.debug_barrier()
    lines = window + (to * KEPT + j)[:, None] * channels + c[None, :]
    tl.store(lines, value, mask=(inside & (to > 0))[:, None] & there[None, :])
    lines = window + (copy * KEPT + j)[:, None] * channels + c[None, :]
    tl.store(lines, value, mask=(inside & (copy > 0))[:, None] & there[None, :])


class Convolved(NamedTuple):
    """What a convolution reads: x, of rows in which channels lie as `places` and `kinds` say; channels of all."""

    x: Tensor
    channels: int
    places: Places = Places()
    kinds: Kinds = Kinds()

    @staticmethod
    def of(inputs: DeltaInputs) -> Convolved:
        """Queries, keys and values where a projection has left them; of several, they are put together."""
        parts = inputs.queries, inputs.keys, inputs.values
        (_, groups, keys), each = inputs.queries.shape, inputs.values.shape[2]
        wide, channels = groups * keys, groups * (2 * keys + each)
        first = int(inputs.queries.storage_offset())
        q, k, v = (int(part.storage_offset()) - first for part in parts)
        places = Places(q, k, v, inputs.queries.stride(1), inputs.keys.stride(1), inputs.values.stride(1))
        alone = len({(part.untyped_storage().data_ptr(), part.stride(0)) for part in parts}) > 1
        if alone or places == Places(0, wide, 2 * wide, keys, keys, each):
            return Convolved(inputs.mixed(), channels)
        return Convolved(inputs.queries, channels, places, Kinds(wide, keys, each))


def convolve(
    read: Convolved, weight: Tensor, bias: Tensor | None, window: Tensor, batch: AttentionPlan, card: DeviceInfo
) -> Tensor:
    """silu of the causal convolution, [T, C]; windows [M, W - 1, C] are read."""
    x, channels, places, kinds = read
    tokens, width = len(x), weight.shape[1]
    states, out = slots_of(batch), x.new_empty(tokens, channels)
    runs, long, columns = (1 if tokens <= 16 else 4, 1, 256) if tokens <= 256 else (8, 8, 128)
    if not card.sms:
        runs, long, columns = 4, 1, 256
    alike = kinds.WIDE > 0 and kinds.KEYS % 128 == kinds.EACH % 128 == 0
    columns = 128 if alike else columns
    convolve_kernel[(triton.cdiv(tokens, runs * long), triton.cdiv(channels, columns))](
        *(x, weight, weight if bias is None else bias, window, out, spans_of(batch), batch.query_start),
        *(states.source, tokens, x.stride(0), channels, *places), **kinds._asdict(), ALIKE=alike,
        WIDTH=width, BIAS=bias is not None, RUNS=runs, LONG=long, BLOCK_C=columns, DEPENDENT=card.dependent,
        num_warps=4, **card.options,
    )  # fmt: skip
    return out


class WindowGrid(NamedTuple):
    """programs: of a kernel that also writes windows after the first tokens of spans; sizes: its constants for that."""

    programs: int
    sizes: dict[str, int]

    @staticmethod
    def of(window: Tensor, batch: AttentionPlan) -> WindowGrid:
        """For all spans, 256 channels a program. window [M, W - 1, C]."""
        _, kept, channels = window.shape
        first = block(min(batch.max_query, max(kept + 1, 8)))
        sizes = {"KEPT": kept, "ROWS": block(kept), "FIRST": first, "BLOCK_C": 256}
        return WindowGrid(len(batch.kv_len) * triton.cdiv(channels, 256), sizes)


def keep_later_windows(
    read: Convolved, window: Tensor, batch: AttentionPlan, sizes: dict[str, int], card: DeviceInfo
) -> None:
    """Write windows after tokens behind the first ones of spans, in programs for some tokens each, if there may be any.
    Called when the windows that the step goes on from have been read. sizes: of `WindowGrid`."""
    if batch.max_query <= sizes["FIRST"]:
        return
    x, channels, places, kinds = read
    _, target, snapshot = slots_of(batch)
    later_windows_kernel[(triton.cdiv(len(x), 128), triton.cdiv(channels, sizes["BLOCK_C"]))](
        *(x, window, spans_of(batch), batch.query_start, target, snapshot, len(x), x.stride(0), channels, *places),
        **kinds._asdict(), **sizes, AT_ONCE=128, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip


@kernel(do_not_specialize=["norms"])
def delta_end_kernel(
    made, gate, weight, out, token_span, eps, gate_stride, gate_apart,
    x, window, query_start, source, target, snapshot, stride, channels, q_at, k_at, v_at, q_apart, k_apart, v_apart,
    norms, HEADS: tl.constexpr, GROUPS: tl.constexpr, VALUES: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, EACH: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, FIRST: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first `norms` programs: BLOCK_H heads of a token, normed head by head, then gated; padding becomes zeros. The
    others: windows of BLOCK_C channels after the first tokens of a span."""
    index, share = tl.program_id(0), HEADS // GROUPS
    wait(DEPENDENT)
    release(DEPENDENT)
    if index < norms:
        parts = (HEADS + BLOCK_H - 1) // BLOCK_H
        t, h, v = (index // parts).to(tl.int64), index % parts * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
        inside = (h < HEADS)[:, None] & (v < VALUES)[None, :]
        gain = tl.load(weight + v, mask=v < VALUES, other=0.0).to(tl.float32)
        at = h[:, None] * VALUES + v[None, :]
        asked = (h // share * gate_apart + h % share * VALUES)[:, None] + v[None, :]
        # Read without waiting for whether the token is one.
        real = tl.load(token_span + t) >= 0
        y = tl.load(made + t * HEADS * VALUES + at, mask=inside, other=0.0)
        z = tl.load(gate + t * gate_stride + asked, mask=inside, other=0.0).to(tl.float32)
        y, z = tl.where(real, y, 0.0), tl.where(real, z, 0.0)
        centred = y * tl.rsqrt(tl.sum(y * y, 1) / VALUES + eps)[:, None]
        normed = gain[None, :] * centred.to(out.dtype.element_ty).to(tl.float32)
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + t * HEADS * VALUES + at, (normed * z * sigmoid(z)).to(out.dtype.element_ty), mask=inside)
    else:
        parts = (channels + BLOCK_C - 1) // BLOCK_C
        s, c = (index - norms) // parts, (index - norms) % parts * BLOCK_C + tl.arange(0, BLOCK_C)
        column = column_of(c, q_at, k_at, v_at, q_apart, k_apart, v_apart, WIDE, KEYS, EACH)
        keep_windows(x, window, query_start, source, target, snapshot, s, c, column, stride, channels,
                     KEPT, ROWS, FIRST)  # fmt: skip


@kernel(do_not_specialize=["norms"])
def scan_end_kernel(
    made, mixed, gate, skip, weight, out, token_span, eps, stride, gate_stride,
    x, window, query_start, source, target, snapshot, x_stride, channels, norms,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first `norms` programs: a group of a token's heads, WIDTH numbers: what is skipped is added, all of it gated,
    then normed; padding becomes zeros. The others: windows of BLOCK_C channels after the first tokens of a span."""
    index = tl.program_id(0)
    wait(DEPENDENT)
    release(DEPENDENT)
    if index < norms:
        t, i = (index // GROUPS).to(tl.int64), tl.arange(0, BLOCK)
        at, inside = index % GROUPS * WIDTH + i, i < WIDTH
        gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(skip + at // VALUES, mask=inside, other=0.0)
        # Read without waiting for whether the token is one.
        real = tl.load(token_span + t) >= 0
        y = tl.load(made + t * INNER + at, mask=inside, other=0.0)
        value = tl.load(mixed + t * stride + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gate + t * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(real, (y + value * share) * z * sigmoid(z), 0.0)
        normed = gain * y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
        tl.store(out + t * INNER + at, normed.to(out.dtype.element_ty), mask=inside)
    else:
        parts = (channels + BLOCK_C - 1) // BLOCK_C
        s, c = (index - norms) // parts, (index - norms) % parts * BLOCK_C + tl.arange(0, BLOCK_C)
        keep_windows(x, window, query_start, source, target, snapshot, s, c, c, x_stride, channels,
                     KEPT, ROWS, FIRST)  # fmt: skip


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
    read = Convolved.of(x)
    mixed = convolve(read, weights.convolution, None, state.window, batch, card)
    (heads, keys, values), (tokens, groups, _) = state.memory.shape[1:], x.queries.shape
    wide, apart = groups * keys, x.rise.stride(1)
    assert x.beta.stride(1) == apart
    limits = (0.0, float("inf"))
    rule = Rule(
        *(mixed, 0, wide, 2 * wide, groups, x.rise, x.beta, apart, weights.fading, weights.rise, *limits), delta=True
    )
    made = recur(rule, state.memory, batch, few, card)
    out, at_once = x.gate.new_empty(tokens, heads * values), min(8, block(heads))
    norms, windows = tokens * triton.cdiv(heads, at_once), WindowGrid.of(state.window, batch)
    delta_end_kernel[(norms + windows.programs,)](
        *(made, x.gate, weights.norm.weight, out, spans_of(batch), weights.norm.eps, x.gate.stride(0)),
        *(x.gate.stride(1), read.x, state.window, batch.query_start, *slots_of(batch), read.x.stride(0)),
        *(read.channels, *read.places, norms),
        HEADS=heads, GROUPS=groups, VALUES=values, BLOCK_H=at_once, BLOCK_V=block(values, 16), **read.kinds._asdict(),
        **windows.sizes, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    keep_later_windows(read, state.window, batch, windows.sizes, card)
    return out


def selective_scan(
    x: ScanInputs, weights: ScanWeights, state: LayerState, batch: AttentionPlan, few: int, card: DeviceInfo
) -> Tensor:
    """See `Ops.selective_scan`."""
    tokens, channels = x.mixed.shape
    read = Convolved(x.mixed, channels)
    mixed = convolve(read, weights.convolution, weights.bias, state.window, batch, card)
    heads, keys, values = state.memory.shape[1:]
    inner = heads * values
    wide = (channels - inner) // 2
    groups = wide // keys
    gates = x.step, x.step, heads // groups, weights.fading, weights.rise, *weights.step_limit
    rule = Rule(mixed, inner + wide, inner, 0, groups, *gates, delta=False)
    made = recur(rule, state.memory, batch, few, card)
    out, width = x.mixed.new_empty(tokens, inner), inner // groups
    norms, windows = tokens * groups, WindowGrid.of(state.window, batch)
    scan_end_kernel[(norms + windows.programs,)](
        *(made, mixed, x.gate, weights.skip, weights.norm.weight, out, spans_of(batch), weights.norm.eps),
        *(mixed.stride(0), x.gate.stride(0), x.mixed, state.window, batch.query_start, *slots_of(batch)),
        *(x.mixed.stride(0), channels, norms),
        GROUPS=groups, WIDTH=width, INNER=inner, VALUES=values, BLOCK=block(width, 16), **windows.sizes,
        DEPENDENT=card.dependent, num_warps=4 if width <= 2048 else 8, **card.options,
    )  # fmt: skip
    keep_later_windows(read, state.window, batch, windows.sizes, card)
    return out
