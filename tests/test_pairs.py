"""The combinations that CI takes of many have every pair of values, and are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.executors import test_cpu, test_cuda
from tests.pairs import pairwise


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("axes", [test_cpu.AXES, test_cuda.AXES, {"a": (1, 2), "b": (3,)}], ids=["cpu", "cuda", "two"])
def test_every_pair_of_values_is_in_few_combinations(axes: dict[str, tuple[object, ...]], seed: int) -> None:
    chosen = pairwise(axes, seed)
    assert chosen == pairwise(axes, seed)
    for a, b in combinations(axes, 2):
        assert {(each[a], each[b]) for each in chosen} == {*product(axes[a], axes[b])}
    longest = sorted(map(len, axes.values()))[-2:]
    assert len(chosen) <= 2 * longest[0] * longest[1]
