"""`quire bench serve`: a load test of a server with OpenAI's completions API, at several levels of load.

A level is a number of users, each of whom sends the next request when the last is answered; or a rate at which requests
arrive whether or not others are answered; or a recorded trace. All timings are saved; `quire bench report` draws them.
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
import numpy as np
from rich.console import Console
from rich.progress import Progress

from quire import __version__
from quire.bench.load_client import ClientResult, LoadJob, RequestTiming, encode_request, run_clients, summarize
from quire.bench.load_levels import USERS, load_levels, parse_counts, parse_goodput, parse_range, parse_rates
from quire.bench.monitor import GPUMonitor, MetricsMonitor, environment, fetch, served_model
from quire.bench.offline import FILE, writable
from quire.checks import ANY
from quire.cli.base import say_unneeded
from quire.cli.ranges import FiniteRange
from quire.cli.tables import numbers, print_table
from quire.config.vllm import without_unneeded
from quire.errors import InvalidConfig
from quire.frontend.http_client import Origin

QUANTILES = (50, 90, 95, 99)
SHOWN: Any = MappingProxyType({"metavar": "TEXT", "show_default": True})
OUTPUT: Any = MappingProxyType({"metavar": "FILE", "help": "Save all of it there, for `quire bench report`."})
HELP: Mapping[str, str] = MappingProxyType(
    {
        "users": "Users, each asking again when answered: one measurement for each number. "
        f"Unset: {','.join(map(str, USERS))}, as far as --num-prompts goes.",
        "rates": "Instead of users: requests a second, whether or not others are answered.",
        "burstiness": "Of the rate: 1 is a Poisson process, less comes in bursts.",
        "trace": "Instead of users: a CSV of TIMESTAMP,ContextTokens,GeneratedTokens, as Azure publishes them.",
        "count": "Requests a measurement. Unset: four a user and 20 at least; 200 at a rate; the whole trace.",
        "shared": "Tokens that all prompts begin with, besides; 0 unless given.",
        "goals": "Count the requests within ttft:MS,tpot:MS,e2el:MS.",
    }
)


_WHY = MappingProxyType(
    {
        "backend": "requests are OpenAI's",
        "endpoint_type": "requests are OpenAI's",
        "endpoint": "requests go to /v1/completions",
        "dataset_name": "prompts are random token ids; see --trace",
        "tokenizer": "prompts are token ids",
        "tokenizer_mode": "prompts are token ids",
        "trust_remote_code": "prompts are token ids",
        "temperature": "it is 0",
        "ignore_eos": "answers always have --random-output-len tokens",
        "disable_tqdm": "nothing is drawn where standard error is no terminal",
    }
)
"""Options of `vllm bench serve` that are none here, and why."""
_FLAGS = ("trust_remote_code", "ignore_eos", "disable_tqdm")
_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "backend": ("vllm", "openai"),
        "endpoint_type": ("vllm", "openai"),
        "endpoint": ("/v1/completions",),
        "dataset_name": ("random",),
        "tokenizer": ANY,
        "tokenizer_mode": ANY,
        "temperature": (0,),
    }
)
"""Of those with a value, what changes nothing."""


class LoadCommand(click.Command):
    """Takes the options of `vllm bench serve` whose values change nothing, and names them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command."""
        return super().parse_args(ctx, say_unneeded(*without_unneeded(args, _FLAGS, _VALUES, _WHY)))


@click.command("serve", cls=LoadCommand)
@click.option("--base-url", help="The server. Unset: http, --host and --port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Of the server, where --base-url is not given.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Its port, likewise.")
@click.option("--model", help="Unset: the first that the server names.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Of the server, if it wants one.")
@click.option("--max-concurrency", "users", type=parse_counts, metavar="N[,N...]", help=HELP["users"])
@click.option("--request-rate", "rates", type=parse_rates, metavar="R[,R...]", help=HELP["rates"])
@click.option("--burstiness", type=FiniteRange(0.01), default=1.0, show_default=True, help=HELP["burstiness"])
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=HELP["trace"])
@click.option("--speed", type=FiniteRange(1e-3), default=1.0, show_default=True, help="Of the trace.")
@click.option("--shrink", type=FiniteRange(1), default=1.0, show_default=True, help="Divides the trace's prompts.")
@click.option("--num-prompts", type=click.IntRange(1), help=HELP["count"])
@click.option("--random-input-len", "length", type=parse_range, default="128:256", **SHOWN, help="Tokens a prompt has.")
@click.option("--random-output-len", "new", type=parse_range, default="32:64", **SHOWN, help="Tokens an answer has.")
@click.option(
    "--random-prefix-len", "shared", type=click.IntRange(0), default=0, show_default=True, help=HELP["shared"]
)
@click.option("--goodput", "goals", type=parse_goodput, default="", metavar="WHAT:MS[,...]", help=HELP["goals"])
@click.option(
    "--num-warmups", type=click.IntRange(0), default=8, show_default=True, help="Requests before, not counted."
)
@click.option("--seed", default=7, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=min(4, os.cpu_count() or 1), show_default=True)
@click.option("--label", help="What the report calls this run. Unset: the model.")
@click.option("--save-result", "path", type=FILE, callback=writable, **OUTPUT)
def command(
    base_url: str | None,
    host: str,
    port: int,
    model: str | None,
    api_key: str,
    path: Path | None,
    processes: int,
    **given: Any,
) -> None:
    """Load-test a server that runs: tokens/s and times by number of users, by rate, or along a recorded trace."""
    num_warmups, goals, label = (given.pop(name) for name in ("num_warmups", "goals", "label"))
    levels = load_levels(**given)
    origin = _origin(base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}")
    base_url = str(origin)
    model = model or served_model(base_url, api_key)
    job = LoadJob(host=origin.host, port=origin.port, model=model, streams=1, prompts=[], output_lens=[], key=api_key)
    job = replace(job, path=origin.prefix, tls=origin.tls)
    about: dict[str, Any] = {"label": label or model, "model": model, "server": base_url}
    about |= {"quire": __version__, "environment": environment(api_key)}
    about |= {"version": parse_version(fetch(f"{base_url}/version", api_key) or b"")}
    if num_warmups:
        # Reversed, so that the first level's prompts are not in the prefix cache.
        prompts = [prompt[::-1] for prompt in levels[0].prompts[:num_warmups]]
        lens = levels[0].output_lens[:num_warmups]
        run_clients(replace(job, streams=num_warmups, prompts=prompts, output_lens=lens), processes)
    found: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for level in levels:
            bar = bars.add_task(level.name, total=len(level.prompts))
            began = time.time()
            with GPUMonitor() as gpu, MetricsMonitor(base_url, api_key) as metrics:
                whole = replace(job, streams=level.users, prompts=level.prompts, output_lens=level.output_lens)
                whole = replace(whole, due=level.due)
                results = run_clients(whole, processes, lambda n, bar=bar: bars.advance(bar, n))  # type: ignore[misc]
            bars.remove_task(bar)
            row = {"level": level.name, "users": level.users, "rate": level.rate, **measured(results, goals)}
            late = min(result["began"] for result in results) - began
            samples = {"gauges": [{**each, "s": each["s"] - late} for each in metrics.samples]}
            found.append({**row, **samples, "gpu": [(s - late, *rest) for s, *rest in gpu.samples]})
            if path is not None:
                path.write_text(json.dumps({"about": about, "goals": goals, "levels": found}))
            Console().print(summary_line(row))
            if not any(each["ok"] for each in found):
                # A server that answered nothing at the first level answers nothing at the next.
                break
    show(found)
    if path is not None:
        click.echo(f"{path} holds all results; `quire bench report {path}` plots them")
    if not any(row["ok"] for row in found):
        summary = asyncio.run(refusal(replace(job, prompts=levels[0].prompts, output_lens=levels[0].output_lens)))
        raise click.ClickException(f"{base_url} answered no request{refused(found[0])}; it says: {summary}")


def _origin(url: str) -> Origin:
    """A server's address. Raises click.BadParameter."""
    try:
        return Origin.parse(url)
    except InvalidConfig as error:
        raise click.BadParameter(str(error).removeprefix("upstream: "), param_hint="--base-url") from error


