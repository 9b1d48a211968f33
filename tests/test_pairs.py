"""The combinations that CI takes of many have every pair of values, and are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.executors import test_cpu, test_cuda
from tests.pairs import in_turn, pairwise


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("axes", [test_cpu.AXES, test_cuda.AXES, {"a": (1, 2), "b": (3,)}], ids=["cpu", "cuda", "two"])
def test_every_pair_of_values_is_in_few_combinations(axes: dict[str, tuple[object, ...]], seed: int) -> None:
    chosen = pairwise(axes, seed)
    assert chosen == pairwise(axes, seed)
    for a, b in combinations(axes, 2):
        assert {(each[a], each[b]) for each in chosen} == {*product(axes[a], axes[b])}
    longest = sorted(map(len, axes.values()))[-2:]
    assert len(chosen) <= 2 * longest[0] * longest[1]


def test_in_ci_one_in_so_many_takes_its_turn_and_at_night_all_do() -> None:
    params = in_turn([(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")], 2, first=1)
    assert [each.values for each in params] == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    assert [[mark.name for mark in each.marks] for each in params] == [["nightly"], [], ["nightly"], [], ["nightly"]]
    assert [each.values for each in in_turn("xy")] == [("x",), ("y",)]
