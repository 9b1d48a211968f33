"""`python -m benchmarks.cpu_formats`: steps of a model on this CPU with weights in several formats, in turns, beside
bfloat16.

Each format is a model of random weights at a public shape, all in one process. The order changes from turn to turn;
medians are shown, and bfloat16's over each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_kernels import AWQ, CASES, batch_of, pools
from quire.bench.shapes import CLOCKS, SHAPES
from quire.models.registry import Model
from quire.ops.native.library import best_level
from quire.ops.native.ops import NativeOps
from quire.weights.load import load_model
from quire.weights.schemes import ONLINE

BASE = "bf16"
INT4: Mapping[str, Any] = MappingProxyType(
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
            }
        },
    }
)
"""llm-compressor's W4A16, with groups that the columns of both shapes are a multiple of."""
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {BASE: {}, "awq": {"quantization_config": AWQ}, "int4": {"quantization_config": dict(INT4)}}
)
"""What config.json says of formats that are not made while loading."""


@click.command("cpu_formats")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--formats", default=f"{','.join(ONLINE)},awq,int4", show_default=True)
@click.option("--steps", default="1,8", show_default=True, help=f"Some of {','.join(CASES)}: sequences, or a prompt.")
@click.option("--repeat", default=9, show_default=True, help="Turns, of which medians count.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="cpu", show_default=True, help="What is timed.")
@click.option("--level", default=best_level(), show_default=True, help="Instruction set.")
def command(shape: str, formats: str, steps: str, repeat: int, clock: str, level: str) -> None:
    """Time steps of a model in several formats by one thread."""
    torch.set_num_threads(1)
    names = (BASE, *(name for name in formats.split(",") if name != BASE))
    table = Table(title=f"{shape}, 1 thread, {level}: ms a step, and bfloat16's over it")
    for heading in ("step", *names):
        table.add_column(heading, justify="right")
    with torch.inference_mode():
        ops = NativeOps(level)
        models = {name: load(shape, name, ops) for name in names}
        for step in steps.split(","):
            medians = measure(models, step, repeat, clock)
            ratios = {name: medians[BASE] / found for name, found in medians.items()}
            table.add_row(step, *(f"{1e3 * medians[name]:.2f} ({ratios[name]:.2f})" for name in names))
    Console(width=160).print(table)


def load(shape: str, name: str, ops: NativeOps) -> Model:
    """A model of random weights in a format."""
    config = {**SHAPES[shape], "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config |= {"torch_dtype": "bfloat16", **CHECKPOINTS.get(name, {})}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        quantization = "auto" if name in CHECKPOINTS else name
        return load_model(folder, dtype="bfloat16", ops=ops, load_format="dummy", quantization=quantization)


def measure(models: Mapping[str, Model], step: str, repeat: int, clock: str) -> dict[str, float]:
    """Median seconds of a step of each model."""
    now, (count, length, new) = CLOCKS[clock], CASES[step]
    batch, pages = batch_of(count, length, new)
    caches = {name: pools(model, pages) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for turn in range(repeat + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = now()
            hidden = models[name].forward(batch, caches[name])
            models[name].logits(hidden[-count:])
            times[name].append(now() - began)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


if __name__ == "__main__":
    command()
