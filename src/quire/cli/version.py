"""`quire version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

import quire


@click.command("version")
def command() -> None:
    """Print the versions of Quire, torch and Python."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    click.echo(f"quire {quire.__version__} (torch {torch}, Python {platform.python_version()})")
