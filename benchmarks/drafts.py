"""`python -m benchmarks.drafts`: speculation with the embedded model, on and off in turns, answers compared.

Stories by its own draft model; and summaries that are made of the story's own sentences, by look-up. The embedded model
does not copy of its own accord, so there a grammar holds it to the sentences: which ones, and in what order, is its own
choice.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from quire.llm import LLM
from quire.scheduler.speculation import DraftStats
from quire.types import SamplingParams, StructuredOutputsParams

STARTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a big red ball",
    "Tom and Sue were playing",
    "The little rabbit",
    "Once there was a baby",
    "A dog named Spot",
    "Mia and her mom",
    "Ben had a boat.",
)
DRAFT = json.dumps({"method": "draft_model", "num_speculative_tokens": 4})
LOOKUP = json.dumps({"method": "ngram", "num_speculative_tokens": 8})

Asked = tuple[list[str], list[SamplingParams]]


@click.command("drafts")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 2, 8), show_default=True)
@click.option("--new", default=200, show_default=True, help="New tokens a story.")
@click.option("--repeat", default=5, show_default=True, help="Turns; medians are shown, the first left out.")
@click.option("--threads", default=1, show_default=True, help="CPU threads.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(batches: tuple[int, ...], new: int, repeat: int, threads: int, as_json: bool) -> None:
    """Tokens a second of the embedded model, without drafts and with."""
    engines = {name: load(how, threads) for name, how in (("off", None), ("draft", DRAFT), ("look-up", LOOKUP))}
    rows = []
    for batch in batches:
        asked = [(list(STARTS[at : at + batch]), [story(new)] * batch) for at in range(0, len(STARTS), batch)]
        rows.append(compared(f"stories, {batch} at once", engines, "draft", asked, repeat))
    summaries = [summary(engines["off"], start, new) for start in STARTS]
    rows.append(compared("summaries, 1 at once", engines, "look-up", summaries, repeat))
    for llm in engines.values():
        llm.close()
    if as_json:
        click.echo(json.dumps(rows))
    else:
        show(rows)


def load(how: str | None, threads: int) -> LLM:
    return LLM("embedded", dtype="float32", max_num_seqs=16, threads=threads, speculative_config=how)


def story(new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)


def summary(llm: LLM, start: str, new: int) -> Asked:
    """A story, and five of its sentences, greedily."""
    said = start + llm.generate([start], [story(new)], use_tqdm=False)[0].outputs[0].text
    sentences = dict.fromkeys(each.strip() for each in re.findall(r"[^.!?\n]{15,}[.!?]", said))
    how = StructuredOutputsParams(regex=f"(({'|'.join(map(re.escape, sentences))}) ){{5}}")
    return [said + "\n\n"], [SamplingParams(temperature=0.0, max_tokens=new, structured_outputs=how)]


def compared(name: str, engines: Mapping[str, LLM], which: str, asked: Sequence[Asked], repeat: int) -> dict[str, Any]:
    """Both engines in turns over the same requests. Raises ClickException when an answer differs."""
    speeds: dict[str, list[float]] = {"off": [], which: []}
    drafted = DraftStats()
    for _ in range(repeat):
        answers = {}
        for kind in speeds:
            llm = engines[kind]
            llm._engine.scheduler.draft_stats = DraftStats()
            began = time.perf_counter()
            done = [each for prompts, how in asked for each in llm.generate(prompts, how, use_tqdm=False)]
            seconds = time.perf_counter() - began
            answers[kind] = [each.outputs[0].token_ids for each in done]
            speeds[kind].append(sum(map(len, answers[kind])) / seconds)
            drafted = llm._engine.scheduler.draft_stats
        if answers["off"] != answers[which]:
            raise click.ClickException(f"{name}: answers differ with drafts")
    off, on = (statistics.median(runs[1:] or runs) for runs in speeds.values())
    return {
        "workload": name,
        "off": off,
        "on": on,
        "times": on / off,
        "runs": speeds,
        "drafted": drafted.num_drafted,
        "right": drafted.num_accepted / max(1, drafted.num_drafted),
        "right_at": drafted.accepted_by_position,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="embedded model, tokens a second, the same answers", title_justify="left")
    for column in ("workload", "off", "on", "times", "drafts", "right"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in rows:
        figures = (f"{row['off']:,.0f}", f"{row['on']:,.0f}", f"{row['times']:.2f}")
        table.add_row(row["workload"], *figures, f"{row['drafted']:,}", f"{row['right']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    command()
