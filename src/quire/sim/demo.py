"""`quire demo`: the engine's loop for a learner, step by step: spans, who waits, what was emitted, the page map."""

from __future__ import annotations

import time
from typing import get_args

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from quire.engine.engine import Engine
from quire.engine.events import StepRecord
from quire.engine.timing import VirtualClock
from quire.scheduler.policy import Pressure
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_time import StepCost
from quire.sim.run import SimConfig
from quire.sim.workload import uniform

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")


class DemoObserver:
    """An observer that keeps the steps not yet told of."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_submit(self, request: object, now: float) -> None:
        """Everybody is submitted before the story begins."""

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_end(self, ended: object) -> None:
        """Nobody hangs up in this story."""

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """Nor does anything break."""


@click.command("demo")
@click.option("--requests", default=6, show_default=True, help="How many.")
@click.option("--pages", default=12, show_default=True, help="Pages (KV blocks) there are.")
@click.option("--page-size", default=4, show_default=True, help="Tokens a page.")
@click.option("--max-num-seqs", default=3, show_default=True, help="Sequences at once.")
@click.option("--max-num-batched-tokens", default=8, show_default=True, help="Tokens a step.")
@click.option("--prompt", type=(int, int), default=(3, 12), show_default=True, help="Prompt tokens, from to.")
@click.option("--new", type=(int, int), default=(3, 9), show_default=True, help="New tokens, from to.")
@click.option("--shared", default=4, show_default=True, help="Prompt tokens that all requests begin with.")
@click.option("--lookahead", default=0, show_default=True, help="Steps launched ahead of results.")
@click.option("--scheduling-policy", default="fcfs", show_default=True, metavar="fcfs|priority|module:Class")
@click.option("--pressure-policy", type=click.Choice(get_args(Pressure)), default="preempt", show_default=True)
@click.option("--delay", default=0.0, show_default=True, help="Seconds to wait after each step.")
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
    house = SimConfig(
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
    teller, console = DemoObserver(), Console()
    engine = house.build(VirtualClock(), [teller])
    for i, load in enumerate(uniform(requests, prompt=prompt, new=new, shared=shared, vocab=100, seed=seed)):
        engine.submit(load.prompt, load.new, id=chr(65 + i % 26) + (str(i // 26) if i >= 26 else ""))
        console.print(f"submitted {_name(engine, i)}: {len(load.prompt)} prompt tokens, {load.new} new ones wanted")
    while engine.has_pending_work:
        engine.step()
        for record in teller.records:
            console.print(_page(engine, record))
            time.sleep(delay)
        teller.records.clear()
    console.print(_ending(engine))


def _name(engine: Engine, i: int) -> str:
    return list(engine.scheduler.sequences)[i]


def _page(engine: Engine, record: StepRecord) -> Group:
    """One step: a table of spans, then who waits, then the pages."""
    table = Table(title=f"step {record.number}   t = {record.committed * 1e3:.0f} ms", title_justify="left")
    for heading in ("request", "fed", "what", "emitted", "pages"):
        table.add_column(heading)
    said = {event.id: event for event in record.events}
    for seq, span in zip(record.seqs, record.plan.spans, strict=True):
        event = said.get(seq.request.id)
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
    why = [_told(d.kind, d.request_id, d.cause, d.n) for d in record.decisions]
    return Group(table, Text.from_markup("\n".join(why)), _map(engine.scheduler), Text())


def _phase(n: int, rows: int, made: int) -> str:
    if not rows:
        return "prompt chunk"
    if made <= 1 and n > 1:
        return "end of prompt + first token"
    return "decode" if rows == 1 else f"verify {rows - 1} drafts"


def _told(what: str, id: str, by: str, n: int) -> str:
    hit = f", {n} tokens found in the prefix cache" if n else ""
    return {
        "opened": f"  {id} gets a row{hit}",
        "waits": f"  {id} waits for {by}",
        "sat-out": f"  {id} sits this step out: its {by} are on their way home",
        "preempted": f"  {id} is preempted for {by}: {n} computed tokens to do again, less what stays cached",
    }[what]


def _colour(id: str) -> str:
    return _COLOURS[(ord(id[0]) - 65) % len(_COLOURS)]


def _map(scheduler: Scheduler) -> Text:
    """Each page: its holders' letters, '*' if several, '.' if free, '+' if free but still cached."""
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
    out.append(
        f"   {pool.num_used} used, {pool.num_free} free;  '*' shared  '+' free but cached  '.' free", style="dim"
    )
    return out


def _ending(engine: Engine) -> Table:
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
