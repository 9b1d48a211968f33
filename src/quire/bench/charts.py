"""Charts as SVG: of load tests, and of benchmarks beside a peer.

Grey on nothing, so that they read on light and dark alike. Needs matplotlib (extra `report`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#14b8a6", "#ec4899")
GREY = "#8a8f98"
STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quire",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color", "text.color", "grid.color"), GREY),
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
}

Run = Mapping[str, Any]
"""What `quire bench serve` saved: `about`, `goals`, `levels`."""


Row = Mapping[str, Any]
"""A workload's row of `python -m benchmarks.gpu` or `http`: `ours`, `peer`, `target`, `ceiling`."""


def charts(runs: Sequence[Run]) -> list[str]:
    """Everything worth a look, as SVG, the comparison of all runs first."""
    with rc_context(dict(STYLE)):
        drawn = []
        if any(len(run["levels"]) > 1 for run in runs):
            drawn += [
                by_load(runs, "tokens a second", [("tokens_s", None)]),
                by_load(runs, "time to first token, ms", [("ttft", 0), ("ttft", -1)]),
                by_load(runs, "time a token after the first, ms", [("tpot", 0), ("tpot", -1)]),
            ]
            if any(run["goals"] for run in runs):
                drawn.append(by_load(runs, "requests a second within the goals", [("good_s", None)]))
        for run in runs:
            drawn += [spread(run, "ttft", "time to first token, ms"), spread(run, "e2el", "time of a whole answer, ms")]
            drawn.append(timeline(run))
        return [svg(figure) for figure in drawn]


def bars(rows: Sequence[Row]) -> list[str]:
    """How much faster than the recorded peer each workload is, and than the ceiling allows; as one SVG."""
    kept = [row for row in rows if row.get("ours") and row.get("peer")][::-1]
    with rc_context(dict(STYLE)):
        figure, axes = plot("times the peer's speed; the tick is the target, the number ours and the peer's", 9.4, 1)
        figure.set_size_inches(9.4, 0.8 + 0.27 * len(kept))
        for at, row in enumerate(kept):
            ratio = times(row, row["ours"])
            axes.barh(at, ratio, 0.66, color=COLOURS[0] if ratio >= 1 else COLOURS[1], alpha=0.85)
            unit = "ms a token" if slow(row) else "tokens/s"
            shown = f"{plain(rounded(row['ours']), None)} / {plain(rounded(row['peer']), None)} {unit}"
            goal = times(row, row["target"]) if row.get("target") else ratio
            axes.plot([goal] * 2, [at - 0.4, at + 0.4], color=GREY, linewidth=1.4)
            end, apart = (max(ratio, goal), at), "offset points"
            axes.annotate(shown, end, xytext=(4, 0), textcoords=apart, va="center", fontsize=7.5)
        axes.axvline(1.0, color=GREY, linewidth=0.9)
        axes.set_yticks(range(len(kept)), [named(row) for row in kept])
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.22 * max((times(row, row["ours"]) for row in kept), default=1.0))
        return [svg(figure)]


def slow(row: Row) -> bool:
    """Whether less is better."""
    return "ms_a_token" in row


def times(row: Row, value: float) -> float:
    """How many times the peer's speed `value` is."""
    return float(row["peer"] / value if slow(row) else value / row["peer"])


def rounded(value: float) -> float:
    """Three significant digits, or a whole number from 100 on."""
    return round(value) if value >= 100 else float(f"{value:.3g}")


def named(row: Row) -> str:
    """Label of a workload."""
    if "concurrency" in row:
        return f"{row['workload']}, {row['concurrency']} at once"
    return str(row["workload"]) + (f", batch {row['batch']}" if row["batch"] else "")


def simulated(rows: Sequence[Row]) -> list[str]:
    """Of simulations: cost against goodput, first tokens, and how many replicas there were; as SVG."""
    with rc_context(dict(STYLE)):
        drawn = [cost_and_goodput(rows), by_replicas(rows, "ttft", "time to first token, ms")]
        drawn.append(by_replicas(rows, "itl", "time between tokens, ms"))
        if any(len(row["sizes"]) > 1 for row in rows):
            drawn.append(replicas_over_time(rows))
        return [svg(figure) for figure in drawn]


