"""`python -m benchmarks.profile`: where a step's time goes, by torch.profiler, and model FLOPs utilization.

Model FLOPs utilization (MFU, PaLM, arXiv:2204.02311) is what the model has to compute, over what the machine
could in the same time. Decoding reads every weight for a few tokens, so its share is small whatever the engine does.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.shapes import SHAPES, write
from quire.assembly.engine import build_engine
from quire.bench.monitor import GPUMonitor, environment
from quire.config import Settings
from quire.engine.engine import Engine
from quire.models.registry import idle_parameters, parameters, read_spec
from quire.models.spec import ModelSpec
from quire.weights.files import read_config
from quire.weights.locate import locate


@dataclass(frozen=True, slots=True)
class Phase:
    """tokens: fed. seconds: it took. operations: a multiplication and an addition are two."""

    tokens: int
    seconds: float
    operations: float


@click.command("profile")
@click.option("--shape", type=click.Choice(["embedded", *SHAPES]), default="embedded", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Sequences at once.")
@click.option("--prompt", type=click.IntRange(1), default=128, show_default=True, help="Prompt tokens of each.")
@click.option("--new", type=click.IntRange(2), default=32, show_default=True, help="New tokens of each.")
@click.option("--peak", type=float, help="TFLOP/s that count as all. Unset: those of a matrix product, measured here.")
@click.option("--top", default=12, show_default=True, help="Operators shown.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a trace for chrome://tracing or Perfetto there.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures there.")
def command(shape: str, trace: Path | None, path: Path | None, top: int, peak: float | None, **given: Any) -> None:
    """Profile prefill and decode: tokens/s, the share of the machine's arithmetic, and what takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        found = profiled(locate(shape) if shape == "embedded" else write(Path(folder), shape), trace, peak, **given)
    found["about"] = {"shape": shape, "environment": environment(), **given}
    show(found, top)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def profiled(
    place: Path, trace: Path | None, peak: float | None, *, dtype: str, batch: int, prompt: int, new: int
) -> dict[str, Any]:
    """Figures of one model: timed without the profiler, which costs time itself, and then once more with it."""
    spec = read_spec(read_config(place))
    engine = build_engine(
        Settings.of(
            model=str(place),
            load_format="auto" if any(place.glob("*.safetensors")) else "dummy",
            dtype=dtype,
            max_num_seqs=batch,
            max_model_len=min(spec.context, prompt + new),
            enable_prefix_caching=False,
            latency_target_ms=0,
        )
    )
    device = torch.device(engine.description.device)
    try:
        run(engine, spec, batch, prompt, new)
        with GPUMonitor() as watch:
            phases = run(engine, spec, batch, prompt, new)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=kinds) as seen:
            run(engine, spec, batch, prompt, new)
    finally:
        engine.close()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    best = 1e12 * peak if peak else ceiling(getattr(torch, engine.description.dtype), device)
    busy = [percent for _, percent, _ in watch.samples]
    return {
        "peak_tflop_s": best / 1e12,
        "gpu_busy_percent": statistics.mean(busy) if busy else None,
        "phases": {
            name: {
                "tokens_s": phase.tokens / phase.seconds,
                "tflop_s": phase.operations / phase.seconds / 1e12,
                "mfu": phase.operations / phase.seconds / best,
            }
            for name, phase in phases.items()
        },
        "operators": operators(seen, device),
    }


def run(engine: Engine, spec: ModelSpec, batch: int, prompt: int, new: int) -> dict[str, Phase]:
    """All at once: prefill is until all have a first token, decode what follows."""
    rng = random.Random(7)
    waiting = {engine.submit([rng.randrange(5, 400) for _ in range(prompt)], new) for _ in range(batch)}
    began = half = time.perf_counter()
    early = made = 0
    while engine.has_pending_work:
        events = engine.step()
        made += sum(len(event.tokens) for event in events)
        if waiting:
            waiting -= {event.id for event in events if event.tokens}
            half, early = time.perf_counter(), made
    late = made - early
    ended = time.perf_counter()
    return {
        "prefill": Phase(batch * prompt, half - began, work(spec, batch * prompt, prompt / 2, sampled=early)),
        "decode": Phase(late, ended - half, work(spec, late, prompt + new / 2, sampled=late)),
    }


def work(spec: ModelSpec, fed: int, seen: float, *, sampled: int) -> float:
    """Operations for `fed` tokens that see `seen` others each on average, and logits for `sampled` of them."""
    head = spec.vocab * spec.hidden
    body = parameters(spec) - idle_parameters(spec) - head * (1 if spec.tie else 2)
    attention = 2 * spec.layers * spec.heads * spec.head_dim * seen
    return 2 * (fed * (body + attention) + sampled * head)


def ceiling(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a large matrix product: the best of five."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    times = []
    for _ in range(6):
        began = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for it
        times.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(times[1:])


def operators(seen: Any, device: torch.device) -> list[dict[str, Any]]:
    """Each operator's own time, the longest first."""
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = [{"name": each.key, "ms": getattr(each, own) / 1e3, "calls": each.count} for each in seen.key_averages()]
    return sorted((row for row in rows if row["ms"] > 0), key=lambda row: -row["ms"])


def show(found: Mapping[str, Any], top: int) -> None:
    console = Console(width=110)
    phases = Table(title=f"of {found['peak_tflop_s']:,.2f} TFLOP/s", title_justify="left")
    for column in ("phase", "tokens/s", "TFLOP/s", "MFU"):
        phases.add_column(column, justify="left" if column == "phase" else "right")
    for name, row in found["phases"].items():
        phases.add_row(name, f"{row['tokens_s']:,.0f}", f"{row['tflop_s']:,.4f}", f"{row['mfu']:.1%}")
    console.print(phases)
    if found["gpu_busy_percent"] is not None:
        console.print(f"GPU busy: {found['gpu_busy_percent']:.0f} %")
    total = sum(row["ms"] for row in found["operators"])
    table = Table(title=f"operators, {total:,.1f} ms in all", title_justify="left")
    for column in ("operator", "own ms", "share", "calls"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for row in found["operators"][:top]:
        table.add_row(row["name"], f"{row['ms']:,.2f}", f"{row['ms'] / total:.0%}", str(row["calls"]))
    console.print(table)


if __name__ == "__main__":
    command()
