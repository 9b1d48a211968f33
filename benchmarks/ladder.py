"""`python -m benchmarks.ladder`: from a static batch in contiguous memory upwards, one optimisation at a time.

Each rung is measured on the workload it is for, without it and with it, everything below it switched on.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import SHAPES, write
from quire.assembly.engine import build_engine
from quire.assembly.limits import choose_device
from quire.bench.monitor import environment
from quire.config import Settings
from quire.engine.engine import Engine
from quire.models.registry import read_spec
from quire.observability.histogram import percentile
from quire.weights.locate import locate

CONTEXTS = 16
"""K/V memory, in sequences of full length: what contiguous memory holds at once."""

Asked = list[tuple[list[int], int]]
"""Prompts, and how many tokens each is to get."""


@dataclass
class Ran:
    """seconds: for all. new: tokens made. gaps: seconds between one request's tokens, of those asked first."""

    seconds: float = 0.0
    new: int = 0
    gaps: list[float] = field(default_factory=list)


Metric = Callable[[Ran], float]


def rate(ran: Ran) -> float:
    return ran.new / ran.seconds


def slowest(ran: Ran) -> float:
    return 1e3 * percentile(ran.gaps, 99)


def typical(ran: Ran) -> float:
    return 1e3 * statistics.median(ran.gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """options: what it switches on. first: requests at once. late: more, when those have begun. Lengths are shares of
    the context, from and to; share: what all prompts begin with. cuda: it means nothing on a CPU. forgets: without it,
    no K/V outlives its step.
    """

    name: str
    options: Mapping[str, Any]
    unit: str
    metric: Metric
    first: int
    prompt: tuple[float, float]
    new: tuple[float, float]
    share: float = 0.0
    late: int = 0
    cuda: bool = False
    forgets: bool = False

    def asked(self, context: int, scale: float, seed: int) -> tuple[Asked, Asked]:
        rng = random.Random(seed)
        head = [rng.randrange(5, 400) for _ in range(int(self.share * context))]

        def length(bounds: tuple[float, float]) -> int:
            return max(2, int(rng.uniform(*bounds) * context))

        def one(prompt: tuple[float, float], new: int) -> tuple[list[int], int]:
            return head + [rng.randrange(5, 400) for _ in range(length(prompt))], new

        count = max(2, int(self.first * scale))
        first = [one(self.prompt, length(self.new)) for _ in range(count)]
        return first, [one((0.75, 0.75), 2) for _ in range(max(1, int(self.late * scale)) if self.late else 0)]


SHORT, LONG = (0.01, 0.03), (0.004, 0.06)
DECODE = Rung(
    name="cuda_graphs",
    options={"enforce_eager": False},
    unit="ms between tokens",
    metric=typical,
    first=8,
    prompt=SHORT,
    new=(0.03, 0.03),
    cuda=True,
)
LADDER = (
    Rung(
        name="kv_cache",
        options={},
        unit="tok/s",
        metric=rate,
        first=4,
        prompt=(0.03, 0.03),
        new=(0.06, 0.06),
        forgets=True,
    ),
    Rung(
        name="continuous_batching",
        options={"batching": "continuous"},
        unit="tok/s",
        metric=rate,
        first=64,
        prompt=SHORT,
        new=LONG,
    ),
    Rung(
        name="paged_attention",
        options={"block_size": "auto"},
        unit="tok/s",
        metric=rate,
        first=128,
        prompt=(0.01, 0.06),
        new=(0.02, 0.04),
    ),
    Rung(
        name="chunked_prefill",
        options={"enable_chunked_prefill": True, "long_prefill_token_threshold": 512},
        unit="ms, p99 between tokens",
        metric=slowest,
        first=32,
        prompt=SHORT,
        new=(0.045, 0.045),
        late=6,
    ),
    Rung(
        name="prefix_caching",
        options={"enable_prefix_caching": True},
        unit="tok/s",
        metric=rate,
        first=128,
        prompt=SHORT,
        new=(0.008, 0.008),
        share=0.25,
    ),
    DECODE,
    replace(DECODE, name="fp8", options={"quantization": "fp8"}),
)


@click.command("ladder")
@click.argument("shapes", nargs=-1, type=click.Choice(["embedded", *SHAPES]))
@click.option("--context", default=4096, show_default=True, help="Longest sequence, in tokens.")
@click.option("--scale", default=1.0, show_default=True, help="Share of the requests to run.")
@click.option("--repeat", default=3, show_default=True, help="Runs of each; the median counts.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures there.")
def command(shapes: tuple[str, ...], context: int, scale: float, repeat: int, path: Path | None) -> None:
    """Add one optimisation at a time, and measure each on the workload it is for."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes or ("embedded",):
            for row in climb(Path(folder), shape, context, scale, repeat):
                found.append(row)
                click.echo(json.dumps(row))
                if path is not None:
                    path.write_text(json.dumps({"environment": environment(), "rows": found}))
    show(found)


def climb(folder: Path, shape: str, context: int, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """A row for each rung. Neighbouring rungs share an engine: one's after is the next one's before."""
    device = choose_device("auto")
    own = shape == "embedded"
    place = locate(shape) if own else write(folder, shape)
    spec = read_spec(json.loads((place / "config.json").read_text()))
    context = min(context, spec.context)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options: dict[str, Any] = {
        "model": str(place),
        "load_format": "auto" if own else "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "canary": "off",
        "max_model_len": context,
        "max_num_seqs": 128,
        "kv_cache_memory_bytes": CONTEXTS * context * spec.kv_bytes(dtype.itemsize),
        "batching": "static",
        "block_size": context,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "latency_target_ms": 0,
    }
    rungs = [rung for rung in LADDER if device.type == "cuda" or not rung.cuda]
    before: float | None = None
    for rung, above in zip((None, *rungs), (*rungs, None), strict=True):
        options |= rung.options if rung is not None else {}
        engine = build_engine(Settings.of(**options))
        try:
            if rung is not None and before is not None:
                after = measured(engine, rung, context, scale, repeat)
                yield {"shape": shape, "rung": rung.name, "unit": rung.unit} | compared(rung, before, after)
            before = None if above is None else measured(engine, above, context, scale, repeat, forgets=above.forgets)
        finally:
            engine.close()
            del engine
            gc.collect()


def compared(rung: Rung, before: float, after: float) -> dict[str, float]:
    return {"without": before, "with": after, "gain": after / before if rung.metric is rate else before / after}


def measured(engine: Engine, rung: Rung, context: int, scale: float, repeat: int, *, forgets: bool = False) -> float:
    """The median of `repeat` runs, after one that is not counted. forgets: see `forgetful`."""
    runs = []
    for seed in range(repeat + 1):
        first, late = rung.asked(context, scale, seed)
        runs.append(forgetful(engine, first) if forgets else run(engine, first, late))
    return statistics.median(rung.metric(each) for each in runs[1:])


def run(engine: Engine, first: Sequence[tuple[list[int], int]], late: Sequence[tuple[list[int], int]]) -> Ran:
    """`first` at once; `late` once all of those have begun."""
    ran = Ran(new=sum(new for _, new in (*first, *late)))
    began = time.perf_counter()
    last = dict.fromkeys([engine.submit(prompt, new) for prompt, new in first], 0.0)
    waiting = set(last)
    while engine.has_pending_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.tokens and event.id in last:
                if last[event.id]:
                    ran.gaps.append(now - last[event.id])
                last[event.id] = now
                waiting.discard(event.id)
        if not waiting:
            for prompt, new in late:
                engine.submit(prompt, new)
            late = ()
    ran.seconds = time.perf_counter() - began
    return ran


def forgetful(engine: Engine, asked: Asked) -> Ran:
    """Every token computed from the whole text before it: what decoding costs where no K/V is kept."""
    texts = [list(prompt) for prompt, _ in asked]
    left = [new for _, new in asked]
    began = time.perf_counter()
    while any(left):
        ids = {engine.submit(text, 1): i for i, text in enumerate(texts) if left[i]}
        while engine.has_pending_work:
            for event in engine.step():
                texts[ids[event.id]] += event.tokens
                left[ids[event.id]] -= 1
    return Ran(seconds=time.perf_counter() - began, new=sum(new for _, new in asked))


def show(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="one optimisation at a time", title_justify="left")
    for column in ("shape", "with", "without it", "with it", "", "gain"):
        table.add_column(column, justify="left" if column in ("shape", "with", "") else "right", no_wrap=True)
    for row in found:
        table.add_row(
            row["shape"],
            row["rung"],
            f"{row['without']:,.2f}",
            f"{row['with']:,.2f}",
            row["unit"],
            f"{row['gain']:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    command()
