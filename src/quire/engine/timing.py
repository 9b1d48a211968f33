"""Clocks; when to plan the next step and how many tokens it may feed; when to restart a process that has died."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Protocol

from quire.scheduler.plan import Plan
from quire.scheduler.step_time import StepTimeModel
from quire.types import UNLIMITED


class Clock(Protocol):
    """Seconds from an arbitrary start, never backwards. A simulation has its own."""

    def now(self) -> float:
        """Seconds."""

    def sleep_until(self, when: float) -> None:
        """Return when `now` is at least `when`."""


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of time.monotonic."""
        return time.monotonic()

    def sleep_until(self, when: float) -> None:
        """Sleep."""
        if (wait := when - time.monotonic()) > 0:
            time.sleep(wait)


class VirtualClock:
    """Time that passes only by `sleep_until`."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start

    def now(self) -> float:
        """The time set last."""
        return self.time

    def sleep_until(self, when: float) -> None:
        """Time passes at once."""
        self.time = max(self.time, when)


class LatencyController:
    """Bounds the tokens of a step by its predicted time, so that long prompts do not stall running requests.

    target: seconds between tokens that prompts may cost running requests. A target below what the machine can do must
    not stop prompts: where a step would take longer however few of their tokens it has, it may have as many as make it
    longer by the share `LEAST`, and where the target leaves less than that of `REACHABLE`, as double one without
    prompts. Nothing is bounded while no request runs.

    What a step takes is predicted right on average. So what is aimed at is below the target, as far as it takes for one
    step with prompts in a hundred to be longer than that.
    """

    LEAST, REACHABLE = 0.125, 1.25
    """Of a step without prompts."""
    MIN_PROMPT_TOKENS = 16
    """Prompt tokens that a step may always feed."""
    MULTIPLE = 16
    """Of so many tokens are steps that are bounded, as executors pad them."""

    MOST_LONGER, LOWERED, LOWEST = 0.01, 0.03, 0.75
    """Share of steps with prompts that may take longer than the target; by how much what is aimed at is lowered when
    one has, and to which share of the target at most."""
    SCATTER = 1.5
    """A step of so many targets does not say how times scatter: the target cannot be reached, or something else ran."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.aim = 0.95
        """Share of the target that steps with prompts are predicted to take."""

    def on_commit(self, plan: Plan, seconds: float) -> None:
        """A step that fed tokens of prompts took so long."""
        if any(span[1] == span[2] for span in plan.spans):  # beside sequences that wait for their tokens
            if seconds <= self.target:
                self.aim = min(1.0, self.aim + self.LOWERED * self.MOST_LONGER)
            elif seconds < self.SCATTER * self.target:
                self.aim = max(self.LOWEST, self.aim - self.LOWERED)

    def max_tokens(self, running: int, step_times: StepTimeModel, context: int = 0) -> int:
        """Most tokens of a step with so many running sequences, one token each included. context: tokens before those
        of prompts."""
        each = step_times.prompt_token(context)
        if not running or each == 0.0:
            return UNLIMITED
        plain = step_times.without_prompts(running)
        most = float(UNLIMITED)  # tokens that cost next to nothing are not counted
        total = running + int(max(min((self.aim * self.target - plain) / each, most), 0.0))
        apart, more = step_times.prompts_apart()
        if self.target <= self.REACHABLE * plain:
            longer = plain
        else:
            longer = self.LEAST * (plain + apart) if plain + apart > self.target else 0.0
        at_least = math.ceil((running + min(longer / more, most)) / self.MULTIPLE) * self.MULTIPLE
        return min(max(total - total % self.MULTIPLE, at_least, running + self.MIN_PROMPT_TOKENS), UNLIMITED)


