"""`python -m benchmarks.checkpoint`: a sharded checkpoint of random numbers, loaded cold, beside what the disk can do.

Each load runs in a process of its own, so that its peak is the load's. Before every reading the files are dropped from
the page cache; what a hypervisor keeps is out of reach, and both readers profit from it alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.progress import track
from safetensors.torch import save_file

from quire.models.registry import parameters, read_spec
from quire.weights.files import INDEX

GIB = 1 << 30
PIECE = 16 << 20
POOL = 1 << 26

CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
)
"""Llama 3's 8 B, of as many layers as make the size asked for."""

LOAD = """
import json, sys, time
from pathlib import Path
import torch
from quire.assembly.progress import loading
from quire.weights.load import load_model
torch.set_num_threads(int(sys.argv[2]))
torch.nn.functional.linear(torch.ones(4, 64).bfloat16(), torch.ones(64, 64).bfloat16())
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
before, began, calls = peak(), time.monotonic(), []
with loading("checkpoint") as bar:
    def progress(done, total):
        calls.append(done)
        bar(done, total)
    model = load_model(sys.argv[1], progress=progress)
whole = time.monotonic() - began
print(json.dumps({"whole": whole, "before": before, "peak": peak(), "calls": len(calls)}))
"""

KEEP = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from quire.weights.load import PIECE, READERS
paths = sorted(Path(sys.argv[1]).glob("*.safetensors"))
began = time.monotonic()
def read(path, start, into):
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while into:
            into = into[file.readinto(into):]
jobs = []
for path in paths:
    whole = torch.empty(path.stat().st_size, dtype=torch.uint8).numpy().data
    jobs += [(path, at, whole[at : at + PIECE]) for at in range(0, len(whole), PIECE)]
with ThreadPoolExecutor(READERS) as pool:
    list(pool.map(lambda job: read(*job), jobs))
print(time.monotonic() - began)
"""
"""The same bytes, by as many threads, into memory that is kept, and nothing made of them: a machine may hand out memory
more slowly than its disk reads."""


@click.command("checkpoint")
@click.option("--gib", type=click.FloatRange(min=0.1), default=8.0, show_default=True, help="Size of the checkpoint.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where it is written [temporary].")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
def command(gib: float, folder: Path | None, threads: int, repeat: int) -> None:
    """Measure loading a sharded checkpoint: speed beside plain reading's, and peak memory beside the model."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        size = write(Path(place), gib)
        runs = [measure(Path(place), size, threads) for _ in range(repeat)]
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    click.echo(json.dumps({"bytes": size, "threads": threads, "median": median, "runs": runs}, indent=1))


def measure(folder: Path, size: int, threads: int) -> dict[str, float]:
    """One sequential read, one filling of memory, one load, one more read: the disk's speed is the mean of both.

    GB are 1e9 bytes. kept: the same bytes read into memory that stays, the control for what the machine can do.
    peak_*: the whole process, and what it grew by from before the load, both as shares of the model. busy: processes
    that wanted to run, of the last minute.
    """
    first = sequential(folder)
    forget(folder)
    kept = size / json.loads(child(KEEP, folder))
    forget(folder)
    found = json.loads(child(LOAD, folder, threads))
    disk = size / statistics.mean((first, sequential(folder)))
    return {
        "disk_gb_s": round(disk / 1e9, 3),
        "load_gb_s": round(size / found["whole"] / 1e9, 3),
        "kept_gb_s": round(kept / 1e9, 3),
        "share_of_disk": round(size / found["whole"] / disk, 3),
        "share_of_kept": round(size / found["whole"] / kept, 3),
        "peak_share_of_model": round(found["peak"] / size, 4),
        "peak_grown_share_of_model": round((found["peak"] - found["before"]) / size, 4),
        "progress_calls": found["calls"],
        "busy": os.getloadavg()[0],
    }


def child(code: str, *words: object) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sequential(folder: Path) -> float:
    """Seconds to read every file from front to back into one buffer."""
    forget(folder)
    buffer = memoryview(bytearray(PIECE))
    began = time.monotonic()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - began


def write(folder: Path, gib: float) -> int:
    """A Llama of about `gib` GiB, a shard for the embedding, the head and each two layers -> bytes of its files."""
    outer = parameters(read_spec({**CONFIG, "num_hidden_layers": 1}))
    layer = parameters(read_spec({**CONFIG, "num_hidden_layers": 2})) - outer
    layers = max(1, round((gib * GIB / 2 - outer) / layer) + 1)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    hidden, width, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shards: list[dict[str, tuple[int, ...]]] = [
        {
            f"model.layers.{i}.{name}.weight": shape
            for i in range(at, min(at + 2, layers))
            for name, shape in matrices.items()
        }
        for at in range(0, layers, 2)
    ]
    shards = [{"model.embed_tokens.weight": (vocab, hidden)}, *shards]
    shards.append({"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)})
    pool, placed = torch.randn(POOL).mul_(0.02).bfloat16(), dict[str, str]()
    for i, shard in enumerate(track(shards, "writing", transient=True)):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: cut(pool, shape) for name, shape in shard.items()}, folder / file)
        placed |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def cut(pool: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of the pool, from somewhere in it on, as often as it takes."""
    start = int(torch.randint(len(pool), ()))
    count = torch.Size(shape).numel()
    return pool.roll(-start).repeat(-(-count // len(pool)))[:count].view(shape)


if __name__ == "__main__":
    command()
