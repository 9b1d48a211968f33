"""The embedded model as it is shipped: what it answers does not depend on who else is being answered."""

from __future__ import annotations

import random

import pytest
import torch

from quire.assembly import engine as build
from quire.assembly.engine import build_engine, choose_ops
from quire.config import Settings
from quire.engine.engine import Engine
from quire.ops.batch_invariant import BatchInvariantOps, SteadyOps, stable_rows
from quire.ops.reference import ReferenceOps
from quire.types import SamplingParams, TokenLogprobs

Asked = tuple[str, tuple[int, ...], int, SamplingParams]


def requests(count: int) -> list[Asked]:
    """Half of them greedy, half seeded; a third begin the same; prompts of 1 to 200 tokens, answers of 3 to 12."""
    chance = random.Random(17)
    shared = [chance.randrange(5, 4000) for _ in range(100)]
    made = []
    for i in range(count):
        own = [chance.randrange(5, 4000) for _ in range(chance.choice((1, 3, 5, 8, 20, 20, 40, 100)))]
        begin = shared[: chance.randrange(101)] if i % 3 == 0 else []
        sampling = SamplingParams(temperature=0.9 * (i % 2), seed=i, logprobs=0)
        made.append((f"{i}", (*begin, *own), chance.choice((3, 5, 8, 12)), sampling))
    return made


def answers(engine: Engine, asked: list[Asked]) -> dict[str, list[tuple[int, TokenLogprobs]]]:
    found: dict[str, list[tuple[int, TokenLogprobs]]] = {}
    for id, prompt, new, sampling in asked:
        engine.submit(prompt, new, id=id, sampling=sampling)
        found[id] = []
    while engine.has_pending_work:
        for event in engine.step():
            found[event.id] += zip(event.tokens, event.logprobs, strict=True)
    return found


def differing(count: int) -> list[str]:
    """Who gets other tokens or log-probabilities in a crowd than alone."""
    engine, asked = build_engine(Settings.of(model="embedded")), requests(count)
    try:
        alone = {id: each for one in asked for id, each in answers(engine, [one]).items()}
        engine.reset_prefix_cache()
        random.Random(1).shuffle(asked)
        crowd = answers(engine, asked)
    finally:
        engine.close()
    return [id for id in alone if alone[id] != crowd[id]]


def test_the_embedded_models_answers_are_the_same_alone_and_in_a_crowd_by_default() -> None:
    assert differing(24) == []


@pytest.mark.nightly
def test_none_of_10000_answers_of_the_embedded_model_depends_on_load() -> None:
    assert differing(10_000) == []


def test_a_machine_whose_libraries_do_otherwise_takes_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "stable_rows", lambda: 0)
    assert type(choose_ops(torch.device("cpu"), embedded=True)) is BatchInvariantOps


def test_what_is_chosen_goes_before_the_embedded_models_default() -> None:
    cpu = torch.device("cpu")
    assert type(choose_ops(cpu, embedded=True)) is (SteadyOps if stable_rows() else BatchInvariantOps)
    assert type(choose_ops(cpu, False, embedded=True)) is type(choose_ops(cpu))
    assert isinstance(choose_ops(cpu), ReferenceOps) and not isinstance(choose_ops(cpu), BatchInvariantOps)
    assert isinstance(choose_ops(cpu, True, embedded=True), BatchInvariantOps)
