"""Recurrent layers: kernels beside the reference, for spans of any lengths, with states kept in the middle of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.delta import DeltaConfig, split_by_head, split_by_kind
from quire.ops.base import Ops
from quire.ops.operands import DeltaInputs, DeltaWeights, Norm, ScanInputs, ScanWeights
from quire.ops.ragged import LayerState, RaggedBatch, StateSlots
from quire.ops.recurrent import convolve as reference
from quire.ops.reference import ReferenceOps
from quire.ops.triton import recurrent
from quire.ops.triton.chunked import CHUNK
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.ops.triton.recurrence import FEW
from tests.ops.batches import Pages
from tests.ops.triton.device import DEVICE

OPS, FIXED, REFERENCE = TritonOps(DEVICE), BatchInvariantTritonOps(DEVICE), ReferenceOps()
HALF, LOSS, ALIKE_LOSS = (torch.bfloat16, 4e-2, 8e-2) if DEVICE.type == "cuda" else (torch.float16, 1e-2, 1e-2)
"""The interpreter multiplies no bfloat16. LOSS: what chunks of the delta rule may lose, which round what their tokens
change; ALIKE_LOSS: where all keys are alike."""

RULES = {
    "float32-delta": (True, torch.float32, 1e-5),
    "float32-scan": (False, torch.float32, 1e-5),
    "half-delta": (True, HALF, LOSS),
    "half-scan": (False, HALF, 2e-2),
}

SMALL = (4, 2, 12, 10, 4)
SIZES = [SMALL, *(pytest.param(each, marks=pytest.mark.nightly) for each in ((3, 1, 16, 33, 3), (2, 2, 20, 8, 2)))]
"""Heads, groups, keys, values, inputs of the convolution."""

SPANS = {
    "decode": [1, 1, 1],
    "verify": [3, 1, FEW],
    "prompts": [FEW + 1, CHUNK, 3, 2 * CHUNK + 7],
}


class Layer:
    """Random weights and states of a layer. delta: of the gated delta rule. by_head: projections make what a head of
    keys has side by side, as Qwen3-Next's do."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, *, delta: bool, by_head: bool = False) -> None:
        torch.manual_seed(sum(sizes))
        self.heads, self.groups, self.keys, self.values, self.width = sizes
        self.channels, self.inner = self.heads * self.values + 2 * self.groups * self.keys, self.heads * self.values
        self.dtype, self.delta, self.by_head = dtype, delta, by_head
        convolution, bias = self.noise(self.channels, self.width), self.noise(self.channels)
        fading, rise, skip = torch.randn(3, self.heads).to(DEVICE)
        gain = self.noise(self.values if delta else self.inner)
        if delta:
            weights: Any = DeltaWeights(convolution, fading, rise, Norm(gain, 1e-6))
        else:
            weights = ScanWeights(convolution, bias, fading, rise, skip, Norm(gain, 1e-6), (0.1, 2.0))
        self.weights = weights

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype).to(DEVICE)

    def states(self, slots: int) -> LayerState:
        window = self.noise(slots, self.width - 1, self.channels)
        made = LayerState(window, torch.randn(slots, self.heads, self.keys, self.values).to(DEVICE))
        for each in made:
            each[0] = 0
        return made

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Some rows apart, as those of one projection are."""
        if self.delta:
            share = self.heads // self.groups
            config = DeltaConfig(
                key_heads=self.groups, value_heads=self.heads, key=self.keys, value=self.values, width=self.width
            )
            if self.by_head:
                wide = self.groups * (2 * self.keys + 2 * share * self.values)
                return split_by_head(config, [self.noise(tokens, n + 5)[:, :n] for n in (wide, 2 * self.heads)])
            sizes = (self.channels, self.inner, self.heads, self.heads)
            return split_by_kind(config, [self.noise(tokens, n + 5)[:, :n] for n in sizes])
        mixed = self.noise(tokens, self.channels + 5)[:, : self.channels]
        return self.noise(tokens, self.inner), mixed, self.noise(tokens, self.heads)

    def __call__(self, ops: Ops, x: Sequence[Tensor], state: LayerState, batch: RaggedBatch) -> Tensor:
        if self.delta:
            return ops.gated_delta(DeltaInputs(*x), self.weights, state, batch)
        return ops.selective_scan(ScanInputs(*x), self.weights, state, batch)


def batch_of(
    counts: Sequence[int], source: Sequence[int], target: Sequence[int], snapshot: Sequence[int]
) -> RaggedBatch:
    """Spans of so many tokens with these slots."""
    plain = Pages(400, 16).batch([(s, 0, [1] * n) for s, n in enumerate(counts)])
    slots = StateSlots(*(torch.tensor(each, device=DEVICE) for each in (source, target, snapshot)))
    placed = {name: getattr(plain, name).to(DEVICE) for name in ("positions", "query_start", "kv_len")}
    return replace(plain, **placed, states=slots)


def scattered(counts: Sequence[int]) -> tuple[RaggedBatch, int]:
    """Every second span begins; each keeps the states after its last token, and, of more than two, after its first and
    two in the middle, one of them in two slots. The batch, and how many slots it needs."""
    source, target, snapshot, slots = list[int](), list[int](), list[int](), 1
    for s, n in enumerate(counts):
        source.append(slots if s % 2 else 0)
        ends, besides = {n - 1: slots}, dict[int, int]()
        slots += 1
        if n > 2:
            ends |= {0: slots, n // 2: slots + 1}
            besides = {n // 2: slots + 2, n // 3 + 1: slots + 3}
            slots += 4
        target += [ends.get(i, 0) for i in range(n)]
        snapshot += [besides.get(i, 0) for i in range(n)]
    return batch_of(counts, source, target, snapshot), slots


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """As a share of the largest number."""
    assert (got.float() - want.float()).abs().max() <= tolerance * want.float().abs().max().clamp(min=1.0)


@pytest.mark.parametrize(("delta", "dtype", "tolerance"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("counts", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_states_are_those_of_the_reference(
    sizes: tuple[int, ...], counts: list[int], dtype: torch.dtype, tolerance: float, *, delta: bool
) -> None:
    for by_head in (False, True)[: 1 + delta]:
        layer, (batch, slots) = Layer(sizes, dtype, delta=delta, by_head=by_head), scattered(counts)
        x, ours = layer.inputs(sum(counts)), layer.states(slots)
        theirs = LayerState(*(each.clone() for each in ours))
        want = layer(REFERENCE, x, theirs, batch)
        got = layer(OPS, x, ours, batch)
        assert got.dtype is want.dtype
        assert got.shape == want.shape
        close(got, want, tolerance)
        close(ours.memory, theirs.memory, tolerance)
        assert torch.equal(ours.window, theirs.window)


def test_heads_of_real_size_are_read_where_a_projection_has_left_them() -> None:
    """A program then convolves channels of one head."""
    counts = SPANS["verify"][:2]
    layer, (batch, slots) = Layer((4, 2, 128, 128, 4), torch.float32, delta=True, by_head=True), scattered(counts)
    x, ours = layer.inputs(sum(counts)), layer.states(slots)
    theirs = LayerState(*(each.clone() for each in ours))
    close(layer(OPS, x, ours, batch), layer(REFERENCE, x, theirs, batch), 1e-5)
    assert torch.equal(ours.window, theirs.window)


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "scan"])
def test_windows_after_any_token_of_a_long_span(*, delta: bool) -> None:
    """Each token's of the first span and, of the second, some of which one goes to the slot that it is read from."""
    counts = [150, 270]
    layer = Layer((1, 1, 8, 8, 4), torch.float32, delta=delta)
    own = 1 + counts[0]
    target = [*range(1, own), *([0] * 269), own]
    snapshot = [0] * sum(counts)
    for slot, at in enumerate((2, 7, 8, 9, 127, 128, 268), own + 1):
        snapshot[counts[0] + at] = slot
    x, ours = layer.inputs(sum(counts)), layer.states(own + 9)
    theirs = LayerState(*(each.clone() for each in ours))
    batch = batch_of(counts, [0, own], target, snapshot)
    want = layer(REFERENCE, x, theirs, batch)
    close(layer(OPS, x, ours, batch), want, 1e-5)
    assert torch.equal(ours.window, theirs.window)


