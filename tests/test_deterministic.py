"""Deterministic mode: tokens and log-probabilities are the same to the bit, whatever happens around a request."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.assembly.engine import choose_ops
from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.device_steps import DeviceSteps, TorchSteps
from quire.model_runner.graphs import WorkQueue
from quire.model_runner.speculative import NgramDrafter, NgramProposer
from quire.models.registry import Model
from quire.ops.reference import ReferenceOps
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.kv_offload import Offload
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import GREEDY, UNLIMITED, Request, SamplingParams, TokenLogprobs
from quire.weights.load import load_model
from quire.weights.locate import embedded
from tests import checkpoints

SETTINGS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=30, min_p=0.01),
    SamplingParams(temperature=0.9, presence_penalty=0.5, top_p=0.7, top_k=120),
)
CONTEXT = 256

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]
"""Tokens, their log-probabilities, and the prompt's."""


class Kind(NamedTuple):
    """A checkpoint, and how it is loaded."""

    shape: str
    dtype: str
    quantization: str = "auto"


class Situation(NamedTuple):
    """What may happen around a request. pages: MANY for as many as can be used."""

    pages: int = UNLIMITED
    size: int = 16
    budget: int = 512
    chunk: int = UNLIMITED
    cap: int = 64
    reuse: bool = True
    drafts: int = 0
    depth: int = 0
    warm: bool = False


