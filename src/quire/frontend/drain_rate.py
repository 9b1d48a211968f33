"""How fast requests leave: what a refused client is told to wait."""

from __future__ import annotations

import math
from collections import deque

_LONGEST = 60.0


class DrainRate:
    """The last few times a request ended, in seconds of one clock."""

    def __init__(self, remembered: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=remembered)

    def record(self, now: float) -> None:
        self._times.append(now)

    def wait(self, backlog: int, now: float) -> float:
        """Whole seconds until `backlog` requests have left at the recent rate: 1 to 60, 1 when nothing is known.

        The rate is taken up to now, so that a stall makes the answer longer.
        """
        if len(self._times) < 2 or now <= self._times[0]:
            return 1.0
        rate = len(self._times) / (now - self._times[0])
        return min(max(math.ceil(backlog / rate), 1.0), _LONGEST)
