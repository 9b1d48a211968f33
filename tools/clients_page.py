"""Writes the table of docs/clients.md from what the clients' tests gave: `make docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/clients.md"
RESULTS = ROOT / "tests/clients/results.json"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->\n"
CELLS = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tool loop",
    "structured": "structured output",
    "images": "images",
    "cancel": "cancel",
}


def table(results: dict[str, Any]) -> str:
    """A row for each client; a cell that has no test is empty."""
    lines = [f"| client | version | {' | '.join(CELLS.values())} |", f"|---|---|{'---|' * len(CELLS)}"]
    for name, found in results.items():
        cells = [found["cells"].get(cell, "") for cell in CELLS]
        lines.append(f"| {name} | {found['version']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(json.loads(RESULTS.read_text("utf-8"))) + END + after


if __name__ == "__main__":
    print(markdown(), end="")
