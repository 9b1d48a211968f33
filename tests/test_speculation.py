"""Speculation is lossless: greedy and seeded answers are the same with it and without, whatever drafts and how deep."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.engine import Engine
from quire.executors.local import CudaExecutor, LocalExecutor
from quire.llm import LLM
from quire.model_runner.device_state import DeviceState
from quire.model_runner.device_steps import DeviceSteps, TorchSteps
from quire.model_runner.graphs import WorkQueue
from quire.model_runner.memory import allocate, layer_shapes
from quire.model_runner.row_state import Ints, RowState
from quire.model_runner.speculative import (
    Drafter,
    ModelDrafter,
    ModelProposer,
    NgramDrafter,
    NgramProposer,
    Proposer,
    lookup,
)
from quire.models.registry import Model
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, SpeculationPolicy
from quire.tokenization.tokenizer import Tokenizer
from quire.types import GREEDY, Request, SamplingParams, StructuredOutputsParams
from quire.weights.load import load_model
from quire.weights.locate import embedded

PAGES, SIZE, ROWS = 600, 8, 24
CONTEXT = 256
COUNT = 24
"""Requests: more than a prompt of each kind with each setting."""
SETTINGS = (
    GREEDY,
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.9, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, logit_bias={260: 4.0, 300: -5.0}, min_tokens=10),
    SamplingParams(temperature=1.0, bad_words_token_ids=((262,), (280, 281)), logprobs=1),
)


@cache
def models() -> tuple[Model, Model]:
    return load_model(embedded(), dtype="float32"), load_model(embedded() / "draft", dtype="float32")


class Drawn(FixedDrafts):
    """A depth nobody can foresee."""

    def num_drafts(self, seq: Any) -> int:
        return hash((seq.arrival, len(seq.tokens))) % (self.max_drafts + 1)


def drafter(kind: str) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter(4)
    draft = models()[1]
    kv = allocate(layer_shapes(draft.spec.kv_shapes, torch.float32), pages=PAGES, page_size=SIZE)
    return ModelDrafter(draft, kv, vocab_size=draft.spec.vocab, num_drafts=4, rows=ROWS, device=torch.device("cpu"))


def engine(
    kind: str, policy: type[FixedDrafts] | type[AdaptiveDrafts] = FixedDrafts, *, pages: int = PAGES, depth: int = 0
) -> Engine:
    drafts = drafter(kind)
    executor = LocalExecutor(
        models()[0],
        pages=pages,
        page_size=SIZE,
        rows=ROWS,
        max_model_len=CONTEXT,
        dtype=torch.float32,
        drafter=drafts,
    )
    speculation: SpeculationPolicy = policy(executor.describe().num_drafts)
    kv = KVCacheManager(pages, SIZE, make_prefix_cache(SIZE, True))
    return Engine(
        Scheduler(
            kv, rows=ROWS, max_num_seqs=12, max_num_batched_tokens=96, max_chunk_tokens=40, speculation=speculation
        ),
        executor,
        lookahead=depth,
    )


def requests(count: int, seed: int = 1) -> list[Request]:
    """Prompts that share prefixes and repeat themselves, every sampling setting in turn."""
    rng = random.Random(seed)
    draw = lambda n: tuple(rng.randrange(300, 2000) for _ in range(n))  # noqa: E731
    shared, words = draw(30), draw(6)
    out = []
    for i in range(count):
        prompt = (shared if i % 3 else ()) + draw(rng.randrange(1, 12)) + words * (i % 4)
        new = rng.randrange(5, 40)
        out.append(
            Request(
                id=str(i),
                prompt=prompt,
                max_new_tokens=new,
                sampling=SETTINGS[i % 8],
                seed=rng.getrandbits(40),
                choice=i % 2,
            )
        )
    return out


def answers(it: Engine, asked: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    for request in asked:
        it.add(request)
    while it.has_pending_work:
        it.step()
    assert it.gauges().used_blocks == 0
    return {c.id: c.tokens for c in it.completed_requests}


@cache
def plain(count: int, seed: int = 1) -> dict[str, tuple[int, ...]]:
    return answers(engine("none"), requests(count, seed))


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (FixedDrafts, "model"),
        (Drawn, "ngram"),
        pytest.param(AdaptiveDrafts, "ngram", marks=pytest.mark.nightly),
        pytest.param(FixedDrafts, "ngram", marks=pytest.mark.nightly),
        pytest.param(Drawn, "model", marks=pytest.mark.nightly),
        pytest.param(AdaptiveDrafts, "model", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_the_same_with_any_drafts(kind: str, policy: type[FixedDrafts]) -> None:
    it = engine(kind, policy)
    assert answers(it, requests(COUNT)) == plain(COUNT)
    assert it.scheduler.draft_stats.num_drafted > 100


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_answers_are_the_same_when_running_ahead(depth: int) -> None:
    assert answers(engine("model", Drawn, depth=depth), requests(COUNT)) == plain(COUNT)


def test_answers_are_the_same_under_memory_pressure() -> None:
    it = engine("model", Drawn, pages=40)
    assert answers(it, requests(COUNT)) == plain(COUNT)
    assert it.gauges().preemptions > 0


def test_the_embedded_draft_is_often_right_about_a_story() -> None:
    it = engine("model")
    prompt = Tokenizer.from_folder(embedded()).encode("Once upon a time, there was a little girl named Lily.")
    for i in range(6):
        it.add(Request(id=str(i), prompt=prompt, max_new_tokens=60, sampling=SamplingParams(temperature=0.7), seed=i))
    while it.has_pending_work:
        it.step()
    assert it.scheduler.draft_stats.num_accepted > 0.4 * it.scheduler.draft_stats.num_drafted


def ahead(kind: str, steps: DeviceSteps | None = None) -> Engine:
    """The executor that runs ahead, drafts for itself and verifies there."""
    proposer: Proposer = NgramProposer(4, shortest=1)
    if kind == "model":
        draft, device = models()[1], torch.device("cpu")
        kv = allocate(layer_shapes(draft.spec.kv_shapes, torch.float32), pages=PAGES, page_size=SIZE)
        proposer = ModelProposer(draft, kv, num_drafts=4, rows=ROWS, device=device)
    executor = CudaExecutor(
        models()[0],
        pages=PAGES,
        page_size=SIZE,
        rows=ROWS,
        max_model_len=CONTEXT,
        tokens=96,
        dtype=torch.float32,
        device=torch.device("cpu"),
        steps=steps or TorchSteps(),
        queue=WorkQueue(),
        proposer=proposer,
    )
    kv_ = KVCacheManager(PAGES, SIZE, make_prefix_cache(SIZE, True))
    return Engine(
        Scheduler(
            kv_, rows=ROWS, max_num_seqs=12, max_num_batched_tokens=96, max_chunk_tokens=40, speculation=Drawn(4)
        ),
        executor,
        lookahead=1,
    )


@pytest.mark.parametrize(
    ("greedy", "kind"),
    [
        (False, "ngram"),
        (True, "model"),
        pytest.param(False, "model", marks=pytest.mark.nightly),
        pytest.param(True, "ngram", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_the_same_where_the_device_drafts(kind: str, greedy: bool) -> None:
    """Greedy rows are sampled and verified there; the others by the host, from drafts it asks back."""
    asked = [r for r in requests(COUNT) if not greedy or r.sampling == GREEDY]
    it = ahead(kind)
    assert answers(it, asked) == {r.id: plain(COUNT)[r.id] for r in asked}
    assert it.scheduler.draft_stats.num_accepted > 5


class OneTooMany(TorchSteps):
    """A planted bug: the first wrong draft of a chain is accepted, too."""

    def verify(self, arena: DeviceState, tokens: torch.Tensor) -> None:
        for c in range(int(arena.step.counts[3])):
            for i in range(int(arena.chain[c]), int(arena.chain[c + 1]) - 1):
                draft = arena.history[int(arena.step.sample_row[i]), int(arena.step.sample_position[i])].clone()
                if tokens[i] != draft:
                    tokens[i] = draft
                    break
        super().verify(arena, tokens)


def test_a_planted_draft_too_many_is_caught() -> None:
    asked = [r for r in requests(COUNT) if r.sampling == GREEDY]
    assert answers(ahead("model", OneTooMany()), asked) != {r.id: plain(COUNT)[r.id] for r in asked}


DRAFTERS = ('{"method": "ngram", "adaptive": false}', '{"method": "draft_model", "adaptive": false}')


@cache
def library(config: str | None) -> LLM:
    return LLM("embedded", dtype="float32", max_model_len=512, max_num_seqs=8, speculative_config=config)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}},
    },
    "required": ["name", "pets"],
    "additionalProperties": False,
}
ASKED = (
    SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(
        temperature=0.9, seed=3, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="(cat|dog| and )+")
    ),
    SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=30, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, n=2, max_tokens=30, presence_penalty=0.5),
)


@pytest.mark.parametrize("config", DRAFTERS)
def test_grammars_choices_and_log_probabilities_are_the_same_with_drafts(config: str) -> None:
    prompts = ["Once upon a time, Tom had a cat and a dog.", *["The cat and the dog and the cat and the dog"] * 4]
    want = library(None).generate(prompts, list(ASKED), use_tqdm=False)
    llm = library(config)
    got = llm.generate(prompts, list(ASKED), use_tqdm=False)
    assert llm._engine.scheduler.draft_stats.num_accepted > 20
    for a, b, asked in zip(got, want, ASKED, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert len(a.outputs) == asked.n
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.finish_reason, x.text) == (y.finish_reason, y.text)
            for one, other in zip(x.logprobs or (), y.logprobs or (), strict=True):
                assert (one.token, one.rank) == (other.token, other.rank)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.nightly
def test_a_thousand_seeded_requests_are_the_same() -> None:
    for seed in range(4):
        for kind in ("ngram", "model"):
            assert answers(engine(kind, Drawn), requests(256, seed)) == plain(256, seed)


class OffByOne(NgramDrafter):
    """A planted bug: the verify accepts the draft after the one it should compare."""

    def propose(self, rows: RowState, which: Ints, depth: Ints) -> Any:
        drafts = super().propose(rows, which, depth)
        settle = rows.advance

        def wrong(shape: Any, sampled: Any, bad: Any) -> Any:
            row = shape.sample_row
            sampled = sampled.copy()
            known = rows.num_known[row] + shape.sample_offset
            sampled[~shape.is_last_sample] = rows.tokens[row, known][
                ~shape.is_last_sample
            ]  # whatever was drafted is right
            return settle(shape, sampled, bad)

        rows.advance = wrong  # type: ignore[method-assign]
        return drafts


def histogram(drafts: Drafter | None, count: int, sampling: SamplingParams) -> Counter[int]:
    """The third token after one prompt, over many seeds."""
    executor = LocalExecutor(
        models()[0], pages=PAGES, page_size=SIZE, rows=ROWS, max_model_len=CONTEXT, dtype=torch.float32, drafter=drafts
    )
    kv = KVCacheManager(PAGES, SIZE, make_prefix_cache(SIZE, True))
    policy = FixedDrafts(0 if drafts is None else drafts.num_drafts)
    it = Engine(Scheduler(kv, rows=ROWS, max_num_seqs=ROWS, speculation=policy), executor)
    prompt = (300, 301, 302, 300, 301, 302, 300, 301)
    for i in range(count):
        it.add(Request(id=str(i), prompt=prompt, max_new_tokens=3, sampling=sampling, seed=i))
    seen: Counter[int] = Counter()
    while it.has_pending_work:
        it.step()
        while it.completed_requests:
            seen[it.completed_requests.popleft().tokens[-1]] += 1
    return seen


def chi_square(a: Counter[int], b: Counter[int]) -> tuple[float, int]:
    """Two-sample statistic and degrees of freedom, rare tokens pooled."""
    common = [t for t, n in (a + b).items() if n >= 20]
    rows = [[c[t] for t in common] + [sum(n for t, n in c.items() if t not in set(common))] for c in (a, b)]
    table = np.array(rows, dtype=float)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(0) * table.sum(1, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", [SETTINGS[1], SETTINGS[2], SETTINGS[3]], ids=["plain", "top-p", "top-k-min-p"])
def test_samples_follow_the_target_alone(sampling: SamplingParams) -> None:
    """Over 200,000 samples in all. p > 0.01 by Wilson and Hilferty's normal approximation."""

    def z(statistic: float, freedom: int) -> float:
        k = 2 / (9 * freedom)
        return ((statistic / freedom) ** (1 / 3) - (1 - k)) / k**0.5

    alone = histogram(None, 35_000, sampling)
    assert z(*chi_square(alone, histogram(drafter("model"), 35_000, sampling))) < 2.33
    assert z(*chi_square(alone, histogram(OffByOne(2, shortest=1), 6_000, sampling))) > 5


def test_lookup_finds_the_latest_place_of_the_longest_suffix() -> None:
    history = np.array([1, 2, 3, 9, 1, 2, 3, 7, 2, 3, 5, 1, 2, 3], np.int32)
    assert history[lookup(history, 4, 2)] == 7  # 1 2 3 at 4..6, not the later 2 3
    assert lookup(np.array([1, 2, 3, 4], np.int32), 4, 2) == 4
    assert lookup(np.array([5], np.int32), 4, 2) == 1
    assert lookup(np.array([7, 8, 7], np.int32), 4, 2) == 3 and lookup(np.array([7, 8, 7], np.int32), 4, 1) == 1
