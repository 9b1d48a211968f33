"""`python -m benchmarks.structured`: decode under JSON schemas beside decode without, in one run, interleaved.

Every sequence makes as many tokens either way: without a schema the end token is ignored, and no schema's answer can be
complete before the last. So the ratio is what masks cost, and nothing else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from quire.assembly.engine import build_engine
from quire.assembly.tokenizer import build_tokenizer
from quire.config import Settings
from quire.engine.engine import Engine
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.plan import Mask
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.types import Request, SamplingParams, StructuredOutputsParams

PROMPT = "Once upon a time, there were many animals. Here is a list of all of them: "


class Timed:
    """A constraint, and the seconds its masks take."""

    def __init__(self, inner: Constraint, spent: list[float]) -> None:
        self.inner, self.spent = inner, spent

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        began = time.perf_counter()
        made = self.inner.masks(output, drafts)
        self.spent.append(time.perf_counter() - began)
        return made

    def why(self) -> str:
        return self.inner.why()

    def beginning(self) -> Sequence[int]:
        return self.inner.beginning()


def schema(i: int) -> dict[str, Any]:
    """One of many alike: a long list of objects with texts, numbers, choices and lists."""
    fields: Mapping[str, Any] = {
        "name": {"type": "string", "minLength": 1, "maxLength": 20 + i},
        f"age_{i}": {"type": "integer", "minimum": 0, "maximum": 100 + i},
        "kind": {"enum": ["cat", "dog", "bird", f"fish {i}"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "tail": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    }
    one = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"type": "array", "items": one, "minItems": 1000}


@click.command("structured")
@click.option("--model", default="embedded", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--batch", default=16, show_default=True, help="Sequences at once, each with a schema of its own.")
@click.option("--new", default=128, show_default=True, help="New tokens a sequence.")
@click.option("--repeat", default=9, show_default=True, help="Interleaved rounds; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, dtype: str, batch: int, new: int, repeat: int, as_json: bool) -> None:
    """Decode with JSON schemas and without, and say what the schemas cost."""
    settings = Settings.of(model=model, dtype=dtype, max_num_seqs=batch)
    engine, tokenizer = build_engine(settings), build_tokenizer(settings)
    compiler, prompt = LlguidanceCompiler(lambda: tokenizer), tokenizer.encode(PROMPT)
    structures = [StructuredOutputsParams(json=schema(i)) for i in range(batch)]
    compiler(structures[0])  # reads the vocabulary
    began = time.perf_counter()
    compiled = [compiler(structure) for structure in structures]
    compiling = (time.perf_counter() - began) / batch
    speed: dict[str, list[float]] = {"with": [], "without": []}
    spent: list[float] = []
    for turn in track(range(repeat), "rounds", console=Console(stderr=True), transient=True, disable=as_json):
        for ruled in (True, False) if turn % 2 else (False, True):
            asked = [
                (_request(prompt, i, turn, new, one if ruled else None), compiled[i]() if ruled else FREE)
                for i, one in enumerate(structures)
            ]
            timed = [(request, Timed(rule, spent) if rule is not FREE else FREE) for request, rule in asked]
            speed["with" if ruled else "without"].append(batch * new / _run(engine, timed, batch * new))
    rates = {name: statistics.median(found) for name, found in speed.items()}
    ratio = statistics.median(a / b for a, b in zip(speed["with"], speed["without"], strict=True))
    found = {
        "model": model,
        "batch": batch,
        "new": new,
        **rates,
        "ratio": ratio,
        "mask_us": statistics.median(spent) * 1e6,
        "mask_p99_us": statistics.quantiles(spent, n=100)[98] * 1e6,
        "compile_ms": compiling * 1e3,
    }
    click.echo(json.dumps(found)) if as_json else _show(found)
    engine.close()


def _request(
    prompt: tuple[int, ...], i: int, turn: int, new: int, structure: StructuredOutputsParams | None
) -> Request:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, structured_outputs=structure)
    return Request(
        id=f"{i}-{turn}-{structure is None}", prompt=prompt, max_new_tokens=new, sampling=sampling, seed=turn, choice=i
    )


def _run(engine: Engine, asked: Sequence[tuple[Request, Constraint]], want: int) -> float:
    """Seconds. Every sequence must make all its tokens, or the comparison is void."""
    for request, rule in asked:
        engine.add(request, rule)
    made, began = 0, time.perf_counter()
    while engine.has_pending_work:
        made += sum(len(event.tokens) for event in engine.step())
    took = time.perf_counter() - began
    if made != want:
        raise click.ClickException(f"{made} tokens were made, not {want}: an answer ended early")
    return took


def _show(found: Mapping[str, Any]) -> None:
    table = Table(title=f"{found['model']}, batch {found['batch']}, {found['new']} new tokens", title_justify="left")
    for heading in ("with schemas, tok/s", "without, tok/s", "ratio", "mask, median", "mask, p99", "compile"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{found['with']:.0f}",
        f"{found['without']:.0f}",
        f"{found['ratio']:.3f}",
        f"{found['mask_us']:.0f} us",
        f"{found['mask_p99_us']:.0f} us",
        f"{found['compile_ms']:.2f} ms",
    )
    Console().print(table)


if __name__ == "__main__":
    command()
