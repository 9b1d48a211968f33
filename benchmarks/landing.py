"""`python -m benchmarks.landing`: what a long prompt costs sequences that decode meanwhile, on a GPU, random weights.

`--decodes` sequences decode; after a while a prompt of `--prompt` tokens comes. The gaps between two tokens of a
sequence before it came, and from then until its first token, are what is compared, at each bound of
`--latency-target-ms`.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.card import needed
from benchmarks.shapes import SHAPES, write
from benchmarks.workloads import prompts
from quire.assembly.engine import build_engine
from quire.bench.monitor import environment
from quire.config import Settings
from quire.engine.engine import Engine

BEFORE = 64
"""Tokens of each sequence before the prompt comes."""


@click.command("landing")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--decodes", type=click.IntRange(1), default=16, show_default=True, help="Sequences that decode.")
@click.option("--own", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens of each of them.")
@click.option("--prompt", type=click.IntRange(1), default=32000, show_default=True, help="Tokens of the long prompt.")
@click.option("--target", "targets", multiple=True, type=float, default=(100.0,), help="--latency-target-ms; several.")
@click.option("--repeat", type=click.IntRange(1), default=2, show_default=True, help="Prompts, one after the other.")
@click.option("--deterministic", is_flag=True, help="Answers that do not depend on the batch.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures there.")
def command(
    shape: str, decodes: int, own: int, prompt: int, targets: tuple[float, ...], repeat: int, deterministic: bool,
    path: Path | None,
) -> None:  # fmt: skip
    """Print p50 and p99 between tokens without and with the prompt, and the milliseconds to its first token."""
    needed("a CPU has no prompts of this length to bound")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder), shape)
        for target in targets:
            engine = build_engine(
                Settings.of(
                    model=str(place),
                    load_format="dummy",
                    max_model_len=prompt + own + 2048 * repeat,
                    max_num_seqs=max(32, decodes + 1),
                    deterministic=deterministic,
                    latency_target_ms=target,
                )
            )
            try:
                while engine.prepare():  # graphs that were postponed, which take a step's time each
                    pass
                landed(engine, decodes, own, prompt, 0)
                for turn in range(1, repeat + 1):
                    row = {"target_ms": target, "deterministic": deterministic, "turn": turn}
                    rows.append({**row, **landed(engine, decodes, own, prompt, turn)})
                    click.echo(json.dumps(rows[-1]))
            finally:
                engine.close()
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def landed(engine: Engine, decodes: int, own: int, prompt: int, seed: int) -> dict[str, Any]:
    """One prompt beside decoding sequences, which are stopped after it."""
    ids, _ = prompts(decodes, (own, own), (1, 1), seed=10 + seed)
    (long,), _ = prompts(1, (prompt, prompt), (1, 1), seed=50 + seed)
    running = [engine.submit(each, 2048, id=f"{seed} {i}") for i, each in enumerate(ids)]
    last: dict[str, float] = {}
    counts = dict.fromkeys(running, 0)
    alone: list[float] = []
    beside: list[float] = []
    came = first = 0.0
    name = f"{seed} long"
    while not first:
        if not came and min(counts.values()) >= BEFORE:
            came = time.perf_counter()
            engine.submit(long, 1, id=name)
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if not event.tokens:
                continue
            if event.id == name:
                first = now
                continue
            counts[event.id] += len(event.tokens)
            if event.id in last and counts[event.id] > BEFORE // 4:
                (beside if came else alone).append(now - last[event.id])
            last[event.id] = now
    for id in running:
        engine.abort(id)
    while engine.has_pending_work:
        engine.step()
    found = {name: [1e3 * float(np.percentile(gaps, q)) for q in (50, 99)] for name, gaps in
             (("alone_ms", alone), ("beside_ms", beside))}  # fmt: skip
    return {**found, "ratio_p99": found["beside_ms"][1] / found["alone_ms"][1], "first_ms": 1e3 * (first - came),
            "tokens_beside": len(beside)}  # fmt: skip


if __name__ == "__main__":
    command()
