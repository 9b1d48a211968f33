"""Prompts become vectors on every executor that says so: in any company, however cut, preempted or run ahead of."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.executor import Executor
from quire.executors.local import LocalExecutor
from quire.model_runner.graphs import GraphKey
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import FixedDrafts
from quire.types import UNLIMITED, Request, RequestStepOutput, SamplingParams
from tests.executors.driver import LONGEST, MODEL, REQUESTS, WANT
from tests.executors.test_cuda import driver, executor
from tests.executors.wired import served
from tests.model_runner.tiny import POISON, VOCAB

POOLED = {how: SamplingParams(temperature=0.0, max_tokens=1, pooling=how) for how in ("mean", "last")}


def prompts() -> list[tuple[int, ...]]:
    """Some share prefixes with others and with answers, so that pages are shared where they may be."""
    rng = random.Random(11)
    fresh = [tuple(rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 30))) for _ in range(4)]
    return [*fresh, fresh[-1], *(r.prompt for r in REQUESTS[1:4]), (7,)]


def pooled() -> list[Request]:
    return [
        Request(id=f"{how}-{i}", prompt=prompt, max_new_tokens=1, sampling=sampling)
        for i, prompt in enumerate(prompts())
        for how, sampling in POOLED.items()
    ]


def expected(request: Request) -> np.ndarray:
    states = MODEL.states(request.prompt).float().numpy()
    return states.mean(0) if request.sampling.pooling == "mean" else states[-1]


def mixed(seed: int) -> list[Request]:
    both = [*pooled(), *(r for r in REQUESTS if r.id in WANT)]
    random.Random(seed).shuffle(both)
    return both


def check(events: dict[str, list[RequestStepOutput]]) -> None:
    for request in pooled():
        [event] = events[request.id]
        assert event.finish == "length"
        vector = np.frombuffer(event.pooled, "<f4")
        np.testing.assert_allclose(vector, expected(request), atol=2e-6, err_msg=request.id)
    for id in WANT:
        assert not any(event.pooled for event in events[id])


@contextmanager
def local() -> Iterator[Executor]:
    yield LocalExecutor(MODEL, pages=200, page_size=4, rows=8, max_model_len=LONGEST + 1, dtype=torch.float64)


@contextmanager
def ahead() -> Iterator[Executor]:
    yield executor(MODEL, pages=200, size=4, rows=8, length=LONGEST + 1)


@contextmanager
def remote() -> Iterator[Executor]:
    with local() as inner, served(inner) as outer:
        yield outer


@pytest.mark.parametrize("make", [local, ahead, remote])
def test_every_executor_that_pools_gives_the_dense_models_vectors(make) -> None:  # type: ignore[no-untyped-def]
    with make() as it:
        assert it.describe().supports_pooling
        engine = Engine(
            Scheduler(
                KVCacheManager(200, 4, make_prefix_cache(4, True)),
                rows=8,
                max_num_batched_tokens=24,
                max_chunk_tokens=7,
            ),
            it,
            lookahead=1,
        )
        events: dict[str, list[RequestStepOutput]] = {}
        for request in mixed(1):
            if request.id not in {"1", "4", "10"}:
                engine.add(request)
        while engine.has_pending_work:
            for event in engine.step():
                events.setdefault(event.id, []).append(event)
        check(events | {id: [] for id in WANT if id not in events})


@pytest.mark.parametrize(
    ("depth", "drafts"),
    [
        pytest.param(depth, drafts, marks=() if (at + depth) % 3 == 0 else pytest.mark.nightly)
        for depth in (0, 1, 2, -1)
        for at, drafts in enumerate(("none", "ngram", "twin"))
    ],
)
def test_running_ahead_changes_no_vector_and_vectors_change_no_answer(depth: int, drafts: str) -> None:
    rng = random.Random(depth)
    for tight, feed in ((2, (16, 5)), (3, (9, UNLIMITED)), (14, (UNLIMITED, UNLIMITED))):
        it = driver(
            size=4, pages=-(-LONGEST // 4) * tight, lookahead=depth, feed=feed, drafts=drafts, policy=FixedDrafts
        )
        answers = it.answer(mixed(depth), late=lambda: rng.randrange(4))
        assert {id: answers[id] for id in WANT} == WANT
        check(it.events)
        assert it.scheduler.kv.block_pool.num_free == it.scheduler.kv.block_pool.num_blocks


def test_an_aborted_row_leaves_nothing_for_the_next_one() -> None:
    it = executor()
    spans: Sequence[Span] = (Span(0, 3, 0, 0),)
    first = NewSequence(0, (5, 6, 7, 8, 9), 0, 5, POOLED["mean"])
    it.launch(Plan((first,), ((0, (1, 2)),), tuple(spans))).result()
    again = NewSequence(0, (1, 2, 3), 0, 3, POOLED["mean"])
    result = it.launch(Plan((again,), ((0, (3,)),), (Span(0, 3, 1, 1),))).result()
    np.testing.assert_allclose(
        np.frombuffer(result.pooled[0], "<f4"), MODEL.states((1, 2, 3)).float().mean(0), atol=2e-6
    )
    plain = it.launch(Plan((NewSequence(0, (1, 2, 3), 0, 3),), ((0, (4,)),), (Span(0, 3, 1, 1),))).result()
    assert plain.pooled == {}


def test_a_vector_that_is_not_finite_is_an_error_of_its_request() -> None:
    it = driver(lookahead=1, feed=(UNLIMITED, 3))
    sick = Request(id="sick", prompt=(1, 2, 3, 4, POISON), max_new_tokens=1, sampling=POOLED["mean"])
    well = Request(id="well", prompt=(1, 2, 3, 4), max_new_tokens=1, sampling=POOLED["mean"])
    it.answer([sick, well])
    assert it.events["sick"][-1].error == "the model produced NaN or infinite logits"
    assert not it.events["sick"][-1].pooled
    np.testing.assert_allclose(np.frombuffer(it.events["well"][-1].pooled, "<f4"), expected(well), atol=2e-6)


def test_steps_without_pooling_give_no_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    it = executor()
    whole: list[bool] = []
    body = it.runner._body

    def seen(key: GraphKey, *more: Any) -> None:
        whole.append(key.kind == "hidden")
        body(key, *more)

    monkeypatch.setattr(it.runner, "_body", seen)
    for sampling in (POOLED["mean"], POOLED["last"], SamplingParams(temperature=0.0)):
        it.launch(Plan((NewSequence(0, (1, 2, 3), 0, 3, sampling),), ((0, (1,)),), (Span(0, 3, 1, 1),))).result()
        it.reset()
    assert whole == [True, False, False]
