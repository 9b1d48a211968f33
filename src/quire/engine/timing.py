"""Progress as the front sees it: is work outstanding, and is the step it waits for late?

How many tokens the next step may feed, so that a long prompt does not stall those who are being answered.

How late the next step can be planned: who comes while a step runs is then in the next one.

Running ahead, a step is launched while the one before it runs. As soon as that one begins, it leaves out everybody who
comes a moment later; shortly before that one ends is early enough for the device. When it will end is learnt.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from quire.engine.clock import Clock, WallClock
from quire.engine.protocol import Update
from quire.types import UNLIMITED


class StallDetector:
    """Of one engine process, from its start at `now` on. Times are one clock's seconds."""

    def __init__(self, now: float) -> None:
        self.idle = True
        self.step_timeout = math.inf
        """Seconds that the engine gives its next step; it says so with its first word."""
        self._num_taken = False
        """Whether it has been asked where it is stuck."""
        self._since, self._step, self._num_submitted = now, 0, 0

    def on_submit(self, now: float) -> None:
        """It is about to be sent work."""
        self._num_submitted += 1
        if self.idle:
            self.idle, self._since = False, now

    def on_update(self, update: Update, now: float) -> None:
        """It has spoken. That it was idle means nothing if it had not taken all it was sent."""
        self.idle, self.step_timeout = update.idle and update.num_submits == self._num_submitted, update.step_timeout
        if update.num_steps != self._step or self.idle:
            self._step, self._since, self._num_taken = update.num_steps, now, False

    def is_stalled(self, now: float) -> float:
        """By how many seconds the next step is late; 0 and below: it is not."""
        return 0.0 if self.idle else now - self._since - self.step_timeout


class StepBudget(Protocol):
    """Learns what steps cost and bounds the next one."""

    def max_tokens(self, running: int) -> int:
        """Most tokens for a step with so many rows on the device, one token each included."""

    def record(self, tokens: int, seconds: float) -> None:
        """A step that fed `tokens` took `seconds`."""


class UnlimitedStepBudget:
    """Steps as large as the scheduler's own budget."""

    def max_tokens(self, running: int) -> int:
        return UNLIMITED

    def record(self, tokens: int, seconds: float) -> None:
        """Nothing to learn for."""


class LatencyController:
    """Bounds steps by predicted time: seconds = a + b * tokens, fitted online by least squares that forget.

    target: seconds between tokens that prompts may cost whoever is being answered. Where even a step without prompts
    takes longer than half of it, twice such a step is the bound: a target below what the machine can do must not stop
    prompts. Nothing is bounded while nobody is being answered.
    """

    FORGET = 0.98
    LEAST = 16
    """Prompt tokens a step may always feed."""

    def __init__(self, target: float) -> None:
        self.target = target
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        keep = self.FORGET
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * seconds

    def fit(self) -> tuple[float, float]:
        """(a, b) in seconds and seconds a token, neither below 0; b is 0 while all steps were alike."""
        spread = self._n * self._xx - self._x * self._x
        if self._n < 2 or spread <= 1e-9 * self._xx * self._n:
            return (self._y / self._n if self._n else 0.0), 0.0
        b = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - b * self._x) / self._n), b

    def max_tokens(self, running: int) -> int:
        a, b = self.fit()
        if not running or b == 0.0:
            return UNLIMITED
        bound = max(self.target, 2 * (a + b * running))
        return max(int((bound - a) / b), running + self.LEAST)


class PlanDelay(Protocol):
    """Learns what steps and launches take, and how long the next plan can wait for newcomers."""

    def remaining(self, fed: int, begun: float) -> float:
        """Seconds until the next plan is due, while a step that feeds `fed` tokens has been running since `begun`."""

    def on_launch(self, planned: float) -> None:
        """A step that has been planned since `planned` is with the device now."""

    def record(self, fed: int, took: float, *, waited: bool) -> None:
        """A step took so long. waited: it was still running when the next one had been launched."""


class NoPlanDelay:
    """Every step is planned at once."""

    def remaining(self, fed: int, begun: float) -> float:
        return 0.0

    def on_launch(self, planned: float) -> None:
        """Nothing to learn for."""

    def record(self, fed: int, took: float, *, waited: bool) -> None:
        """Nothing to learn for."""


class MeasuredPlanDelay:
    """Plans are due by what launching has taken at most, and a margin, before the end that is foreseen.

    A step is expected to take as long as the quickest of the last few that fed no more than about as much; while fewer
    than `KNOWN` are known nothing is expected, and plans are due at once. It counts only what the engine waited for:
    of any other step nobody knows when it ended. One that had ended already although the next plan was late on purpose
    left the device idle: the margin doubles and what was known is forgotten, so that a device which has become faster
    is measured anew. Otherwise the margin, a share of the step, shrinks slowly.

    clock: the engine's, read apart from it: what is decided here is when to plan, never what.
    """

    KEPT = 64
    KNOWN = 4
    ALIKE, FEW = 1.125, 8
    """`fed` so many times and so many tokens more is still about as much: a few cost nothing."""
    MARGIN = 0.1
    LEAST = 0.02
    SHRINK = 0.995
    WORTH = 1e-3
    """Seconds: for less nobody need wait. Waking up in time is not that sure, and steps so short keep nobody long."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = WallClock() if clock is None else clock
        self.margin = self.MARGIN
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.KEPT)
        self._launches: deque[float] = deque(maxlen=self.KEPT)
        self._late = False

    def remaining(self, fed: int, begun: float) -> float:
        known = [took for other, took in self._steps if other <= self.ALIKE * fed + self.FEW]
        if len(known) < self.KNOWN:
            return 0.0
        due = begun + min(known) * (1 - self.margin) - max(self._launches)
        left = due - self.clock.now()
        if left < self.WORTH:
            return 0.0
        self._late = True
        return left

    def on_launch(self, planned: float) -> None:
        self._launches.append(self.clock.now() - planned)

    def record(self, fed: int, took: float, *, waited: bool) -> None:
        if waited:
            self._steps.append((fed, took))
            self.margin = max(self.LEAST, self.margin * self.SHRINK)
        elif self._late:
            self._steps.clear()
            self.margin = min(1.0, 2 * self.margin)
        self._late = False
