"""The local executor under the real scheduler and engine: tokens equal a dense loop's, whatever the settings."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from quire.errors import StepFailed
from quire.executors.local import LocalExecutor
from quire.model_runner.speculative import Drafter
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.types import UNLIMITED, Request
from tests.executors.driver import (
    LONGEST,
    MODEL,
    OPENING,
    REQUESTS,
    WANT,
    Driver,
    Fragile,
    scripted_drafter,
)
from tests.model_runner.oracle import naive
from tests.model_runner.tiny import POISON, VOCAB, Tiny
from tests.pairs import pairwise


def driver(
    *, size: int = 4, pages: int = 400, model: Tiny = MODEL, drafter: Drafter | None = None, **settings: Any
) -> Driver:
    executor = LocalExecutor(
        model, pages=pages, page_size=size, rows=16, max_model_len=LONGEST + 1, dtype=torch.float64, drafter=drafter
    )
    return Driver(executor, **settings)


AXES = {
    "lookahead": (0, 1, 2),
    "size": (1, 4, 64),
    "tight": (1, 2, 14),
    "reuse": (False, True),
    "feed": ((UNLIMITED, UNLIMITED), (16, 5), (9, UNLIMITED)),
    "admit": ("continuous", "static"),
    "drafts": (0, 3),
    "max_num_seqs": (3, 16),
}
COMBOS = [dict(zip(AXES, v, strict=True)) for v in itertools.product(*AXES.values())]
CHOSEN = pairwise(AXES)
"""In CI: every pair of values, three times over with other values beside it."""
CHOSEN += [each for seed in (1, 2) for each in pairwise(AXES, seed) if each not in CHOSEN]
OTHERS = [each for each in random.Random(1).sample(COMBOS, 216) if each not in CHOSEN]


@pytest.mark.parametrize(
    "combo",
    [*CHOSEN, *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)],
    ids=lambda c: "-".join(str(v) for v in c.values()).replace(str(UNLIMITED), "all"),
)
def test_every_combination_gives_the_dense_loops_tokens(combo: dict[str, object]) -> None:
    kw = dict(combo)
    size, tight, drafts = int(str(kw["size"])), int(str(kw.pop("tight"))), int(str(kw.pop("drafts")))
    rng = random.Random(str(combo))
    it = driver(pages=-(-LONGEST // size) * tight, drafter=scripted_drafter(drafts), **kw)
    assert it.answer(REQUESTS, late=lambda: rng.randrange(3)) == WANT
    assert it.scheduler.kv.block_pool.num_free == it.scheduler.kv.block_pool.num_blocks


def test_every_setting_changes_some_answer_of_the_workload() -> None:
    plain = {r.id: naive(MODEL, Request(id=r.id, prompt=r.prompt, max_new_tokens=r.max_new_tokens)) for r in REQUESTS}
    assert sum(plain[r.id] != WANT[r.id] for r in REQUESTS) >= 10
    assert len({t for answer in WANT.values() for t in answer}) > VOCAB // 2
    assert max(len(answer) for answer in WANT.values()) >= 10


@pytest.mark.parametrize("drafts", [0, 3])
def test_logprobs_are_those_of_the_dense_model(drafts: int) -> None:
    it = driver(feed=(32, 5), drafter=scripted_drafter(drafts))
    it.answer(REQUESTS)
    request = next(r for r in REQUESTS if r.sampling.logprobs == 2)
    scores = [each for e in it.events[request.id] for each in e.logprobs]
    tokens = [*request.prompt, *WANT[request.id]]
    want = MODEL.dense(tokens).log_softmax(-1)[len(request.prompt) - 1 : -1]
    assert [each.token for each in scores] == WANT[request.id]
    for each, row in zip(scores, want, strict=True):
        values, ids = row.topk(2)
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-5)
        assert each.rank == int((row > row[each.token]).sum()) + 1
        assert [t for t, _ in each.top] == ids.tolist()
        assert [x for _, x in each.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, UNLIMITED])
def test_prompt_logprobs_are_complete_with_any_chunk_size(chunk: int) -> None:
    it = driver(feed=(UNLIMITED, chunk))
    request = next(r for r in REQUESTS if r.sampling.prompt_logprobs is not None)
    it.answer([request])
    scores = [each for e in it.events[request.id] for each in e.prompt_logprobs]
    want = MODEL.dense(request.prompt).log_softmax(-1)
    assert [each.token for each in scores] == list(request.prompt[1:])
    assert [each.logprob for each in scores] == pytest.approx(
        [float(want[i, t]) for i, t in enumerate(request.prompt[1:])], abs=1e-5
    )


def test_a_row_with_nan_logits_fails_alone() -> None:
    it = driver(lookahead=1, feed=(UNLIMITED, 7))
    sick = [Request(id=f"sick-{i}", prompt=(*range(i), POISON), max_new_tokens=5) for i in (0, 5, 20)]
    mixed = [r for pair in itertools.zip_longest(REQUESTS, sick) for r in pair if r]
    answers = it.answer(mixed, late=lambda: 2)
    assert {id: answers[id] for id in WANT} == WANT
    for each in sick:
        assert answers[each.id] == []
        assert it.events[each.id][-1].error == "the model produced NaN or infinite logits"


def test_a_failed_step_fails_only_the_request_that_causes_it() -> None:
    harmless = [r for r in REQUESTS if 13 not in (*r.prompt, *WANT[r.id])]
    assert len(harmless) >= 4
    it = driver(lookahead=1, model=Fragile())
    answers = it.answer([*harmless[:3], Request(id="bad", prompt=(1, 13, 2), max_new_tokens=4), *harmless[3:]])
    assert {r.id: answers[r.id] for r in harmless} == {r.id: WANT[r.id] for r in harmless}
    assert it.events["bad"][-1].error == "the engine could not run this request (RuntimeError)"


def executor(model: Tiny = MODEL) -> LocalExecutor:
    return LocalExecutor(model, pages=8, page_size=4, rows=2, max_model_len=16, dtype=torch.float64)


def test_a_failure_keeps_its_cause_and_lasts_until_reset() -> None:
    it = executor(Fragile())
    failed = it.launch(Plan((NewSequence(0, (13,), 0, 1),), ((0, (5,)),), (Span(0, 1, 1, 1),)))
    with pytest.raises(StepFailed, match=r"^the step failed: a kernel failed$") as caught:
        failed.result()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(StepFailed, match="a kernel failed"):
        it.launch(OPENING).result()
    it.reset()
    assert it.launch(OPENING).result().tokens == [[int(MODEL.dense((1, 2, 3))[-1].argmax())]]


@pytest.mark.parametrize(
    "plan",
    [
        Plan((NewSequence(7, (1,), 0, 1),), (), (Span(7, 1, 1, 1),)),
        Plan((NewSequence(0, tuple(range(17)), 0, 17),), (), (Span(0, 17, 1, 1),)),
        Plan((NewSequence(0, (1, 2), 0, 2),), ((0, (5,)),), (Span(0, 1, 1, 1),)),
    ],
    ids=["no such row", "longer than the context", "samples before the prompt is fed"],
)
def test_an_impossible_plan_is_a_failed_step(plan: Plan) -> None:
    with pytest.raises(StepFailed, match="row"):
        executor().launch(plan).result()


def test_the_forward_runs_ahead_of_the_masks_and_sampling_does_not() -> None:
    model = Tiny()
    it = executor(model)
    step = it.launch(OPENING._replace(masked_spans=(0,)))
    assert model.fed == 3
    with pytest.raises(StepFailed, match="waits for masks"):
        step.result()
    only = 42
    step.sample([[(1 << only).to_bytes(8, "little")]])
    assert step.result().tokens == [[only]]


def test_a_mask_that_allows_nothing_fails_the_row() -> None:
    step = executor().launch(OPENING._replace(masked_spans=(0,)))
    step.sample([[bytes(8)]])
    result = step.result()
    assert result.tokens == [[]]
    assert "no token is allowed" in result.errors[0]


def test_an_executor_describes_its_sizes() -> None:
    about = executor().describe()
    assert (about.num_blocks, about.block_size, about.num_rows, about.max_model_len, about.vocab_size) == (
        8,
        4,
        2,
        16,
        VOCAB,
    )
    assert about.block_bytes == 2 * 2 * 4 * 2 * 8 * 8
    assert (about.dtype, about.device, about.num_drafts, about.lookahead) == ("float64", "cpu", 0, 0)


def test_closing_releases_the_pool() -> None:
    it = executor()
    it.close()
    assert not it.runner.kv
