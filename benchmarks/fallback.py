"""`python -m benchmarks.fallback`: decode through --executor hf on this CPU, one stream and many, on random weights.

Answers are compared with those of transformers' own generate, which is timed too. A Llama of the same shape also runs
on Quire's own layers, to see what the fall-back costs. Rounds are interleaved; ratios of medians are what to read.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.doors import decode
from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.engine.engine import Engine

SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "pythia-14m": {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 50304},
        "pythia-70m": {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 50304},
        "pythia-160m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50304},
    }
)
"""Sizes of public models; MLPs are four times as wide."""


@click.command("fallback")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="pythia-70m", show_default=True)
@click.option("--architectures", default="gpt_neox,llama", show_default=True, help="model_type names, with commas.")
@click.option("--batch", default=16, show_default=True, help="Streams at once.")
@click.option("--prompt", default=32, show_default=True, help="Prompt tokens of each.")
@click.option("--new", default=64, show_default=True, help="New tokens of each.")
@click.option("--repeat", default=5, show_default=True, help="Interleaved rounds; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(shape: str, architectures: str, batch: int, prompt: int, new: int, repeat: int, as_json: bool) -> None:
    """Decode with one stream and with many, through transformers, and, where there are any, Quire's own layers."""
    rows = [
        row
        for name in architectures.split(",")
        for row in measured(name, shape, batch=batch, prompt=prompt, new=new, repeat=repeat)
    ]
    about = {"shape": shape, "batch": batch, "prompt": prompt, "new": new, "threads": torch.get_num_threads()}
    if as_json:
        click.echo(json.dumps({**about, "rows": rows}))
        return
    heads = ("model_type", "run by", "1 stream", f"{batch} streams", "times", "generate, 1", "tokens equal")
    table = Table(*heads, title=f"{shape}, tokens/s, float32, {about['threads']} threads")
    for row in rows:
        speeds = (f"{row[name]:.0f}" for name in ("one", "many"))
        table.add_row(
            row["model"], row["executor"], *speeds, f"{row['times']:.1f}", f"{row['theirs']:.0f}", row["equal"]
        )
    Console(width=120).print(table)


def measured(name: str, shape: str, *, batch: int, prompt: int, new: int, repeat: int) -> list[dict[str, Any]]:
    """A line for each executor that runs an architecture."""
    sizes = SHAPES[shape]
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(name, **sizes, **ends, intermediate_size=4 * sizes["hidden_size"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        chosen = {"model": folder, "dtype": "float32", "device": "cpu", "max_num_seqs": batch}
        executors = ["hf", "local"] if name == "llama" else ["hf"]
        engines = {each: build_engine(Settings.of(executor=each, **chosen), keep=batch) for each in executors}
    speeds: dict[tuple[str, int], list[float]] = {}
    theirs = list[float]()
    for turn in range(repeat + 1):
        for each, engine in engines.items():
            for streams in (1, batch):
                found = decode(engine, streams, prompt, new, turn)
                if turn:  # the first warms
                    speeds.setdefault((each, streams), []).append(found)
        theirs.append(generated(model, prompt, new)[1])
    lines = list[dict[str, Any]]()
    for each, engine in engines.items():
        one, many = (statistics.median(speeds[each, streams]) for streams in (1, batch))
        equal = answers(engine, batch, prompt, new) == [generated(model, prompt, new, i)[0] for i in range(batch)]
        lines.append({"model": name, "executor": each, "one": one, "many": many, "times": many / one})
        lines[-1] |= {"theirs": statistics.median(theirs[1:]), "equal": "yes" if equal else "no"}
        engine.close()
    return lines


def tokens_of(i: int, prompt: int) -> list[int]:
    """The prompt of stream i, of which no two begin alike."""
    return [1000 + (13 * i + 7 * p) % 3000 for p in range(prompt)]


def answers(engine: Engine, batch: int, prompt: int, new: int) -> list[list[int]]:
    """The greedy answers of all streams at once."""
    said: dict[str, list[int]] = {engine.submit(tokens_of(i, prompt), new): [] for i in range(batch)}
    while engine.has_pending_work:
        for event in engine.step():
            said[event.id] += event.tokens
    return list(said.values())


@torch.inference_mode()
def generated(model: Any, prompt: int, new: int, i: int = 0) -> tuple[list[int], float]:
    """transformers' greedy answer to stream i alone, and tokens a second, its prompt included."""
    ids = torch.tensor([tokens_of(i, prompt)])
    began = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0)
    return out[0, prompt:].tolist(), new / (time.perf_counter() - began)


if __name__ == "__main__":
    command()
