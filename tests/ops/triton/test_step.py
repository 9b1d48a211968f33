"""The kernels around a forward, against plain torch on the same arena, and a whole house that runs on them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from quire.core.kv import KV, prefix_index
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.executors.cuda import CudaExecutor
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.ops.triton.ops import TritonOps
from quire.runner.arena import Arena
from quire.runner.device import DeviceSteps, PlainSteps
from quire.runner.graphs import AtOnce
from quire.runner.kernels import TritonSteps
from quire.runner.rows import Rows
from quire.values import Request, SamplingParams
from tests.ops.triton.device import DEVICE
from tests.runner.oracle import naive
from tests.runner.tiny import VOCAB, Tiny

PAGE, LENGTH, ROWS = 4, 40, 6


def arena(seed: int) -> tuple[Arena, Rows, int]:
    """Four spans of 3, 1, 5 and 0 tokens, three of which are picked, padded to 8 spans."""
    draw = torch.Generator().manual_seed(seed)
    rows = Rows(ROWS, LENGTH, PAGE)
    made = Arena(rows, spans=16, tokens=64, device=DEVICE)
    number = lambda high, *shape: torch.randint(high, shape, generator=draw, dtype=torch.int32)  # noqa: E731
    made.history.copy_(number(1000, *made.history.shape))
    made.table.copy_(number(50, *made.table.shape))
    made.columns["length"][:ROWS] = number(LENGTH - 6, ROWS).to(DEVICE)
    made.columns["known"][:ROWS] = made.columns["length"][:ROWS] + 1
    order = torch.randperm(ROWS, generator=draw)[:4].int()
    put = lambda name, values: made.part(name, len(values)).copy_(torch.as_tensor(values))  # noqa: E731
    put("counts", [9, 4, 3])
    put("span_row", [*order.tolist(), *[ROWS] * 4])
    put("query_start", [0, 3, 4, 9, 9, 9, 9, 9, 9])
    put("token_span", [0, 0, 0, 1, 2, 2, 2, 2, 2])
    put("picked", [2, 3, 8, 0])
    put("pick_row", [*order[:3].tolist(), ROWS])
    return made, rows, 8


def empty(made: Arena, spans: int, tokens: int) -> RaggedBatch:
    poison = lambda *shape, dtype=torch.int64: torch.full(shape, -7, dtype=dtype, device=DEVICE)  # noqa: E731
    return RaggedBatch(
        tokens=poison(tokens),
        positions=poison(tokens),
        slots=poison(tokens),
        query_start=made.part("query_start", spans + 1),
        kv_len=poison(spans, dtype=torch.int32),
        page_table=poison(spans, made.pages, dtype=torch.int32),
        page_size=PAGE,
        max_query=tokens,
        max_kv=LENGTH,
    )


@pytest.mark.parametrize("seed", range(3))
def test_what_a_step_feeds(seed: int) -> None:
    got, want = [], []
    for steps, out in ((TritonSteps(DEVICE), got), (PlainSteps(), want)):
        made, _, spans = arena(seed)
        batch = empty(made, spans, 16)
        steps.stage(made, batch, LENGTH)
        held = -(-batch.kv_len // PAGE)
        seen = torch.arange(made.pages, device=DEVICE) < held[:, None]
        out += [batch.tokens, batch.positions, batch.slots, batch.kv_len, batch.page_table.where(seen, 0)]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert want[0][9:].eq(0).all() and want[2][9:].eq(0).all()


def test_where_what_a_step_made_goes() -> None:
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(16, 24, generator=draw).to(DEVICE)
    made = []
    for steps in (TritonSteps(DEVICE), PlainSteps()):
        it, _, spans = arena(1)
        out = torch.zeros(4, 24, device=DEVICE)
        steps.settle(it, spans, hidden, out)
        steps.append(it, torch.tensor([5, -1, 7], dtype=torch.int32, device=DEVICE))
        made.append((it.data, out))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert torch.equal(made[0][1][:3], hidden[[2, 3, 8]])


def test_scatter_puts_numbers_in_their_places() -> None:
    places = torch.randperm(5000)[:1500].int().to(DEVICE)
    values = torch.randint(1000, (1500,), dtype=torch.int32).to(DEVICE)
    got, want = (torch.zeros(5000, dtype=torch.int32, device=DEVICE) for _ in range(2))
    TritonSteps(DEVICE).scatter(got, places, values)
    PlainSteps().scatter(want, places, values)
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


def house(steps: DeviceSteps, depth: int) -> Engine:
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
        queue=AtOnce(),
        depth=2,
    )
    scheduler = Scheduler(KV(40, PAGE, prefix_index(PAGE, True)), rows=8, cap=4, budget=24, chunk=7)
    return Engine(scheduler, executor, depth=depth)


SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.8),
    SamplingParams(temperature=1.1, min_p=0.05, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.8, logprobs=1),
)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_house_on_these_kernels_answers_as_the_dense_loop(depth: int) -> None:
    rng = random.Random(depth)
    asked = [
        Request(
            id=str(i),
            prompt=tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 20))),
            max_new=rng.randrange(3, 9),
            sampling=sampling,
            seed=rng.randrange(1 << 40),
        )
        for i, sampling in enumerate(SAMPLING)
    ]
    engine = house(TritonSteps(DEVICE), depth)
    for request in asked:
        engine.add(request)
    while engine.has_pending_work:
        engine.step()
    model = Tiny()
    answers = {done.id: list(done.tokens) for done in engine.completed_requests}
    assert answers == {request.id: naive(model, request) for request in asked}


@pytest.mark.parametrize("half", [1, 24, 64])
def test_angles_are_those_of_the_reference(half: int) -> None:
    positions = torch.randint(131072, (37,)).to(DEVICE)
    frequencies = 500000.0 ** -(torch.arange(half) / half).to(DEVICE)
    got = TritonOps(DEVICE).angles(positions, frequencies, 1.3)
    want = ReferenceOps().angles(positions, frequencies, 1.3)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
