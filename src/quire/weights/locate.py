"""From what a user calls a model to a folder on this disk: the embedded one, a path, or a hub id."""

from __future__ import annotations

import importlib
import re
from importlib.resources import files
from pathlib import Path

from quire.errors import InvalidModel

EMBEDDED = "embedded"
"""The name of the model that comes with the package."""

_DESCRIBED = ("config.json", "hparams.json", "adapter_config.json")
"""Files that say what a model is, one of which has to be there: OpenAI's for GPT-2, too; adapters are refused later."""


def locate(model: str, *, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder (or GGUF file) of `model`: "embedded", a path, or a hub id such as "owner/name".

    A hub id is fetched when it is not cached. cache: where fetched models are kept, instead of the hub's own cache.
    HF_HUB_OFFLINE and the hub's other variables mean what they always do. Raises InvalidModel when there is no such
    model, Unavailable when the hub cannot be reached.
    """
    if model == EMBEDDED:
        return embedded()
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_file():
        raise InvalidModel(f"{model} is a file: name the folder that holds config.json")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith((".", "/", "~")):
        raise InvalidModel(
            f"model {model!r} is neither {EMBEDDED!r}, nor a folder here, nor a hub id such as 'owner/name'"
        )
    hub = importlib.import_module("quire.weights.hub")  # loaded for hub ids only, so that others start sooner
    return Path(hub.fetch(model, revision, cache))


def check(place: Path) -> None:
    """Raises InvalidModel for a folder that holds no model: before anybody misses its tokenizer."""
    if place.is_dir() and not any(place.glob("*.gguf")) and not any((place / name).is_file() for name in _DESCRIBED):
        raise InvalidModel(f"there is no model in {place}: it has neither config.json nor a .gguf file")


def embedded() -> Path:
    folder = Path(str(files("quire.weights").joinpath(EMBEDDED)))
    if not (folder / "config.json").is_file():
        raise InvalidModel("this installation has no embedded model: install the package again")
    return folder