def cost_of(row: Row) -> float:
    """The cost of a simulated row, or the replicas' hours where no price was given."""
    return float(row.get("cost", row["replica_hours"]))


def in_groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of the same settings but for the number of replicas, by cost."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=cost_of):
        others = [f"{name} {value}" for name, value in row["set"].items() if name != "replicas"]
        groups.setdefault(", ".join(others) or "as asked", []).append(row)
    return groups


def beside(axes: Axes) -> None:
    """A legend on the right, where it covers nothing."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def cost_and_goodput(rows: Sequence[Row]) -> Figure:
    """A point a row, joined where only the number of replicas differs."""
    priced = any("cost" in row for row in rows)
    figure, axes = plot(
        ("cost" if priced else "replica hours") + " against requests a second within the goals", 6.4, 3.6
    )
    groups, all_chosen = in_groups(rows), all(row.get("chosen") for row in rows)
    for (name, group), colour in zip(groups.items(), cycle(COLOURS), strict=False):
        points = [(row["good_s"], cost_of(row)) for row in group]
        axes.plot(*zip(*points, strict=True), "-", marker="o", ms=4, color=colour, label=name)
        for row, point in zip(group, points, strict=True):
            shown = f"{row['replicas']}" + (" *" if row.get("chosen") and not all_chosen else "")
            axes.annotate(shown, point, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("requests a second within the goals")
    axes.set_ylabel("cost" if priced else "replica hours")
    axes.set_xlim(0, 1.08 * max(row["good_s"] for row in rows) or None)
    axes.set_ylim(0, 1.08 * max(map(cost_of, rows)) or None)
    if len(groups) > 1:
        beside(axes)
    return figure


def by_replicas(rows: Sequence[Row], what: str, title: str) -> Figure:
    """p50 (dashed) and p99 of a time, by replicas where their number differs, else by row."""
    figure, axes = plot(title)
    groups = in_groups(rows)
    if any(len(group) > 1 for group in groups.values()):
        for (name, group), colour in zip(groups.items(), cycle(COLOURS), strict=False):
            for statistic, line in (("p99", "-"), ("p50", "--")):
                points = sorted((row["replicas"], row["ms"][what][statistic]) for row in group)
                axes.plot(*zip(*points, strict=True), line, marker="o", ms=3, color=colour, label=f"{name} {statistic}")
        axes.set_xlabel("replicas")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(plain))
        beside(axes)
    else:
        names = list(groups)
        figure.set_size_inches(5.2, max(2.9, 0.8 + 0.27 * len(names)))
        for shift, statistic, colour in ((-0.2, "p50", COLOURS[0]), (0.2, "p99", COLOURS[1])):
            heights = [groups[name][0]["ms"][what][statistic] for name in names]
            axes.barh([i + shift for i in range(len(names))], heights, 0.38, color=colour, label=statistic)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("ms")
        beside(axes)
        return figure
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_minor_formatter(FuncFormatter(sparse))
    return figure


def replicas_over_time(rows: Sequence[Row]) -> Figure:
    """How many replicas took requests, as an autoscaler had it."""
    figure, axes = plot("replicas over time, s", 10.8, 2.6)
    for row, colour in zip(rows, cycle(COLOURS), strict=False):
        points = [*row["sizes"], (row["seconds"], row["sizes"][-1][1])]
        axes.step(*zip(*points, strict=True), where="post", color=colour, label=row["name"])
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG element, the same for the same data."""
    with io.StringIO() as out:
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        return "<svg" + out.getvalue().partition("<svg")[2]


def plot(title: str, width: float = 5.2, height: float = 2.9) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def load_of(level: Mapping[str, Any]) -> float:
    """Where a level stands on the axis of loads."""
    return float(level["rate"] or level["users"])


