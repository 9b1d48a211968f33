"""How late the next step can be planned: who comes while a step runs is then in the next one.

Running ahead, a step is launched while the one before it runs. As soon as that one begins, it leaves out everybody who
comes a moment later; shortly before that one ends is early enough for the device. When it will end is learnt.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from quire.engine.clock import Clock, WallClock


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
