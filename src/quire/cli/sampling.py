"""Sampling options of the commands that make text. Without one, the model's own default holds."""

from __future__ import annotations

from typing import Any

import click


def sampling_options() -> list[click.Option]:
    """Fresh options, in the names of SamplingParams; the seed is the settings' own `--seed`."""
    return [
        click.Option(["--max-tokens"], type=int, help="Longest answer, in tokens."),
        click.Option(["--temperature"], type=float, help="0 takes the likeliest token each time."),
        click.Option(["--top-p"], type=float, help="Sample from the likeliest tokens that make up this share."),
        click.Option(["--top-k"], type=int, help="Sample from so many of the likeliest tokens; 0: all."),
        click.Option(["--min-p"], type=float, help="Leave out tokens below this share of the likeliest one's."),
        click.Option(["--stop"], multiple=True, help="End where this text appears; may be repeated."),
    ]


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """Only what was set."""
    return {name: value for name, value in sampling.items() if value is not None and value != ()}