@pytest.mark.parametrize("by_head", [False, True], ids=["plain", "by_head"])
@pytest.mark.parametrize("biased", [False, True], ids=["bare", "biased"])
def test_long_steps_convolve_runs_of_tokens(*, biased: bool, by_head: bool) -> None:
    """Spans begin anywhere in a run, with a window or without; behind them is padding that is not a number."""
    counts = [1, 2, 3, 97, 0, 1, 1, 30, 5, 128, 1]
    fed, padded, sizes = sum(counts), sum(counts) + 11, (2, 1, 12, 10, 4)
    layer = Layer(sizes, torch.float32, delta=True, by_head=by_head)
    batch = batch_of(counts, [s % 3 for s in range(len(counts))], [0] * fed, [0] * fed)
    batch = replace(batch, positions=torch.zeros(padded, dtype=torch.int64, device=DEVICE))
    parts = layer.inputs(padded)
    for each in parts:
        each[fed:] = float("nan")
    x, window = DeltaInputs(*parts), layer.states(3).window
    bias = layer.noise(layer.channels) if biased else None
    got = recurrent.convolve(
        recurrent.Convolved.of(x), layer.weights.convolution, bias, window, OPS.prepare(batch), OPS.card
    )
    assert batch.states is not None
    want = reference(x.mixed()[:fed], layer.weights.convolution, window.clone(), batch.query_start, batch.states, bias)
    close(got[:fed], want, 1e-6)
    assert got[fed:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("sizes", [SMALL, (3, 1, 64, 64, 4), (32, 16, 128, 128, 4)], ids=str)
@pytest.mark.parametrize(("delta", "dtype", "tolerance"), RULES.values(), ids=RULES)
def test_long_prompts_on_the_gpu(sizes: tuple[int, ...], dtype: torch.dtype, tolerance: float, *, delta: bool) -> None:
    """Matrix units, which the interpreter has not: chunks of 64 of the delta rule were wrong on them."""
    layer, (batch, slots) = Layer(sizes, dtype, delta=delta), scattered([1000, 3, 217])
    x, ours = layer.inputs(1220), layer.states(slots)
    theirs = LayerState(*(each.clone() for each in ours))
    want = layer(REFERENCE, x, theirs, batch)
    close(layer(OPS, x, ours, batch), want, tolerance)
    close(ours.memory, theirs.memory, tolerance)
    assert torch.equal(ours.window, theirs.window)


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "scan"])
def test_padding_reads_and_writes_nothing(*, delta: bool) -> None:
    layer, counts = Layer(SMALL, torch.float32, delta=delta), [2, FEW + 3]
    batch, slots = scattered(counts)
    fed, padded = sum(counts), sum(counts) + 7
    x, ours = layer.inputs(padded), layer.states(slots)
    theirs = LayerState(*(each.clone() for each in ours))
    want = layer(REFERENCE, [each[:fed] for each in x], theirs, batch)
    assert batch.states is not None
    more = batch.query_start.new_full((3,), fed)
    states = StateSlots(
        *(torch.cat((each, each.new_full((n,), 1))) for each, n in zip(batch.states, (3, 7, 7), strict=True))
    )
    wide = replace(
        batch,
        positions=torch.zeros(padded, dtype=torch.int64, device=DEVICE),
        query_start=torch.cat((batch.query_start, more)),
        kv_len=torch.cat((batch.kv_len, batch.kv_len.new_zeros(3))),
        states=states,
    )
    for each in x:
        each[fed:] = float("nan")
    got = layer(OPS, x, ours, wide)
    close(got[:fed], want, 1e-5)
    assert not got[fed:].any()
    close(ours.memory, theirs.memory, 1e-5)
    assert torch.equal(ours.window, theirs.window)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (HALF, ALIKE_LOSS)], ids=["float32", "half"])
