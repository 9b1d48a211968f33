"""The kernels around a forward, against plain torch on the same state, and an engine that runs on them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.engine.engine import Engine
from quire.executors.local import CudaExecutor
from quire.model_runner.device_state import DeviceState
from quire.model_runner.device_steps import DROPPED, DeviceSteps, TorchSteps
from quire.model_runner.graphs import CudaQueue, WorkQueue
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.row_state import RowState
from quire.model_runner.speculative import ModelProposer, NgramProposer, Proposer
from quire.model_runner.triton_steps import TritonSteps
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.ops.triton.ops import TritonOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import Request, SamplingParams
from tests.model_runner.oracle import naive
from tests.model_runner.tiny import VOCAB, Tiny
from tests.ops.triton.device import DEVICE

PAGE, LENGTH, ROWS, DRAFTS = 4, 40, 6, 3


def state_with_rows(seed: int) -> tuple[DeviceState, RowState, int]:
    """Four spans of 3, 1, 5 and 0 tokens, padded to 8 spans; the last two tokens of the first and the last three of the
    third are picked, with drafts between them, of which the first is right, and then the second wrong."""
    draw = torch.Generator().manual_seed(seed)
    rows = RowState(ROWS, LENGTH, PAGE, DRAFTS)
    made = DeviceState(rows, spans=16, tokens=64, vocab_size=VOCAB, device=DEVICE)
    number = lambda high, *shape: torch.randint(high, shape, generator=draw, dtype=torch.int32)  # noqa: E731
    made.history.copy_(number(1000, *made.history.shape))
    made.block_table.copy_(number(50, *made.block_table.shape))
    made.columns["length"][:ROWS] = number(LENGTH - 9, ROWS).to(DEVICE) + 3
    made.columns["known"][:ROWS] = made.columns["length"][:ROWS] + 1
    made.columns["done"][:ROWS] = made.columns["length"][:ROWS] - torch.tensor([0, -2, 1, 3, 0, 2], device=DEVICE)
    order = torch.randperm(ROWS, generator=draw)[:4].int()
    put = lambda part, values: part[: len(values)].copy_(torch.as_tensor(values))  # noqa: E731
    step = made.step
    put(step.counts, [9, 4, 6, 3])
    put(step.span_row, [*order.tolist(), *[ROWS] * 4])
    put(step.query_start, [0, 3, 4, 9, 9, 9, 9, 9, 9])
    put(step.token_span, [0, 0, 0, 1, 2, 2, 2, 2, 2])
    put(step.sample_indices, [1, 2, 3, 6, 7, 8, 0, 0])
    put(step.sample_row, [*order[[0, 0, 1, 2, 2, 2]].tolist(), ROWS, ROWS])
    put(step.sample_offset, [0, 1, 0, 0, 1, 2, 0, 0])
    put(made.chain, [0, 2, 3, 6])
    put(made.wanted_drafts, [2, 0, 3])
    return made, rows, 8


def both(seed: int) -> Iterator[tuple[DeviceSteps, DeviceState, int]]:
    for steps in (TritonSteps(DEVICE), TorchSteps()):
        made, _, spans = state_with_rows(seed)
        yield steps, made, spans


def sampled(made: DeviceState) -> torch.Tensor:
    """Right behind the first draft of both, then wrong; -1 in the middle."""
    step = made.step
    row = [int(step.sample_row[i]) for i in (0, 3)]
    right = [int(made.history[r, int(made.columns["known"][r])]) for r in row]
    return torch.tensor([right[0], 5, -1, right[1], 1007, 9, 3, 3], dtype=torch.int32, device=DEVICE)


def empty(made: DeviceState, spans: int, tokens: int) -> RaggedBatch:
    poison = lambda *shape, dtype=torch.int64: torch.full(shape, -7, dtype=dtype, device=DEVICE)  # noqa: E731
    return RaggedBatch(
        tokens=poison(tokens),
        positions=poison(tokens),
        slots=poison(tokens),
        query_start=made.step.query_start[: spans + 1],
        kv_len=poison(spans, dtype=torch.int32),
        page_table=poison(spans, made.num_table_columns, dtype=torch.int32),
        page_size=PAGE,
        max_query=tokens,
        max_kv=LENGTH,
    )


@pytest.mark.parametrize("seed", range(3))
def test_prepare_inputs_equals_torch(seed: int) -> None:
    found = []
    for steps, made, spans in both(seed):
        batch = empty(made, spans, 16)
        steps.prepare_inputs(made, made.step, batch, LENGTH)
        held = -(-batch.kv_len // PAGE)
        seen = torch.arange(made.num_table_columns, device=DEVICE) < held[:, None]
        found.append([batch.tokens, batch.positions, batch.slots, batch.kv_len, batch.page_table.where(seen, 0)])
    got, want = found
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert want[0][9:].eq(0).all() and want[2][9:].eq(0).all()


@pytest.mark.parametrize("seed", range(3))
def test_advance_and_verify_equal_torch(seed: int) -> None:
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(16, 24, generator=draw).to(DEVICE)
    found = []
    for steps, it, spans in both(seed):
        out, tokens = torch.zeros(8, 24, device=DEVICE), sampled(it)
        rows, before = it.step.sample_row[[0, 2, 3]].long(), it.columns["known"].clone()
        steps.advance(it, it.step, spans, hidden, out)
        steps.verify(it, tokens)
        assert (it.columns["known"] - before)[rows].tolist() == [2, 1, 2]
        assert torch.equal(it.columns["length"][rows], it.columns["known"][rows] - 1)
        assert tokens[:6].tolist() == [*sampled(state_with_rows(seed)[0])[:5].tolist(), DROPPED]
        found.append((it.data, out[:6], tokens[:6]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found[0][1], hidden[[1, 2, 3, 6, 7, 8]])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at", [(-1, 4), (-1, 32), (0, 8), (1, 4)])
def test_prepare_draft_equals_torch(seed: int, at: tuple[int, int]) -> None:
    found = []
    for steps, it, _ in both(seed):
        steps.prepare_draft(it, 4, at[1], at[0])
        batch = empty(it, 4, at[1])
        steps.prepare_inputs(it, it.draft, replace(batch, query_start=it.draft.query_start[:5]), LENGTH)
        total = int(it.draft.counts[0])
        fed = [
            it.draft.query_start[:5],
            it.draft.token_span[:total],
            it.draft.sample_indices[:4],
            it.draft.sample_row[:4],
        ]
        found.append(
            [*fed, it.draft.sample_offset[:4], it.draft.counts[2], it.columns["done"], batch.tokens, batch.slots]
        )
        assert total <= at[1]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_written_after_the_history(seed: int) -> None:
    found = []
    for steps, it, _ in both(seed):
        steps.prepare_draft(it, 4, 8, 0)
        steps.advance(it, it.draft, 4, torch.ones(8, 3, device=DEVICE), torch.zeros(4, 3, device=DEVICE))
        steps.write_drafts(it, torch.tensor([11, 12, -1, 13], dtype=torch.int32, device=DEVICE))
        found.append(it.history[:ROWS])
    assert torch.equal(*found)


@pytest.mark.parametrize("seed", range(4))
def test_lookup_on_the_device_equals_the_hosts(seed: int) -> None:
    found = []
    for steps, it, _ in both(seed):
        rng = np.random.default_rng(seed)
        it.history.copy_(torch.from_numpy(rng.integers(0, 4, it.history.shape, np.int32)))
        steps.lookup(it, 4, 3, 4, 2)
        found.append(it.history)
    assert torch.equal(*found)


def test_scatter_puts_numbers_in_their_places() -> None:
    places = torch.randperm(5000)[:1500].int().to(DEVICE)
    values = torch.randint(1000, (1500,), dtype=torch.int32).to(DEVICE)
    got, want = (torch.zeros(5000, dtype=torch.int32, device=DEVICE) for _ in range(2))
    TritonSteps(DEVICE).scatter(got, places, values)
    TorchSteps().scatter(want, places, values)
    assert torch.equal(got, want)


class Moved(Tiny):
    """The tiny model where the kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position, self.head = (t.to(DEVICE) for t in (self.embedding, self.position, self.head))
        self.qkv, self.out = [t.to(DEVICE) for t in self.qkv], [t.to(DEVICE) for t in self.out]

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> torch.Tensor:
        with DEVICE:
            return super().forward(batch, kv)


