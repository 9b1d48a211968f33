"""Time as an object, so that a simulation can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary start, never backwards."""

    def now(self) -> float: ...

    def sleep_until(self, when: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, when: float) -> None:
        if (wait := when - time.monotonic()) > 0:
            time.sleep(wait)


class VirtualClock:
    """Time that passes only when somebody waits for it."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start

    def now(self) -> float:
        return self.time

    def sleep_until(self, when: float) -> None:
        self.time = max(self.time, when)
