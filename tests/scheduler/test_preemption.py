"""Who gives way when blocks run out: the least urgent, then who loses least; and how to have that seldom or never."""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import pytest

from quire.engine.events import Completed, StepRecord
from quire.engine.timing import VirtualClock
from quire.scheduler.policy import Pressure
from quire.scheduler.sequence import Decision
from quire.sim.run import SimConfig
from quire.types import Request


class Watching:
    """Keeps every decision, and counts tokens fed."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.fed = 0

    def on_submit(self, request: Request, now: float) -> None: ...

    def on_step(self, record: StepRecord) -> None:
        self.decisions += record.decisions
        self.fed += sum(span.num_tokens for span in record.plan.spans)

    def on_end(self, ended: Completed) -> None: ...

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None: ...


def first_victim(lengths: dict[str, int], pages: int, urgency: dict[str, int]) -> tuple[str, str]:
    """(who gave way first, to whom) where these prompts are all computed and then grow."""
    seen = Watching()
    house = SimConfig(
        pages=pages, page_size=4, prefix_caching=False, scheduling_policy="priority", pressure_policy="preempt"
    )
    engine = house.build(VirtualClock(), [seen])
    for id, length in lengths.items():
        engine.submit([1] * length, 8, id=id, priority=urgency.get(id, 0))
    while engine.has_pending_work:
        engine.step()
    chosen = next(each for each in seen.decisions if each.kind == "preempted")
    assert all(len(one.tokens) == 8 for one in engine.completed_requests)
    return chosen.request_id, chosen.cause


@pytest.mark.parametrize("order", [("long", "short", "middle"), ("long", "middle", "short")])
def test_who_loses_least_gives_way_whenever_it_came(order: tuple[str, ...]) -> None:
    lengths = {"long": 40, "short": 8, "middle": 20}
    assert first_victim({id: lengths[id] for id in order}, 17, {}) == ("short", "long")


def test_urgency_counts_before_what_is_lost() -> None:
    assert first_victim({"long": 40, "short": 8, "middle": 20}, 17, {"middle": 1}) == ("middle", "long")


def pressed(policy: Pressure) -> tuple[int, float]:
    """(preemptions, tokens fed for each that had to be) where prompts take many chunks and pages hold few of them."""
    seen, rng = Watching(), random.Random(3)
    sizes = {"pages": 100, "page_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 16, "chunk": 16}
    house = SimConfig(**sizes, prefix_caching=False, pressure_policy=policy)  # type: ignore[arg-type]
    engine = house.build(VirtualClock(), [seen])
    least = 0
    for _ in range(30):
        prompt, new = rng.randint(6, 190), rng.randint(6, 190)
        engine.submit([1] * prompt, new)
        least += prompt + new - 1
    while engine.has_pending_work:
        engine.step()
    assert [one.finish for one in engine.completed_requests] == ["length"] * 30
    return engine.gauges().preemptions, seen.fed / least


def test_little_is_computed_twice_where_what_is_coming_is_foreseen() -> None:
    rashly, foreseeing = pressed("preempt"), pressed("foresee")
    assert 0 < foreseeing[0] < rashly[0] / 3
    assert foreseeing[1] - 1 < (rashly[1] - 1) / 3


def test_nobody_is_sent_away_where_all_is_reserved() -> None:
    assert pressed("reserve") == (0, 1.0)


def test_one_piece_a_sequence_is_wanted_once() -> None:
    """Contiguous memory: as many run at once as there are pieces, whatever the policy."""
    for policy in get_args(Pressure):
        engine = SimConfig(pages=4, page_size=64, max_num_seqs=8, pressure_policy=policy).build(VirtualClock())
        for _ in range(8):
            engine.submit([1] * 8, 8)
        while engine.has_pending_work:
            engine.step()
        assert engine.metrics_snapshot()["max_batch_observed"] == 4, policy


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_preemption_is_told_once(depth: int) -> None:
    """Also one after which nobody could be fed, so that there was no plan to tell it with."""
    seen, rng = Watching(), random.Random(5)
    house = SimConfig(
        pages=8, page_size=4, max_num_seqs=3, depth=depth, prefix_caching=False, pressure_policy="preempt"
    )
    engine = house.build(VirtualClock(), [seen])
    for i in range(40):
        engine.submit([1] * rng.randint(1, 10), rng.randint(4, 20), id=f"r-{i}")
    while engine.has_pending_work:
        engine.step()
    told = Counter(each.request_id for each in seen.decisions if each.kind == "preempted")
    assert told == {one.id: one.preemptions for one in engine.completed_requests if one.preemptions}
    assert told.total() == engine.gauges().preemptions > 0