class PlanDelay:
    """Delays each plan until shortly before the running step ends, so that requests arriving meanwhile are in it.

    With look-ahead a step is launched while the one before it runs. The plan is due by what launching has taken at
    most, and a margin, before the earliest end predicted. Only steps that the engine waited for count: when others
    ended is not known. If one had ended already although the next plan was delayed, the device was idle: the margin
    doubles and the prediction starts anew. Otherwise the margin, a share of the step, shrinks slowly.

    Without look-ahead a step that has begun keeps all that come later waiting, and then feeds their prompts in small
    chunks, for the sake of the one that runs. So an idle engine, too, waits a moment for those that were sent together
    with the first: a small share of what their step will take.

    clock: the engine's, read apart from it: what is decided here is when to plan, never what.
    """

    NUM_LAUNCHES = 64
    INITIAL_MARGIN = 0.1
    MIN_MARGIN = 0.02
    SHRINK = 0.995
    MIN_DELAY = 1e-3
    """Seconds: shorter delays are not worth a sleep, which is not that exact."""
    GATHERING_SHARE, GATHERING_STEPS, MAX_GATHERING = 0.03, 0.25, 0.02
    """How long an idle engine waits for more requests at most: a share of the step that it would begin, as many steps
    of a single token, which are what a request that comes too late costs, and seconds."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = WallClock() if clock is None else clock
        self.margin = self.INITIAL_MARGIN
        self._launches: deque[float] = deque(maxlen=self.NUM_LAUNCHES)
        self._delayed = False
        self._gathering_since, self._gathered_tokens = -math.inf, 0

    def on_arrival(self, num_tokens: int, idle: bool) -> None:
        """A prompt of so many tokens has been queued. idle: there was nothing to do before."""
        if idle:
            self._gathering_since, self._gathered_tokens = self.clock.now(), 0
        self._gathered_tokens += num_tokens

    def until_gathered(self, max_tokens: int, step_times: StepTimeModel) -> float:
        """Seconds for which an idle engine still waits for requests beside those that have come. max_tokens: of a
        step; as many need not wait."""
        if self._gathered_tokens >= max_tokens:
            return 0.0
        line = step_times.fit()
        step, least = line.seconds(self._gathered_tokens), line.seconds(1)
        wait = min(self.MAX_GATHERING, self.GATHERING_SHARE * step, self.GATHERING_STEPS * least)
        return 0.0 if wait < self.MIN_DELAY else max(0.0, self._gathering_since + wait - self.clock.now())

    def remaining(self, num_tokens: int, begun: float, step_times: StepTimeModel) -> float:
        """Seconds until the next plan is due, while a step of so many tokens has been running since `begun`."""
        return self.until_due(step_times.fastest(num_tokens), begun)

    def until_due(self, fastest: float | None, begun: float) -> float:
        """As `remaining`, where steps like the one that runs are known to take `fastest` seconds at least."""
        if fastest is None:
            return 0.0
        due = begun + fastest * (1 - self.margin) - max(self._launches)
        left = due - self.clock.now()
        if left < self.MIN_DELAY:
            return 0.0
        self._delayed = True
        return left

    def on_launch(self, planned: float) -> None:
        """A step that has been planned since `planned` is with the device now."""
        self._launches.append(self.clock.now() - planned)

    def on_commit(self, waited: bool, step_times: StepTimeModel) -> None:
        """A step is committed. waited: it was still running when the next one had been launched."""
        if waited:
            self.margin = max(self.MIN_MARGIN, self.margin * self.SHRINK)
        elif self._delayed:
            step_times.forget_fastest()
            self.margin = min(1.0, 2 * self.margin)
        self._delayed = False


class RestartBackoff:
    """Pauses before starts of a process that keeps dying: none, then `first` seconds, doubled up to `MAX_DELAY`."""

    MAX_DELAY = 30.0
    STABLE_AFTER = 60.0
    """Seconds of life after which a death counts as the first."""

    def __init__(self, first: float = 0.5) -> None:
        self.first = first
        self.delay = 0.0
        """Seconds until the next start."""

    def on_death(self, lifetime: float) -> None:
        """The process ended, so many seconds after its start."""
        if lifetime > self.STABLE_AFTER:
            self.delay = 0.0

    def next_delay(self) -> float:
        """The pause before this start; the one after it will be longer."""
        delay = self.delay
        self.delay = min(max(2 * delay, self.first), self.MAX_DELAY)
        return delay
