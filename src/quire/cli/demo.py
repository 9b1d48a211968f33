"""`quire demo`: the engine's loop step by step: spans, waiting requests, tokens, and a map of the KV blocks."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any, get_args

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from quire.cli.ranges import LENGTHS, FiniteRange, ascending
from quire.engine.engine import Engine
from quire.engine.events import Observer, StepRecord
from quire.engine.timing import VirtualClock
from quire.observability.histogram import percentile
from quire.scheduler.policy import Pressure
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_time import StepCost
from quire.sim.replay import decision_text
from quire.sim.run import SimConfig
from quire.sim.workload import uniform

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
_SIZE = click.IntRange(1, 1 << 20)
_SPAN: Any = MappingProxyType({"type": LENGTHS, "callback": ascending, "show_default": True})


class DemoObserver(Observer):
    """Keeps the steps not printed yet."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.seconds = 0.0
        self.peak = 0
        """Most pages in use after a step."""

    def on_step(self, record: StepRecord) -> None:
        """Keep it."""
        self.records.append(record)
        self.seconds = record.committed


@click.command("demo")
@click.option("--requests", type=click.IntRange(1, 10_000), default=6, show_default=True, help="How many.")
@click.option("--pages", type=_SIZE, default=12, show_default=True, help="Pages (KV blocks) there are.")
@click.option("--page-size", type=_SIZE, default=4, show_default=True, help="Tokens a page.")
@click.option("--max-num-seqs", type=_SIZE, default=3, show_default=True, help="Sequences at once.")
@click.option("--max-num-batched-tokens", type=_SIZE, default=8, show_default=True, help="Tokens a step.")
@click.option("--prompt", default=(3, 12), help="Prompt tokens, from to.", **_SPAN)
@click.option("--new", default=(3, 9), help="New tokens, from to.", **_SPAN)
@click.option(
    "--shared",
    type=click.IntRange(0, 1 << 20),
    default=4,
    show_default=True,
    help="Prompt tokens that all requests begin with.",
)
@click.option(
    "--lookahead", type=click.IntRange(0, 8), default=0, show_default=True, help="Steps launched ahead of results."
)
@click.option("--scheduling-policy", default="fcfs", show_default=True, metavar="fcfs|priority|module:Class")
@click.option("--pressure-policy", type=click.Choice(get_args(Pressure)), default="preempt", show_default=True)
@click.option(
    "--delay", type=FiniteRange(0, 3600), default=0.0, show_default=True, help="Seconds to wait after each step."
)
@click.option("--seed", default=7, show_default=True)
def command(
    requests: int,
    pages: int,
    page_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    shared: int,
    lookahead: int,
    scheduling_policy: str,
    pressure_policy: Pressure,
    delay: float,
    seed: int,
) -> None:
    """Watch requests share a small pool of pages, one table a step."""
    config = SimConfig(
        pages=pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        chunk=max_num_batched_tokens,
        depth=lookahead,
        scheduling_policy=scheduling_policy,
        pressure_policy=pressure_policy,
        cost=StepCost(base=0.01, per_token=0.001),
    )
    observer = DemoObserver()
    console = Console()
    engine = config.build(VirtualClock(), [observer])
    for i, load in enumerate(uniform(requests, prompt=prompt, new=new, shared=shared, vocab=100, seed=seed)):
        engine.submit(load.prompt, load.new, id=chr(65 + i % 26) + (str(i // 26) if i >= 26 else ""))
        console.print(f"submitted {_name(engine, i)}: {len(load.prompt)} prompt tokens, {load.new} new ones wanted")
    while engine.has_pending_work:
        engine.step()
        observer.peak = max(observer.peak, engine.scheduler.kv.block_pool.num_used)
        for record in observer.records:
            console.print(_step(engine, record))
            time.sleep(delay)
        observer.records.clear()
    console.print(_totals(engine))
    console.print(_summary(engine, observer, pages), soft_wrap=True)


def _name(engine: Engine, i: int) -> str:
    return list(engine.scheduler.sequences)[i]


def _step(engine: Engine, record: StepRecord) -> Group:
    """One step: a table of spans, then the decisions, then the blocks."""
    table = Table(title=f"step {record.number}   t = {record.committed * 1e3:.0f} ms", title_justify="left")
    for heading in ("request", "fed", "what", "emitted", "pages"):
        table.add_column(heading)
    outputs = {event.id: event for event in record.events}
    for seq, span in zip(record.seqs, record.plan.spans, strict=True):
        event = outputs.get(seq.request.id)
        emitted = " ".join(map(str, event.tokens)) if event else ""
        if event and event.finish:
            emitted += f"   [b]finished: {event.finish}[/b]"
        colour = _colour(seq.request.id)
        table.add_row(
            f"[{colour}]{seq.request.id}[/{colour}]",
            str(span.num_tokens),
            _phase(span.num_tokens, span.num_samples, len(seq.tokens) - seq.prompt_length),
            emitted,
            " ".join(map(str, seq.blocks)),
        )
    why = [f"  {decision_text(decision)}" for decision in record.decisions]
    return Group(table, Text.from_markup("\n".join(why)), _block_map(engine.scheduler), Text())


def _phase(n: int, rows: int, made: int) -> str:
    if not rows:
        return "prompt chunk"
    if made <= 1 and n > 1:
        return "end of prompt + first token"
    return "decode" if rows == 1 else f"verify {rows - 1} drafts"


def _colour(id: str) -> str:
    return _COLOURS[(ord(id[0]) - 65) % len(_COLOURS)]


def _block_map(scheduler: Scheduler) -> Text:
    """Each block: its sequence's letter, '*' if shared, '.' if free, '+' if free but still cached."""
    pool, out = scheduler.kv.block_pool, Text("  pages ")
    owner = {page: seq.request.id for seq in scheduler.running for page in seq.blocks}
    for page in range(1, pool.num_blocks + 1):
        if pool.ref_counts[page] > 1:
            out.append("*", style="bold white")
        elif pool.ref_counts[page]:
            id = owner.get(page, "?")
            out.append(id[0], style=_colour(id))
        else:
            out.append("+" if pool.prefix_cache.contains(page) else ".", style="dim")
    out.append(f"   {pool.num_used} used, {pool.num_free} free; * shared, + cached, . empty", style="dim")
    return out


def _totals(engine: Engine) -> Table:
    table = Table(title="in the end", title_justify="left")
    for heading in ("request", "prompt", "made", "finish", "waited ms", "took ms", "preempted"):
        table.add_column(heading, justify="right")
    for done in engine.completed_requests:
        waited = (done.finished if done.opened is None else done.opened) - done.submitted
        took = done.finished - done.submitted
        table.add_row(
            done.id,
            str(done.prompt_tokens),
            str(len(done.tokens)),
            done.finish,
            f"{waited * 1e3:.0f}",
            f"{took * 1e3:.0f}",
            str(done.preemptions),
        )
    return table


def _summary(engine: Engine, observer: DemoObserver, pages: int) -> str:
    """The last line: throughput, latency from submission to the last token, and memory, in virtual time."""
    done = list(engine.completed_requests)
    took = [1e3 * (each.finished - each.submitted) for each in done]
    made = sum(len(each.tokens) for each in done)
    return (
        f"{len(done)} requests, {made} tokens in {observer.seconds * 1e3:.0f} ms: "
        f"{made / observer.seconds:.0f} tokens/s; "
        f"latency p50 {percentile(took, 50):.0f} ms, p99 {percentile(took, 99):.0f} ms; "
        f"peak {observer.peak} of {pages} pages ({observer.peak / pages:.0%})"
    )
