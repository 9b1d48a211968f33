"""`quire quantize`: write a model as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from quire.cli.base import SettingsCommand
from quire.config import Settings
from quire.config.option import amount
from quire.errors import InvalidConfig
from quire.weights.locate import check as holds_a_model
from quire.weights.locate import locate
from quire.weights.quantize import FILE_TYPES, NAMES, Written, choose_type, quantize


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
def command(
    settings: Settings, model: str, out: Path, kind: str | None, threads: int, check: bool, vocabulary: bool
) -> None:
    """Write MODEL, a folder, a GGUF file or a hub id, as the GGUF file OUT, and check what it answers.

    A file that exists is not overwritten. Tensors are read, converted and written some rows at a time.
    """
    if not out.name:
        raise InvalidConfig("OUT is empty: name the file to write, such as model.gguf", param="out")
    if not out.parent.is_dir():
        raise InvalidConfig(f"{out}: there is no folder {out.parent}: make it, or name another", param="out")
    if kind is None:
        known = ", ".join((*FILE_TYPES, *NAMES))
        raise InvalidConfig(f"name the type with --type: q4_k_m is the usual one (known: {known})", param="type")
    choose_type(kind)
    place = locate(model, revision=settings.model.revision, cache=settings.model.download_dir)
    holds_a_model(place)
    with bar() as shown:
        task = shown.add_task(out.name, total=None, visible=False)

        def progress(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total, visible=True)

        written = quantize(
            place,
            out,
            kind,
            name=model.rstrip("/").rpartition("/")[2],
            vocabulary=vocabulary,
            threads=threads,
            check=check,
            progress=progress,
        )
    report(written)


def bar() -> Progress:
    """A bar on stderr, which is drawn on terminals only."""
    errors = Console(stderr=True)
    return Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )


def report(written: Written) -> None:
    """Say what was written, how well it answers, and how it is served."""
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(written.kinds.items()))
    click.echo(f"{written.path}: {amount(written.size)}, from {amount(written.source)}; tensors: {kinds}")
    if written.quality is not None:
        click.echo(f"against the source: {written.quality}")
    click.echo(f"serve it with: quire serve {written.path}")
