"""`quire verify`: the same answers to the bit, here and now, or where they differ; and what that costs."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from quire.cli.base import OFFLINE, SettingsCommand
from quire.cli.verification import Difference, Price, Row, prices, verified
from quire.config import Settings
from quire.errors import InvalidConfig

WIDE = 160
"""Columns where the output is no terminal."""


@click.command(
    "verify",
    cls=SettingsCommand,
    sections=OFFLINE,
    positional=True,
    params=[
        click.Option(["--requests"], type=click.IntRange(1, 512), default=12, show_default=True, help="How many."),
        click.Option(
            ["--new"], type=click.IntRange(1, 4096), default=24, show_default=True, help="Tokens of each answer."
        ),
        click.Option(
            ["--repeat"],
            type=click.IntRange(0, 100),
            default=5,
            show_default=True,
            help="Rounds in which both modes are timed, in turns; 0: not timed. They need the weights twice.",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ],
)
@click.pass_context
def command(ctx: click.Context, settings: Settings, requests: int, new: int, repeat: int, as_json: bool) -> None:
    """Answer the same requests alone, in a batch, from a warm cache, in chunks, preempted and with drafts, and compare
    tokens and log-probabilities to the bit. With --deterministic they must be equal: the exit code is 1 where any
    differs, in either mode."""
    console = Console(stderr=True)
    rows = list[Row]()
    with console.status("answering") as status:
        for row in verified(settings, count=requests, new=new):
            rows.append(row)
            status.update(f"answered: {row.name}")
        cost, why = charged(settings, repeat)
    about = {
        "model": settings.model.model,
        "deterministic": bool(settings.execution.deterministic),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    if as_json:
        click.echo(
            json.dumps(
                {
                    **about,
                    "equal": equal(rows),
                    "situations": list(map(plain, rows)),
                    "price": [{**each._asdict(), "ratio": each.ratio} for each in cost],
                    "unpriced": why,
                }
            )
        )
    else:
        show(settings, rows, cost, why)
    ctx.exit(0 if equal(rows) else 1)


def charged(settings: Settings, repeat: int) -> tuple[list[Price], str]:
    """The price, or why there is none."""
    if not repeat:
        return [], "not asked for (--repeat 0)"
    try:
        return prices(settings, repeat), ""
    except InvalidConfig as error:
        return [], str(error)


def equal(rows: Sequence[Row]) -> bool:
    """Whether no answer differs."""
    return not any(row.differ for row in rows)


def plain(row: Row) -> dict[str, Any]:
    """A situation's row for JSON."""
    return {
        **row._asdict(),
        "happened": row.happened[0],
        "of": row.happened[1],
        "first": row.first and row.first._asdict(),
    }


def show(settings: Settings, rows: Sequence[Row], cost: Sequence[Price], why: str) -> None:
    """Print the tables. why: there is no price."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    mode = "deterministic mode" if settings.execution.deterministic else "default mode"
    table = Table(title=f"{settings.model.model}, {mode}: beside what each request is answered alone")
    table.title_justify = "left"
    for heading in ("situation", "requests", "tokens", "seen", "differ", "in tokens", "log-prob. apart", "the first"):
        numbers = heading in ("requests", "tokens", "differ", "in tokens", "log-prob. apart")
        table.add_column(heading, justify="right" if numbers else "left")
    for row in rows:
        seen = f"{row.happened[0]:,} {row.happened[1]}" if row.happened[0] else "it did not come about"
        counts = (str(row.differ), str(row.changed), f"{row.apart:.1e}" if row.apart else "0")
        cells = (str(row.requests), f"{row.tokens:,}", seen, *counts, describe(row.first))
        table.add_row(row.name, *(("", "", "not tried", "", "", "", row.why) if row.why else cells))
    console.print(table)
    console.print(verdict(bool(settings.execution.deterministic), rows))
    if not cost:
        console.print(f"price: {why}")
        return
    table = Table(title="price, tokens a second, medians of turns", title_justify="left")
    for heading in ("workload", "default", "deterministic", "ratio"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for each in cost:
        table.add_row(each.workload, f"{each.off:,.0f}", f"{each.on:,.0f}", f"{each.ratio:.2f}")
    console.print(table)


def describe(first: Difference | None) -> str:
    """The position, and both tokens with their log-probabilities."""
    if first is None:
        return ""
    alone, here = ("the end" if each is None else f"{each[0]} ({each[1]:.9g})" for each in (first.alone, first.here))
    return f"request {first.request}, token {first.position + 1}: {alone} alone, {here} here"


def verdict(deterministic: bool, rows: Sequence[Row]) -> str:
    """The conclusion, in a sentence."""
    idle = [row.name for row in rows if not row.happened[0]]
    rest = f" Not put to the test: {', '.join(idle)}." if idle else ""
    if equal(rows):
        return f"Every token and every log-probability compared is the same to the bit.{rest}"
    if deterministic:
        return f"Some differ: on this machine the mode does not keep its promise. Please report it, with --json.{rest}"
    return f"Some differ, by rounding, as they may in the default mode; --deterministic is the one without.{rest}"
