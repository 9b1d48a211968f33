"""`quire bench load`: so many users at once, each asking again when answered, and a report of how that went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from quire.backends.http1 import Origin
from quire.bench.chart import lines, page
from quire.bench.clients import Part, figures, run
from quire.bench.pair import environment
from quire.bench.started import fetched, model_of
from quire.bench.watch import Watch, revision
from quire.bench.workloads import prompts
from quire.observe.histogram import percentile

Row = dict[str, Any]

HEAD: tuple[str, ...] = (
    *("users", "requests", "failed", "requests/s", "tokens/s"),
    *("first token ms", "p99", "next ms", "p99", "answer ms", "p95", "p99"),
)


@click.command("load")
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--users",
    "levels",
    multiple=True,
    type=click.IntRange(1, 4096),
    default=tuple(1 << i for i in range(8)),
    show_default=True,
    help="Users at once, one level after the other.",
)
@click.option("--requests", type=click.IntRange(1), default=4, show_default=True, help="Requests a user, 16 at least.")
@click.option("--prompt", type=(int, int), default=(16, 64), show_default=True, help="Prompt tokens, from and to.")
@click.option("--new", type=(int, int), default=(16, 32), show_default=True, help="New tokens, from and to.")
@click.option("--model", help="Unset: the first that the server lists.")
@click.option("--api-key", envvar="QUIRE_API_KEY", default="", help="The server's key.")
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True, help="Client processes at most.")
@click.option("--seed", default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for report.html, with plots, and report.json.")
def command(url: str, levels: tuple[int, ...], model: str | None, api_key: str, out: Path | None, **load: Any) -> None:
    """Load a running server with more and more users, and report throughput and latencies.

    The server is Quire, vLLM, or another that takes token ids and `ignore_eos` at /v1/completions.
    """
    where = Origin.parse(url)
    served = model or model_of(str(where), api_key)
    about = {"url": str(where), "model": served, "revision": revision(), "environment": machine(), "load": load}
    _level(where, served, api_key, 1, **{**load, "requests": 1, "seed": load["seed"] - 1})  # opens what is opened once
    rows: list[Row] = []
    with Watch() as watch:
        for users in sorted(set(levels)):
            rows.append(_level(where, served, api_key, users, **load))
            click.echo(
                "  ".join(f"{name} {value}" for name, value in zip(HEAD, cells(rows[-1]), strict=True)), err=True
            )
    show(rows)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        kept = {"about": about, "levels": rows, "gpu": watch.samples}
        (out / "report.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (out / "report.html").write_text(report(rows, about), encoding="utf-8")
        click.echo(f"report: {out / 'report.html'}")


def _level(
    where: Origin,
    model: str,
    key: str,
    users: int,
    *,
    requests: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    processes: int,
    seed: int,
) -> Row:
    """So many users until all is answered. Prompts are new at each level, so that none finds its own cached."""
    count = max(16, users * requests)
    ids, lengths = prompts(count, prompt, new, seed=1000 * seed + users)
    small = [[5 + token % 395 for token in each] for each in ids]  # any vocabulary has these
    parts = run(
        where.host, where.port, model, small, lengths, streams=users, processes=processes, key=key, tls=where.tls
    )
    stats = fetched(f"{where}/stats", key)
    return {"users": users, "requests": count, **measured(parts), "stats": stats and json.loads(stats), "parts": parts}


def measured(parts: Sequence[Part]) -> Row:
    """`figures`, and besides: requests/s, whole answers' [p50, p95, p99] in ms, and refusals by status."""
    whole = [x for part in parts for x in part["whole"]]
    seconds = max(part["ended"] for part in parts) - min(part["began"] for part in parts)
    refused: dict[str, int] = {}
    for part in parts:
        for status, count in part["refused"].items():
            refused[status] = refused.get(status, 0) + count
    return {
        **figures(parts),
        "requests_s": len(whole) / seconds,
        "answer_ms": [1e3 * percentile(whole, q) for q in (50, 95, 99)],
        "refused": refused,
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A level's figures in the order of HEAD; failures with the statuses they had."""
    refused = ", ".join(f"{count} x {status}" for status, count in sorted(row["refused"].items()))
    failed = f"{row['failed']}{f' ({refused})' if refused else ''}"
    times = [*row["ttft_ms"], *row["itl_ms"], *row["answer_ms"]]
    speeds = [f"{row['requests_s']:.1f}", f"{row['tokens_s']:,.0f}"]
    return [str(row["users"]), str(row["requests"]), failed, *speeds, *(f"{ms:,.1f}" for ms in times)]


def machine() -> dict[str, Any]:
    """`environment`, but for the command line: it may hold a key."""
    return {name: value for name, value in environment().items() if name != "argv"}


def show(rows: Sequence[Row]) -> None:
    table = Table(title="load: medians and tails by users at once", title_justify="left")
    for name in HEAD:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=140).print(table)


def report(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The table and its plots, as a page."""
    xs = [row["users"] for row in rows]

    def over(name: str, labels: Sequence[str]) -> dict[str, list[float]]:
        return {label: [row[name][i] for row in rows] for i, label in enumerate(labels)}

    charts = [
        lines("tokens/s by users", xs, {"tokens/s": [row["tokens_s"] for row in rows]}),
        lines("requests/s by users", xs, {"requests/s": [row["requests_s"] for row in rows]}),
        lines("time to first token, ms", xs, over("ttft_ms", ("p50", "p99"))),
        lines("time between tokens, ms", xs, over("itl_ms", ("p50", "p99"))),
        lines("time of an answer, ms", xs, over("answer_ms", ("p50", "p95", "p99"))),
        lines("failed", xs, {"failed": [float(row["failed"]) for row in rows]}),
    ]
    table = [cells(row) for row in rows]
    return page(f"Load on {about['model']} at {about['url']}", HEAD, table, charts, json.dumps(about, indent=1))
