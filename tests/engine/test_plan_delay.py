"""Plans are made as late as can be, so that who comes while a step runs is in the next, and the device is kept busy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.engine.engine import Engine
from quire.engine.events import StepRecord
from quire.engine.step_watch import StepWatch
from quire.engine.timing import PlanDelay, VirtualClock
from quire.executors.synthetic import SyntheticHandle
from quire.scheduler.plan import Plan, Span
from quire.scheduler.step_time import StepCost, StepTimeModel
from quire.sim.run import SimConfig

STEP, HOST = 0.005, 0.0003


class Device:
    """A synthetic executor whose launches take the host `host` seconds; `dry`: for how long it had nothing to run."""

    def __init__(self, engine: Engine, clock: VirtualClock, host: float, pace: Callable[[], float]) -> None:
        self.inner, self.clock, self.host, self.pace = engine.executor, clock, host, pace
        self.describe, self.reset, self.close = self.inner.describe, self.inner.reset, self.inner.close
        self.until = 0.0
        self.dry: list[float] = []
        self.busy = False

    def launch(self, plan: Plan) -> SyntheticHandle:
        self.clock.time += self.host
        handle, now = self.inner.launch(plan), self.clock.now()
        assert isinstance(handle, SyntheticHandle)
        self.dry.append(max(0.0, now - self.until) if self.busy else 0.0)
        self.until = handle.done = max(now, self.until) + self.pace()
        return handle


@dataclass
class Rig:
    """A server's loop on a virtual clock. late: seconds by which its next sleep is too long. pace: of the next step."""

    slack: Callable[[VirtualClock], PlanDelay | None] = PlanDelay
    host: float = HOST
    late: Callable[[], float] = lambda: 0.00005
    depth: int = 1
    pace: Callable[[], float] = lambda: STEP
    waits: list[float] = field(default_factory=list)
    """How long each plan waited."""
    first: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        plain = SimConfig(
            depth=self.depth, pages=8192, max_num_batched_tokens=2048, chunk=2048, cost=StepCost(STEP)
        ).build(self.clock)
        self.device = Device(plain, self.clock, self.host, self.pace)
        self.watch = StepWatch(keep=100_000)
        self.engine = Engine(
            plain.scheduler,
            self.device,
            lookahead=self.depth,
            clock=self.clock,
            plan_delay=self.slack(self.clock),
            observers=[self.watch],
        )

    def run(self, steps: int, arrivals: Iterable[tuple[float, str, int]] = ()) -> list[tuple[float, str, int]]:
        """So many steps; meanwhile requests of two tokens' prompts come: when, who, and how many tokens they want.
        Those that have not come by then."""
        coming, engine, clock = sorted(arrivals), self.engine, self.clock
        for _ in range(steps):
            self.waits.append(0.0)
            while (left := engine.time_to_next_plan()) > 0:
                until = clock.now() + left
                heard = [c for c in coming if c[0] <= until]
                upto = heard[0][0] if heard else until + self.late()
                self.waits[-1] += upto - clock.now()
                clock.sleep_until(upto)
                self._take(coming)
            self._take(coming)
            self.device.busy = bool(engine.inflight)
            for event in engine.step():
                if event.tokens:
                    self.first.setdefault(event.id, clock.now())
        return coming

    def _take(self, coming: list[tuple[float, str, int]]) -> None:
        while coming and coming[0][0] <= self.clock.now():
            _, id, new = coming.pop(0)
            self.engine.submit([1, 2], new, id=id)

    def warm(self, steps: int = 200) -> Rig:
        """Four rows decode on, and what steps take is known."""
        for i in range(4):
            self.engine.submit([i, i + 1], 100_000, id=f"long-{i}")
        self.run(steps)
        return self

    def idle(self, since: int) -> float:
        """The device's share of the time since that step in which it had nothing to run."""
        dry = sum(self.device.dry[since:])
        return dry / (dry + STEP * len(self.device.dry[since:]))


def noisy(seed: int, share: float, every: Callable[[], float] = lambda: STEP) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: every() * (1 + abs(rng.gauss(0.0, share)))


def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_one() -> None:
    waited = {}
    for slack in (PlanDelay, lambda clock: None):
        rig = Rig(slack).warm()
        came = [rig.clock.now() + i * 10 * STEP + 0.5 * STEP for i in range(20)]
        rig.run(250, [(at, f"new-{i}", 1) for i, at in enumerate(came)])
        waited[slack is PlanDelay] = [rig.first[f"new-{i}"] - at for i, at in enumerate(came)]
    assert max(waited[True]) < 1.6 * STEP  # the rest of one step, and its own
    assert min(waited[False]) > 2.0 * STEP  # and one more between


