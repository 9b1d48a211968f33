"""Prometheus: histograms, percentiles, and the metrics of several servers as one text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts per bucket, as Prometheus has them. `bounds` are upper limits, ascending; one more is +Inf."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        return sum(self.counts)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) by nearest rank; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))]


Families = dict[str, tuple[list[str], list[str]]]
"""Name to (HELP and TYPE lines, samples)."""


def merge_metrics(own: bytes, theirs: Iterable[tuple[str, bytes]]) -> bytes:
    """`own` as it is, and of `theirs`, (server, text), the families that `own` lacks, labelled `upstream`."""
    known = families(own.decode("utf-8", "replace"))
    found: Families = {}
    for server, text in theirs:
        for name, (about, samples) in families(text.decode("utf-8", "replace")).items():
            if name not in known:
                found.setdefault(name, (about, []))[1].extend(labelled(sample, server) for sample in samples)
    lines = [line for about, samples in found.values() for line in (*about, *samples)]
    return own + "".join(line + "\n" for line in lines).encode()


def families(text: str) -> Families:
    """Prometheus text by family. A sample belongs to the family declared last, if its name begins like that."""
    found: Families = {}
    family = ""
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            family = line.split(" ", 3)[2]
            found.setdefault(family, ([], []))[0].append(line)
        elif line and not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            of = family if family and name.startswith(family) else name
            found.setdefault(of, ([], []))[1].append(line)
    return found


def labelled(sample: str, server: str) -> str:
    label = f'upstream="{server}"'
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, rest = sample.partition(" ")
    return f"{name}{{{label}}} {rest}"
