"""Whether there is a card to measure."""

from __future__ import annotations

import click
import torch


def needed(instead: str) -> None:
    """Raises ClickException where torch sees no CUDA device: before hours of work on a CPU, or all of its memory.

    instead: what to do there.
    """
    if not torch.cuda.is_available():
        raise click.ClickException(f"torch sees no CUDA device here, and this measures one: {instead}")