def test_requests_that_arrive_during_one_step_are_all_in_the_next() -> None:
    rig = Rig().warm()
    now = rig.clock.now()
    shares = (0.1, 0.3, 0.5, 0.7)
    rig.run(4, [(now + share * STEP, f"new-{share}", 1) for share in shares])
    assert {round((rig.first[f"new-{share}"] - now) / STEP, 3) for share in shares} == {2.0}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.0001), (0.02, 0.001), (0.2, 0.001)])
def test_the_device_is_kept_busy(noise: float, most: float, depth: int) -> None:
    rig = Rig(pace=noisy(3, noise), depth=depth).warm()
    rig.run(2000)
    assert rig.idle(since=200) < most
    assert sum(rig.waits[200:]) > 0.5 * STEP * 2000, "and plans do wait"


def test_the_margin_grows_where_sleeps_are_too_long() -> None:
    """By a fifth of a step, more than the margin is at first."""
    rig = Rig(late=lambda: 0.2 * STEP).warm()
    rig.run(2000)
    late = [dry for dry in rig.device.dry[200:] if dry]
    assert len(late) < 20 and sum(rig.waits[200:]) > 0.3 * STEP * 2000


def test_a_host_that_is_stopped_for_a_step_now_and_then_waits_less() -> None:
    """One sleep of a hundred: what that costs stays below half a percent, and most plans go on waiting."""
    rng = random.Random(2)
    rig = Rig(late=lambda: 0.00005 + (rng.random() < 0.01) * rng.uniform(0, STEP)).warm()
    rig.run(4000)
    assert rig.idle(since=200) < 0.005 and sum(rig.waits[200:]) > 0.4 * STEP * 4000


def test_a_device_that_becomes_twice_as_fast_is_kept_busy_again_at_once() -> None:
    speed = [1.0]
    rig = Rig(pace=noisy(5, 0.01, lambda: STEP * speed[0])).warm()
    speed[0] = 0.5
    rig.run(400)
    assert 1 <= sum(dry > 0 for dry in rig.device.dry[200:]) <= 3
    assert sum(rig.waits[-100:]) > 0.25 * STEP * 100


def test_the_delay_follows_a_device_that_becomes_slower() -> None:
    speed = [1.0]
    rig = Rig(pace=noisy(5, 0.01, lambda: STEP * speed[0])).warm()
    speed[0] = 3.0
    rig.run(200)
    assert not any(rig.device.dry[200:]) and rig.waits[-1] > 2 * STEP


def test_a_host_that_is_slower_than_the_device_never_waits() -> None:
    rig, plain = Rig(host=1.5 * STEP).warm(), Rig(lambda clock: None, host=1.5 * STEP).warm()
    assert not any(rig.waits) and rig.clock.now() == plain.clock.now()


def test_a_launch_that_takes_long_once_is_remembered_for_a_while() -> None:
    rig = Rig().warm()
    rig.device.host = 0.9 * STEP
    rig.run(1)
    rig.device.host = HOST
    rig.run(50)
    assert max(rig.waits[-49:]) < 0.1 * STEP
    rig.run(50)
    assert rig.waits[-1] > 0.8 * STEP


def test_no_plan_waits_without_look_ahead_or_on_an_idle_engine() -> None:
    assert Rig().engine.time_to_next_plan() == 0.0
    rig = Rig(depth=0).warm()
    assert not any(rig.waits)


SLOW = 0.1
"""Seconds of a step without look-ahead, as of a model on a CPU."""


def slow(**options: Any) -> Rig:
    """An idle engine without look-ahead that knows what its steps take."""
    rig = Rig(depth=0, pace=lambda: SLOW, **options)
    rig.run(4, [(0.0, "before", 4)])
    assert not rig.engine.can_step
    return rig


def burst(rig: Rig, gap: float, count: int = 8, new: int = 32) -> list[int]:
    """Requests come one after another, `gap` seconds apart: sequences of each step until all have ended."""
    done, now = len(rig.watch.last), rig.clock.now()
    coming = [(now + i * gap, f"new-{i}", new) for i in range(count)]
    while coming or rig.engine.can_step:
        if not rig.engine.can_step:
            rig.clock.sleep_until(coming[0][0])
            rig._take(coming)
        coming = rig.run(1, coming)
    return [len(record.plan.spans) for record in list(rig.watch.last)[done:]]


def test_requests_sent_together_to_an_idle_engine_share_all_its_steps() -> None:
    assert burst(slow(), 0.0003) == [8] * 32
    alone = burst(slow(slack=lambda clock: None), 0.0003)
    assert alone == [1, *[8] * 31, 7], "planned at once, the first one is a step ahead of the others"


