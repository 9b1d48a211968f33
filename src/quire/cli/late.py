"""Commands that look at models, without what they do: their modules import torch, which their help does without."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from quire.cli.base import OFFLINE, SettingsCommand, integer
from quire.weights.file_types import FILE_TYPES, NAMES

_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")


@click.command(
    "quantize",
    cls=SettingsCommand,
    sections=(),
    also=("revision", "download_dir"),
    params=[
        click.Argument(["model"]),
        click.Argument(["out"], type=click.Path(dir_okay=False, path_type=Path)),
        click.Option(
            ["--type", "kind"],
            metavar="|".join((*FILE_TYPES, *NAMES)),
            help="Type of the matrices, or mixture of types, as llama.cpp names them.",
        ),
        click.Option(["--threads"], type=click.IntRange(1, 1024), default=2, show_default=True, help="Threads."),
        click.Option(
            ["--check/--no-check"],
            default=True,
            help="Compare the file's answers to a probe with the model's, which takes memory for it in float32. [yes]",
        ),
        click.Option(["--vocabulary/--no-vocabulary"], default=True, help="Write tokenizer and chat template. [yes]"),
    ],
)
def quantize(**given: Any) -> None:
    """Write MODEL, a folder, a GGUF file or a hub id, as the GGUF file OUT, and check what it answers.

    A file that exists is not overwritten. Tensors are read, converted and written some rows at a time.
    """
    import_module("quire.cli.quantize").run(**given)


@click.command("inspect", cls=SettingsCommand, sections=("model",), positional=True)
def inspect(**given: Any) -> None:
    """Print what MODEL is, from headers alone: architecture, shapes, formats, tokenizer, template, KV bytes a token.

    The exit code is 2 where it could not be served, and the last line says why.
    """
    import_module("quire.cli.inspect").run(**given)


@click.command(
    "plan",
    cls=SettingsCommand,
    sections=("model", "cache", "scheduler", "execution"),
    positional=True,
    params=[click.Option(["--memory"], metavar="SIZE", help="Memory to plan for (24GiB works) [what is free here]")],
)
def plan(**given: Any) -> None:
    """Print what serving MODEL takes, what is left, and, where it does not fit, the smallest change that does.

    The exit status says which: 0, it fits; 1, it does not.
    """
    import_module("quire.cli.plan").run(**given)


@click.command(
    "check",
    cls=SettingsCommand,
    sections=OFFLINE,
    positional=True,
    params=[click.Option(["--all", "every"], is_flag=True, help="A tiny model of each family, with random weights.")],
)
def check(**given: Any) -> None:
    """Let MODEL answer three prompts alone and together, and compare; with --all, a tiny model of each family.

    The exit code is 1 where one fails. In the default mode, rounding may make answers in a batch differ: only with
    --deterministic are they compared.
    """
    import_module("quire.cli.check").run(**given)


@click.command("diff", cls=SettingsCommand, sections=("model",), positional=True)
def diff(**given: Any) -> None:
    """Compare MODEL's activations with transformers', layer by layer in float32, and name the first that departs."""
    import_module("quire.cli.diff").run(**given)


@click.command(
    "verify",
    cls=SettingsCommand,
    sections=OFFLINE,
    positional=True,
    params=[
        integer("--requests", 12, "How many.", high=512),
        integer("--new", 24, "Tokens of each answer.", high=4096),
        integer(
            "--repeat",
            5,
            "Rounds in which both modes are timed, in turns; 0: not timed. They need the weights twice.",
            low=0,
            high=100,
        ),
        _JSON,
    ],
)
def verify(**given: Any) -> None:
    """Answer the same requests alone, in a batch, from a warm cache, in chunks, preempted and with drafts, and compare
    tokens and log-probabilities to the bit. With --deterministic they must be equal: the exit code is 1 where any
    differs, in either mode."""
    import_module("quire.cli.verify").run(**given)


@click.command(
    "doctor",
    params=[
        click.Option(
            ["--port"],
            type=click.IntRange(0, 65535),
            default=8000,
            show_default=True,
            help="Where a server would listen.",
        ),
        _JSON,
    ],
)
def doctor(**given: Any) -> None:
    """Look at torch, GPU, compiler, processor, memory, disk, limits and caches.

    The exit code is 1 where something is missing.
    """
    import_module("quire.cli.doctor").run(**given)
