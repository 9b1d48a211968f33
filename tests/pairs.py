"""Few combinations of settings that have every pair of values in them: the part in CI of a test of all combinations."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Combination = dict[str, Any]
CANDIDATES = 20


def pairs_of(chosen: Mapping[str, int]) -> set[tuple[tuple[str, int], ...]]:
    return set(combinations(sorted(chosen.items()), 2))


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Combination]:
    """The same for the same seed. Each combination has a pair that none before it has."""
    rng, out = random.Random(seed), list[Combination]()
    names = sorted(axes)
    left = {
        ((a, i), (b, j)) for a, b in combinations(names, 2) for i in range(len(axes[a])) for j in range(len(axes[b]))
    }
    while left:
        needed = dict(min(left))
        drawn = [{name: needed.get(name, rng.randrange(len(axes[name]))) for name in names} for _ in range(CANDIDATES)]
        best = max(drawn, key=lambda each: len(pairs_of(each) & left))
        left -= pairs_of(best)
        out.append({name: axes[name][best[name]] for name in axes})
    return out


def in_turn(values: Iterable[Any], every: int = 2, first: int = 0) -> list[Any]:
    """Parameters of a test: all of them at night, one in `every` of them in CI, from number `first` on."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if at % every == first else pytest.mark.nightly,
        )
        for at, value in enumerate(values)
    ]