def test_an_idle_engine_waits_for_a_small_share_of_a_step_and_not_for_more_than_a_step_takes_in() -> None:
    rig = slow()
    assert burst(rig, 1.0, count=3, new=1) == [1, 1, 1]
    assert rig.waits[-3:] == [pytest.approx(PlanDelay.GATHERING_SHARE * SLOW, abs=1e-4)] * 3
    rig = slow()
    rig.engine.scheduler.max_num_seqs = 8
    assert burst(rig, 0.0, new=1) == [8] and rig.waits[-1] == 0.0
    rig = slow()
    rig.engine.scheduler.max_num_batched_tokens = 16
    assert burst(rig, 0.0, new=1) == [8] and rig.waits[-1] == 0.0


def test_an_idle_engine_does_not_wait_where_steps_are_short_or_unknown_or_launched_ahead() -> None:
    unknown, short, ahead = Rig(depth=0), Rig(depth=0).warm(), Rig(depth=1, pace=lambda: SLOW)
    ahead.run(4, [(0.0, "before", 4)])
    for rig in (unknown, short, ahead):
        for id in list(rig.engine.scheduler.sequences):
            rig.engine.abort(id)
        rig.run(1)
        rig.engine.submit([1, 2], 4)
        assert rig.engine.time_to_next_plan() == 0.0


def test_no_request_that_comes_to_a_running_one_makes_it_wait() -> None:
    rig = slow()
    rig.engine.submit([1, 2], 9)
    rig.run(1)
    rig.engine.submit([1, 2], 9)
    assert rig.engine.time_to_next_plan() == 0.0


def test_the_wait_is_no_part_of_what_a_step_took() -> None:
    rig = Rig().warm()
    records: list[StepRecord] = list(rig.watch.last)[100:]
    assert min(rig.waits[100:]) > 0.7 * STEP
    for before, record in itertools.pairwise(records):
        assert record.launched - record.planned < 2 * HOST  # planning is the host's own time
        assert record.committed - max(record.launched, before.committed) == pytest.approx(STEP)
        assert record.committed - record.planned < 1.3 * STEP  # and what is fed has been waiting less, not more


@dataclass
class Delay:
    """A plan delay and what steps take."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    times: StepTimeModel = field(default_factory=StepTimeModel)

    def __post_init__(self) -> None:
        self.inner = PlanDelay(self.clock)

    def record(self, num_tokens: int, seconds: float, *, waited: bool) -> None:
        self.times.record(Plan((), (), (Span(0, num_tokens, 1, 1),)), seconds, waited=waited)
        self.inner.on_commit(waited, self.times)

    def remaining(self, num_tokens: int, begun: float) -> float:
        return self.inner.remaining(num_tokens, begun, self.times)


def known(delay: Delay, num_tokens: int, seconds: float, times: int) -> None:
    for _ in range(times):
        delay.inner.on_launch(delay.clock.now())
        delay.record(num_tokens, seconds, waited=True)


def test_a_step_is_expected_to_take_the_least_time_of_recent_steps_of_its_size() -> None:
    delay = Delay()
    clock = delay.clock
    known(delay, 16, 0.005, StepTimeModel.MIN_KNOWN - 1)
    assert delay.remaining(16, clock.now()) == 0.0, "too little is known"
    known(delay, 16, 0.006, 1)
    assert 0.004 < delay.remaining(16, clock.now()) < 0.005
    assert delay.remaining(15, clock.now()) == delay.remaining(300, clock.now()) == delay.remaining(16, clock.now())
    known(delay, 300, 0.02, 10)
    assert delay.remaining(300, clock.now()) < 0.005, "some that fed less were faster"
    known(delay, 300, 0.02, StepTimeModel.NUM_RECENT)
    assert delay.remaining(300, clock.now()) > 0.015, "those are long ago"
    assert delay.remaining(16, clock.now()) == 0.0, "and of others nothing is known"


def test_no_plan_waits_for_less_than_the_least_delay() -> None:
    delay = Delay()
    clock = delay.clock
    known(delay, 16, 2 * PlanDelay.MIN_DELAY, 10)
    begun = clock.now()
    assert delay.remaining(16, begun) > PlanDelay.MIN_DELAY
    clock.time += PlanDelay.MIN_DELAY
    assert delay.remaining(16, begun) == 0.0


def test_a_result_that_had_arrived_raises_the_margin_only_if_the_plan_was_late() -> None:
    delay = Delay()
    clock = delay.clock
    known(delay, 16, 0.005, 10)
    margin = delay.inner.margin
    delay.record(16, 0.001, waited=False)  # a host that was busy elsewhere: it is unknown when that step ended
    before = delay.remaining(16, clock.now())
    assert delay.inner.margin == margin and before > 0.004
    delay.record(16, 0.006, waited=False)
    assert delay.inner.margin == 2 * margin and delay.remaining(16, clock.now()) == 0.0
    delay.record(16, 0.006, waited=False)
    assert delay.inner.margin == 2 * margin
