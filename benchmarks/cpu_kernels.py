"""`python -m benchmarks.cpu_kernels`: steps of a model on this CPU, by torch and by Quire's kernels, in turns.

Each format is a model of random weights at a public shape. A step is the model's forward and its logits: one prompt,
one sequence, eight sequences. The floor is what a decode step reads, weights and K/V, over the bandwidth that plain
reads of memory reach in the same minutes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from quire.bench.monitor import environment
from quire.bench.shapes import CLOCKS, SHAPES
from quire.models.registry import Model, parameters
from quire.ops.base import Ops
from quire.ops.native.library import best_level
from quire.ops.native.ops import InvariantNativeOps, NativeOps
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.weights.load import load_model

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FORMATS: Mapping[str, tuple[float, str, Mapping[str, Any]]] = MappingProxyType(
    {
        "bf16": (2.0, "auto", {}),
        "int8": (1.0, "int8", {}),
        "q8_0": (1.0625, "q8_0", {}),
        "awq": (0.5 + 4 / 64, "auto", {"quantization_config": AWQ}),
    }
)
"""Bytes of a number of a layer's matrices with its share of scales, --quantization, and what config.json says."""

CASES = {"prompt": (1, 512, 512), "1": (1, 256, 1), "8": (8, 192, 1), "64": (64, 128, 1), "256": (256, 128, 1)}
"""Sequences, tokens of each, and how many of them are computed in the step."""

PAGE = 16


@click.command("cpu_kernels")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--formats", default=",".join(FORMATS), show_default=True)
@click.option("--threads", default=torch.get_num_threads(), show_default=True)
@click.option("--repeat", default=9, show_default=True, help="Turns, of which medians count.")
@click.option("--ways", default="torch,kernels", show_default=True, help="Two of torch, kernels, deterministic.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True, help="What is timed.")
@click.option("--level", default=best_level(), show_default=True, help="Instruction set.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store rows there.")
def command(
    shape: str, formats: str, threads: int, repeat: int, ways: str, clock: str, level: str, path: Path | None
) -> None:
    """Time steps of a model in two ways: by torch's operations, by Quire's kernels, by those in deterministic mode."""
    torch.set_num_threads(threads)
    first, second = ways.split(",")
    made = {"torch": lambda _: ReferenceOps(), "kernels": NativeOps, "deterministic": InvariantNativeOps}
    chosen = {way: made[way](level) for way in (first, second)}
    rows = [row for name in formats.split(",") for row in measured(shape, name, chosen, repeat, CLOCKS[clock])]
    console, table = Console(width=120), Table(title=f"{shape}, {threads} threads, {level}")
    for heading in ("format", "step", f"{first}, ms", f"{second}, ms", "ratio", "floor, ms", "share"):
        table.add_column(heading, justify="left" if heading in ("format", "step") else "right")
    for row in rows:
        floor = f"{row['floor_ms']:.2f}" if row["floor_ms"] else ""
        share = f"{row['floor_ms'] / row[f'{second}_ms']:.2f}" if row["floor_ms"] else ""
        ratio = row[f"{first}_ms"] / row[f"{second}_ms"]
        table.add_row(
            row["format"],
            row["step"],
            f"{row[f'{first}_ms']:.2f}",
            f"{row[f'{second}_ms']:.2f}",
            f"{ratio:.2f}",
            floor,
            share,
        )
    console.print(table)
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", "utf-8")


@torch.inference_mode()
def measured(
    shape: str, name: str, ways: Mapping[str, Ops], repeat: int, now: Callable[[], float]
) -> list[dict[str, Any]]:
    """Rows of one format."""
    each, quantization, more = FORMATS[name]
    config = {**SHAPES[shape], "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **more}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}), "utf-8")
        models = {
            way: load_model(folder, dtype="bfloat16", ops=ops, load_format="dummy", quantization=quantization)
            for way, ops in ways.items()
        }
    rows = []
    for step, (count, length, new) in CASES.items():
        times: dict[str, list[float]] = {way: [] for way in models}
        batch, pages = batch_of(count, length, new)
        caches = {way: pools(model, pages) for way, model in models.items()}
        for turn in range(repeat + 1):
            for way in models if turn % 2 else reversed(models):
                began = now()
                hidden = models[way].forward(batch, caches[way])
                models[way].logits(hidden[-count:])
                times[way].append(now() - began)
        medians = {f"{way}_ms": 1e3 * statistics.median(taken[1:]) for way, taken in times.items()}
        floor = (
            0.0
            if step == "prompt"
            else 1e3 * read_bytes(next(iter(models.values())), each, count * length) / bandwidth()
        )
        rows.append({"format": name, "step": step, **medians, "floor_ms": floor})
    return rows


def read_bytes(model: Model, each: float, tokens: int) -> float:
    """Bytes that a decode step reads: of `each` a number, 2 of the head's, and K/V."""
    spec = model.spec
    head = spec.vocab * spec.hidden
    kv = 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
    return (parameters(spec) - head) * each + 2.0 * head + tokens * kv


def bandwidth() -> float:
    """Bytes a second that torch's threads read, at best."""
    numbers, best = torch.ones(1 << 26), 0.0
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best


def batch_of(count: int, length: int, new: int) -> tuple[RaggedBatch, int]:
    """A step of so many sequences, and the pages it needs."""
    held = -(-length // PAGE)
    table = torch.arange(1, 1 + count * held, dtype=torch.int32).view(count, held)
    positions = torch.arange(length - new, length).repeat(count)
    owner = torch.arange(count).repeat_interleave(new)
    slots = table.long()[owner, positions // PAGE] * PAGE + positions % PAGE
    made = RaggedBatch(
        tokens=torch.arange(len(positions)) % 1000,
        positions=positions,
        slots=slots,
        query_start=torch.arange(0, count * new + 1, new, dtype=torch.int32),
        kv_len=torch.full((count,), length, dtype=torch.int32),
        page_table=table,
        page_size=PAGE,
        max_query=new,
        max_kv=length,
    )
    return made, 1 + count * held


def pools(model: Model, pages: int) -> Sequence[LayerKV]:
    """K/V of random numbers."""
    spec = model.spec
    shape = (pages, spec.kv_heads, PAGE, spec.head_dim)
    return [LayerKV(*(torch.randn(shape).to(model.dtype) for _ in range(2))) for _ in range(spec.layers)]


if __name__ == "__main__":
    command()