def test_keys_that_are_all_alike_lose_no_digits(dtype: torch.dtype, tolerance: float) -> None:
    """A text that repeats one token: nothing fades, and each value replaces the one before."""
    heads, keys, values, tokens = 1, 16, 16, CHUNK + 16
    layer = Layer((heads, heads, keys, values, 2), dtype, delta=True)
    x = DeltaInputs(*layer.inputs(tokens))
    x.beta[:], x.rise[:], x.queries[:], x.keys[:] = 8.0, -40.0, x.queries[:1], x.keys[:1]
    batch = batch_of([tokens], [0], [0] * (tokens - 1) + [1], [0] * tokens)
    ours, theirs = (LayerState(*(torch.zeros_like(each) for each in layer.states(2))) for _ in "ab")
    want = layer(FIXED, x, theirs, batch)
    close(layer(OPS, x, ours, batch), want, tolerance)
    close(ours.memory, theirs.memory, tolerance)


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "scan"])
def test_batch_invariant_results_have_the_same_bits_in_any_batch_and_chunk(*, delta: bool) -> None:
    layer, total = Layer(SMALL, HALF, delta=delta), 27
    x, neighbour = layer.inputs(total), layer.inputs(18)
    alone, cut = layer.states(3), layer.states(3)
    alone.memory[1:], cut.memory[1:] = 0, 0
    end = lambda n, slot: [0] * (n - 1) + [slot]  # noqa: E731
    want = layer(FIXED, x, alone, batch_of([total], [0], end(total, 1), [0] * total))
    parts, start = list[Tensor](), 0
    for n in (1, 18, 3, 5):
        both = [torch.cat((b[:n], a[start : start + n])) for a, b in zip(x, neighbour, strict=True)]
        batch = batch_of([n, n], [0, int(start > 0)], [*end(n, 2), *end(n, 1)], [0] * 2 * n)
        parts.append(layer(FIXED, both, cut, batch)[n:])
        start += n
    assert torch.equal(torch.cat(parts), want)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(alone, cut, strict=True))


def test_lists_are_found_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (batch, slots) = Layer(SMALL, torch.float32, delta=True), scattered([FEW + 1, 2])
    planned, run = OPS.prepare(batch), partial(layer, OPS, layer.inputs(FEW + 3), layer.states(slots))
    run(planned)
    lists = dict(planned.spans)
    run(planned)
    assert planned.spans == lists
    assert lists["token_span"].tolist() == [0] * (FEW + 1) + [1] * 2
    assert lists["chunks"][: int(lists["chunk_count"])].tolist() == [[0, 16], [16, FEW + 1]]
