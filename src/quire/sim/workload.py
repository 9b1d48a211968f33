"""Synthetic requests, seeded: the same for every engine and every run."""

from __future__ import annotations

import random
from typing import NamedTuple


class Load(NamedTuple):
    """One request of a workload: when it arrives (seconds), its prompt, and how many tokens it wants."""

    arrival: float
    prompt: tuple[int, ...]
    new: int


def uniform(
    requests: int,
    *,
    prompt: tuple[int, int] = (4, 96),
    new: tuple[int, int] = (4, 24),
    shared: int = 0,
    rate: float = 0.0,
    vocab: int = 32000,
    seed: int = 7,
) -> list[Load]:
    """`requests` with lengths drawn uniformly (bounds included), the first `shared` prompt tokens the same in all.

    rate: arrivals a second, exponentially spaced; 0: all at once.
    """
    rng = random.Random(seed)
    head = tuple(rng.randrange(vocab) for _ in range(shared))
    now, out = 0.0, []
    for _ in range(requests):
        now += rng.expovariate(rate) if rate else 0.0
        tokens = head + tuple(rng.choices(range(vocab), k=rng.randint(*prompt)))
        out.append(Load(now, tokens, rng.randint(*new)))
    return out