class Subject:
    """A model, twelve requests, and what each is answered alone."""

    def __init__(self, model: Model) -> None:
        self.model = model
        rng, vocab = random.Random(5), model.spec.vocab
        draw = lambda n: tuple(rng.randrange(vocab) for _ in range(n))  # noqa: E731
        shared, words = draw(40), draw(5)
        self.requests = [
            Request(
                id=str(i),
                prompt=(shared if i % 3 == 0 else ()) + draw(rng.randrange(1, 90)) + words * (i % 4),
                max_new_tokens=8,
                sampling=replace(
                    SETTINGS[i % 5],
                    logprobs=i % 3,
                    prompt_logprobs=1 if i == 4 else None,
                    logit_bias={words[0]: 100.0} if i == 5 else {},  # repeats itself, so that some drafts are right
                ),
                seed=i * 7 + 1,
            )
            for i in range(12)
        ]
        self.alone: dict[str, Answer] = {}
        for request in self.requests:
            self.alone |= self.ask(self.engine(Situation(reuse=False)), [request])

    def executor(self, s: Situation, pages: int) -> Executor:
        return LocalExecutor(
            self.model,
            pages=pages,
            page_size=s.size,
            rows=64,
            max_model_len=CONTEXT,
            dtype=self.model.dtype,
            drafter=NgramDrafter(s.drafts, shortest=1) if s.drafts else None,
            snapshots=64,
        )

    def tiers(self, executor: Executor) -> Offload | None:
        """Where evicted blocks go; None: nowhere."""
        return None

    def engine(self, s: Situation) -> Engine:
        pages = min(s.pages, 12 * -(-CONTEXT // s.size))
        executor = self.executor(s, pages)
        about = executor.describe()
        cache = make_prefix_cache(s.size, s.reuse, about.num_snapshots if about.recurrent else None)
        kv = KVCacheManager(pages, s.size, cache, offload=self.tiers(executor))
        scheduler = Scheduler(
            kv,
            rows=64,
            max_num_seqs=s.cap,
            max_num_batched_tokens=s.budget,
            max_chunk_tokens=s.chunk,
            speculation=FixedDrafts(s.drafts),
        )
        return Engine(scheduler, executor, lookahead=s.depth)

    def ask(self, engine: Engine, requests: list[Request]) -> dict[str, Answer]:
        got: dict[str, tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]] = {}
        for request in requests:
            got[request.id] = [], [], []
            engine.add(request)
        while engine.has_pending_work:
            engine.wait(0.05)
            for event in engine.step():
                assert event.error is None
                for told, more in zip(
                    got[event.id], (event.tokens, event.logprobs, event.prompt_logprobs), strict=True
                ):
                    told.extend(more)
        return {id: tuple(map(tuple, told)) for id, told in got.items()}  # type: ignore[misc]

    def check(self, s: Situation, order: int, count: int = 12) -> Engine:
        """Some of them in a situation, twice if it is warm. The engine, to see that it happened."""
        engine = self.engine(s)
        asked = random.Random(order).sample(self.requests, count)
        for _ in range(1 + s.warm):
            answers = self.ask(engine, asked)
        assert answers == {request.id: self.alone[request.id] for request in asked}, s
        return engine


class Ahead(Subject):
    """The same by the executor of a device that is run ahead of. On a CPU its steps are plain torch."""

    steps: DeviceSteps = TorchSteps()
    queue: WorkQueue = WorkQueue()
    device = torch.device("cpu")

    def executor(self, s: Situation, pages: int) -> Executor:
        return CudaExecutor(
            self.model,
            pages=pages,
            page_size=s.size,
            rows=64,
            max_model_len=CONTEXT,
            tokens=512,
            dtype=self.model.dtype,
            device=self.device,
            steps=self.steps,
            queue=self.queue,
            proposer=NgramProposer(s.drafts, shortest=1) if s.drafts else None,
            depth=s.depth,
            snapshots=64,
        )


@cache
def subject(kind: Kind, base: Path) -> Subject:
    folder = embedded() if kind.shape == "embedded" else base / f"deterministic-{kind.shape}"
    if not folder.exists():
        checkpoints.make(folder, kind.shape)
    ops = choose_ops(torch.device("cpu"), True)
    return Subject(load_model(folder, dtype=kind.dtype, quantization=kind.quantization, ops=ops))  # type: ignore[arg-type]


SOME = (
    Kind("embedded", "float32"),
    Kind("embedded", "bfloat16"),
    Kind("mixtral-gqa", "float32"),
    Kind("qwen3_moe-gqa", "bfloat16"),
    Kind("gemma2-gqa", "float32"),
    Kind("gpt2-odd-heads", "bfloat16"),
    Kind("qwen2-gqa", "float16"),
    Kind("llama-gqa-tied", "bfloat16", "fp8"),
    Kind("llama-gqa-tied", "float32", "int8_w8a8"),
)
SITUATIONS = {
    "a crowd": Situation(),
    "a warm cache": Situation(size=4, warm=True),
    "small chunks": Situation(size=3, budget=24, chunk=7),
    "no memory": Situation(pages=36, size=8, reuse=False),
    "drafts": Situation(drafts=4, depth=1),
}


FURTHER = (
    Kind("nemotron_h-gqa", "bfloat16"),
    Kind("qwen3_next-shared-keys", "float32"),
    Kind("deepseek_v32-groups-yarn", "bfloat16"),
)


@pytest.mark.parametrize(
    "kind",
    [*SOME[1::2], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (*SOME[::2], *FURTHER))],
    ids="-".join,
)
def test_an_answer_has_the_same_bits_in_every_situation(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> None:
    seen_in_every_situation(subject(kind, tmp_path_factory.getbasetemp()))


def seen_in_every_situation(it: Subject) -> None:
    seen = {name: it.check(s, 3).gauges() for name, s in SITUATIONS.items()}
    assert seen["a warm cache"].prefix_hit > seen["a crowd"].prefix_hit
    assert seen["no memory"].preemptions > 0
    _, drafted, right = seen["drafts"].draft_totals
    assert drafted > 0
    assert right > 0, "some drafts were right"
    assert seen["drafts"].draft_totals[1] > seen["drafts"].draft_totals[2], "and some wrong"


def test_a_device_that_is_run_ahead_of_gives_the_same_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    at_once = subject(SOME[2], tmp_path_factory.getbasetemp())
    it = Ahead(at_once.model)
    assert it.alone == at_once.alone
    seen_in_every_situation(it)


situations = st.builds(
    Situation,
    pages=st.sampled_from([UNLIMITED, UNLIMITED, 160]),
    size=st.sampled_from([1, 3, 8, 16, 256]),
    budget=st.sampled_from([64, 65, 128, 512]),
    chunk=st.sampled_from([1, 5, 32, 100, UNLIMITED]),
    cap=st.sampled_from([1, 3, 64]),
    reuse=st.booleans(),
    drafts=st.sampled_from([0, 0, 1, 5]),
    depth=st.sampled_from([0, 1, 2]),
    warm=st.booleans(),
).map(lambda s: s._replace(pages=max(s.pages, -(-CONTEXT // s.size))))


@settings(deadline=None, max_examples=4, derandomize=True)
@given(s=situations, order=st.integers(0, 99), kind=st.sampled_from(SOME[1:4]))
def test_an_answer_has_the_same_bits_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, s: Situation, order: int, kind: Kind
) -> None:
    subject(kind, tmp_path_factory.getbasetemp()).check(s, order, 6)


DTYPES = ("float32", "bfloat16", "float16")
FIRST = {shape.split("-")[0]: shape for shape in reversed(checkpoints.SHAPES)}
"""A shape of each architecture: in every data type. The others are each in one."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for i, shape in enumerate(checkpoints.SHAPES)
        for dtype in (DTYPES if shape in FIRST.values() else (DTYPES[i % 3],))
    ],
)
def test_every_architecture_has_the_same_bits_whatever_happens(
    shape: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject(Kind(shape, dtype), tmp_path_factory.getbasetemp())
    for s in SITUATIONS.values():
        it.check(s, 3)

    @settings(deadline=None, max_examples=4, derandomize=True)
    @given(s=situations, order=st.integers(0, 99))
    def whatever(s: Situation, order: int) -> None:
        it.check(s, order)

    whatever()


def test_without_the_mode_the_last_bits_are_the_crowds(tmp_path: Path) -> None:
    """What the tests above would not see if they compared nothing."""
    it = subject(SOME[0], tmp_path)
    other = Subject.__new__(Subject)
    other.model, other.requests = load_model(embedded(), dtype="float32", ops=ReferenceOps()), it.requests
    alone = other.ask(other.engine(Situation(reuse=False)), it.requests[1:2])
    assert other.ask(other.engine(Situation()), it.requests)["1"][1] != alone["1"][1]
