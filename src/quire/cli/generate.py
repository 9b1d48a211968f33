"""`quire generate`."""

from __future__ import annotations

import sys
from typing import Any

import click

import quire
from quire.cli.options import OFFLINE, SettingsCommand
from quire.cli.sampling import given, sampling_options
from quire.config import Settings

OPENING = "Once upon a time"


@click.command(
    "generate",
    cls=SettingsCommand,
    sections=OFFLINE,
    params=[click.Argument(["prompt"], required=False), *sampling_options()],
)
def command(settings: Settings, prompt: str | None, **sampling: Any) -> None:
    """Print one completion of PROMPT ('-' reads it from standard input; without one, of an opening of ours)."""
    with quire.LLM(settings=settings) as llm:
        if prompt is None:
            click.echo(OPENING, nl=False)
        text = OPENING if prompt is None else sys.stdin.read() if prompt == "-" else prompt
        params = llm.default_sampling_params(**{"max_tokens": None, **given(sampling)})
        for piece in llm.stream(text, params):
            click.echo(piece, nl=False)
    click.echo()
