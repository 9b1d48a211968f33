"""How many tokens the next step may feed, so that a long prompt does not stall those who are being answered."""

from __future__ import annotations

from typing import Protocol

from quire.values import UNLIMITED


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
