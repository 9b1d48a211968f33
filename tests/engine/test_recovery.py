"""Which request is blamed for a step that failed, and which are not."""

from __future__ import annotations

import pytest

from quire.engine.engine import Engine
from quire.engine.executor import Executor, StepHandle
from quire.engine.timing import VirtualClock
from quire.errors import StepFailed
from quire.scheduler.constraint import FREE, PENDING
from quire.scheduler.plan import Plan
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig
from quire.types import Request


class Failing:
    """Steps fail at the numbers in `at`, counted from 1, whichever requests are in them."""

    def __init__(self, inner: Executor, at: set[int]) -> None:
        self.inner, self.at, self.launched = inner, at, 0
        self.describe, self.reset, self.close = inner.describe, inner.reset, inner.close

    def launch(self, plan: Plan) -> StepHandle:
        self.launched += 1
        if self.launched in self.at:
            raise StepFailed("by number")
        return self.inner.launch(plan)


def ran(at: set[int], lengths: tuple[int, ...] = (12,), **settings: object) -> tuple[list[str], int]:
    """(how each request ended, steps that failed). lengths: tokens that each request may produce."""
    config = SimConfig(**{"pages": 64, "page_size": 4, "max_num_seqs": 4, "cost": StepCost(0.01), **settings})  # type: ignore[arg-type]
    engine: Engine = config.build(VirtualClock())
    engine.executor = Failing(engine.executor, at)
    for i, length in enumerate(lengths):
        engine.submit([i, 1, 2, 3, 4], length)
    for _ in range(1000):
        if not engine.has_pending_work:
            break
        engine.step()
    assert not engine.has_pending_work
    return [done.finish for done in engine.completed_requests], engine.failures


@pytest.mark.parametrize("later", [5, 6, 9, 13])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_fails_alone_at_two_positions_is_not_blamed(later: int, depth: int) -> None:
    assert ran({2, later}, depth=depth) == (["length"], 2)


def test_a_request_that_fails_alone_at_many_positions_is_not_blamed() -> None:
    assert ran({2, 4, 6, 8, 10, 12, 14}) == (["length"], 7)


def test_a_request_that_fails_alone_twice_at_one_position_is_blamed() -> None:
    assert ran({1, 2}) == (["error"], 2)
    assert ran({2, 3, 4}) == (["error"], 3), "the second time when it is begun anew, which is another place"


def test_a_failure_alone_and_a_later_one_in_a_batch_blame_no_request() -> None:
    """Both in step 1; then the first alone, which passes when it is tried again; then both."""
    assert ran({1, 2, 4}, (12, 12)) == (["length", "length"], 3)


def test_a_request_whose_grammar_is_not_compiled_is_not_held_back_while_suspects_are_tried() -> None:
    engine: Engine = SimConfig(pages=64, page_size=4, max_num_seqs=4, cost=StepCost(0.01)).build(VirtualClock())
    engine.executor = Failing(engine.executor, {1})
    for i in range(2):
        engine.submit([i, 1, 2, 3, 4], 3)
    engine.step()
    assert engine.recovery.active
    engine.add(Request(id="late", prompt=(5, 6), max_new_tokens=2), PENDING)
    assert [each.request_id for each in engine.scheduler.waiting.set_aside()] == ["late"]
    assert engine.recovery.parked and "late" not in {seq.request.id for seq in engine.recovery.parked}
    engine.set_constraint("late", FREE)
    assert [seq.request.id for seq in engine.recovery.parked].count("late") == 1
    while engine.has_pending_work:
        engine.step()
    assert [(done.id, done.finish) for done in engine.completed_requests][-1] == ("late", "length")
    assert engine.failures == 1


def test_two_requests_that_each_fail_alone_once_at_one_position_are_not_blamed() -> None:
    """Both in step 1; then the first alone, which ends with the step of its second trial; then the second alone."""
    assert ran({1, 2, 4}, (1, 12)) == (["length", "length"], 3)
    assert ran({1, 2, 4, 5}, (1, 12)) == (["length", "error"], 4), "which fails there twice"