def parse_version(body: bytes) -> Any:
    """A server's answer to /version; None where that is not JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


async def refusal(job: LoadJob) -> str:
    """The server's error message to a job's first request."""
    try:
        reader, writer = await asyncio.open_connection(job.host, job.port, ssl=job.tls or None)
        writer.write(encode_request(job, 0))
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


def measured(results: Sequence[ClientResult], goals: Mapping[str, float]) -> dict[str, Any]:
    """One level's row: counts, rates, times in milliseconds by QUANTILES, their means, and the timing of every request.

    The definitions are those of `vllm bench serve`: `ttft` to the first token, `e2el` to the last, `itl` between
    events, `tpot` from the first token to the last over the tokens after the first, of answers with more than one.
    Percentiles are interpolated. Requests that failed count in none of them.

    goals: milliseconds that a request may take, by ttft, tpot and e2el; those within all goals count as `good`.
    """
    whole = summarize(results)
    every = sorted((RequestTiming(*one) for result in results for one in result["asked"]), key=lambda one: one.since)
    answered = [one for one in every if one.status == 200 and one.first]
    times: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
    good = 0
    for one in answered:
        took = {"ttft": one.first - one.since, "e2el": one.ended - one.since}
        took["tpot"] = (one.ended - one.first) / max(1, one.new - 1)
        for what, seconds in took.items():
            if what != "tpot" or one.new > 1:
                times[what].append(1e3 * seconds)
        good += all(1e3 * took[what] <= limit for what, limit in goals.items())
    times["itl"] = [1e3 * x for result in results for x in result["gaps"]]
    known = {what: np.asarray(values or [np.nan]) for what, values in times.items()}
    seconds = whole["seconds"]
    return {
        "requests": len(every),
        "ok": len(answered),
        "statuses": dict(Counter(str(one.status) for one in every)),
        "seconds": seconds,
        "requests_s": len(answered) / seconds,
        "prompt_tokens_s": whole["prompted"] / seconds,
        "tokens_s": whole["tokens_s"],
        "tokens_an_event": whole["tokens_an_event"],
        "good": good if goals else None,
        "good_s": good / seconds if goals else None,
        "ms": {what: np.percentile(values, QUANTILES).tolist() for what, values in known.items()},
        "mean_ms": {what: float(values.mean()) for what, values in known.items()},
        "asked": every,
    }


def summary_line(row: Mapping[str, Any]) -> str:
    """One line about one level."""
    summary = f"{row['level']}: {row['ok']} of {row['requests']} answered, {row['tokens_s']:,.0f} tokens/s"
    return summary + refused(row)


def refused(row: Mapping[str, Any]) -> str:
    """How many requests had which status, besides those that were answered."""
    other = {status: count for status, count in row["statuses"].items() if status != "200"}
    return "".join(f", {count} x {status if status != '0' else 'broken'}" for status, count in other.items())


def show(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row for each level."""
    table = numbers(
        "times in milliseconds, p50 / p99",
        *("load", "answered", "requests/s", "tokens/s", "first token", "a token", "whole answer", "good"),
    )
    for row in found:
        times = [row["ms"][what] for what in ("ttft", "tpot", "e2el")]
        ms = [f"{each[0]:,.1f} / {each[-1]:,.1f}" if row["ok"] else "-" for each in times]
        good = "" if row["good"] is None else f"{100 * row['good'] / row['requests']:.0f} %"
        answered = f"{row['ok']}/{row['requests']}"
        table.add_row(row["level"], answered, f"{row['requests_s']:.2f}", f"{row['tokens_s']:,.0f}", *ms, good)
    print_table(table, least=120)
