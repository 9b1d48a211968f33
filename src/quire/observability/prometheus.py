"""Prometheus: histograms, percentiles, and the metrics of several servers as one text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


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
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) by nearest rank; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))]


def histogram_family(
    name: str, help: str, labels: Mapping[str, str], bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """A histogram's metric. counts: by bucket, one more than `bounds`; total: sum of the values."""
    family = HistogramMetricFamily(name, help, labels=list(labels))
    limits = [*(str(float(bound)) for bound in bounds), "+Inf"]
    buckets = [(limit, float(count)) for limit, count in zip(limits, accumulate(counts), strict=True)]
    family.add_metric(list(labels.values()), buckets, total)
    return family


def labelled_family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help: str,
    labels: Mapping[str, str],
    value: float | Mapping[str, float],
    label: str | None = None,
) -> Metric:
    """A counter or gauge: one value, or one for each value of `label`."""
    family = kind(name, help, labels=[*labels, label] if label else list(labels))
    if isinstance(value, Mapping):
        for label_value, each in value.items():
            family.add_metric([*labels.values(), label_value], each)
    else:
        family.add_metric(list(labels.values()), value)
    return family


Families = dict[str, tuple[list[str], list[str]]]
"""Name to (HELP and TYPE lines, samples)."""


def merge_metrics(own: bytes, others: Iterable[tuple[str, bytes]]) -> bytes:
    """`own`, and the families of `others`, (server, text) each, that `own` lacks, with a label `upstream`."""
    known = families(own.decode("utf-8", "replace"))
    found: Families = {}
    for server, text in others:
        for name, (about, samples) in families(text.decode("utf-8", "replace")).items():
            if name not in known:
                found.setdefault(name, (about, []))[1].extend(labelled(sample, server) for sample in samples)
    lines = [line for about, samples in found.values() for line in (*about, *samples)]
    return own + "".join(line + "\n" for line in lines).encode()


def families(text: str) -> Families:
    """Prometheus text by family. A sample belongs to the family declared last if its name begins with that."""
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
    """A sample with the label `upstream`."""
    label = f'upstream="{server}"'
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, rest = sample.partition(" ")
    return f"{name}{{{label}}} {rest}"
