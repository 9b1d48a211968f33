"""Where layers are cut into stages, and what stages do when one of them fails."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quire.errors import InvalidModel, StepFailed
from quire.layers.stages import ONE_STAGE, Pipeline, cut_layers
from tests.ranks import RankThreads


def largest(cut: Sequence[range], sizes: Sequence[int], ends: tuple[int, int]) -> int:
    held = [sum(sizes[i] for i in layers) for layers in cut]
    held[0] += ends[0]
    held[-1] += ends[1]
    return max(held)


def every_cut(count: int, stages: int, uncut: Sequence[int]) -> list[list[range]]:
    places = [i for i in range(1, count) if i not in uncut]
    return [
        [range(*pair) for pair in itertools.pairwise((0, *inner, count))]
        for inner in itertools.combinations(places, stages - 1)
    ]


def test_no_other_cut_has_a_smaller_largest_stage() -> None:
    rng = random.Random(3)
    for _ in range(200):
        count, stages = rng.randrange(1, 9), rng.randrange(1, 5)
        sizes = [rng.randrange(1, 20) for _ in range(count)]
        ends = rng.randrange(40), rng.randrange(40)
        uncut = [i for i in range(1, count) if rng.random() < 0.2]
        known = every_cut(count, stages, uncut)
        if not known:
            with pytest.raises(InvalidModel, match="lower --pipeline-parallel-size"):
                cut_layers(sizes, ends, stages, uncut)
            continue
        cut = cut_layers(sizes, ends, stages, uncut)
        assert cut in known
        assert largest(cut, sizes, ends) == min(largest(each, sizes, ends) for each in known)


def test_one_stage_has_all_layers_and_sends_nothing() -> None:
    assert cut_layers([5, 5, 5], (9, 9), 1) == [range(3)]
    with ONE_STAGE.step():
        pass


def steps(works: Sequence[Callable[[Pipeline], Tensor | None]], count: int = 3) -> list[list[Tensor | str | None]]:
    """What `count` steps give on every stage, or why they failed."""
    ranks = RankThreads(1, len(works))

    def run(rank: int) -> list[Tensor | str | None]:
        found: list[Tensor | str | None] = []
        for _ in range(count):
            try:
                with ranks.groups[rank].pipeline.step():
                    found.append(works[rank](ranks.groups[rank].pipeline))
            except (StepFailed, ZeroDivisionError) as error:
                found.append(str(error))
        return found

    try:
        return ranks.run(run)
    finally:
        ranks.close()


def first(pipeline: Pipeline) -> Tensor:
    return pipeline.send(torch.arange(6.0).view(2, 3))


def middle(pipeline: Pipeline) -> Tensor:
    return pipeline.send(pipeline.receive(torch.empty(2, 3)) + 1)


def last(pipeline: Pipeline) -> Tensor:
    return pipeline.receive(torch.empty(2, 3)) * 2


def test_hidden_states_go_from_stage_to_stage() -> None:
    for each in steps((first, middle, last))[-1]:
        assert isinstance(each, Tensor) and each.tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("when", ["at once", "once it has received"])
def test_a_stage_that_fails_fails_the_later_ones_and_no_other_step(stage: int, when: str) -> None:
    works: list[Callable[[Pipeline], Tensor | None]] = [first, middle, last]
    count, own = itertools.count(), works[stage]

    def failing(pipeline: Pipeline) -> Tensor | None:
        if next(count) != 1:
            return own(pipeline)
        if stage and when != "at once":
            pipeline.receive(torch.empty(2, 3))
        raise ZeroDivisionError("here")

    works[stage] = failing
    before = threading.active_count()
    for number, found in enumerate(steps(works)):
        assert isinstance(found[0], Tensor) and isinstance(found[2], Tensor)
        wanted = "here" if number == stage else "an earlier stage could not run the step"
        assert found[1] == wanted if number >= stage else isinstance(found[1], Tensor)
    assert threading.active_count() <= before
