"""Rows of `benchmarks.price` as a heat map and as a page of Markdown."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Cell = tuple[str, str, int]
"""Feature, model, sequences at once."""

FLAGSHIP = "0.6B bf16"
"""The model whose targets also hold with 256 sequences."""

TARGETS: Mapping[str, float] = {
    **dict.fromkeys(("logprobs", "prompt_logprobs", "bias", "allowed", "bad words"), 0.90),
    **dict.fromkeys(("min_tokens", "penalties", "seeds"), 0.90),
    **dict.fromkeys(("JSON schema", "regex"), 0.85),
    "first run of a schema": 1 / 1.3,
    **dict.fromkeys(("logprobs, HTTP", "JSON schema, HTTP"), 0.85),
}
"""The least ratio wanted with 64 sequences; of those of 0.90 with 256 too, for the flagship."""

NEIGHBOURS, PLAIN_NEIGHBOURS, NEIGHBOURS_WANTED = "beside 8 structured", "beside 8 plain", 0.97
"""What plain requests lose to others that are structured is against as many that are plain."""

LATE_MS = 50.0
"""Nothing may be compiled or captured for longer once an engine is ready."""

PLAIN = ("plain", "plain, HTTP")
"""What ratios are to."""

PEERS = Path(__file__).with_name("data") / "price-peers.json"


def read(paths: Sequence[Path]) -> list[Row]:
    """All rows, in order."""
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines() if line.strip()]


def cells(rows: Sequence[Row]) -> dict[Cell, Row]:
    """The last row of each cell; of plain, which is measured with every group, the median."""
    found: dict[Cell, Row] = {}
    plain: dict[Cell, list[float]] = {}
    for row in rows:
        if "feature" in row:
            cell = (row["feature"], row["model"], row["size"])
            found[cell] = row
            if row["feature"] == "plain" and row["prompt"][0] < row["prompt"][1]:
                plain.setdefault(cell, []).append(row["tok_s"])
    return found | {cell: {**found[cell], "tok_s": round(statistics.median(each))} for cell, each in plain.items()}


def columns(found: Mapping[Cell, Row], models: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Every model with every size, and what else was measured."""
    every = {(model, size) for model in models for size in sizes} | {(model, size) for _, model, size in found}
    order = list(dict.fromkeys([*models, *(model for _, model, _ in found)]))
    return sorted(every, key=lambda column: (order.index(column[0]), column[1]))


def lines(found: Mapping[Cell, Row], features: Sequence[str]) -> list[str]:
    """Every feature, and what else was measured, but plain requests."""
    return list(dict.fromkeys([*features, *(feature for feature, _, _ in found if feature not in PLAIN)]))


# ---------------------------------------------------------------- the heat map


