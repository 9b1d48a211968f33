"""`quire bench cpu`: decode on this CPU beside transformers' generate, in one run, interleaved, random weights.

Both get the same shape, dtype, threads, prompts and lengths; the order alternates. Ratios and
medians are what to read: the speed of a shared CPU drifts.
"""

from __future__ import annotations

import importlib
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from quire.assembly.engine import build_engine
from quire.cli.tables import numbers
from quire.config import Settings
from quire.engine.engine import Engine

_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smollm2-135m": dict(zip(_FIELDS, (576, 30, 9, 3, 1536, 49152, 2048), strict=True)),
        "llama-3.2-1b": dict(zip(_FIELDS, (2048, 16, 32, 8, 8192, 128256, 8192), strict=True)),
    }
)
"""Public shapes, all Llama, tied heads."""

Decode = Callable[[list[list[int]], int], float]
"""(prompts, new tokens) -> seconds for all of them."""


@click.command("cpu")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="smollm2-135m", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8), show_default=True)
@click.option("--prompt", default=128, show_default=True, help="Prompt tokens a sequence.")
@click.option("--new", default=64, show_default=True, help="New tokens a sequence.")
@click.option("--repeat", default=5, show_default=True, help="Interleaved rounds; medians are shown.")
@click.option("--threads", default=0, help="CPU threads; 0: as many as there are cores.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    shape: str,
    dtype: str,
    batches: tuple[int, ...],
    prompt: int,
    new: int,
    repeat: int,
    threads: int,
    as_json: bool,
) -> None:
    """Decode side by side with transformers (pip install 'quire-llm[dev]')."""
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    config = {
        **SHAPES[shape],
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    }
    ours, theirs = _quire(config, dtype, threads, max(batches)), _transformers(config, dtype)
    rows = []
    for batch in batches:
        times: dict[str, list[float]] = {"quire": [], "transformers": []}
        for turn in track(
            range(repeat), f"batch {batch}", console=Console(stderr=True), transient=True, disable=as_json
        ):
            rng = random.Random(turn)
            prompts = [[rng.randrange(1000, 40000) for _ in range(prompt)] for _ in range(batch)]
            pair = [("quire", ours), ("transformers", theirs)]
            for name, decode in pair if turn % 2 else reversed(pair):
                decode(prompts, 2)  # warm, and the cache is as it will be
                fresh = [[*p[1:], turn] for p in prompts]  # no prefix hits from the warm-up
                once, all_of_it = decode(fresh, 1), decode([[*p[1:], turn] for p in fresh], new)
                times[name].append((new - 1) * batch / (all_of_it - once))
        speed = {name: statistics.median(found) for name, found in times.items()}
        rows.append({"batch": batch, **speed, "ratio": speed["quire"] / speed["transformers"]})
    found = {
        "shape": shape,
        "dtype": dtype,
        "prompt": prompt,
        "new": new,
        "threads": threads,
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "cpu": _cpu(),
        "rows": rows,
    }
    click.echo(json.dumps(found)) if as_json else _show(found)


def _quire(config: Mapping[str, Any], dtype: str, threads: int, batch: int) -> Decode:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
        engine: Engine = build_engine(
            Settings.of(
                model=folder,
                load_format="dummy",
                dtype=dtype,
                device="cpu",  # where there is a GPU, too
                threads=threads,
                max_num_seqs=batch,
                max_model_len=2048,
            )
        )

    def decode(prompts: list[list[int]], new: int) -> float:
        began = time.perf_counter()
        for prompt in prompts:
            engine.submit(prompt, new)
        while engine.has_pending_work:
            engine.step()
        return time.perf_counter() - began

    return decode


def _transformers(config: Mapping[str, Any], dtype: str) -> Decode:
    library = importlib.import_module("transformers")
    fields = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    made = library.LlamaForCausalLM(library.LlamaConfig(**fields)).to(getattr(torch, dtype)).eval()

    def decode(prompts: list[list[int]], new: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            made.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    return decode


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def _show(found: dict[str, Any]) -> None:
    title = f"decode, {found['shape']} {found['dtype']}, {found['threads']} threads, {found['cpu']}"
    table = numbers(title, "batch", "quire tok/s", f"transformers {found['transformers']} tok/s", "ratio")
    table.caption, table.caption_justify = f"torch {found['torch']}", "left"
    for row in found["rows"]:
        table.add_row(str(row["batch"]), f"{row['quire']:.1f}", f"{row['transformers']:.1f}", f"{row['ratio']:.2f}")
    Console().print(table)
