"""`quire replay`: decide again what an engine decided, and say what was decided and why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.errors import InvalidRequest, nearest
from quire.observe import tape
from quire.observe.explain import MISSING, explain
from quire.sim.replay import Departure, Replay, lines, replay, told
from quire.sim.tally import Tally
from quire.text.harmless import harmless


@click.command("replay")
@click.argument("path", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--request", "request", metavar="ID", help="Tell the life of one request.")
@click.option("--step", "step", type=click.IntRange(1), help="Tell what was decided in one step, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: tuple[Path, ...], request: str | None, step: int | None, as_json: bool) -> None:
    """Make the decisions of a recording (files, or a folder) again, with this code and no model, and compare each.

    Exit code 0 if all are the same, 1 where one departs, 2 if PATH cannot be read.
    """
    found, notes = newest(tape.segments(list(path)))
    tally = Tally(request, step)
    again = replay(found, [tally], prepare=lambda engine: tally.begin(engine, found[0].began.clock))
    if request is not None and tally.story is None:
        tally.story = _unfinished(tally, request)
    if step is not None and tally.step is None and (again.departure is None or again.departure.step != step):
        raise InvalidRequest(f"no step {step} is in this recording: it has {tally.first_step} to {tally.last_step}")
    if as_json:
        click.echo(json.dumps(report(again, tally, found, notes)))
    else:
        _show(again, tally, found, notes)
    if again.departure is not None:
        sys.exit(1)


def newest(segments: Any) -> tuple[list[tape.Segment], list[str]]:
    """The last unbroken stretch of segments, and what is to be said about the rest."""
    found: list[tape.Segment] = []
    left = 0
    for segment in segments:
        last = found[-1].began if found else None
        if last and (last.run, last.number + 1) != (segment.began.run, segment.began.number):
            left += len(found)
            found = []
        found.append(segment)
    notes = (
        [f"{left} earlier segments are of other runs, and left out: name their files to replay them"] if left else []
    )
    return found, notes + [f"segment {s.began.number}: {s.amiss}" for s in found if s.amiss]


def _unfinished(tally: Tally, request: str) -> dict[str, Any]:
    story = explain(tally.history, request, tally.last)
    if story is None:
        hint = nearest(request, tally.history.stories)
        raise InvalidRequest(f"no request {harmless(request)!r} is in this recording.{hint}")
    return story


def report(again: Replay, tally: Tally, segments: list[tape.Segment], notes: list[str]) -> dict[str, Any]:
    """Everything, plain JSON."""
    began, out = segments[0].began, tally.report()
    scheduler = again.engine.scheduler
    departure = again.departure
    return {
        "quire": began.quire,
        "run": began.run,
        "began": began.unix,
        "segments": len(segments),
        "notes": notes,
        "settings": {
            **{name: began.about[name] for name in ("pages", "page_size", "max_model_len")},
            **{name: getattr(scheduler, name) for name in ("cap", "budget", "gap", "chunk")},
            "order": scheduler.order.__name__,
            "admission": scheduler.admit.__name__,
            "speculation": _kind(scheduler.speculation),
            "pace": _kind(again.engine.pacer),
            "prefix": _kind(scheduler.kv.reuse),
            "eviction": _kind(scheduler.kv.pool.shelf),
        },
        "same": departure is None,
        "departure": departure and {name: getattr(departure, name) for name in Departure.__slots__},
        "crash": again.crash and f"{type(again.crash).__name__}: {again.crash}",
        "under_way": _under_way(again) if again.under_way else [],
        **out,
        **({"request": tally.story} if tally.story else {}),
        **({"step": tally.step} if tally.step else {}),
    }


def _kind(part: Any) -> str:
    return type(part).__name__


def _under_way(again: Replay) -> list[str]:
    """The steps that had not come home when the recording ended."""
    out = []
    for step in again.engine.scheduler.flight:
        out += lines(told(step.plan, [seq.request.id for seq in step.seqs], step.decisions))
    return out


# -------------------------------------------------------------------- for people


def _show(again: Replay, tally: Tally, segments: list[tape.Segment], notes: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    said = report(again, tally, segments, notes)

    def say(line: str, style: str = "") -> None:
        console.print(Text(harmless(line), style=style))

    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(said["began"]))
    say(f"recorded by quire {said['quire']} from {when} on, {said['seconds']:.3f} s, segments: {said['segments']}")
    for note in notes:
        say(f"note: {note}", "yellow")
    if tally.step:
        _step(tally.step, say)
    elif tally.story:
        _life(tally.story, say)
    else:
        _summary(said, say)
    if said["under_way"]:
        say("under way when the recording ended:", "bold")
        for line in said["under_way"]:
            say(f"  {line}")
    _verdict(again, said, console)


def _summary(said: dict[str, Any], say: Any) -> None:
    settings = said["settings"]
    say("  " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    first, last = said["steps"]
    ended = ", ".join(f"{n} {name}" for name, n in said["ended"].items()) or "none"
    say(f"steps {first} to {last}: {said['tokens']} tokens made, {said['fed']} fed")
    say(f"requests {said['requests']}: ended {ended}")
    time = said["time"]
    say("time: " + ", ".join(f"{seconds:.3f} s {_PARTS[name]}" for name, seconds in time.items()))
    lost = said["preemptions"]
    say(
        f"preemptions {lost['count']} ({lost['tokens_again']} tokens to compute again), evictions {said['evictions']}, "
        f"discarded spans {said['discarded_spans']}, failed steps {said['failures']}"
    )
    for each in lost["each"][:20]:
        say(f"  step {each['step']}: {each['says']}")
    if lost["count"] > 20:
        say(f"  and {lost['count'] - 20} more (--json has {len(lost['each'])})")
    for name, about in said["waited"].items():
        say(f"the queue waited {about['seconds']:.3f} s, {about['steps']} steps, for {MISSING.get(name, name)}")
    if said["longest_steps"]:
        say("longest steps:")
    for step in said["longest_steps"]:
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


def _life(story: dict[str, Any], say: Any) -> None:
    say(f"{story['id']}: {story['summary']}", "bold")
    for event in story["events"]:
        say(f"  {event['at'] * 1e3:10.2f} ms  {event['says']}")


def _verdict(again: Replay, said: dict[str, Any], console: Console) -> None:
    departure = again.departure
    if departure is None:
        broke = f"; the engine broke as it did then: {said['crash']}" if said["crash"] else ""
        console.print(Text(f"every decision is the same{broke}", style="bold green"))
        return
    console.print(Text(harmless(f"departs at step {departure.step}: {departure.what}"), style="bold red"))
    if departure.recorded or departure.decided:
        table = Table("recorded", "decided now")
        for left, right in _beside(departure.recorded, departure.decided):
            style = "" if left == right else "bold"
            table.add_row(Text(harmless(left), style=style), Text(harmless(right), style=style))
        console.print(table)


def _beside(recorded: list[str], decided: list[str]) -> list[tuple[str, str]]:
    """Equal lines side by side; what only one side has, alone."""
    out = [(line, line if line in decided else "") for line in recorded]
    return out + [("", line) for line in decided if line not in recorded]
