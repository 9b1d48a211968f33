"""What metrics are made of: histograms, percentiles, and tables of names. An engine counts with these alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COUNTS: tuple[float, ...] = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
"""Buckets of numbers of tokens."""


class Histogram:
    """Counts by bucket, cheap enough for the engine loop. bounds: ascending upper limits; one more bucket is +Inf."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def value(self) -> tuple[list[int], float]:
        """Counts by bucket, and the sum of the values."""
        return self.counts, self.sum


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) by nearest rank; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))]


class Metrics(NamedTuple):
    """The metrics of a part of the server. A label distinguishes the samples of a metric; '' if there is only one."""

    counters: Mapping[str, tuple[str, str]]
    """Label and meaning by name."""
    gauges: Mapping[str, tuple[str, str]]
    """Label and meaning by name."""
    histograms: Mapping[str, tuple[Sequence[float], str]]
    """Upper limits of the buckets and meaning by name."""
