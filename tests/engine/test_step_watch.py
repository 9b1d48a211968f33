"""How long a step may take before the engine counts as standing still."""

from __future__ import annotations

import io
import re

import pytest

from quire.assembly.engine_child import _step_timeout
from quire.config import Settings
from quire.engine.step_watch import StepWatch
from quire.engine.timing import VirtualClock
from quire.scheduler.plan import Plan, Span
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig


class Watched:
    """A watch, and a scheduler whose steps took so long."""

    def __init__(self, timeout: float | None = None) -> None:
        self.watch = StepWatch(timeout=timeout)
        self.scheduler = SimConfig().build().scheduler

    def step(self, num_tokens: int, seconds: float) -> None:
        self.scheduler.step_times.record(Plan((), (), (Span(0, num_tokens, 1, 1),)), seconds)

    def timeout(self, num_tokens: int) -> float:
        self.scheduler.max_num_batched_tokens = num_tokens
        return self.watch.step_timeout(self.scheduler)


def test_the_limit_is_ten_seconds_where_steps_are_known_to_be_short() -> None:
    watch = Watched()
    assert watch.timeout(512) == pytest.approx(30 + 51.2), "nothing is known yet"
    for fed, seconds in ((12, 0.03), (1, 0.01), (64, 0.05), (512, 0.3), (64, 0.05)):
        watch.step(fed, seconds)
    assert watch.timeout(512) == 10.0


def test_times_of_small_steps_do_not_raise_the_limit_once_larger_steps_are_known() -> None:
    watch = Watched()
    watch.step(12, 0.3)
    assert watch.timeout(4096) > 10
    watch.step(4000, 0.8)
    watch.step(16, 0.4)
    assert watch.timeout(4096) == 10.0


def test_a_step_may_take_ten_times_what_those_before_suggest() -> None:
    watch = Watched(timeout=5.0)
    watch.step(100, 2.0)
    assert watch.timeout(1000) == pytest.approx(10 * 2.0 * 10)
    watch.step(1, 50.0)
    assert watch.timeout(1000) == pytest.approx(10 * 50.0)


def test_the_time_is_an_option() -> None:
    watch = Watched(timeout=_step_timeout(Settings.of(step_timeout=3)))
    watch.step(512, 0.01)
    assert watch.timeout(512) == 3.0
    assert _step_timeout(Settings.of()) is None
    grpc = Settings.of(executor="grpc", executor_address="localhost:1", executor_step_timeout=45)
    assert _step_timeout(grpc) == 45


def test_a_failed_step_names_eight_of_its_requests_and_counts_the_others() -> None:
    for count, shown in ((8, "6, 7\n"), (9, "6, 7 and 1 more\n"), (20, "6, 7 and 12 more\n")):
        out = io.StringIO()
        StepWatch(out=out).on_failure("no\x1b memory", [str(i) for i in range(count)], 0.0)
        assert out.getvalue().endswith(shown) and "\x1b" not in out.getvalue()


def test_a_report_names_the_last_steps_and_no_more_than_are_kept() -> None:
    clock, watch = VirtualClock(), StepWatch(keep=3, out=io.StringIO())
    engine = SimConfig(pages=16, page_size=4, cost=StepCost(0.5)).build(clock, observers=[watch])
    engine.submit((1, 2, 3), 5, id="it")
    for steps in range(5):
        said = watch.report(engine)
        assert f"engine: {steps} steps committed" in said
        assert re.findall(r"^  step (\d+) ", said, re.MULTILINE) == [str(n + 1) for n in range(steps)][-3:]
        engine.step()
