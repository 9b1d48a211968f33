"""`python -m benchmarks.logits`: how far logits of real-size models are off, beside plain PyTorch in the same dtype."""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.shapes import SHAPES, write
from quire.assembly.engine import choose_ops
from quire.assembly.limits import choose_device
from quire.bench.monitor import environment
from quire.ops.base import Ops
from quire.ops.reference import ReferenceOps
from quire.weights.canary import answers
from quire.weights.load import DType, load_model


@click.command("logits")
@click.argument("shapes", nargs=-1, required=True, type=click.Choice(list(SHAPES)))
@click.option("--dtype", "dtypes", multiple=True, default=("bfloat16",), show_default=True)
@click.option("--tokens", default=512, show_default=True, help="Length of the prompt, fed in two steps.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures there.")
def command(shapes: tuple[str, ...], dtypes: tuple[str, ...], tokens: int, path: Path | None) -> None:
    """Compare logits with float32 ones of the same random weights: ours, and plain PyTorch's in the same dtype."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            place = write(Path(folder), shape)
            for row in compared(place, shape, dtypes, tokens):
                found.append(row)
                click.echo(json.dumps(row))
                if path is not None:
                    path.write_text(json.dumps({"environment": environment(), "rows": found}))
    show(found)


def compared(place: Path, shape: str, dtypes: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """A row for each dtype and each way of computing."""
    device = choose_device("auto")
    rng = random.Random(0)
    prompt = [rng.randrange(1000, 50000) for _ in range(tokens)]
    exact = logits(place, "float32", ReferenceOps(), prompt, device)
    ways: Sequence[tuple[str, Ops]] = (("PyTorch", ReferenceOps()), ("Quire", choose_ops(device)))
    return [
        {"shape": shape, "dtype": dtype, "by": by, **apart(logits(place, dtype, ops, prompt, device), exact)}
        for dtype in dtypes
        for by, ops in ways
    ]


def logits(place: Path, dtype: str, ops: Ops, prompt: Sequence[int], device: torch.device) -> Tensor:
    """[tokens, V] float32 on the CPU."""
    model = load_model(place, dtype=cast("DType", dtype), device=device, ops=ops, load_format="dummy")
    try:
        return answers(model, prompt, device)
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def apart(got: Tensor, exact: Tensor) -> dict[str, float]:
    off = (got - exact).abs()
    return {
        "largest": off.max().item(),
        "mean": off.mean().item(),
        "deviation": exact.std().item(),
        "same_top": (got.argmax(-1) == exact.argmax(-1)).float().mean().item(),
    }


def show(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="logits against float32", title_justify="left")
    for column in ("shape", "dtype", "by", "largest difference", "mean", "deviation of logits", "same likeliest token"):
        table.add_column(column, justify="left" if column in ("shape", "dtype", "by") else "right")
    for row in found:
        figures = (f"{row[name]:.4f}" for name in ("largest", "mean", "deviation"))
        table.add_row(row["shape"], row["dtype"], row["by"], *figures, f"{row['same_top']:.1%}")
    Console().print(table)


if __name__ == "__main__":
    command()
