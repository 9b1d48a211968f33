"""A long prompt does not stall those who are being answered."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from quire.engine.engine import Engine
from quire.engine.timing import LatencyController, VirtualClock
from quire.scheduler.plan import Plan, Span
from quire.scheduler.step_time import StepCost, StepTimeModel
from quire.sim.run import SimConfig
from quire.types import UNLIMITED


def record(times: StepTimeModel, tokens: int, seconds: float) -> None:
    times.record(Plan((), (), (Span(0, tokens, 1, 1),)), seconds)


def test_the_fit_finds_the_line_and_follows_it_when_it_moves() -> None:
    times, rng = StepTimeModel(), random.Random(1)
    for base, each in ((0.01, 0.001), (0.03, 0.0002)):
        for _ in range(400):
            tokens = rng.randrange(1, 500)
            record(times, tokens, (base + each * tokens) * rng.uniform(0.95, 1.05))
        a, b, *_ = times.fit()
        assert a == pytest.approx(base, rel=0.35) and b == pytest.approx(each, rel=0.1)


def test_no_step_is_limited_before_times_are_known_or_while_no_request_decodes() -> None:
    pace, times = LatencyController(0.1), StepTimeModel()
    assert pace.max_tokens(3, times) == UNLIMITED
    for _ in range(50):
        record(times, 8, 0.01)  # all alike: no slope to be had
    assert pace.max_tokens(3, times) == UNLIMITED
    record(times, 200, 0.2)
    assert pace.max_tokens(3, times) < 1000 and pace.max_tokens(0, times) == UNLIMITED


def test_a_target_the_machine_cannot_reach_does_not_stop_prompts() -> None:
    pace, times = LatencyController(0.001), StepTimeModel()
    for tokens in (1, 2, 50, 100):
        record(times, tokens, 0.5 + 0.01 * tokens)
    assert pace.max_tokens(4, times) >= 4 + LatencyController.MIN_PROMPT_TOKENS
    assert 0.4 < (pace.max_tokens(4, times) * 0.01) < 0.7  # twice a step without prompts


@pytest.mark.parametrize("tokens", [8, 100], ids=["few", "many"])
def test_prompts_that_cost_nothing_for_long_end_no_engine(tokens: int) -> None:
    """What a token costs is halved by each step that took no longer than one without prompts."""
    pace, times = LatencyController(0.1), StepTimeModel()
    plain = Plan((), (), (Span(0, 1, 1, 1),))
    for _ in range(4):
        times.record(plain, 0.01)
    times.record(Plan((), (), (Span(0, 100, 0, 0),)), 0.02)
    wanted = pace.max_tokens(1, times)
    assert wanted < 1000
    for _ in range(1200):
        times.record(Plan((), (), (Span(0, tokens, 0, 0),)), 0.0099)
        assert 1 < pace.max_tokens(1, times) <= 1 + UNLIMITED
    if tokens < StepTimeModel.MANY:
        assert pace.max_tokens(1, times) == wanted, "a few say nothing of what many cost"


def test_what_a_long_context_adds_to_a_step_is_found_from_the_last_one() -> None:
    cost = StepCost(0.004, 2e-5, per_pair=1.2e-9)  # as 8 billion parameters have it on an H200
    plain = SimConfig(pages=3000, max_num_batched_tokens=8192, chunk=8192, depth=1, cost=cost).build(VirtualClock())
    engine = Engine(
        plain.scheduler, plain.executor, lookahead=1, clock=plain.clock, step_budget=LatencyController(0.02)
    )
    engine.submit([1, 2, 3], 4000, id="talker")
    last, gaps, answered = 0.0, list[float](), False
    while not answered:
        if len(gaps) == 100:
            engine.submit([5] * 30000, 1, id="long")
        for event in engine.step():
            answered |= event.id == "long"
            if event.id == "talker" and event.tokens:
                now = engine.clock.now()
                gaps.append(now - last)
                last = now
    beside = sorted(gaps[104:-2])
    assert len(beside) > 50 and beside[len(beside) // 2] > 0.016 and beside[-1] < 0.024


def test_prompts_are_not_made_tiny_where_that_does_not_shorten_a_step() -> None:
    pace, times = LatencyController(0.009), StepTimeModel()
    for tokens in (16, 16, 16, 512, 512):
        record(times, tokens, 0.004 + 0.00002 * tokens)
    for _ in range(200):  # a context is long now: whatever a step feeds, it takes 10 ms more
        tokens = pace.max_tokens(16, times)
        record(times, tokens, 0.014 + 0.00002 * tokens)
    assert 150 < tokens <= 416


def test_a_target_is_kept_to_where_smaller_prompts_shorten_a_step() -> None:
    pace, times = LatencyController(0.009), StepTimeModel()
    plain = Plan((), (), (Span(0, 1, 1, 1),) * 16)
    for each in (2e-5, 6e-5):  # as a context grows
        for _ in range(100):
            times.record(plain, 0.0046)
            most = pace.max_tokens(17, times)
            fed = min(most, 512) - 16
            times.record(Plan((), (), (Span(0, 1, 1, 1),) * 16 + (Span(1, fed, 0, 0),)), 0.0046 + each * fed)
        assert most % LatencyController.MULTIPLE == 0
        assert 0.008 < 0.0046 + each * fed < 0.0092


def test_a_step_that_was_measured_badly_soon_bounds_nothing() -> None:
    pace, times = LatencyController(0.1), StepTimeModel()
    for tokens in (1, 1, 1, 200, 200):
        record(times, tokens, 0.01 + 0.0001 * tokens)
    usual = pace.max_tokens(1, times)
    assert usual == pytest.approx(1 + (0.1 * pace.aim - 0.01) / 0.0001, rel=0.02)
    record(times, 200, 3.0)
    assert pace.max_tokens(1, times) == 1 + LatencyController.MIN_PROMPT_TOKENS
    fed = []
    for _ in range(400):
        record(times, tokens := pace.max_tokens(1, times), 0.01 + 0.0001 * tokens)
        fed.append(tokens)
    assert all(later <= 2 * earlier + LatencyController.MULTIPLE for earlier, later in pairwise(fed))
    assert fed[-1] == pytest.approx(usual, rel=0.1)


@pytest.mark.parametrize(
    ("target", "plain", "each"), [(0.009, 0.0046, 1.1e-5), (0.025, 0.0046, 1.1e-5), (0.1, 0.0046, 1.1e-5),
                                  (0.009, 0.006, 4e-6), (0.012, 0.006, 4e-6)],
)  # fmt: skip
def test_one_step_in_a_hundred_takes_longer_than_the_target(target: float, plain: float, each: float) -> None:
    """Prompts of 32,000 tokens beside 16 sequences, two steps in flight, times that scatter. each: seconds of a token
    without a context, of which 96 share what the sequences take anyway."""
    pace, times, rng = LatencyController(target), StepTimeModel(), random.Random(1)
    beside = (Span(0, 1, 1, 1),) * 16

    def commit(fed: int, seconds: float, done: int) -> None:
        plan = Plan((), (), (*beside, Span(1, fed, 0, 0)))
        times.record(plan, seconds, context=done)
        pace.on_commit(plan, seconds)

    for _ in range(50):
        times.record(Plan((), (), beside), plain)
    commit(2000, 0.06, 2000)
    for _ in range(6):
        done, taken, flying = 0, list[float](), list[tuple[int, float, int]]()
        while done < 32000:
            fed = min(pace.max_tokens(17, times, done or 32000) - 16, 32000 - done, 8176)
            few = min(fed, 96) * each + max(fed - 96, 0) * 1.65e-5
            taken.append((plain + few + fed * (done + fed / 2) * 1.75e-9) * (1 + abs(rng.gauss(0, 0.008))))
            done += fed
            flying.append((fed, taken[-1], done))
            if len(flying) > 1:
                commit(*flying.pop(0))
        for last in flying:
            commit(*last)
    taken.sort()
    assert taken[int(0.99 * len(taken))] <= 1.05 * target and taken[len(taken) // 2] > 0.8 * target


def test_steps_far_beyond_the_target_do_not_say_how_times_scatter() -> None:
    pace, both = LatencyController(0.01), Plan((), (), (Span(0, 1, 1, 1), Span(1, 40, 0, 0)))
    begun = pace.aim
    pace.on_commit(both, 0.02)
    assert pace.aim == begun
    pace.on_commit(Plan((), (), (Span(1, 40, 0, 0),)), 0.012)
    assert pace.aim == begun, "nobody waited for a token"
    pace.on_commit(both, 0.012)
    lowered = pace.aim
    pace.on_commit(both, 0.009)
    assert lowered < pace.aim < begun
    for _ in range(100):
        pace.on_commit(both, 0.012)
    assert pace.aim == LatencyController.LOWEST


def longest_gap(engine: Engine) -> float:
    """A request is being answered while long prompts arrive; the longest wait between two of the tokens."""
    engine.submit([1, 2, 3], 400, id="talker")
    last, worst, n = None, 0.0, 0
    while engine.has_pending_work:
        n += 1
        if n % 40 == 5 and n < 200:
            engine.submit([random.Random(n).randrange(1000) for _ in range(2000)], 2)
        for event in engine.step():
            if event.id == "talker" and event.tokens:
                now = engine.clock.now()
                if last is not None:
                    worst = max(worst, now - last)
                last = now
    assert len(engine.completed_requests) == 6
    return worst


@pytest.mark.parametrize("depth", [0, 1])
def test_the_longest_gap_comes_near_the_target(depth: int) -> None:
    config = SimConfig(max_num_batched_tokens=2048, chunk=2048, depth=depth, cost=StepCost(0.01, 0.001))

    def engine(budget: LatencyController | None) -> Engine:
        plain = config.build(VirtualClock())
        return Engine(plain.scheduler, plain.executor, lookahead=depth, clock=plain.clock, step_budget=budget)

    assert longest_gap(engine(None)) > 1.9
    bounded = engine(LatencyController(0.1))
    for tokens in (1, 100):
        record(bounded.scheduler.step_times, tokens, 0.01 + 0.001 * tokens)  # as once the engine has run for a moment
    assert longest_gap(bounded) < 0.13


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_alone_are_not_bounded(depth: int) -> None:
    config = SimConfig(max_num_batched_tokens=2048, chunk=2048, depth=depth, cost=StepCost(0.01, 0.001))
    plain = config.build(VirtualClock())
    pace = LatencyController(0.1)
    engine = Engine(plain.scheduler, plain.executor, lookahead=depth, clock=plain.clock, step_budget=pace)
    for tokens in (1, 100):
        record(engine.scheduler.step_times, tokens, 0.01 + 0.001 * tokens)
    for number in range(5):
        engine.submit([random.Random(number).randrange(1000) for _ in range(1500)], 1)
    while engine.has_pending_work:
        engine.step()
    assert engine.clock.now() < 7500 * 0.001 + 6 * 0.01  # four steps of the most tokens, and what is left
