"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


def console(width: int = 1000) -> Console:
    """A console that prints text as it is; with `width` columns if the output is no terminal, for programs."""
    made = Console(highlight=False, markup=False)
    if not made.is_terminal:
        made.width = width
    return made


def numbers(title: str, *headings: str, left: Iterable[str] = ()) -> Table:
    """An empty table with columns aligned right, those in `left` aligned left."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def print_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print two columns: names and values."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    print_table(table)


def print_table(table: Table, *, least: int = 0) -> None:
    """Print a table, for programs without spaces at the ends of lines. least: columns, however narrow the terminal."""
    out = console()
    out.width = max(out.width, least)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as printed:
        out.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()), flush=True)
