"""What a batch in the gaps costs those who ask meanwhile, on a virtual clock: the same people with it and without."""

from __future__ import annotations

from itertools import count

import pytest

from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.executors.synthetic import SyntheticExecutor
from quire.observability.histogram import percentile
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_time import StepCost
from quire.sim.workload import Load, uniform
from quire.types import BACKGROUND

LAPTOP = StepCost(base=0.0015, per_token=0.00012)
"""The embedded model on a CPU."""
CARD = StepCost(base=0.008, per_token=0.00002, per_kv=2e-9)
"""A model of some billions of parameters on a large GPU."""


def run(people: list[Load], cost: StepCost, budget: int, depth: int, lines: int) -> tuple[list[float], int]:
    """Seconds each of the people waited for a whole answer, and the lines answered, `lines` being under way."""
    clock = VirtualClock()
    rows = 64 * (1 + depth)
    scheduler = Scheduler(
        KVCacheManager(8192, 16, make_prefix_cache(16, True)),
        rows=rows,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_background_tokens=budget // 8,
        max_chunk_tokens=budget,
    )
    executor = SyntheticExecutor(pages=8192, page_size=16, rows=rows, depth=depth, cost=cost, clock=clock)
    engine = Engine(scheduler, executor, lookahead=depth, clock=clock, keep=1 << 16)
    prompts, began, came = count(), {}, 0
    took: list[float] = []
    under_way = done = 0
    while len(took) < len(people):
        while came < len(people) and people[came].arrival <= clock.now():
            began[engine.submit(people[came].prompt, people[came].new)] = people[came].arrival
            came += 1
        while under_way < lines:
            engine.submit([next(prompts) % 30000] * 150, 200, id=f"line {next(prompts)}", priority=BACKGROUND)
            under_way += 1
        if not engine.has_pending_work:
            clock.sleep_until(people[came].arrival)
            continue
        for event in engine.step():
            if event.finish is None:
                continue
            if event.id in began:
                took.append(clock.now() - began[event.id])
            else:
                under_way, done = under_way - 1, done + 1
    return took, done


@pytest.mark.parametrize(
    ("cost", "budget", "depth", "rate"),
    [
        pytest.param(LAPTOP, 512, 0, 3.0, id="laptop"),
        pytest.param(CARD, 8192, 1, 0.8, id="card", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_at_most_a_twentieth_slower_at_p95(cost: StepCost, budget: int, depth: int, rate: float) -> None:
    people = uniform(400, prompt=(20, 200), new=(32, 128), rate=rate)
    alone, _ = run(people, cost, budget, depth, 0)
    beside, lines = run(people, cost, budget, depth, 16)
    assert lines > 100
    assert percentile(beside, 95) <= 1.05 * percentile(alone, 95)
