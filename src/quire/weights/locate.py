"""From a model's name to a folder on this disk: the embedded model, a path, or a hub id."""

from __future__ import annotations

import importlib
import re
from importlib.resources import files
from pathlib import Path

from quire.errors import InvalidModel, Unavailable

EMBEDDED = "embedded"
"""The name of the model that comes with the package."""

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.bpe", "*.tiktoken")
"""Files that are downloaded: never code, never pickles."""

_DESCRIBED = ("config.json", "hparams.json", "adapter_config.json")
"""Files that describe a model, one of which must be there; adapters are refused when they are read."""


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
        raise InvalidModel(f"{model} is a file but not a .gguf file: name one, or the folder that holds config.json")
    if model.startswith(("http://", "https://")):
        raise InvalidModel(
            f"model {model!r} is an address: name a folder or a hub id such as 'owner/name'; a server that runs is "
            "used with `quire chat --url ADDRESS`"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith((".", "/", "~")):
        raise InvalidModel(
            f"model {model!r} is neither {EMBEDDED!r}, nor a folder here, nor a hub id such as 'owner/name'"
        )
    return fetch(model, revision, cache)


def check(place: Path) -> None:
    """Raise InvalidModel for a folder that holds no model, before its tokenizer is looked for."""
    if place.is_dir() and not any(place.glob("*.gguf")) and not any((place / name).is_file() for name in _DESCRIBED):
        raise InvalidModel(f"there is no model in {place}: it has neither config.json nor a .gguf file")


def embedded() -> Path:
    """The folder of the model that comes with the package. Raises InvalidModel where it is missing."""
    folder = Path(str(files("quire.weights").joinpath(EMBEDDED)))
    if not (folder / "config.json").is_file():
        raise InvalidModel("this installation has no embedded model: install the package again")
    return folder


def fetch(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a hub id in `cache` (by default the hub's own), downloaded first where needed.

    Raises InvalidModel or Unavailable.
    """
    # The client takes a fifth of a second to import, which other models need not wait for.
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(WANTED)))
    except errors.GatedRepoError:
        raise InvalidModel(f"{name} is gated: accept its terms on the hub and log in (`hf auth login`)") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise InvalidModel(f"the hub has no model {name!r}, or it is private and you are not logged in") from None
    except errors.LocalEntryNotFoundError:
        where = cache or importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
        raise Unavailable(
            f"{name} is not in the local hub cache, and the hub is offline or cannot be reached: it was searched "
            f"for in {where} "
            f"(HF_HOME names another). Where there is a network, `hf download {name}` fetches it"
        ) from None
    except OSError as error:
        raise Unavailable(f"{name} could not be downloaded: {error}") from None
