"""On a GPU: tiny checkpoints of every family answer as the CPU path does, captured or not, whatever happens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from quire import LLM
from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.model_runner.graphs import CudaQueue, stand_ins
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.speculative import ModelProposer, NgramProposer, Proposer
from quire.scheduler.block_pool import EVICTION_POLICIES, PrefixCache
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.policy import SchedulingPolicy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, draft_counts
from quire.scheduler.step_time import StepTimeModel
from quire.types import UNLIMITED, Request, SamplingParams
from quire.weights.load import load_model
from tests import checkpoints
from tests.executors import test_features

triton_ops = pytest.importorskip("quire.ops.triton.ops")
kernels = pytest.importorskip("quire.model_runner.triton_steps")
graph_keys = pytest.importorskip("quire.assembly.cuda").graph_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGES, ROWS, LENGTH, SNAPSHOTS = 480, 32, 160, 24
GREEDY = SamplingParams(temperature=0.0)
SAMPLING = (
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.1, top_k=12),
    SamplingParams(temperature=0.7, min_p=0.1, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, presence_penalty=1.1, frequency_penalty=0.6),
    SamplingParams(temperature=0.0, logit_bias={5: 4.0}, min_tokens=3),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(3, 90))),
)


def workload(vocab: int, new: int, sampling: Sequence[SamplingParams]) -> list[Request]:
    """Shared prefixes and duplicates, so that pages are shared."""
    rng = random.Random(5)
    draw = lambda n: tuple(rng.randrange(vocab) for _ in range(n))  # noqa: E731
    shared = draw(40)
    prompts = [(shared if i % 3 == 0 else ()) + draw(rng.randrange(2, 60)) for i in range(15)]
    return [
        Request(id=str(i), prompt=p, max_new_tokens=new, sampling=sampling[i % len(sampling)], seed=rng.getrandbits(40))
        for i, p in enumerate([*prompts, prompts[0]])
    ]


class Subject:
    """One checkpoint on the CPU, whose answers count, and on the GPU."""

    def __init__(self, folder: Path, shape: str) -> None:
        checkpoints.make(folder, shape)
        device = torch.device("cuda")
        self.cpu = load_model(folder, dtype="float32")
        self.gpu = load_model(folder, dtype="float32", device=device, ops=triton_ops.TritonOps(device))
        self.houses: dict[tuple[int, bool, str], CudaExecutor] = {}

    def executor(self, page_size: int, *, eager: bool, drafts: str = "none") -> CudaExecutor:
        """Kept, so that what it captured is used again; empty."""
        if (page_size, eager, drafts) not in self.houses:
            device = torch.device("cuda")
            self.houses[page_size, eager, drafts] = CudaExecutor(
                self.gpu,
                pages=PAGES,
                page_size=page_size,
                rows=ROWS,
                max_model_len=LENGTH,
                tokens=ROWS * LENGTH,
                dtype=torch.float32,
                device=device,
                steps=kernels.TritonSteps(device),
                queue=CudaQueue(device, 0 if eager else 256),
                proposer=self.proposer(drafts, page_size),
                depth=2,
                snapshots=SNAPSHOTS,
            )
        found = self.houses[page_size, eager, drafts]
        found.reset()
        return found

    def proposer(self, kind: str, page_size: int) -> Proposer | None:
        """The model drafts for itself: nearly always right, but that its sums have other shapes."""
        if kind == "none":
            return None
        if kind == "ngram":
            return NgramProposer(3, shortest=1)
        device, shapes = torch.device("cuda"), layer_shapes(self.gpu.spec.kv_shapes, torch.float32)
        kv = allocate(shapes, pages=PAGES, page_size=page_size, device=device)
        return ModelProposer(self.gpu, kv, num_drafts=3, rows=ROWS, device=device)

    def local(self, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
        executor = self.local_executor()
        return ask(Engine(Scheduler(KVCacheManager(400, 16, cache_of(executor, 16)), rows=ROWS), executor), requests)

    def local_executor(self) -> LocalExecutor:
        sizes: dict[str, Any] = {"pages": 400, "page_size": 16, "rows": ROWS, "max_model_len": LENGTH}
        return LocalExecutor(self.cpu, **sizes, dtype=torch.float32, snapshots=SNAPSHOTS)


def cache_of(executor: Executor, size: int, reuse: bool = True) -> PrefixCache:
    """The prefix cache of an executor: of a recurrent model one with snapshots."""
    about = executor.describe()
    return make_prefix_cache(size, reuse, about.num_snapshots if about.recurrent else None)


def ask(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    for request in requests:
        engine.add(request)
    while engine.has_pending_work:
        engine.step()
    assert not engine.failures  # a step that failed and was done again would answer as well
    return {done.id: done.tokens for done in engine.completed_requests}


@cache
def subject(shape: str, base: Path) -> Subject:
    return Subject(base / shape, shape)


@pytest.mark.parametrize("shape", [shape for shape in checkpoints.SHAPES if shape.split("-")[0] in CONFIG_MAPPING])
def test_every_family_that_transformers_knows_answers_as_on_the_cpu(
    shape: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject(shape, tmp_path_factory.getbasetemp())
    requests = workload(checkpoints.VOCAB, 24, (GREEDY,))
    executor = it.executor(16, eager=False)
    kv = KVCacheManager(PAGES, 16, cache_of(executor, 16))
    engine = Engine(Scheduler(kv, rows=ROWS, max_num_batched_tokens=96), executor, lookahead=1)
    assert ask(engine, requests) == it.local(requests)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafts", ["none", "ngram", "model"])
def test_every_sampling_setting_answers_as_on_the_cpu(
    drafts: str, eager: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject("qwen3-gqa", tmp_path_factory.getbasetemp())
    requests = workload(checkpoints.VOCAB, 20, SAMPLING)
    executor = it.executor(16, eager=eager, drafts=drafts)
    for which in (requests, [r for r in requests if r.sampling in SAMPLING[:5]]):
        executor.reset()
        scheduler = Scheduler(
            KVCacheManager(PAGES, 16, make_prefix_cache(16, True)),
            rows=ROWS,
            max_num_batched_tokens=96,
            speculation=FixedDrafts(executor.describe().num_drafts),
        )
        assert ask(Engine(scheduler, executor, lookahead=1), which) == it.local(which)
        drafted = scheduler.draft_stats
        assert drafts != "model" or drafted.num_accepted > 0.6 * drafted.num_drafted
    assert not any(
        each.k[0].any() or each.v[0].any() for each in executor.runner.kv
    )  # the null block: nothing writes there


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafts", ["none", "ngram", "model"])
def test_every_pair_of_features_answers_as_on_the_cpu(
    drafts: str, eager: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject("qwen3-gqa", tmp_path_factory.getbasetemp())
    want = test_features.answers(it.local_executor(), 0)
    for lookahead in (1, 2):
        got = test_features.answers(it.executor(16, eager=eager, drafts=drafts), lookahead)
        test_features.agree(got, want, 2e-4)


@pytest.mark.parametrize("shape", ["qwen3-gqa", "qwen3_next-shared-keys"])
def test_answers_are_the_same_while_graphs_are_still_captured(
    shape: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sizes whose graphs come later are served by larger ones, then by their own, also in the middle of answers."""
    it, device = subject(shape, tmp_path_factory.getbasetemp()), torch.device("cuda")
    keys = graph_keys(ROWS, 256, 256)
    queue = CudaQueue(device, 256)
    executor = CudaExecutor(
        *(it.gpu,), pages=PAGES, page_size=16, rows=ROWS, max_model_len=LENGTH, tokens=256, dtype=torch.float32,
        device=device, steps=kernels.TritonSteps(device), queue=queue, snapshots=SNAPSHOTS, warm=keys,
        larger=stand_ins(keys),
    )  # fmt: skip
    requests = workload(checkpoints.VOCAB, 30, SAMPLING)
    wanted, postponed = it.local(requests), len(queue.postponed)
    assert postponed > 10
    for turn in range(3):
        scheduler = Scheduler(
            KVCacheManager(PAGES, 16, cache_of(executor, 16)),
            rows=ROWS,
            max_num_batched_tokens=256,
            max_chunk_tokens=90,
        )
        engine = Engine(scheduler, executor, lookahead=1)
        for request in requests:
            engine.add(request)
        while engine.has_pending_work:
            engine.step()
            if turn == 1:
                executor.prepare_next()
        assert {done.id: done.tokens for done in engine.completed_requests} == wanted
        executor.reset()
    assert not queue.postponed and not queue.larger
    executor.close()


