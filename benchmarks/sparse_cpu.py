"""`python -m benchmarks.sparse_cpu`: what a token costs on this CPU at the end of contexts of several lengths, with
DeepSeek V3.2's attention and with V3's, beside transformers.

Two layers of random weights with V3.2's sizes of attention and the heads of one rank of eight; all else is small. K/V
of the context is random, too. Turns alternate; medians of the processor's time are shown.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_kernels import PAGE, batch_of
from quire.assembly.engine import choose_ops
from quire.model_runner.memory import allocate, layer_shapes
from quire.models.registry import Model
from quire.weights.load import load_model

CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 1000,
        "max_position_embeddings": 65536,
    }
)


def write(folder: Path, version: str) -> Path:
    """A config.json alone."""
    folder.mkdir()
    names = {"architectures": [f"Deepseek{version}ForCausalLM"], "model_type": f"deepseek_{version.lower()}"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **names}))
    return folder


def step(model: Model, context: int, tokens: int) -> Callable[[], object]:
    """A step that feeds the last `tokens` of a context of so many."""
    batch, pages = batch_of(1, context, tokens)
    kv = allocate(layer_shapes(model.spec.kv_shapes, model.dtype), pages=pages, page_size=PAGE)
    for pool in (pool for layer in kv for pool in layer.pools):
        pool.copy_(torch.randn(pool.shape))
    return lambda: model.forward(replace(batch), kv)


def theirs(folder: Path, context: int, tokens: int) -> Callable[[], object]:
    """The same by transformers, whose context is fed first."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.config)
    for fed in torch.split(torch.arange(context - tokens) % 1000, 512):
        model(fed[None], past_key_values=cache, use_cache=True)

    def run() -> None:
        model(torch.arange(tokens)[None] % 1000, past_key_values=cache, use_cache=True)
        cache.crop(-tokens)

    return run


@click.command()
@click.option("--contexts", default="1024,2048,4096,8192,16384", show_default=True)
@click.option("--tokens", default=1, show_default=True, help="Fed in a step.")
@click.option("--repeat", default=7, show_default=True)
@click.option("--peer", default=4096, show_default=True, help="The longest context of transformers'.")
@torch.inference_mode()
def main(contexts: str, tokens: int, repeat: int, peer: int) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    table = Table(title=f"ms of {tokens} tokens", title_justify="left")
    for column in ("context", "V3", "V3.2", "V3.2, left out", "transformers"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as place:
        old, new = (write(Path(place) / version, version) for version in ("V3", "V32"))
        how: Any = {"dtype": "bfloat16", "load_format": "dummy", "ops": choose_ops(torch.device("cpu"))}
        models = [load_model(old, **how), load_model(new, **how), load_model(new, max_model_len=2048, **how)]
        for context in map(int, contexts.split(",")):
            ways = [step(model, context, tokens) for model in models[: 2 + (context <= 2048)]]
            ways += [theirs(new, context, tokens)] if context <= peer else []
            found: list[list[float]] = [[] for _ in ways]
            for _ in range(1 + repeat):
                for way, seconds in zip(ways, found, strict=True):
                    started = time.process_time()
                    way()
                    seconds.append(1000 * (time.process_time() - started))
            cells = [f"{statistics.median(each[1:]):.1f}" for each in found]
            if context > 2048:
                cells.insert(2, "")
            table.add_row(f"{context:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
