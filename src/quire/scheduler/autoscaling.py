"""Autoscaling policies: how many replicas a deployment should have. No clock: the caller says what time it is."""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.errors import InvalidConfig


class FleetLoad(NamedTuple):
    """What a policy decides by.

    now: seconds. queued_tokens: prompt tokens that were sent to replicas and are not computed yet. running, starting:
    replicas that take requests, and that will.
    """

    now: float
    queued_tokens: int
    running: int
    starting: int


class QueuedTokensAutoscaler:
    """As many replicas as keep `target` queued prompt tokens each, within `low` and `high`.

    More are started when more have been wanted for `up_delay` seconds, as many as were wanted at least in that time;
    fewer are kept when fewer have been wanted for `down_delay` seconds, as many as were wanted at most. So neither a
    burst shorter than a start nor a pause between two bursts changes anything.
    """

    def __init__(self, target: int, *, low: int, high: int, up_delay: float = 10.0, down_delay: float = 300.0) -> None:
        if target < 1 or not 1 <= low <= high or up_delay < 0 or down_delay < 0:
            raise InvalidConfig(
                f"autoscaling needs a target above 0, 1 <= low <= high and delays of at least 0, not target {target}, "
                f"low {low}, high {high}, up_delay {up_delay:g}, down_delay {down_delay:g}"
            )
        self.target, self.low, self.high = target, low, high
        self.up_delay, self.down_delay = up_delay, down_delay
        self._above: list[int] | None = None
        self._below: list[int] | None = None
        self._above_since = self._below_since = 0.0

    def desired(self, load: FleetLoad) -> int:
        """How many replicas there should be now, those that start included."""
        current = load.running + load.starting
        wanted = min(self.high, max(self.low, math.ceil(load.queued_tokens / self.target)))
        if wanted <= current:
            self._above = None
        if wanted >= current:
            self._below = None
        if wanted > current:
            if self._above is None:
                self._above, self._above_since = [], load.now
            self._above.append(wanted)
            if load.now - self._above_since >= self.up_delay:
                chosen, self._above = min(self._above), None
                return chosen
        elif wanted < current:
            if self._below is None:
                self._below, self._below_since = [], load.now
            self._below.append(wanted)
            if load.now - self._below_since >= self.down_delay:
                chosen, self._below = max(self._below), None
                return chosen
        return min(self.high, max(self.low, current))