def proposer(kind: str) -> Proposer | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramProposer(2, shortest=1)
    draft = Moved()
    draft.head = draft.head + 0.1
    kv = allocate(layer_shapes(draft.spec.kv_shapes, torch.float64), pages=40, page_size=PAGE, device=DEVICE)
    return ModelProposer(draft, kv, num_drafts=2, rows=8, device=DEVICE)


def engine_with(steps: DeviceSteps, depth: int, drafts: str) -> Engine:
    executor = CudaExecutor(
        Moved(),
        pages=40,
        page_size=PAGE,
        rows=8,
        max_model_len=LENGTH,
        tokens=8 * LENGTH,
        dtype=torch.float64,
        device=DEVICE,
        steps=steps,
        queue=WorkQueue() if DEVICE.type == "cpu" else CudaQueue(DEVICE, largest=0),
        proposer=proposer(drafts),
        depth=2,
    )
    kv = KVCacheManager(40, PAGE, make_prefix_cache(PAGE, True))
    speculation = FixedDrafts(executor.describe().num_drafts)
    scheduler = Scheduler(
        kv, rows=8, max_num_seqs=4, max_num_batched_tokens=24, max_chunk_tokens=7, speculation=speculation
    )
    return Engine(scheduler, executor, lookahead=depth)


SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.8),
    SamplingParams(temperature=1.1, min_p=0.05, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.8, logprobs=1),
)


@pytest.mark.parametrize(
    ("drafts", "depth"),
    [
        ("none", 0),
        ("ngram", 1),
        ("model", 1),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("none", 1), ("ngram", 0), ("model", 0))),
    ],
)
def test_an_engine_on_these_kernels_answers_as_the_dense_loop(drafts: str, depth: int) -> None:
    rng = random.Random(depth)
    asked = [
        Request(
            id=str(i),
            prompt=tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 20))),
            max_new_tokens=rng.randrange(3, 9),
            sampling=sampling,
            seed=rng.randrange(1 << 40),
        )
        for i, sampling in enumerate(SAMPLING)
    ]
    engine = engine_with(TritonSteps(DEVICE), depth, drafts)
    for request in asked:
        engine.add(request)
    while engine.has_pending_work:
        engine.step()
    model = Tiny()
    answers = {done.id: list(done.tokens) for done in engine.completed_requests}
    assert answers == {request.id: naive(model, request) for request in asked}
    assert drafts != "model" or engine.scheduler.draft_stats.num_accepted > 3


@pytest.mark.parametrize("half", [1, 24, 64])
def test_angles_are_those_of_the_reference(half: int) -> None:
    positions = torch.randint(131072, (37,)).to(DEVICE)
    frequencies = 500000.0 ** -(torch.arange(half) / half).to(DEVICE)
    got = TritonOps(DEVICE).angles(positions, frequencies, 1.3)
    want = ReferenceOps().angles(positions, frequencies, 1.3)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
