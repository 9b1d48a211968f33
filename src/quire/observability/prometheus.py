"""Prometheus: metrics as text, and those of several servers as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.observability.histogram import Metrics


def text(metrics: Metrics, values: Mapping[str, Any], model: str, engine: str = "0") -> bytes:
    """Metrics as text.

    values: by name, a number; a number by value of the label, or all labels if the metric has none; or a histogram's
    counts and sum.
    """
    return text_of(metrics, {engine: values}, model)


def text_of(metrics: Metrics, engines: Mapping[str, Mapping[str, Any]], model: str) -> bytes:
    """Metrics of several engines as text: the values of each by the label `engine`."""
    return bytes(generate_latest(_Families(metrics, engines, model)))


@dataclass
class _Families(Collector):
    metrics: Metrics
    engines: Mapping[str, Mapping[str, Any]]
    model: str

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a value."""
        for kind, table in zip(("counter", "gauge", "histogram"), self.metrics, strict=True):
            for name, (about, help) in table.items():
                family = Metric(name, help, kind)
                for engine, values in self.engines.items():
                    for suffix, labels, value in _samples(kind, about, values[name]) if name in values else ():
                        family.add_sample(name + suffix, {"model_name": self.model, "engine": engine, **labels}, value)
                if any(name in values for values in self.engines.values()):
                    yield family


def _samples(kind: str, about: Any, value: Any) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """(suffix of the name, labels, value) of a metric's samples. about: a label, or upper limits of buckets."""
    suffix = "_total" if kind == "counter" else ""
    if kind == "histogram":
        counts, total = value
        for bound, count in zip([*map(float, about), "+Inf"], accumulate(counts), strict=True):
            yield "_bucket", {"le": str(bound)}, count
        yield "_count", {}, sum(counts)
        yield "_sum", {}, total
    elif not isinstance(value, Mapping):
        yield suffix, {}, value
    elif about:
        for each, number in value.items():
            yield suffix, {about: each}, number
    else:
        yield suffix, value, 1


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
