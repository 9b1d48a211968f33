"""`quire bench report`: one page that shows what load tests found, several side by side, with nothing to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from quire.assembly import extra
from quire.bench.offline import FILE
from quire.bench.serve import QUANTILES
from quire.errors import InvalidRequest

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.charts svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8a8f9840; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 0; overflow-wrap: anywhere; }
"""

_COLUMNS = (
    "load",
    "answered",
    "refused",
    "requests/s",
    "tokens/s in",
    "tokens/s out",
    "tokens an event",
    "within goals",
)
_TIMES: Mapping[str, str] = {"ttft": "first token", "tpot": "a token", "itl": "between events", "e2el": "whole answer"}


@click.command("report")
@click.argument("paths", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FILE, default=Path("report.html"), show_default=True, help="The page.")
def command(paths: tuple[Path, ...], output: Path) -> None:
    """Draw results of `quire bench serve`, a line per file, and of `python -m benchmarks.gpu` and `http`."""
    found = [read(path) for path in paths]
    draw = extra("quire.bench.charts", "report")
    runs = [each for each in found if "levels" in each]
    rows = [row for each in found if "rows" in each for row in each["rows"]]
    charts = [*(draw.charts(runs) if runs else ()), *(draw.bars(rows) if rows else ())]
    output.write_text(page(runs, rows, charts), encoding="utf-8")
    click.echo(f"{output}: open it in a browser")


def read(path: Path) -> dict[str, Any]:
    """Of `quire bench serve`, or of a benchmark beside a peer. Raises InvalidRequest where it is neither."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {str(error.strerror).lower()}", param="paths") from error
    try:
        found = json.loads(text)
        load = "levels" in found and {"about", "goals"} <= found.keys() and all("asked" in x for x in found["levels"])
        whole = load or ("rows" in found and all("workload" in row for row in found["rows"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
        found = {}
    if not whole:
        raise InvalidRequest(
            f"{path} is not what `quire bench serve --save-result` or `python -m benchmarks.gpu` saves", param="paths"
        )
    return dict(found)


def page(runs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], charts: Sequence[str]) -> str:
    """The whole report as HTML with its charts inside."""
    names = escape(" and ".join(run["about"]["label"] for run in runs)) or "beside a peer"
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Quire bench: {names}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>{names}</h1>",
        f'<div class="charts">{"".join(charts)}</div>',
    ]
    for run in runs:
        parts.append(f"<h2>{escape(run['about']['label'])}</h2>{table(run)}{times(run)}{about(run)}")
    if rows:
        parts.append(f"<h2>Beside a peer</h2>{beside(rows)}")
    return "\n".join((*parts, "</body></html>\n"))


def beside(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of workloads beside a peer."""
    heads = ("workload", "at once", "ours", "peer", "target", "ceiling")
    shown = []
    for row in rows:
        figures = (row.get(name) for name in heads[2:])
        cells = ("" if x is None else f"{x:,.3f}" if x < 100 else f"{x:,.0f}" for x in figures)
        shown.append((row["workload"], str(row.get("batch") or row.get("concurrency") or ""), *cells))
    return grid(heads, shown)


def table(run: Mapping[str, Any]) -> str:
    """A table with a row for each level."""
    rows = []
    for level in run["levels"]:
        refused = ", ".join(f"{count} x {status}" for status, count in level["statuses"].items() if status != "200")
        good = "" if level["good"] is None else f"{100 * level['good'] / level['requests']:.0f} %"
        speeds = (f"{level[name]:,.0f}" for name in ("prompt_tokens_s", "tokens_s"))
        answered = f"{level['ok']} of {level['requests']}"
        shown = (level["level"], answered, refused, f"{level['requests_s']:.2f}", *speeds)
        rows.append((*shown, f"{level['tokens_an_event']:.2f}", good))
    return grid(_COLUMNS, rows)


def times(run: Mapping[str, Any]) -> str:
    """Milliseconds, a row for each level and a column for each quantile."""
    heads = ("milliseconds", *(f"{name} p{q}" for name in _TIMES.values() for q in QUANTILES))
    rows = [(level["level"], *(f"{x:,.1f}" for what in _TIMES for x in level["ms"][what])) for level in run["levels"]]
    return grid(heads, rows)


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def about(run: Mapping[str, Any]) -> str:
    """Versions, options and hardware of a run."""
    details = {**run["about"], "goals, milliseconds": run["goals"] or "none"}
    lines = (
        f"<dt>{escape(str(k))}</dt><dd>{escape(v if isinstance(v, str) else json.dumps(v))}</dd>"
        for k, v in details.items()
    )
    return f"<details><summary>How it was measured</summary><dl>{''.join(lines)}</dl></details>"
