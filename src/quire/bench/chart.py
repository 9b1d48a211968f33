"""Line charts as SVG text, and a page of them that needs nothing else: for reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 46, 32
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea")

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .7rem; text-align: right; }
thead { border-bottom: 1px solid currentColor; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
svg { max-width: 100%; } text { fill: currentColor; font-size: 12px; } .grid { stroke: currentColor; opacity: .2; }
pre { white-space: pre-wrap; }
"""


def lines(title: str, xs: Sequence[int], series: Mapping[str, Sequence[float]]) -> str:
    """A chart of each series over `xs`, which is drawn by its logarithm: doublings are equally far apart.

    Values that are no numbers are left out, and the line with them.
    """
    top = _round_up(max((y for ys in series.values() for y in ys if math.isfinite(y)), default=1.0))
    span = math.log(max(xs) / min(xs)) or 1.0

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / min(xs)) / span

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for part in range(5):
        at = y(top * part / 4)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{top * part / 4:,.4g}</text>')
    for value in xs:
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{value}</text>')
    for number, (name, ys) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        known = [(a, b) for a, b in zip(xs, ys, strict=True) if math.isfinite(b)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in known)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for a, b in known:
            told = escape(f"{name}: {b:,.4g} at {a}")
            parts.append(
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{colour}"><title>{told}</title></circle>'
            )
        parts.append(f'<text x="{LEFT + 90 * number}" y="34" style="fill:{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def page(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], charts: Sequence[str], about: str) -> str:
    """A table, the charts below it, and what it all was measured on, as one HTML file."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<body><h1>{escape(title)}</h1><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
        f'<div class="charts">{"".join(charts)}</div><h2>Measured on</h2><pre>{escape(about)}</pre></body></html>\n'
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 10 times a power of ten: four equal parts of it are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 5, 10) if value <= power * step * (1 + 1e-9))
