"""One page about simulations, with its charts inside: nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quire.assembly import extra
from quire.bench.report import STYLE, grid
from quire.sim.results import PERCENTILES

_TIMES: Mapping[str, str] = {"ttft": "first token", "tpot": "a token", "itl": "between tokens", "e2el": "whole answer"}
_HEADS = (
    *("run", "replicas", "answered", "refused", "requests/s", "tokens/s", "within goals", "busy", "hits", "preempted"),
    *("cost", "a million tokens", "digest"),
)


def page(found: Mapping[str, Any]) -> str:
    """HTML about what `quire simulate` found."""
    rows = found["runs"]
    title = escape(f"{found['model']}, {found['load']}")
    charts = extra("quire.bench.charts", "report").simulated(rows)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Quire simulate: {title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        f'<div class="charts">{"".join(charts)}</div>',
        f"<h2>Runs</h2>{grid(_HEADS, [_cells(row, all(each['chosen'] for each in rows)) for row in rows])}",
        f"<h2>Times</h2>{_times(rows)}",
        f"<details><summary>How it was simulated</summary><dl>{_about(found)}</dl></details>",
    ]
    return "\n".join((*parts, "</body></html>\n"))


def _cells(row: Mapping[str, Any], all_chosen: bool) -> tuple[str, ...]:
    good = f"{100 * row['good_share']:.1f} %"
    hits = f"{100 * row['hit_rate']:.1f} %" if row["has_prefixes"] else "unknown"
    cost = f"{row['cost']:,.2f}" if "cost" in row else ""
    each = f"{row['cost_per_million_tokens']:,.3f}" if "cost" in row else ""
    return (
        row["name"] + (" *" if row["chosen"] and not all_chosen else ""),
        *(f"{row['replicas']:,}", f"{row['answered']:,} of {row['requests']:,}", f"{row['refused']:,}"),
        *(f"{row['requests_s']:,.2f}", f"{row['tokens_s']:,.0f}", good, f"{100 * row['utilisation']:.0f} %"),
        *(hits, f"{row['preemptions']:,}", cost, each, row["digest"]),
    )


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("milliseconds", *(f"{name} p{q}" for name in _TIMES.values() for q in PERCENTILES))
    return grid(
        heads,
        [(row["name"], *(f"{row['ms'][what][f'p{q}']:,.1f}" for what in _TIMES for q in PERCENTILES)) for row in rows],
    )


def _about(found: Mapping[str, Any]) -> str:
    lines = [*found["runs"][0]["describes"], ("goals, milliseconds", json.dumps(found["goals"]))]
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in lines)
