"""Whether there is a card to measure, and an engine that is ready to be measured."""

from __future__ import annotations

from contextlib import suppress

import click
import torch

from quire import LLM
from quire.errors import InvalidRequest
from quire.structured_output.compiler import WARM_UP


def needed(instead: str) -> None:
    """Raises ClickException where torch sees no CUDA device: before hours of work on a CPU, or all of its memory.

    instead: what to do there.
    """
    if not torch.cuda.is_available():
        raise click.ClickException(f"torch sees no CUDA device here, and this measures one: {instead}")


def prepare_all(llm: LLM) -> None:
    """Return when nothing is left that the engine does while it is idle, and the vocabulary for grammars has been read,
    which takes Python's lock from steps for a second: steps are no faster later. Graphs an `LLM` has from the start."""

    def work() -> None:
        while llm._engine.prepare():
            pass

    llm._thread._call(work)
    with suppress(InvalidRequest):  # a vocabulary that has no grammars
        llm._grammars._compile(WARM_UP)