def draw(
    paths: Sequence[Path], to: Path, *, features: Sequence[str], models: Sequence[str], sizes: Sequence[int]
) -> None:
    """The matrix as an image: a row for each feature, a column for each model and size, the ratio as colour and number.

    Grey: not measured. Needs matplotlib.
    """
    found = cells(read(paths))
    across, down = columns(found, models, sizes), lines(found, features)
    ratios = [[found.get((name, *column), {}).get("ratio", math.nan) for column in across] for name in down]
    figure = import_module("matplotlib.figure").Figure(
        figsize=(2.2 + 0.45 * len(across), 1.3 + 0.3 * len(down)), layout="constrained"
    )
    axes = figure.subplots()
    colours = import_module("matplotlib").colormaps["RdYlGn"].with_extremes(bad="#d4d4d8")
    image = axes.imshow(ratios, cmap=colours, vmin=0.5, vmax=1.0, aspect="auto")
    for y, numbers in enumerate(ratios):
        for x, ratio in enumerate(numbers):
            if not math.isnan(ratio):
                # Ends of the scale are dark.
                dark = ratio < 0.58 or ratio > 0.95
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", size=7, color="white" if dark else "black")
    axes.set_xticks(range(len(across)), [str(size) for _, size in across], size=8)
    axes.set_yticks(range(len(down)), down, size=8)
    axes.tick_params(length=0)
    axes.set_xticks([x - 0.5 for x in range(1, len(across))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(down))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    for model in dict.fromkeys(model for model, _ in across):
        places = [x for x, (name, _) in enumerate(across) if name == model]
        axes.text(statistics.mean(places), -0.75, model, ha="center", va="bottom", size=9, weight="bold")
        if places[0]:
            axes.axvline(places[0] - 0.5, color="black", linewidth=1)
    axes.set_xlabel("sequences at once", size=8)
    bar = figure.colorbar(image, ax=axes, extend="both", pad=0.01, fraction=0.02)
    bar.set_label("output tokens/s, ratio to plain", size=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(to, dpi=150)


# ---------------------------------------------------------------- the page


def page(
    paths: Sequence[Path], picture: str, *, features: Sequence[str], models: Sequence[str], sizes: Sequence[int]
) -> str:
    """The matrix in Markdown: what was run, targets, all cells, peers, what was compiled late, what is missing."""
    rows = read(paths)
    found = cells(rows)
    starts = [row for row in rows if "environment" in row]
    parts = [
        "# What each feature of a request costs\n",
        "Speeds are output tokens a second of random weights, and each number is a feature's ratio to plain requests "
        "(greedy, end-of-text ignored) with the same prompts and lengths, from an empty prefix cache: medians of "
        "turns. `benchmarks/price.py` says what each feature is. Of structured answers, forced tokens, where the "
        "grammar allows only one, are not counted.\n",
        *([f"![Ratios to plain]({picture})\n"] if picture else ()),
        "## What was run\n",
        *runs(starts),
        "\n## Targets\n",
        *table(("feature", "model", "sequences", "wanted", "ratio", ""), targets(found)),
        "\n## Ratios\n",
        *matrix(found, lines(found, features), columns(found, models, sizes)),
        "\n## Structured answers\n",
        *table(("feature", "model", "sequences", "tokens", "forced", "ratio", "ratio with forced"), structured(found)),
        "\n## Beside peers\n",
        *peers(found),
        "\n## After ready\n",
        *late(rows),
        *missing(rows),
    ]
    return "\n".join(parts) + "\n"


def table(heads: Sequence[str], body: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for line in body:
        yield f"| {' | '.join(line)} |"


def runs(starts: Sequence[Row]) -> Iterator[str]:
    """Each process: its command, commit, versions, and seconds until it was ready."""
    for row in starts:
        about = row["environment"]
        card = ", ".join(dict.fromkeys((about["card"] or "").splitlines()))
        versions = f"torch {about['torch']}, Python {about['python']}, {card or about['system']}"
        yield (
            f"- `python -m benchmarks.price {' '.join(about['argv'])}` at {about['revision']}: {versions}; "
            f"ready in {row['ready_s']:.1f} s"
            + (f", first structure in {row['first_structure_s']:.2f} s" if row.get("first_structure_s") else "")
        )


def targets(found: Mapping[Cell, Row]) -> Iterator[Sequence[str]]:
    for (feature, model, size), row in found.items():
        wanted = TARGETS.get(feature)
        wide = wanted == 0.90 and model == FLAGSHIP and size == 256
        if wanted is not None and "ratio" in row and (size == 64 or wide):
            yield judged(feature, model, size, wanted, row["ratio"])
        plain = found.get((PLAIN_NEIGHBOURS, model, size), {})
        if feature == NEIGHBOURS and size == 64 and "ratio" in row and "ratio" in plain:
            named = f"{feature}, to {PLAIN_NEIGHBOURS}"
            yield judged(named, model, size, NEIGHBOURS_WANTED, row["ratio"] / plain["ratio"])


def judged(feature: str, model: str, size: int, wanted: float, ratio: float) -> Sequence[str]:
    """A line of the targets."""
    return feature, model, str(size), f"{wanted:.2f}", f"{ratio:.3f}", "met" if ratio >= wanted else "missed"


def matrix(found: Mapping[Cell, Row], down: Sequence[str], across: Sequence[tuple[str, int]]) -> Iterator[str]:
    """A table for each model that was measured: plain's speed, then ratios."""
    for model in dict.fromkeys(model for model, _ in across):
        sizes = [size for name, size in across if name == model]
        if any(name == model for _, name, _ in found):
            yield f"### {model}\n"
            speeds = {name: [found.get((name, model, size), {}).get("tok_s") for size in sizes] for name in PLAIN}
            body = [
                [f"{name}, tokens/s", *(f"{speed:,}" if speed else "" for speed in each)]
                for name, each in speeds.items()
                if any(each)
            ]
            body += [[name, *(ratio(found.get((name, model, size), {})) for size in sizes)] for name in down]
            yield from table(("sequences", *map(str, sizes)), body)
            yield ""


def ratio(row: Row) -> str:
    return "error" if "error" in row else f"{row['ratio']:.3f}" if "ratio" in row else ""


def structured(found: Mapping[Cell, Row]) -> Iterator[Sequence[str]]:
    for (feature, model, size), row in found.items():
        if row.get("forced"):
            counts = (f"{row['tokens']:,}", f"{row['forced']:,}")
            yield feature, model, str(size), *counts, f"{row['ratio']:.3f}", f"{row['ratio_all']:.3f}"


def peers(found: Mapping[Cell, Row]) -> Iterator[str]:
    """Recorded speeds beside ours."""
    recorded = json.loads(PEERS.read_text("utf-8"))
    yield f"{recorded['how']}\n"
    body = []
    for row in recorded["rows"]:
        ours = found.get((row["feature"], row["model"], row["size"]), {}).get("tok_s")
        theirs = [f"{row[name]:,}" if name in row else "" for name in recorded["peers"]]
        body.append([row["feature"], row["model"], str(row["size"]), f"{ours:,}" if ours else "", *theirs, row["as"]])
    yield from table(
        ("feature", "model", "sequences", "Quire, tokens/s", *recorded["peers"], "the peers' request"), body
    )


def late(rows: Sequence[Row]) -> Iterator[str]:
    """What was compiled or captured after an engine was ready."""
    every = [one for row in rows for one in row.get("late", ())]
    long = [one for one in every if one["ms"] > LATE_MS]
    yield f"{len(every)} kernels and graphs were compiled or captured late, {len(long)} for over {LATE_MS:g} ms."
    for one in sorted(long, key=lambda one: -one["ms"]):
        yield f"- {one['what']}: {one['ms']:,.0f} ms, during {one.get('during', 'the first requests')}"


def missing(rows: Sequence[Row]) -> Iterator[str]:
    """Cells that failed, and those there was no time for."""
    found = cells(rows)
    failed = [(cell, row["error"]) for cell, row in found.items() if "error" in row]
    if failed:
        yield "\n## Errors\n"
    for (feature, model, size), error in failed:
        yield f"- {feature}, {model}, {size}: {error}"
    waiting = [f"{row['model']}: {cell}" for row in rows for cell in row.get("missing", ())]
    if waiting:
        yield "\n## Not measured in time\n"
    for each in waiting:
        yield f"- {each}"