def test_an_llm_captures_nothing_while_its_caller_may_wait_for_the_device() -> None:
    with LLM("embedded", device="cuda", max_num_seqs=64, kv_cache_memory_bytes=1 << 28) as llm:
        torch.cuda.synchronize()
        assert not cast(CudaQueue, cast(CudaExecutor, llm._engine.executor).runner.queue).postponed


def test_a_step_that_drafts_is_timed_and_leaves_no_trace(tmp_path_factory: pytest.TempPathFactory) -> None:
    it = subject("qwen3-gqa", tmp_path_factory.getbasetemp())
    executor = it.executor(16, eager=False, drafts="model")
    assert min(executor.runner.step_seconds(4, drafts) for drafts in (0, 1, 3)) > 0
    requests = workload(checkpoints.VOCAB, 8, (GREEDY,))
    measured = {(n, d): executor.runner.step_seconds(n, d) for n in (1, 2, 4, 8, 16, 32) for d in draft_counts(3)}
    policy = AdaptiveDrafts(3, StepTimeModel(measured))
    kv = KVCacheManager(PAGES, 16, make_prefix_cache(16, True))
    engine = Engine(Scheduler(kv, rows=ROWS, max_num_batched_tokens=96, speculation=policy), executor, lookahead=1)
    assert ask(engine, requests) == it.local(requests)


