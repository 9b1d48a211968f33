"""`quire version`."""

from __future__ import annotations

import platform
from importlib import metadata

import click

import quire


@click.command("version")
def command() -> None:
    """Print the versions of Quire, torch and Python."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    click.echo(f"quire {quire.__version__} (torch {torch}, Python {platform.python_version()})")
