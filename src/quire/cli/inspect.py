"""`quire inspect`."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from quire.cli.model_facts import Fact, files, read_facts, shapes, text
from quire.cli.options import SettingsCommand
from quire.config import Settings
from quire.errors import InvalidModel

ENDLESS = 1000
"""Columns where nobody looks: a program that reads the table must not meet folded lines."""


@click.command("inspect", cls=SettingsCommand, sections=("model",), positional=True)
def command(settings: Settings) -> None:
    """Print what MODEL is, from headers alone: architecture, shapes, formats, tokenizer, template, KV bytes a token.

    The exit code is 2 where it could not be served, and the last line says why.
    """
    looked = read_facts(settings)
    spoken, mute, doubts = text(settings, looked.spec.vocab)
    tell([*shapes(looked), *files(looked), *spoken])
    if looked.trouble or mute:
        raise InvalidModel(looked.trouble or mute)
    if doubts:
        click.echo(f"WARNING: {doubts}", err=True)


def tell(rows: list[Fact]) -> None:
    """Two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = ENDLESS
    console.print(table)
