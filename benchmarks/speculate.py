"""`python -m benchmarks.speculate`: a draft model of real size on a GPU, on and off, random weights.

Random weights never agree, so acceptance is drawn: `speculative_config`'s synthetic_acceptance_rate. The engines stand
side by side and take turns, so that a drifting clock does not count. Where in a card's memory an engine lies changes
its steps by up to 4 % (docs/benchmarks), so there are two without drafts, one made before and one after, and their mean
counts.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.card import needed
from benchmarks.gpu import answer, decode
from benchmarks.shapes import SHAPES, write
from benchmarks.workloads import BANDWIDTH, Workload, prompts
from quire import heap
from quire.bench.monitor import environment
from quire.config.speculative import SpeculativeConfig
from quire.llm import LLM
from quire.models.registry import parameters, read_spec
from quire.scheduler.speculation import DraftStats

ROOM = 28 << 30
"""Bytes of K/V for each engine: 256 sequences fit, of the target and of the draft."""


@click.command("speculate")
@click.option("--model", default="llama-3.2-3b", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--draft", default="llama-3.2-1b", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--batch", "batches", multiple=True, type=int, default=tuple(1 << i for i in range(9)), show_default=True)
@click.option("--rate", default=0.7, show_default=True, help="Share of drafts that is accepted, at full depth.")
@click.option("--drafts", default=4, show_default=True, help="The most drafted a step.")
@click.option("--quantization", default="auto", show_default=True, help="Of the draft.")
@click.option("--fixed", is_flag=True, help="Also with as many drafts in every step; then off is one engine, not two.")
@click.option("--prompt", default=512, show_default=True, help="Prompt tokens a sequence.")
@click.option("--new", default=256, show_default=True, help="New tokens a sequence.")
@click.option("--repeat", default=3, show_default=True, help="Turns; medians are shown.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also store figures there.")
def command(
    model: str,
    draft: str,
    batches: tuple[int, ...],
    rate: float,
    drafts: int,
    quantization: str,
    fixed: bool,
    prompt: int,
    new: int,
    repeat: int,
    path: Path | None,
) -> None:
    """Milliseconds a token by sequences at once, without drafts and with."""
    needed("for a CPU there is `python -m benchmarks.drafts`")
    work = Workload(model=model, batches=batches, prompt=(prompt, prompt), new=(new, new))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_:
        target, small = write(Path(folder), model), write(Path(folder), draft)
        config: dict[str, Any] = {"model": str(small), "num_speculative_tokens": drafts, "quantization": quantization}
        config["synthetic_acceptance_rate"] = rate
        chance = SpeculativeConfig("draft_model", **config).draft_acceptance() or 0.0
        asked: dict[str, str | None] = {"off": None, "measured": json.dumps(config)}
        if fixed:
            asked["fixed"] = json.dumps(config | {"adaptive": False})
        else:  # a fourth engine would have no room
            asked["off again"] = None
        engines = {
            kind: open_.enter_context(
                LLM(
                    str(target),
                    load_format="dummy",
                    max_model_len=work.context,
                    max_num_seqs=max(batches),
                    kv_cache_memory_bytes=ROOM,
                    speculative_config=how,
                )
            )
            for kind, how in asked.items()
        }
        for llm in engines.values():
            answer(llm, *prompts(8, (32, 64), (8, 8), seed=99))
        heap.settled()  # a turn is the difference of two runs, and a look for garbage in one of them is a tenth of it
        for row in turns(engines, work, repeat):
            row["ceiling"] = ceiling(model, draft, row["batch"], prompt + new // 2, chance, drafts)
            rows.append(row)
            click.echo(json.dumps(row))
            if path is not None:
                path.write_text(json.dumps({"environment": environment(), "config": config, "rows": rows}))
    show(rows, [kind for kind, how in asked.items() if how is not None])


def turns(engines: Mapping[str, LLM], work: Workload, repeat: int) -> Iterator[dict[str, Any]]:
    for batch in work.batches:
        runs: dict[str, list[float]] = {kind: [] for kind in engines}
        made: dict[str, dict[str, float]] = {}
        for turn in range(repeat):
            for kind, llm in engines.items():
                drafted = llm._engine.scheduler.draft_stats = DraftStats()
                runs[kind].append(1e3 * decode(llm, work, batch, turn)[0])
                steps = max(1, drafted.num_verified)
                made[kind] = {
                    "a_step": drafted.num_drafted / steps,
                    "right": drafted.num_accepted / max(1, drafted.num_drafted),
                }
        best = {kind: statistics.median(each) for kind, each in runs.items()}
        off = statistics.mean(took for kind, took in best.items() if kind.startswith("off"))
        faster = {kind: off / took for kind, took in best.items()}
        yield {"batch": batch, "ms_a_token": best, "faster": faster, "drafts": made, "runs": runs}


def ceiling(model: str, draft: str, batch: int, context: int, chance: float, most: int) -> float:
    """Times as fast at most where weights and K/V of both, in bf16, are all that takes time.

    chance: that a draft is right, those before it being so.
    """

    def seconds(name: str) -> float:
        spec = read_spec(dict(SHAPES[name]))
        embedding = 0 if spec.tie else spec.vocab * spec.hidden
        return (2 * (parameters(spec) - embedding) + batch * context * spec.kv_bytes(2)) / BANDWIDTH

    share = seconds(draft) / seconds(model)
    return max(sum(chance**i for i in range(d + 1)) / (1 + d * share) for d in range(most + 1))


def show(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> None:
    table = Table(title="milliseconds a token, random weights", title_justify="left")
    for column in (
        "batch",
        "off, off again",
        *(f"{kind}: ms, times, drafts a step, right" for kind in kinds),
        "ceiling, bf16",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        each = [
            f"{row['ms_a_token'][k]:.3f}  {row['faster'][k]:.2f}  {row['drafts'][k]['a_step']:.1f}"
            f"  {row['drafts'][k]['right']:.2f}"
            for k in kinds
        ]
        off = "  ".join(f"{took:.3f}" for kind, took in row["ms_a_token"].items() if kind not in kinds)
        table.add_row(str(row["batch"]), off, *each, f"{row['ceiling']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    command()
