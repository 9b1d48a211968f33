"""`python -m benchmarks.kernels`: each kernel checked on fresh random inputs, then timed inside a captured graph, cold.

What a kernel reads is rotated through more memory than the L2 cache holds. Beside each time stands the bandwidth or
the arithmetic it amounts to and the share that is of the card's ceiling.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.card import needed
from benchmarks.kernel_cases import Case, cases
from quire.ops.triton.ops import TritonOps

READ = 4.57
"""TB/s that reading alone reaches on an H200, measured; `reading` measures it."""

MULTIPLY = 770.0
"""TFLOP/s of bf16 products on an H200, measured."""


@dataclass(frozen=True, slots=True)
class Timed:
    """error: ||got - want|| / ||want||, want in float32. us: of one call. share: of the ceiling that binds it."""

    name: str
    error: float
    us: float
    tb_s: float
    tflop_s: float
    share: float


def replayed(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Median microseconds a call: all calls captured once in a graph, which is replayed."""
    calls = list(calls) * -(-16 // len(calls))  # a replay costs some microseconds of its own
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return timed(graph, len(calls), rounds)


def timed(graph: torch.cuda.CUDAGraph, parts: int, rounds: int) -> float:
    """Median microseconds of one of a graph's `parts`, over so many replays."""
    times = list[float]()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / parts)
    return statistics.median(times)


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(x, out, each, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read `each` words a program, all of which are needed for whether anything is written."""
    i, acc = tl.arange(0, block), tl.zeros([block], tl.int32)
    for begin in range(0, each, block):
        acc ^= tl.load(x + tl.program_id(0).to(tl.int64) * each + begin + i)
    if tl.sum(acc, 0) == 123456789:
        tl.store(out + i, acc)


def reading() -> float:
    """TB/s that reading alone reaches on this card: of 1 GB at a time, of 4 GB."""
    words = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    programs = 8 * torch.cuda.get_device_properties().multi_processor_count
    each = (1 << 28) // programs // 4096 * 4096

    def read(x: Tensor) -> None:
        read_kernel[(programs,)](x, x, each, block=4096, num_warps=8)

    us = replayed([partial(read, words[part << 28 :]) for part in range(4)])
    return 4e-6 * each * programs / us


def run(case: Case, read: float) -> Timed:
    """read: TB/s that reading alone reaches."""
    error = case.check()
    us = replayed(case.calls)
    tb_s, tflop_s = case.bytes / us / 1e6, case.flops / us / 1e6
    return Timed(
        case.name, error, round(us, 2), round(tb_s, 3), round(tflop_s, 1), max(tb_s / read, tflop_s / MULTIPLY)
    )


def measure(only: str, dependent: bool, read: float) -> Iterator[Timed]:
    ops = TritonOps("cuda", dependent=dependent)
    for make in cases(ops, only):
        case = make()
        yield run(case, read)
        del case
        torch.cuda.empty_cache()


@click.command("kernels")
@click.option("--only", default="", help="Cases whose name contains this.")
@click.option("--dependent/--no-dependent", default=True, show_default=True, help="Programmatic dependent launch.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here, too.")
def command(only: str, dependent: bool, path: Path | None) -> None:
    """Check and time every kernel on this machine's CUDA device."""
    needed("the tests check every kernel on a CPU, too")
    read = round(reading(), 3)
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": {"read_tb_s": read, "bf16_tflop_s": MULTIPLY},
        "dependent": dependent,
    }
    click.echo(f"{about['device']}, torch {about['torch']}; shares are of {read} TB/s or {MULTIPLY:.0f} TFLOP/s")
    click.echo(f"{'kernel':58} {'error':>9} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'share':>6}")
    rows = []
    for row in measure(only, dependent, read):
        rows.append(asdict(row))
        click.echo(f"{row.name:58} {row.error:9.1e} {row.us:9.2f} {row.tb_s:6.2f} {row.tflop_s:8.0f} {row.share:6.0%}")
    if path is not None:
        path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command()
