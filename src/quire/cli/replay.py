"""`quire replay`: decide again what an engine decided, and say what was decided and why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.engine.engine import Engine
from quire.errors import InvalidRequest, escape_control, nearest
from quire.observability import recording_format
from quire.observability.checkpoint import CLASSES
from quire.observability.explain import MISSING
from quire.scheduler.policy import class_path, load_policy, policy_name
from quire.sim.replay import Divergence, Replay, replay, step_lines, step_summary
from quire.sim.replay_page import ReplayPage
from quire.sim.replay_stats import ReplayStats


@click.command("replay")
@click.argument("path", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--run", "run", type=click.IntRange(1), help="Of several recordings, only this one (1: the oldest).")
@click.option("--request", "request", metavar="ID", help="Explain one request.")
@click.option("--step", "step", type=click.IntRange(1), help="Show what was decided in one step, and why.")
@click.option(
    "--scheduling-policy", metavar="module:Class", help="The policy class of your own that the recording was made with."
)
@click.option(
    "--page",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a file that the live page opens: what it would have shown. Two are compared there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    path: tuple[Path, ...],
    run: int | None,
    request: str | None,
    step: int | None,
    scheduling_policy: str | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Make the decisions of recordings (files, or a folder) again, with this code and no model, and compare each.

    Each start of an engine is a recording. Exit code 0 if all decisions are the same, 1 where one departs, 2 if PATH
    cannot be read.
    """
    if missing := [each for each in path if not each.exists()]:
        hint = "`quire serve --recording-dir FOLDER` makes recordings"
        raise InvalidRequest(f"there is no file or folder {escape_control(str(missing[0]))}: {hint}", param="path")
    reader, reports = recording_format.RecordingReader(path), list[dict[str, Any]]()
    pages: list[ReplayPage] = []
    console, known = Console(highlight=False, soft_wrap=True), dict(CLASSES)
    if scheduling_policy is not None:
        own = load_policy(scheduling_policy)
        known[class_path(own)] = own
    while reader.next is not None:
        stats = ReplayStats(request, step)
        watching: list[Any] = [stats] if page is None else [stats, ReplayPage(stats)]

        def begin(engine: Engine, began: recording_format.Began, observers: Sequence[Any] = watching) -> None:
            for each in observers:
                each.begin(engine, began)

        again = replay(reader, watching, known=known, prepare=begin)
        pages += watching[1:]
        notes, reader.notes = reader.notes, []
        found = {"number": len(reports) + 1, **report(again, stats, notes)}
        reports.append(found)
        if not as_json and run in (None, found["number"]):
            _show(again, found, console)
    if run is not None and run > len(reports):
        raise InvalidRequest(f"there is no recording {run}: the path holds {len(reports)}")
    if page is not None:
        if run is None and len(pages) > 1:
            raise InvalidRequest(f"--page takes one recording, and there are {len(pages)}: choose one with --run")
        pages[(run or 1) - 1].write(page)
    reports = [each for each in reports if run in (None, each["number"])]
    _missed(reports, request, step)
    same = all(found["same"] for found in reports)
    if as_json:
        click.echo(json.dumps({"same": same, "recordings": reports}))
    if not same:
        sys.exit(1)


def _missed(reports: list[dict[str, Any]], request: str | None, step: int | None) -> None:
    """Raise InvalidRequest for a request or step that is in no recording."""
    if request is not None and not any("request" in each for each in reports):
        hint = nearest(request, [id for found in reports for id in found["known"]])
        raise InvalidRequest(f"no request {escape_control(request)!r} is in this recording.{hint}")
    departed = {found["departure"]["step"] for found in reports if found["departure"]}
    if step is not None and step not in departed and not any("step" in each for each in reports):
        has = " and ".join("{} to {}".format(*found["steps"]) for found in reports)
        raise InvalidRequest(f"no step {step} is in this recording: it has {has}")


def report(again: Replay, stats: ReplayStats, notes: list[str]) -> dict[str, Any]:
    """Everything that a replay showed, plain JSON."""
    began, out, lives = again.began, stats.report(), stats.to_json()
    scheduler = again.engine.scheduler
    departure = again.divergence
    return {
        "quire": began.quire,
        "run": began.run,
        "began": began.unix,
        "segments": again.segments,
        "notes": notes,
        "settings": {
            **{name: began.about[name] for name in ("pages", "page_size", "max_model_len")},
            "cap": scheduler.max_num_seqs,
            "budget": scheduler.max_num_batched_tokens,
            "gap": scheduler.max_background_tokens,
            "chunk": scheduler.max_chunk_tokens,
            "order": policy_name(scheduler.policy),
            "admission": scheduler.policy.batching,
            "pressure": scheduler.policy.pressure,
            "speculation": _kind(scheduler.speculation),
            "pace": _kind(again.engine.step_budget) if again.engine.step_budget else "UnlimitedStepBudget",
            "prefix": _kind(scheduler.kv.prefix_cache),
            "eviction": _kind(scheduler.kv.pins.others),
        },
        "same": departure is None,
        "departure": departure and {name: getattr(departure, name) for name in Divergence.__slots__},
        "crash": again.crash and f"{type(again.crash).__name__}: {again.crash}",
        "under_way": _under_way(again) if again.under_way else [],
        **out,
        **({"request": lives} if lives else {}),
        **({"step": stats.step} if stats.step else {}),
    }


