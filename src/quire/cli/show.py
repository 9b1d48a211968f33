"""`quire config`: the effective settings, and where each came from."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click
from rich.table import Table

import quire
from quire.cli.base import SettingsCommand
from quire.cli.tables import print_table
from quire.config import OPTIONS, Settings


@click.command("config", cls=SettingsCommand, positional=True)
def command(settings: Settings) -> None:
    """Print the effective settings and where each came from: defaults < file < environment < flags."""
    table = Table("option", "value", "from", box=None, pad_edge=False, header_style="bold")
    for section in dict.fromkeys(known.section for known in OPTIONS.values()):
        table.add_section()
        for known in filter(lambda known: known.section == section, OPTIONS.values()):
            source = settings.source(known.name)
            style = "dim" if source == "default" else "bold"
            table.add_row(known.flag.removeprefix("--"), known.show(settings.get(known.name)), source, style=style)
    print_table(table)


@click.command("version")
def show_version() -> None:
    """Print the versions of Quire, torch and Python."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    click.echo(f"quire {quire.__version__} (torch {torch}, Python {platform.python_version()})")
