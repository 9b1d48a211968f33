"""Sampling options of the commands that make text. Without one, the model's own default holds."""

from __future__ import annotations

from typing import Any

import click

from quire.types import NUMERIC_PARAMETERS


def sampling_options() -> list[click.Option]:
    """New options, named as the fields of SamplingParams; `--seed` is an option of the engine's configuration."""
    return [
        click.Option(["--max-tokens"], type=int, help="Longest answer, in tokens."),
        *(
            click.Option([f"--{each.name.replace('_', '-')}"], type=type(each.low), help=each.help)
            for each in NUMERIC_PARAMETERS
            if each.help
        ),
        click.Option(["--stop"], multiple=True, help="End where this text appears; may be repeated."),
    ]


def given(sampling: dict[str, Any]) -> dict[str, Any]:
    """Only what was set."""
    return {name: value for name, value in sampling.items() if value is not None and value != ()}
