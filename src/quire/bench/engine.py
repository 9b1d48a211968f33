"""`quire bench engine`: the engine loop alone, without weights: what scheduling, batching and paging cost."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import click
from rich.console import Console
from rich.progress import Progress

from quire.cli.ranges import LENGTHS, FiniteRange, ascending
from quire.cli.tables import numbers
from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock, WallClock
from quire.observability.engine_metrics import EngineMetrics
from quire.observability.histogram import percentile
from quire.observability.recorder import recorded
from quire.scheduler.policy import Batching, Pressure
from quire.scheduler.step_time import StepCost
from quire.sim.run import Outcome, SimConfig, peak_memory, simulate
from quire.sim.workload import Load, uniform

_POINTS = (50, 95, 99)
_SIZE = click.IntRange(1, 1 << 20)
_SPAN: Any = MappingProxyType({"type": LENGTHS, "callback": ascending, "show_default": True})


@click.command("engine")
@click.option("--requests", type=click.IntRange(1, 1 << 24), default=1000, show_default=True, help="How many.")
@click.option("--prompt", default=(4, 96), help="Prompt tokens, from to.", **_SPAN)
@click.option("--new", default=(4, 24), help="New tokens, from to.", **_SPAN)
@click.option("--rate", type=FiniteRange(0), default=0.0, help="Arrivals a second; 0: all at once.")
@click.option("--max-num-seqs", type=_SIZE, default=32, show_default=True, help="Sequences at once.")
@click.option("--max-num-batched-tokens", type=_SIZE, default=512, show_default=True, help="Tokens a step.")
@click.option("--blocks", type=click.IntRange(1, 1 << 24), default=4096, show_default=True, help="KV blocks.")
@click.option("--block-size", type=_SIZE, default=16, show_default=True, help="Tokens a block.")
@click.option("--batching", type=click.Choice(get_args(Batching)), default="continuous", show_default=True)
@click.option("--pressure-policy", type=click.Choice(get_args(Pressure)), default="foresee", show_default=True)
@click.option(
    "--lookahead", type=click.IntRange(0, 8), default=0, show_default=True, help="Steps launched ahead of results."
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option(
    "--step-ms",
    type=FiniteRange(0),
    default=0.0,
    help="Simulated milliseconds a step takes; 0: only the engine's own time.",
)
@click.option("--token-us", type=FiniteRange(0), default=0.0, help="Simulated microseconds a token fed adds.")
@click.option("--virtual", is_flag=True, help="Simulated time passes at once (needs --step-ms or --token-us).")
@click.option("--recording-dir", type=click.Path(path_type=Path), help="Record the run there, for `quire replay`.")
@click.option("--seed", default=7, show_default=True)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs; the one with the median tokens/s is shown.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    requests: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    rate: float,
    seed: int,
    repeat: int,
    step_ms: float,
    token_us: float,
    virtual: bool,
    recording_dir: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Run synthetic requests through the real engine, with metrics on, and say how fast it was."""
    config = SimConfig(
        pages=sizes["blocks"],
        page_size=sizes["block_size"],
        max_num_seqs=sizes["max_num_seqs"],
        max_num_batched_tokens=sizes["max_num_batched_tokens"],
        chunk=sizes["max_num_batched_tokens"],
        depth=sizes["lookahead"],
        prefix_caching=sizes["prefix_caching"],
        batching=sizes["batching"],
        pressure_policy=sizes["pressure_policy"],
        cost=StepCost(step_ms / 1e3, token_us / 1e6) if step_ms or token_us else SimConfig().cost,
    )
    if virtual and not config.cost.seconds(1):
        raise click.UsageError("--virtual needs simulated time: give --step-ms or --token-us")
    loads = uniform(requests, prompt=prompt, new=new, rate=rate, seed=seed)
    make = Engine if recording_dir is None else recorded(recording_dir)
    outcomes = [_run(config, loads, virtual, quiet=as_json, make=make) for _ in range(repeat)]
    outcome = sorted(outcomes, key=lambda o: o.tokens / o.seconds)[repeat // 2]
    outcome.peak_bytes = peak_memory(lambda: _run(config, loads[:10_000], virtual=True, quiet=True))
    found = report(outcome)
    click.echo(json.dumps(found)) if as_json else _show(found)


def _run(
    config: SimConfig, loads: list[Load], virtual: bool, quiet: bool, make: Callable[..., Engine] = Engine
) -> Outcome:
    engine = config.build(VirtualClock() if virtual else WallClock(), [EngineMetrics()], make)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("requests", total=len(loads))
        return simulate(engine, loads, lambda done: bar.update(task, completed=done))


def report(outcome: Outcome) -> dict[str, Any]:
    """The figures of a run, plain JSON. Times in milliseconds unless named otherwise."""
    snapshot = outcome.snapshot
    return {
        "requests": outcome.requests,
        "failed": outcome.failed,
        "tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 4),
        "requests_per_s": round(outcome.requests / outcome.seconds, 1),
        "tokens_per_s": round(outcome.tokens / outcome.seconds, 1),
        "latency_ms": _spread(outcome.latency),
        "queue_wait_ms": _spread(outcome.queue_wait),
        "step_ms": _spread(outcome.steps),
        "steps": len(outcome.steps),
        "average_batch_size": round(snapshot["average_batch_size"], 2),
        "max_batch_observed": snapshot["max_batch_observed"],
        "peak_kv_use": round(outcome.peak_use, 4),
        "peak_memory_bytes": outcome.peak_bytes,
        "internal_fragmentation": round(statistics.fmean(outcome.internal), 4) if outcome.internal else 0.0,
        "external_fragmentation": round(statistics.fmean(outcome.external), 4) if outcome.external else 0.0,
        "preemptions": snapshot["cache"]["pressure_events"],
        "python": platform.python_version(),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(1e3 * percentile(seconds, q), 4) for q in _POINTS}


def _show(found: dict[str, Any]) -> None:
    table = numbers("engine loop, no weights", "what", "figure", left=("what",))
    for name, value in found.items():
        table.add_row(name.replace("_", " "), _figure(value))
    Console().print(table)


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{k} {v:g}" for k, v in value.items())
    return value if isinstance(value, str) else f"{value:,}"
