"""`quire bench serve`: a load test of any server that speaks OpenAI's completions, at a list of loads.

A load is a number of users, each of whom asks again when answered, or a rate at which requests come whether or not
others are answered, or a recorded trace. Everything seen is kept; `quire bench report` draws it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quire import __version__
from quire.bench import params
from quire.bench.asking import asked, rate
from quire.bench.clients import figures, run
from quire.bench.gauges import Gauges
from quire.bench.load import Asked, Job, spoken
from quire.bench.started import fetched, model_of
from quire.bench.watch import Watch, environment
from quire.errors import InvalidConfig
from quire.frontend.http_client import Origin
from quire.observability.histogram import percentile

USERS = "1,2,4,8,16,32,64,128"
QUANTILES = (50, 90, 95, 99)
SHOWN: Any = MappingProxyType({"metavar": "TEXT", "show_default": True})
FILE = click.Path(dir_okay=False, path_type=Path)
HELP: Mapping[str, str] = MappingProxyType(
    {
        "users": "Users, each asking again when answered: one measurement for each number.",
        "rates": "Instead of users: requests a second, whether or not others are answered.",
        "burstiness": "Of the rate: 1 is a Poisson process, less comes in bursts.",
        "trace": "Instead of users: a CSV of TIMESTAMP,ContextTokens,GeneratedTokens, as Azure publishes them.",
        "count": "Requests a measurement. Unset: four a user and 20 at least; 200 at a rate; the whole trace.",
        "shared": "Tokens that all prompts begin with, besides; 0 unless given.",
        "goals": "Count the requests within ttft:MS,tpot:MS,e2el:MS.",
        "path": "Where all of it goes, for `quire bench report`.",
    }
)


@click.command("serve")
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--model", help="Unset: the first that the server names.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Of the server, if it wants one.")
@click.option("--max-concurrency", "users", type=params.counts, default=USERS, **SHOWN, help=HELP["users"])
@click.option("--request-rate", "rates", type=params.rates, metavar="R[,R...]", help=HELP["rates"])
@click.option("--burstiness", type=click.FloatRange(0.01), default=1.0, show_default=True, help=HELP["burstiness"])
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=HELP["trace"])
@click.option("--speed", type=click.FloatRange(1e-3), default=1.0, show_default=True, help="Of the trace.")
@click.option("--shrink", type=click.FloatRange(1), default=1.0, show_default=True, help="Divides the trace's prompts.")
@click.option("--num-prompts", type=click.IntRange(1), help=HELP["count"])
@click.option("--random-input-len", "length", type=params.span, default="128:256", **SHOWN, help="Tokens a prompt has.")
@click.option("--random-output-len", "new", type=params.span, default="32:64", **SHOWN, help="Tokens an answer has.")
@click.option(
    "--random-prefix-len", "shared", type=click.IntRange(0), default=0, show_default=True, help=HELP["shared"]
)
@click.option("--goodput", "goals", type=params.goals, default="", metavar="WHAT:MS[,...]", help=HELP["goals"])
@click.option(
    "--num-warmups", type=click.IntRange(0), default=8, show_default=True, help="Requests before, not counted."
)
@click.option("--seed", default=7, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=min(4, os.cpu_count() or 1), show_default=True)
@click.option("--label", help="What the report calls this run. Unset: the model.")
@click.option("--save-result", "path", type=FILE, default=Path("load.json"), show_default=True, help=HELP["path"])
def command(base_url: str, model: str | None, api_key: str, path: Path, processes: int, **given: Any) -> None:
    """Load-test a server that runs: tokens/s and times by number of users, by rate, or along a recorded trace."""
    try:
        where = Origin.parse(base_url)
    except InvalidConfig as error:
        raise click.BadParameter(str(error).removeprefix("upstream: "), param_hint="--base-url") from error
    base_url = str(where)
    keepable(path)  # better now than after the test
    model = model or model_of(base_url, api_key)
    job = Job(host=where.host, port=where.port, model=model, streams=1, prompts=[], new=[], key=api_key)
    job = replace(job, path=where.prefix, tls=where.tls)
    about: dict[str, Any] = {"label": given.pop("label") or model, "model": model, "server": base_url}
    about |= {"quire": __version__, "environment": environment(api_key)}
    about |= {"version": version(fetched(f"{base_url}/version", api_key) or b"")}
    warmups, goals = given.pop("num_warmups"), given.pop("goals")
    levels = asked(**given)
    if warmups:
        others = [prompt[::-1] for prompt in levels[0].prompts[:warmups]]  # or the first of the level were cached
        run(replace(job, streams=warmups, prompts=others, new=levels[0].new[:warmups]), processes)
    found: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for level in levels:
            bar = bars.add_task(level.name, total=len(level.prompts))
            began = time.time()
            with Watch() as gpu, Gauges(base_url, api_key) as gauges:
                whole = replace(job, streams=level.users, prompts=level.prompts, new=level.new, due=level.due)
                parts = run(whole, processes, lambda n, bar=bar: bars.advance(bar, n))  # type: ignore[misc]
            bars.remove_task(bar)
            row = {"level": level.name, "users": level.users, "rate": rate(level), **judged(parts, goals)}
            late = min(part["began"] for part in parts) - began
            seen = {"gauges": [{**each, "s": each["s"] - late} for each in gauges.samples]}
            found.append({**row, **seen, "gpu": [(s - late, *rest) for s, *rest in gpu.samples]})
            path.write_text(json.dumps({"about": about, "goals": goals, "levels": found}))
            Console().print(line(row))
            if not any(each["ok"] for each in found):
                break  # nobody else would be answered either
    show(found)
    click.echo(f"{path} has all of it; quire bench report {path} draws it")
    if not any(row["ok"] for row in found):
        said = asyncio.run(refusal(replace(job, prompts=levels[0].prompts, new=levels[0].new)))
        raise click.ClickException(f"{base_url} answered nothing: {found[0]['statuses']}; it says: {said}")


def keepable(path: Path) -> None:
    """Raises BadParameter where nothing can be written. A file that was not there is not there afterwards."""
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}", param_hint="--save-result") from error
    if not there:
        path.unlink()


def version(said: bytes) -> Any:
    """What a server says of its version; None where that is no JSON."""
    try:
        return json.loads(said)
    except ValueError:
        return None


async def refusal(job: Job) -> str:
    """What the server says to the first request."""
    try:
        reader, writer = await asyncio.open_connection(job.host, job.port, ssl=job.tls or None)
        writer.write(spoken(job, 0))
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(min(int(length[1]), 1 << 16)) if length else await reader.read(1 << 14)
        writer.close()
    except (OSError, EOFError, TimeoutError) as error:
        return str(error) or type(error).__name__
    text = (body or head).decode(errors="replace")
    found = re.search(r'"message":\s*("(?:[^"\\]|\\.)*")', text)
    return str(json.loads(found[1])) if found else " ".join(text.split())[:300]


def judged(parts: Sequence[Mapping[str, Any]], goals: Mapping[str, float]) -> dict[str, Any]:
    """A level's figures, in milliseconds and by QUANTILES, and every request."""
    whole = figures([dict(part) for part in parts])
    every = sorted((Asked(*one) for part in parts for one in part["asked"]), key=lambda one: one.since)
    fine = [one for one in every if one.status == 200 and one.first]
    times = {"ttft": [], "tpot": [], "e2el": []}  # type: dict[str, list[float]]
    good = 0
    for one in fine:
        took = {"ttft": one.first - one.since, "e2el": one.ended - one.since}
        took["tpot"] = (one.ended - one.first) / max(1, one.new - 1)
        for what, seconds in took.items():
            times[what].append(1e3 * seconds)
        good += all(1e3 * took[what] <= limit for what, limit in goals.items())
    gaps = [1e3 * x for part in parts for x in part["gaps"]]
    quantiles = {what: [percentile(values, q) for q in QUANTILES] for what, values in {**times, "itl": gaps}.items()}
    seconds = whole["seconds"]
    return {
        "requests": len(every),
        "ok": len(fine),
        "statuses": dict(Counter(str(one.status) for one in every)),
        "seconds": seconds,
        "requests_s": len(fine) / seconds,
        "prompt_tokens_s": whole["prompted"] / seconds,
        "tokens_s": whole["tokens_s"],
        "tokens_an_event": whole["tokens_an_event"],
        "good": good if goals else None,
        "good_s": good / seconds if goals else None,
        "ms": quantiles,
        "asked": every,
    }


def line(row: Mapping[str, Any]) -> str:
    other = {status: count for status, count in row["statuses"].items() if status != "200"}
    refused = "".join(f", {count} x {status if status != '0' else 'broken'}" for status, count in other.items())
    return f"{row['level']}: {row['ok']} of {row['requests']} answered, {row['tokens_s']:,.0f} tokens/s{refused}"


def show(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="times in milliseconds, p50 / p99", title_justify="left")
    for column in ("load", "answered", "requests/s", "tokens/s", "first token", "a token", "whole answer", "good"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found:
        ms = [f"{row['ms'][what][0]:,.1f} / {row['ms'][what][-1]:,.1f}" for what in ("ttft", "tpot", "e2el")]
        good = "" if row["good"] is None else f"{100 * row['good'] / row['requests']:.0f} %"
        answered = f"{row['ok']}/{row['requests']}"
        table.add_row(row["level"], answered, f"{row['requests_s']:.2f}", f"{row['tokens_s']:,.0f}", *ms, good)
    Console(width=max(Console().width, 120)).print(table)