def _kind(part: Any) -> str:
    return type(part).__name__


def _under_way(again: Replay) -> list[str]:
    """The steps in flight when the recording ended."""
    out = []
    for step in again.engine.scheduler.inflight:
        ids = [seq.request.id for seq in step.seqs]
        out += step_lines(step_summary(step.plan, ids, step.decisions), ids)
    return out


# -------------------------------------------------------------------- for people


def _show(again: Replay, facts: dict[str, Any], console: Console) -> None:
    """Print a recording's report."""

    def say(line: str, style: str = "") -> None:
        console.print(Text(escape_control(line), style=style))

    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["began"]))
    say(
        f"recording {facts['number']}: quire {facts['quire']}, from {when} on, {facts['seconds']:.3f} s",
        "bold",
    )
    for note in facts["notes"]:
        say(f"note: {note}", "yellow")
    if "step" in facts:
        _step(facts["step"], say)
    elif "request" in facts:
        for life in facts["request"]:
            say(f"{life['id']}: {life['summary']}", "bold")
            for event in life["events"]:
                say(f"  {event['at'] * 1e3:10.2f} ms  {event['says']}")
    elif facts["requests"]:
        _summary(facts, say)
    else:
        say("the recording has no requests")
    if facts["under_way"]:
        say("under way when the recording ended:", "bold")
        for line in facts["under_way"]:
            say(f"  {line}")
    _verdict(again, facts, say, console)


def _summary(facts: dict[str, Any], say: Any) -> None:
    settings = facts["settings"]
    say("  " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    first, last = facts["steps"]
    ended = ", ".join(f"{n} {name}" for name, n in facts["ended"].items()) or "none"
    say(f"steps {first} to {last}: {facts['tokens']} tokens made, {facts['fed']} fed")
    say(f"requests {facts['requests']}: ended {ended}")
    time = facts["time"]
    say("time: " + ", ".join(f"{seconds:.3f} s {_PARTS[name]}" for name, seconds in time.items()))
    lost = facts["preemptions"]
    say(
        f"preemptions {lost['count']} ({lost['tokens_again']} tokens to compute again), "
        f"evictions {facts['evictions']}, discarded spans {facts['discarded_spans']}, failed steps {facts['failures']}"
    )
    for each in lost["each"][:20]:
        say(f"  step {each['step']}: {each['says']}")
    if lost["count"] > 20:
        say(f"  and {lost['count'] - 20} more (--json has {len(lost['each'])})")
    for what, counts in facts["tiers"].items():
        say(f"tiers: {what.replace('_', ' ')} " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    for name, about in facts["waited"].items():
        say(f"the queue waited {about['seconds']:.3f} s, {about['steps']} steps, for {MISSING.get(name, name)}")
    if facts["longest_steps"]:
        say("longest steps:")
    for step in facts["longest_steps"]:
        say(f"  step {step['step']}: {step['seconds'] * 1e3:.2f} ms, {step['rows']} rows, {step['fed']} tokens fed")


_PARTS: Mapping[str, str] = {"executor": "waiting for the executor", "planning": "planning", "between": "between steps"}


def _step(step: dict[str, Any], say: Any) -> None:
    say(f"step {step['step']}, {step['planned']:.4f} s from the beginning, took {step['seconds'] * 1e3:.2f} ms", "bold")
    for line in step["plan"]:
        say(f"  {line}")
    say("  made " + (", ".join(f"{id}: {n}" for id, n in step["tokens"].items()) or "nothing"))
    for id, finish in step["ended"].items():
        say(f"  {id} ended: {finish}")
    say("  after it: " + ", ".join(f"{name} {value}" for name, value in step["after"].items()))


def _verdict(again: Replay, facts: dict[str, Any], say: Any, console: Console) -> None:
    departure = again.divergence
    if departure is None:
        broke = f"; the engine broke as it did then: {facts['crash']}" if facts["crash"] else ""
        say(f"every decision is the same{broke}", "bold green")
        return
    say(f"departs at step {departure.step}: {departure.what}", "bold red")
    if departure.recorded or departure.decided:
        table = Table("recorded", "decided now")
        for pair in _beside(departure.recorded, departure.decided):
            style = "" if pair[0] == pair[1] else "bold"
            table.add_row(*(Text(escape_control(line), style=style) for line in pair))
        console.print(table)


def _beside(recorded: list[str], decided: list[str]) -> list[tuple[str, str]]:
    """Equal lines side by side; what only one side has, alone."""
    out = [(line, line if line in decided else "") for line in recorded]
    return out + [("", line) for line in decided if line not in recorded]
