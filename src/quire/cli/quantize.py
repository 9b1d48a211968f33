"""`quire quantize`: write a model as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from quire.config import Settings
from quire.config.option import amount
from quire.errors import InvalidConfig
from quire.weights.file_types import FILE_TYPES, NAMES
from quire.weights.locate import check as holds_a_model
from quire.weights.locate import locate
from quire.weights.quantize import Written, choose_type, quantize


def run(
    settings: Settings, model: str, out: Path, kind: str | None, threads: int, check: bool, vocabulary: bool
) -> None:
    """`quire quantize`, see `quire.cli.late`."""
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
