"""`quire pull`, `quire list` and `quire rm`: models that are kept on this machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from quire.cli.base import SettingsCommand
from quire.cli.tables import numbers, print_table
from quire.config import Settings
from quire.config.option import amount
from quire.errors import InvalidConfig, InvalidModel
from quire.weights.cache import CachedModel, cached_models, check_hashes, kept_files, plan_removal, remove
from quire.weights.hub import cache_folder
from quire.weights.locate import EMBEDDED, check, locate
from quire.weights.names import mapped_names, on_hub, parse_name

KEPT = ("model", "revision", "download_dir")


@click.command("pull", cls=SettingsCommand, sections=(), also=KEPT, positional=True)
def pull(settings: Settings) -> None:
    """Download MODEL, check it, and say where it is. What was interrupted is resumed.

    MODEL is OWNER/NAME of the Hugging Face hub, with :Q4_K_M or another type for one of its GGUF files.
    """
    model = settings.model
    named(settings)
    place = locate(model.model, revision=model.revision, cache=model.download_dir)
    check(place)
    files = kept_files(place) if Path(model.model).expanduser().resolve() != place.resolve() else []
    hashed = check_hashes(files)
    size = sum(file.blob.stat().st_size for file in files) or (place.stat().st_size if place.is_file() else 0)
    about = f"{len(files) or 1} file{'s' * (len(files) > 1)}, {amount(size)}" + f", {hashed} checked by hash" * bool(
        hashed
    )
    click.echo(f"{model.model} is at {place} ({about})")
    further = "".join(f" --{name.replace('_', '-')} {settings.get(name)}" for name in KEPT[1:] if settings.get(name))
    click.echo(f"serve it with: quire serve {model.model}{further}")


def named(settings: Settings) -> None:
    """Raise InvalidConfig where no model is named; say which repository a name of Ollama's library is."""
    model = settings.model.model
    if settings.source("model") == "default":
        raise InvalidConfig("name the model: quire pull OWNER/NAME, or OWNER/NAME:Q4_K_M", param="model")
    name = None if model == EMBEDDED or Path(model).expanduser().exists() else parse_name(model)
    mapped = on_hub(name) if name is not None and name.source == "ollama" else None
    if mapped is not None:
        tag = f":{mapped.tag}" if mapped.tag else ""
        click.echo(f"{model} is {mapped.name}{tag} on the hub, unless Ollama's store has it", err=True)


@click.command(
    "list",
    cls=SettingsCommand,
    sections=(),
    also=("download_dir",),
    params=[
        click.Option(["--json", "as_json"], is_flag=True, help="Print a JSON array."),
        click.Option(
            ["--library"], is_flag=True, help="Print which names of Ollama's library are on the hub, and where."
        ),
    ],
)
def list_models(settings: Settings, as_json: bool, library: bool) -> None:
    """List the models that are kept here: downloads of the Hugging Face hub, and Ollama's."""
    if library:
        for name, repository in mapped_names().items():
            click.echo(f"{name}:SIZE  {repository.format(size='SIZE')}")
        return
    found = cached_models(settings.model.download_dir)
    if as_json:
        click.echo(json.dumps([{**model._asdict(), "path": str(model.path)} for model in found], indent=2))
        return
    if not found:
        click.echo(
            f"no models are kept in {cache_folder(settings.model.download_dir)}; `quire pull MODEL` downloads one"
        )
        return
    table = numbers("", "model", "format", "size", "last used", "place", left=("model", "format", "last used", "place"))
    table.title = None
    for model in found:
        table.add_row(model.name, model.format, amount(model.size), ago(model.used), model.place)
    print_table(table)
    click.echo(f"{amount(sum(model.size for model in found))} in all")


def ago(used: float) -> str:
    """'3 days ago'."""
    seconds = max(0.0, time.time() - used)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


@click.command(
    "rm",
    cls=SettingsCommand,
    sections=(),
    also=KEPT,
    positional=True,
    params=[click.Option(["--yes", "-y"], is_flag=True, help="Do not ask.")],
)
def rm(settings: Settings, yes: bool) -> None:
    """Remove a downloaded MODEL: a whole repository, or with :Q4_K_M one of its GGUF files.

    Files that another revision needs are kept.
    """
    model = settings.model
    if settings.source("model") == "default" or not model.model.strip():
        raise InvalidConfig("name the model to remove: `quire list` shows what is kept", param="model")
    if model.model == EMBEDDED or Path(model.model).expanduser().exists():
        raise InvalidModel(f"{model.model} is not a download: only what the hub's cache keeps is removed")
    name = parse_name(model.model)
    if name is not None and name.source == "ollama":
        mapped = on_hub(name)
        if any(kept_as(each, model.model) for each in cached_models(model.download_dir)):
            raise InvalidModel(f"{model.model} is Ollama's: `ollama rm {model.model}` removes it")
        if mapped is None:
            raise InvalidModel(f"no model {model.model!r} is kept here: `quire list` shows what is")
        name = mapped
    if name is None:
        raise InvalidModel(f"{model.model!r} is no name of a model: `quire list` shows what is kept")
    plan = plan_removal(name, model.download_dir, model.revision)
    for path in plan.folders or plan.links:
        click.echo(path)
    if not yes and not click.confirm(f"Remove this? It frees {amount(plan.freed)}."):
        click.echo("nothing was removed")
        sys.exit(1)
    remove(plan)
    click.echo(f"removed {model.model}: {amount(plan.freed)} freed")


def kept_as(model: CachedModel, name: str) -> bool:
    """Whether a model of Ollama's store has this name."""
    return model.place == "ollama" and model.name in (name, f"{name}:latest")
