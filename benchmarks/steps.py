"""`python -m benchmarks.steps`: what each kernel adds to prompts and to a step of decoding, in captured graphs.

Kernels that depend on each other overlap, so that their own durations add up to more than the step takes. What one adds
is how much later than all before it it ends.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.card import needed, prepare_all
from benchmarks.gpu import answer
from benchmarks.shapes import write
from benchmarks.workloads import WORKLOADS, prompts
from quire.llm import LLM

MARK, STEPS, NEW = "advance_kernel", 10, 24
"""A kernel that each step has once; steps that are looked at; new tokens, of whose steps these are the last."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that a GPU does."""


class Launch(NamedTuple):
    """A kernel, in microseconds. grid: programs along its last two dimensions: the first depends on the batch."""

    name: str
    grid: tuple[int, ...]
    begin: float
    took: float


class Added(NamedTuple):
    """What launches of one kind add, and take, on average, in microseconds."""

    name: str
    grid: tuple[int, ...]
    times: int
    adds: float
    took: float


def launches(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """Those of a trace of torch's profiler, in the order in which they began."""
    found = [
        Launch(each["name"], tuple(each.get("args", {}).get("grid", ())[1:]), each["ts"], each["dur"])
        for each in events
        if each.get("cat") in DEVICE
    ]
    return sorted(found, key=lambda each: each.begin)


def added(order: Sequence[Launch]) -> list[Added]:
    """By name and grid, what adds most first."""
    kinds, ended = defaultdict[tuple[str, tuple[int, ...]], list[tuple[float, float]]](list), None
    for each in order:
        end = each.begin + each.took
        later = each.took if ended is None else max(0.0, end - ended)
        kinds[each.name, each.grid].append((later, each.took))
        ended = end if ended is None else max(ended, end)
    made = [
        Added(*kind, len(every), *(sum(column) / len(every) for column in zip(*every, strict=True)))
        for kind, every in kinds.items()
    ]
    return sorted(made, key=lambda each: -each.times * each.adds)


def last_steps(order: Sequence[Launch], count: int) -> Sequence[Launch]:
    """The launches of the last `count` steps. Raises ClickException where there are fewer."""
    marks = [at for at, each in enumerate(order) if MARK in each.name]
    if len(marks) <= count:
        raise click.ClickException(f"{len(marks)} steps are too few to look at {count}")
    return order[marks[-count - 1] + 1 : marks[-1] + 1]


def traced(work: Callable[[], object]) -> list[Launch]:
    """What a GPU does meanwhile."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return launches(json.loads(path.read_text())["traceEvents"])


def lines(title: str, order: Sequence[Launch], steps: int, top: int) -> Iterator[str]:
    every = added(order)
    whole = sum(each.times * each.adds for each in every) / 1e3 / steps
    yield f"{title}: {whole:.3f} ms in {len(order) / steps:.0f} kernels"
    for each in every[:top]:
        times = each.times / steps
        figures = (
            f"{times * each.adds / 1e3:9.3f} ms {times:7.1f} times, adds {each.adds:8.2f} us, takes {each.took:8.2f}"
        )
        yield f"  {figures}  {each.name[:80]}"


@click.command("steps")
@click.argument("name", type=click.Choice(list(WORKLOADS)))
@click.option("--batch", "batches", type=int, multiple=True, help="Sequences; the workload's, unless some are named.")
@click.option("--top", default=20, show_default=True, help="Kernels shown.")
@click.option("--deterministic", is_flag=True, help="Answers that do not depend on the batch.")
def command(name: str, batches: Sequence[int], top: int, deterministic: bool) -> None:
    """What each kernel adds to the prompts of a workload, and to its steps of decoding."""
    needed("`python -m benchmarks.profile` shows operators on a CPU")
    work = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder), work.model, config=work.config)
        options = {"max_num_seqs": 256, "latency_target_ms": 0.0, "deterministic": deterministic, **work.options}
        with LLM(str(place), load_format="dummy", max_model_len=work.context, **options) as llm:
            prepare_all(llm)
            for batch in batches or work.batches:
                for turn in range(2):  # the first compiles what is left
                    answer(llm, prompts(batch, work.prompt, (1, 1), seed=turn)[0], [1] * batch)
                ids, _ = prompts(batch, work.prompt, (1, 1), seed=2)
                fed = traced(lambda: answer(llm, ids, [1] * batch))  # noqa: B023  called at once
                decoded = last_steps(traced(lambda: answer(llm, ids, [NEW] * batch)), STEPS)  # noqa: B023
                for line in (
                    *lines(f"{batch} prompts of {work.prompt[0]}", fed, 1, top),
                    *lines(f"a step of {batch}", decoded, STEPS, top),
                ):
                    click.echo(line)


if __name__ == "__main__":
    command()
