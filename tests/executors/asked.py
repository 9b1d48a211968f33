"""Prompts of several lengths, some sharing a beginning, and what an engine answers to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from quire.engine.engine import Engine
from quire.types import SamplingParams

NEW = 16


def prompts(vocab: int) -> list[tuple[int, ...]]:
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(5, vocab) for _ in range(n))  # noqa: E731
    shared = draw(40)
    found = [(shared if i % 3 == 0 else ()) + draw(rng.randrange(2, 60)) for i in range(9)]
    return [*found, found[0]]


def ask(engine: Engine, asked: Sequence[tuple[int, ...]], new: int = NEW, **sampling: Any) -> list[tuple[int, ...]]:
    """Answers of `new` tokens in the order of the prompts."""
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    ids = [engine.submit(prompt, new, sampling=params) for prompt in asked]
    said: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    while engine.has_pending_work:
        for event in engine.step():
            assert event.error is None, event.error
            said[event.id] += event.tokens
    assert engine.gauges().used_blocks == 0
    return [said[id] for id in ids]