def vectors(engine: Engine, requests: Sequence[Request]) -> dict[str, bytes]:
    """Of those that were to be pooled."""
    for request in requests:
        engine.add(request)
    made: dict[str, bytes] = {}
    while engine.has_pending_work:
        made |= {event.id: event.pooled for event in engine.step() if event.pooled}
    return made


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompts_become_the_vectors_that_they_become_on_the_cpu(
    depth: int, eager: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    it = subject("qwen3-gqa", tmp_path_factory.getbasetemp())
    answers = workload(checkpoints.VOCAB, 12, (GREEDY,))
    pooled = [
        replace(one, id=f"{how}-{one.id}", max_new_tokens=1, sampling=SamplingParams(temperature=0.0, pooling=how))
        for one in answers
        for how in ("mean", "last")
    ]
    both = [one for pair in itertools.zip_longest(pooled, answers) for one in pair if one is not None]
    local = LocalExecutor(it.cpu, pages=400, page_size=16, rows=ROWS, max_model_len=LENGTH, dtype=torch.float32)
    want = vectors(Engine(Scheduler(KVCacheManager(400, 16, make_prefix_cache(16, True)), rows=ROWS), local), pooled)
    executor = it.executor(16, eager=eager)
    assert executor.describe().supports_pooling
    kv = KVCacheManager(PAGES, 16, make_prefix_cache(16, True))
    engine = Engine(Scheduler(kv, rows=ROWS, max_num_batched_tokens=96, max_chunk_tokens=17), executor, lookahead=depth)
    made = vectors(engine, both)
    assert made.keys() == want.keys() == {one.id for one in pooled}
    for id, vector in made.items():
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), np.frombuffer(want[id], "<f4"), atol=2e-4, err_msg=id)
    said = {done.id: done.tokens for done in engine.completed_requests}
    assert {one.id: said[one.id] for one in answers} == it.local(answers)


AXES: dict[str, Sequence[Any]] = {
    "depth": (0, 1, 2),
    "page_size": (1, 4, 16, 64),
    "tight": (1, 2, 16),
    "reuse": (False, True),
    "eviction": ("lru", "fifo"),
    "cap": (1, 4, UNLIMITED),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (64, 7), (9, UNLIMITED)),
    "admit": ("continuous", "static"),
    "eager": (False, False, True),
    "drafts": ("none", "ngram", "model"),
}


RECURRENT = ("qwen3_next-shared-keys", "nemotron_h-gqa", "granitemoehybrid-mamba-experts")


@pytest.mark.parametrize(
    ("shape", "share"),
    [*(("qwen3-gqa", share) for share in range(8)), *((shape, share) for shape in RECURRENT for share in range(2))],
)
def test_a_slice_of_the_lattice_on_the_gpu(shape: str, share: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """26 combinations a share, 208 in all, and 52 of each model with recurrent layers, which do not draft."""
    it = subject(shape, tmp_path_factory.getbasetemp())
    requests = workload(checkpoints.VOCAB, 6, SAMPLING[:5])
    want = it.local(requests)
    longest = max(len(r.prompt) for r in requests) + 6
    axes = AXES | ({"drafts": ("none", "ngram")} if shape in RECURRENT else {})
    combos = list(itertools.product(*axes.values()))
    for values in random.Random(share).sample(combos, 26):
        c = dict(zip(axes, values, strict=True))
        size, (budget, chunk) = c["page_size"], c["feed"]
        pages = min(PAGES, -(-longest // size) * c["tight"])
        executor = it.executor(size, eager=c["eager"], drafts=c["drafts"])
        kv = KVCacheManager(pages, size, cache_of(executor, size, c["reuse"]), EVICTION_POLICIES[c["eviction"]]())
        scheduler = Scheduler(
            kv,
            rows=ROWS,
            max_num_seqs=c["cap"],
            max_num_batched_tokens=budget,
            max_chunk_tokens=chunk,
            policy=SchedulingPolicy(batching=c["admit"]),
            speculation=FixedDrafts(executor.describe().num_drafts),
        )
        which = random.Random(str(c)).sample(range(16), 6)
        engine = Engine(scheduler, executor, lookahead=c["depth"])
        answers = ask(engine, [requests[i] for i in which])
        assert answers == {str(i): want[str(i)] for i in which}, c
