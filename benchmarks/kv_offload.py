"""`python -m benchmarks.kv_offload`: the first token of a conversation that comes back after its blocks were evicted.

In turns, in one engine: a prompt that was never seen, which is computed; and prompts whose K/V is in host memory, or in
files alone. The cache on the device holds little more than one prompt, so each evicts the one before. What is printed
are medians and minima of the seconds to the first token, and how many of the prompt's tokens came from where; beside
them the bytes of a prompt, and on a GPU what the bus carries in a second, each way alone and both at once.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shapes import SHAPES, write
from quire.llm import LLM
from quire.types import SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

LONG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""A tiny model with a context of 32k tokens."""


class Bench:
    """One engine whose device holds `tokens` and an eighth more; prompts of `tokens` tokens each."""

    def __init__(
        self, model: str, tokens: int, folder: Path | None, host_gib: float, pause: float = 0.0, **options: Any
    ) -> None:
        self.tokens, self.rng, self.pause = tokens, random.Random(1), pause
        self.size = size = int(options.pop("block_size", 64))
        if folder is not None:
            options |= {"kv_offloading_dir": str(folder), "kv_offloading_dir_size": 64.0}
        self.llm = LLM(
            model,
            max_model_len=tokens + 2 * size,
            num_gpu_blocks_override=-(-tokens * 9 // (8 * size)) + 3,
            block_size=size,
            max_num_seqs=1,
            kv_offloading_size=host_gib,
            **options,
        )

    def prompt(self) -> list[int]:
        """One that was never seen."""
        return [self.rng.randrange(100, 1900) for _ in range(self.tokens)]

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many of the prompt's tokens were cached."""
        began = time.perf_counter()
        (answer,) = self.llm.generate([{"prompt_token_ids": prompt}], ONE)
        return time.perf_counter() - began, answer.num_cached_tokens

    def measure(self, rounds: int) -> dict[str, Any]:
        """In turns: a new prompt, one of four that were seen before it, and the same again, from the device."""
        kept = [self.prompt() for _ in range(4)]
        for prompt in (*kept, *kept, self.prompt()):
            self.first_token(prompt)
        seconds: dict[str, list[float]] = {"computed": [], "came back": [], "on the device": []}
        cached = []
        for i in range(rounds):
            seconds["computed"].append(self.first_token(self.prompt())[0])
            time.sleep(self.pause)
            took, found = self.first_token(kept[i % len(kept)])
            seconds["came back"].append(took)
            cached.append(found)
            seconds["on the device"].append(self.first_token(kept[i % len(kept)])[0])
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        return {
            "tokens": self.tokens,
            "median": medians,
            "least": {name: min(each) for name, each in seconds.items()},
            "share": medians["came back"] / medians["computed"],
            "least_cached_tokens": min(cached),
            "copied": self.stats(lambda stats: dict(stats.copied)),
            "from": self.stats(lambda stats: dict(stats.num_hit)),
            "failures": self.stats(lambda stats: dict(stats.failures)),
            "declined": self.stats(lambda stats: stats.num_declined),
            "bytes": self.llm._engine.scheduler.kv.offload.block_bytes() * (min(cached) // self.size),
            "bus_gb_per_s": bus_speeds() if torch.cuda.is_available() else {},
        }

    def stats(self, read: Callable[[Any], Any]) -> Any:
        """Of the tiers."""
        return read(self.llm._engine.scheduler.kv.offload.stats)


def bus_speeds(size: int = 1 << 29, rounds: int = 4) -> dict[str, float]:
    """Gigabytes a second that copies of `size` bytes between pinned memory and the GPU reach, each way and both."""
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    ways = {"in": [(device[0], host[0])], "out": [(host[1], device[1])]}
    ways["both, each"] = ways["in"] + ways["out"]
    found = {}
    for name, copies in ways.items():
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            for stream, (to, of) in zip(streams, copies, strict=False):
                with torch.cuda.stream(stream):
                    to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        found[name] = round(rounds * size / (time.perf_counter() - began) / 1e9, 1)
    return found


@click.command()
@click.argument("model", default="embedded")
@click.option("--tokens", default=1500, help="Of a prompt.")
@click.option("--rounds", default=11, help="Of each kind.")
@click.option("--host-gib", default=1.0, help="Host memory for blocks.")
@click.option("--pause", default=0.0, help="Seconds for which the engine is idle before a prompt comes back.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Folder for blocks: give little host memory.")
@click.option("--block-size", default=16, help="Tokens of a block.")
@click.option("--option", "options", multiple=True, help="name=value, an option of LLM; several are allowed.")
def command(
    model: str,
    tokens: int,
    rounds: int,
    host_gib: float,
    pause: float,
    folder: Path | None,
    block_size: int,
    options: tuple[str, ...],
) -> None:
    """Measure MODEL: embedded, a folder, a shape of benchmarks.shapes, or 32k, a tiny model with a long context."""
    given = dict(each.partition("=")[::2] for each in options)
    with tempfile.TemporaryDirectory() as made:
        if model in SHAPES or model == "32k":
            changed = LONG if model == "32k" else {}
            model = str(write(Path(made), "qwen2.5-7b" if changed else model, config=changed))
            given |= {"load_format": "dummy"}
        bench = Bench(model, tokens, folder, host_gib, pause, block_size=block_size, **given)
        try:
            click.echo(json.dumps(bench.measure(rounds)))
        finally:
            bench.llm.close()


if __name__ == "__main__":
    command()
