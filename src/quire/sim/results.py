"""What a simulation found: the times of each request, and totals of the replicas."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

_GAP_STEP = math.log(1.0025)
"""Times between tokens are counted in classes 0.25 % wide."""

ANSWERED, QUEUE_FULL, TOO_LONG = 1, 2, 3

PERCENTILES = (50, 90, 95, 99)


class Results:
    """Times of `count` requests, in seconds of the simulation. NaN: it has not come about.

    first: of the first token. end: of the last. replica: where each ran, -1 before. status: 0 unanswered, 1 answered, 2
    refused by a full queue, 3 too long to ever run. gaps: times between tokens, by class: how many.
    """

    def __init__(self, count: int) -> None:
        self.arrival = array("d", bytes(8 * count))
        self.prompt = array("q", bytes(8 * count))
        self.output = array("q", bytes(8 * count))
        self.first = array("d", [math.nan]) * count
        self.end = array("d", [math.nan]) * count
        self.cached = array("q", bytes(8 * count))
        self.replica = array("q", [-1]) * count
        self.status = bytearray(count)
        self.gaps: dict[int, int] = {}
        self.preemptions = 0
        self.overhead = 0.0
        """Seconds that a client waits for each first token beyond the engine."""

    def add(self, arrival: float, prompt: int, output: int) -> int:
        """One request more. Returns its number."""
        for column, value in ((self.arrival, arrival), (self.first, math.nan), (self.end, math.nan)):
            column.append(value)
        for numbers, whole in ((self.prompt, prompt), (self.output, output), (self.cached, 0), (self.replica, -1)):
            numbers.append(whole)
        self.status.append(0)
        return len(self.status) - 1

    def __len__(self) -> int:
        return len(self.status)

    def first_token(self, number: int, at: float, cached: int) -> None:
        """The first token of a request; `cached` tokens of its prompt were in the prefix cache."""
        self.first[number] = at
        self.cached[number] = cached

    def gap(self, seconds: float, count: int) -> None:
        """So many tokens came so long after those before them."""
        kind = int(math.log(seconds) / _GAP_STEP) if seconds > 1e-9 else -10_000
        self.gaps[kind] = self.gaps.get(kind, 0) + count

    def ended(self, number: int, at: float, preemptions: int) -> None:
        """A request was answered."""
        self.end[number] = at
        self.status[number] = ANSWERED
        self.preemptions += preemptions

    def refused(self, number: int, at: float, status: int) -> None:
        """A request came to a queue that was full (2), or can never run (3)."""
        self.end[number] = at
        self.status[number] = status

    def merge(self, other: Results) -> None:
        """Take over what another process found about requests that are not known here."""
        for number, status in enumerate(other.status):
            if status or other.replica[number] >= 0:
                self.status[number] = status
                for name in ("first", "end", "cached", "replica"):
                    getattr(self, name)[number] = getattr(other, name)[number]
        for kind, count in other.gaps.items():
            self.gaps[kind] = self.gaps.get(kind, 0) + count
        self.preemptions += other.preemptions

    def digest(self) -> str:
        """Of all decisions and times: equal where two simulations did the same."""
        sha = hashlib.sha256()
        for column in (self.arrival, self.first, self.end, self.cached, self.replica):
            sha.update(column.tobytes())
        sha.update(bytes(self.status))
        sha.update(repr((sorted(self.gaps.items()), self.preemptions)).encode())
        return sha.hexdigest()[:16]

    # ---------------------------------------------------------------- statistics

    def answered(self) -> list[int]:
        """Numbers of the requests that were answered."""
        return [number for number, status in enumerate(self.status) if status == ANSWERED]

    def ttft(self, numbers: Sequence[int]) -> list[float]:
        """Seconds to the first token."""
        return [self.first[n] - self.arrival[n] + self.overhead for n in numbers]

    def tpot(self, numbers: Sequence[int]) -> list[float]:
        """Seconds a token after the first, of answers with more than one."""
        return [(self.end[n] - self.first[n]) / (self.output[n] - 1) for n in numbers if self.output[n] > 1]

    def e2el(self, numbers: Sequence[int]) -> list[float]:
        """Seconds of whole answers."""
        return [self.end[n] - self.arrival[n] + self.overhead for n in numbers]

    def itl(self, q: float) -> float:
        """The q-th percentile of the seconds between tokens, to 0.25 %."""
        total, seen = sum(self.gaps.values()), 0
        for kind in sorted(self.gaps):
            seen += self.gaps[kind]
            if seen >= q / 100 * total:
                return math.exp((kind + (0.5 if kind >= 0 else -0.5)) * _GAP_STEP) if kind > -10_000 else 0.0
        return math.nan

    def good(self, goals: Mapping[str, float]) -> int:
        """Requests that were within every goal: seconds by ttft, tpot and e2el."""
        count = 0
        for n in self.answered():
            begun = self.arrival[n] - self.overhead
            took = {"ttft": self.first[n] - begun, "e2el": self.end[n] - begun}
            took["tpot"] = (self.end[n] - self.first[n]) / max(1, self.output[n] - 1)
            count += all(took[what] <= limit for what, limit in goals.items())
        return count


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, interpolated as `quire bench serve` does; NaN without values. `values` must be sorted."""
    if not values:
        return math.nan
    at = q / 100 * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds: mean and percentiles."""
    ordered = sorted(values)
    out = {"mean": 1e3 * sum(ordered) / len(ordered) if ordered else math.nan}
    return out | {f"p{q}": 1e3 * percentile(ordered, q) for q in PERCENTILES}


def summarize(results: Results, goals: Mapping[str, float], busy: float, replica_seconds: float) -> dict[str, Any]:
    """Throughput, times in milliseconds, and what it took. goals: seconds by ttft, tpot, e2el.

    busy, replica_seconds: seconds in which replicas ran steps, and in which they were there.
    """
    numbers = results.answered()
    begin = min(results.arrival, default=0.0)
    seconds = max((results.end[n] for n in numbers), default=begin) - begin
    refused, too_long = results.status.count(QUEUE_FULL), results.status.count(TOO_LONG)
    prompt, output = sum(results.prompt[n] for n in numbers), sum(results.output[n] for n in numbers)
    good = results.good(goals)
    per = 1 / seconds if seconds else 0.0
    return {
        "requests": len(results),
        "answered": len(numbers),
        "refused": refused,
        "too_long": too_long,
        "seconds": seconds,
        "requests_s": len(numbers) * per,
        "prompt_tokens_s": prompt * per,
        "tokens_s": output * per,
        "good": good,
        "good_s": good * per,
        "good_share": good / len(results) if len(results) else math.nan,
        "ms": {
            "ttft": spread(results.ttft(numbers)),
            "tpot": spread(results.tpot(numbers)),
            "itl": {f"p{q}": 1e3 * results.itl(q) for q in PERCENTILES},
            "e2el": spread(results.e2el(numbers)),
        },
        "preemptions": results.preemptions,
        "hit_rate": sum(results.cached[n] for n in numbers) / prompt if prompt else 0.0,
        "utilisation": busy / replica_seconds if replica_seconds else 0.0,
        "replica_hours": replica_seconds / 3600,
        "digest": results.digest(),
    }
