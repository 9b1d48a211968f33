"""`python -m benchmarks.families`: models of every family at their published sizes on a GPU, random weights.

For each model, in a process of its own: the time until it is ready, milliseconds a token at several numbers of
sequences, the first token of the most of them, and the floor: what a step reads, over the card's bandwidth. A family
that is far from the floor, or fails, is what this is for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.card import needed, prepare_all
from benchmarks.gpu import answer
from benchmarks.shapes import words
from benchmarks.workloads import BANDWIDTH, prompts
from quire import heap
from quire.bench.monitor import environment
from quire.llm import LLM
from quire.models.registry import idle_parameters, parameters, read_spec
from quire.models.spec import ModelSpec
from quire.types import UNLIMITED
from tests.models.test_published import PUBLISHED

Row = dict[str, Any]
IDS = (1000, 40000)
"""Tokens that every vocabulary has."""

BYTES = {"": (2.0, 2.0), "fp8": (1.0, 1.0), "mxfp4": (2.0, 17 / 32)}
"""Of a number of matrices and of experts, with its share of a scale, by the way in which a checkpoint is quantized."""

FP8: Mapping[str, Any] = MappingProxyType(
    {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
)
"""What config.json says of checkpoints that are published as FP8."""


@click.command("families")
@click.argument("names", nargs=-1)
@click.option("--batches", default="1,16,64", show_default=True, help="Sequences at once.")
@click.option("--prompt", default=700, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=60, show_default=True, help="Tokens of an answer.")
@click.option("--repeat", default=2, show_default=True, help="Runs of each, of which the median counts.")
@click.option("--fp8", is_flag=True, help="With matrices in float8, as checkpoints named FP8 have them.")
@click.option("--seconds", default=150.0, show_default=True, help="Limit for one model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store rows there.")
@click.option("--here", is_flag=True, help="One model, in this process.")
def command(
    names: tuple[str, ...],
    batches: str,
    prompt: int,
    new: int,
    repeat: int,
    seconds: float,
    path: Path | None,
    *,
    fp8: bool,
    here: bool,
) -> None:
    """Measure models by their published names, or parts of them; all without any."""
    needed("for a CPU there is `quire bench cpu`")
    chosen = [each for each in PUBLISHED if not names or any(name.lower() in each.lower() for name in names)]
    if here:
        sizes = [int(each) for each in batches.split(",")]
        click.echo(json.dumps(measured(chosen[0], sizes, prompt, new, repeat, FP8 if fp8 else {})))
        return
    rows: list[Row] = []
    options = ["--batches", batches, "--prompt", str(prompt), "--new", str(new), "--repeat", str(repeat), "--here"]
    options += ["--fp8"] * fp8
    for name in chosen:
        rows.append(in_a_process([name, *options], name, seconds))
        click.echo(json.dumps(rows[-1]))
        if path is not None:
            path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    show(rows)


def in_a_process(arguments: Sequence[str], name: str, seconds: float) -> Row:
    """The row of one model, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.families", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "error": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"model": name, "error": (done.stderr.strip() or done.stdout.strip())[-1500:]}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(name: str, batches: Sequence[int], prompt: int, new: int, repeat: int, changes: Mapping[str, Any]) -> Row:
    """One model, started and measured. changes: to its config.json."""
    count, config = PUBLISHED[name]
    config = {**config, **changes}
    spec = read_spec(config)
    began = time.perf_counter()
    row: Row = {"model": name, "parameters": count, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config, spec)
        options: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(batches), "latency_target_ms": 0.0}
        with LLM(folder, load_format="dummy", **options) as llm:
            row["ready_s"] = round(time.perf_counter() - began, 1)
            answer(llm, *prompts(4, (32, 64), (8, 8), seed=99, ids=IDS))
            prepare_all(llm)
            heap.settled()
            for batch in batches:
                runs = [decode(llm, batch, prompt, new, turn) for turn in range(repeat)]
                token, first = (statistics.median(each) for each in zip(*runs, strict=True))
                least = floor(spec, config, batch, prompt + new // 2)
                row["rows"].append(
                    {
                        "batch": batch,
                        "ms_a_token": round(1e3 * token, 3),
                        "first_ms": round(1e3 * first, 1),
                        "floor_ms": round(1e3 * least, 3),
                    }
                )
    return row


def write(folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> None:
    """A model's folder, with a tokenizer of made-up words."""
    folder.joinpath("config.json").write_text(json.dumps(config))
    words(spec.vocab).save(str(folder / "tokenizer.json"))


def decode(llm: LLM, batch: int, prompt: int, new: int, turn: int) -> tuple[float, float]:
    """(seconds a token after the first, seconds to the first) of `batch` sequences together."""
    ids, _ = prompts(batch, (prompt, prompt), (1, 1), seed=100 + turn + batch, ids=IDS)
    first = answer(llm, ids, [1] * batch)
    ids, _ = prompts(batch, (prompt, prompt), (1, 1), seed=200 + turn + batch, ids=IDS)
    return (answer(llm, ids, [new] * batch) - first) / (new - 1), first


def floor(spec: ModelSpec, config: Mapping[str, Any], batch: int, length: int) -> float:
    """Seconds in which a step of `batch` sequences reads its weights, those of experts as often as random routing uses
    them, and `length` positions of K/V each, of a window at most; states of recurrent layers are also written."""
    number, idle = parameters(spec), idle_parameters(spec)
    table = spec.vocab * spec.hidden
    matrices, packed = BYTES[config.get("quantization_config", {}).get("quant_method", "")]
    experts = used = 0.0
    if spec.experts is not None:
        unused = 1 - spec.experts.num_experts_per_token / spec.experts.num_experts
        experts = idle / unused
        used = experts * (1 - unused**batch) * packed
    body = number - experts - table * (1 if spec.tie else 2)
    windows = [min(length, length if window == UNLIMITED else window) for window in spec.windows]
    kept = (shape.numbers * 2 for shape in spec.kv_shapes)
    kv = sum(size * seen for size, seen in zip(kept, windows, strict=False))
    states = 2 * sum(each.nbytes(2) for each in spec.state_shapes if each)
    return (matrices * body + 2 * table + used + batch * (kv + states)) / BANDWIDTH


def show(rows: Sequence[Row]) -> None:
    table = Table(title="offline, random weights", title_justify="left")
    for column in ("model", "ready s", "sequences", "ms a token", "floor", "ratio", "first token ms"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], "", row["error"][-80:])
        for each in row.get("rows", ()):
            ms, least = each["ms_a_token"], each["floor_ms"]
            figures = (f"{ms:.2f}", f"{least:.2f}", f"{ms / least:.2f}", f"{each['first_ms']:.0f}")
            table.add_row(row["model"], str(row["ready_s"]), str(each["batch"]), *figures)
    Console(width=140).print(table)


if __name__ == "__main__":
    command()
