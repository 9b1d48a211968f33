"""`python -m benchmarks.paging`: the same requests with contiguous K/V memory and with blocks."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import SHAPES, write
from quire.assembly.engine import build_engine
from quire.bench.monitor import environment
from quire.config import Settings
from quire.engine.engine import Engine
from quire.models.registry import read_spec

ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@click.command("paging")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="gpt2", show_default=True)
@click.option("--dtype", type=click.Choice(list(ITEMSIZE)), default="float32", show_default=True)
@click.option("--batch", multiple=True, type=int, default=(1, 8, 32, 128, 512), show_default=True)
@click.option("--prompt", type=(int, int), default=(16, 128), show_default=True, help="Tokens, from to.")
@click.option("--new", type=(int, int), default=(128, 256), show_default=True, help="Tokens, from to.")
@click.option("--context", default=1024, show_default=True, help="Longest sequence, in tokens.")
@click.option("--kv-gib", default=16.0, show_default=True, help="Memory for K/V, in GiB.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures there.")
def command(batch: tuple[int, ...], path: Path | None, **sizes: Any) -> None:
    """Tokens a second and peak K/V memory by batch, standard against paged."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("standard", "paged"):
            for row in rows(Path(folder), layout, batch, **sizes):
                found.append(row)
                click.echo(json.dumps(row))
                if path is not None:
                    path.write_text(json.dumps({"environment": environment(), "rows": found}))
    table = Table(title="K/V memory, standard against paged", title_justify="left")
    for column in ("layout", "batch", "tok/s", "peak K/V MiB", "of it holding tokens", "most at once"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in found:
        table.add_row(
            row["layout"],
            f"{row['batch']}",
            f"{row['tokens_a_second']:,.0f}",
            f"{row['peak_kv_bytes'] / 2**20:,.0f}",
            f"{row['used_share']:.0%}",
            f"{row['most_at_once']}",
        )
    Console().print(table)


def rows(
    folder: Path,
    layout: str,
    batches: tuple[int, ...],
    *,
    shape: str,
    dtype: str,
    prompt: tuple[int, int],
    new: tuple[int, int],
    context: int,
    kv_gib: float,
) -> Iterator[dict[str, Any]]:
    """One engine, each batch in turn."""
    engine, token = built(folder, layout, max(batches), shape=shape, dtype=dtype, context=context, kv_gib=kv_gib)
    try:
        drive(engine, min(batches), prompt, new, token, seed=1)
        for batch in batches:
            yield {"layout": layout, "batch": batch, **drive(engine, batch, prompt, new, token, seed=0)}
    finally:
        engine.close()
        del engine
        gc.collect()


def built(
    folder: Path, layout: str, seqs: int, *, shape: str, dtype: str, context: int, kv_gib: float
) -> tuple[Engine, int]:
    """An engine of random weights with contiguous memory or blocks, and the bytes of K/V that one token takes."""
    spec = read_spec(dict(SHAPES[shape]))
    settings = Settings.of(
        model=str(write(folder, shape)),
        load_format="dummy",
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=seqs,
        kv_cache_memory_bytes=int(kv_gib * 2**30),
        block_size=context if layout == "standard" else "auto",
        enable_prefix_caching=False,
        latency_target_ms=0,
    )
    return build_engine(settings), spec.kv_bytes(ITEMSIZE[dtype])


def drive(
    engine: Engine, batch: int, prompt: tuple[int, int], new: tuple[int, int], token: int, seed: int
) -> dict[str, Any]:
    """`batch` requests at once. token: bytes of K/V one takes."""
    rng = random.Random(seed)
    asked = [([rng.randrange(5, 400) for _ in range(rng.randint(*prompt))], rng.randint(*new)) for _ in range(batch)]
    page = engine.description.block_size
    held: dict[str, int] = {}
    peak = (0, 0)
    most = 0
    began = time.perf_counter()
    for ids, count in asked:
        held[engine.submit(ids, count)] = len(ids)
    first = dict(held)
    while engine.has_pending_work:
        for event in engine.step():
            held[event.id] += len(event.tokens)
            if event.finish is not None:
                del held[event.id]
        gauges = engine.gauges()
        most = max(most, gauges.running)
        written = sum(n for id, n in held.items() if n > first[id])
        peak = max(peak, (gauges.used_blocks * page, written))
    seconds = time.perf_counter() - began
    return {
        "tokens_a_second": sum(count for _, count in asked) / seconds,
        "peak_kv_bytes": peak[0] * token,
        "used_share": peak[1] / max(1, peak[0]),
        "most_at_once": most,
    }


if __name__ == "__main__":
    command()