def by_load(runs: Sequence[Run], title: str, what: Sequence[tuple[str, int | None]]) -> Figure:
    """A line a run and quantity: solid for the first of `what`, dashed for others. An int picks a quantile."""
    figure, axes = plot(title)
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        levels = sorted((level for level in run["levels"] if level["ok"]), key=load_of)
        for i, (name, quantile) in enumerate(what):
            values = [level[name] if quantile is None else level["ms"][name][quantile] for level in levels]
            label = run["about"]["label"] + ("" if quantile is None else " p50" if quantile == 0 else " p99")
            kept = [(load_of(level), y) for level, y in zip(levels, values, strict=True) if y is not None]
            if kept:
                axes.plot(*zip(*kept, strict=True), "--" if i else "-", marker="o", ms=3, color=colour, label=label)
    rates = any(level["rate"] for run in runs for level in run["levels"])
    axes.set_xlabel("requests a second" if rates else "users")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    if what[0][1] is None:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(FuncFormatter(sparse))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.legend()
    return figure


def spread(run: Run, what: str, title: str) -> Figure:
    """Which share of a level's requests took how long."""
    figure, axes = plot(f"{run['about']['label']}: {title}", 4.5)
    levels = [level for level in run["levels"] if level["ok"]]
    for level, colour in zip(levels, cycle(COLOURS), strict=False):
        end = 1 if what == "ttft" else 2
        took = sorted(1e3 * (one[end] - one[0]) for one in level["asked"] if one[5] == 200 and one[1])
        axes.step(took, [(i + 1) / len(took) for i in range(len(took))], color=colour, label=level["level"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.xaxis.set_minor_formatter(FuncFormatter(sparse))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    if levels:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def timeline(run: Run) -> Figure:
    """What the server said of itself, level after level, and how busy a GPU was."""
    figure = Figure(figsize=(10.8, 4.4))
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title(f"{run['about']['label']}: requests at once")
    lower.set_title("tokens a second, and how full the K/V cache is")
    right = lower.twinx()
    right.grid(False)
    right.set_ylim(0, 100)
    right.yaxis.set_major_formatter(PercentFormatter(100.0))
    at = 0.0
    for level in run["levels"]:
        seen = [each for each in level["gauges"] if each["s"] > -0.5]
        s = [at + each["s"] for each in seen]
        upper.plot(s, [each.get("running", 0) for each in seen], color=COLOURS[0])
        upper.plot(s, [each.get("waiting", 0) for each in seen], color=COLOURS[1])
        lower.plot([at + when for when, _ in speeds(seen)], [speed for _, speed in speeds(seen)], color=COLOURS[2])
        right.plot(s, [100 * each.get("kv", 0) for each in seen], color=COLOURS[3])
        right.plot([at + each[0] for each in level["gpu"]], [each[1] for each in level["gpu"]], ":", color=GREY)
        upper.annotate(level["level"], (at, 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top")
        for axes in (upper, lower):
            axes.axvline(at, color=GREY, linewidth=0.6, linestyle=":")
        at += level["seconds"] + 0.5
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
    upper.legend(upper.get_lines()[:2], ("running", "waiting"), loc="center left")
    names = ["tokens a second", "K/V cache", *(["GPU busy"] if run["levels"][0]["gpu"] else [])]
    lower.legend((lower.get_lines()[0], *right.get_lines()[:2])[: len(names)], names, loc="center left")
    lower.set_xlabel("seconds")
    figure.tight_layout()
    return figure


def speeds(seen: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """(seconds, tokens a second) between neighbouring samples."""
    pairs = [(a, b) for a, b in pairwise(seen) if "tokens" in a and "tokens" in b and b["s"] > a["s"]]
    return [((a["s"] + b["s"]) / 2, (b["tokens"] - a["tokens"]) / (b["s"] - a["s"])) for a, b in pairs]


def plain(value: float, _: int | None) -> str:
    """A tick label without exponent."""
    return f"{value:,g}"


def sparse(value: float, at: int | None) -> str:
    """Of ten parts of a decade three are named."""
    return plain(value, at) if f"{value:e}"[0] in "25" else ""
