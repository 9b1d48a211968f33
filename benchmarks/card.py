"""Whether there is a card to measure, and an engine that is ready to be measured."""

from __future__ import annotations

import click
import torch

from quire import LLM


def needed(instead: str) -> None:
    """Raises ClickException where torch sees no CUDA device: before hours of work on a CPU, or all of its memory.

    instead: what to do there.
    """
    if not torch.cuda.is_available():
        raise click.ClickException(f"torch sees no CUDA device here, and this measures one: {instead}")


def capture_all(llm: LLM) -> None:
    """Return when the engine has captured the graphs that it postponed: steps are no faster later, and another thread
    may wait for the whole device, which breaks a capture."""

    def work() -> None:
        while llm._engine.prepare():
            pass

    llm._thread._call(work)
