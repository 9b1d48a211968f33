"""From a model's name to a folder or a GGUF file on this disk: the embedded model, a path, a hub id, Ollama's name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from quire.errors import InvalidModel, Unavailable, nearest
from quire.weights import hub, ollama_store
from quire.weights.gguf import is_gguf
from quire.weights.names import ModelName, on_hub, parse_name

EMBEDDED = "embedded"
"""The name of the model that comes with the package."""

_DESCRIBED = ("config.json", "hparams.json", "adapter_config.json")
"""Files that describe a model, one of which must be there; adapters are refused when they are read."""


def locate(model: str, *, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder (or GGUF file) of `model`: "embedded", a path, or one of the names of `names.parse_name`.

    A hub id is fetched when it is not cached. cache: where fetched models are kept, instead of the hub's own cache.
    HF_HUB_OFFLINE and the hub's other variables mean what they always do, OLLAMA_MODELS what it means to Ollama. Raises
    InvalidModel when there is no such model, or none of this revision, Unavailable when the hub cannot be reached.
    """
    here = on_disk(model)
    if here is not None:
        if revision not in (None, "main"):
            raise InvalidModel(
                f"revision {revision!r} is of a repository on the hub, but {model} is on this machine: leave it out"
            )
        return here
    path = Path(model).expanduser()
    if path.is_file():
        held = f": its folder is {path.parent}" if (path.parent / "config.json").is_file() else ""
        raise InvalidModel(
            f"{model} is a file but not a .gguf file: name one, or the folder that holds config.json{held}"
        )
    if model.startswith(("./", "../", "/", "~")) and not model.endswith(".gguf"):
        raise InvalidModel(f"there is no folder or file {model}")
    name = parse_name(model)
    # OWNER/REPO/FILE.gguf names a file of a repository; one folder less is a path.
    if model.endswith(".gguf") and (name is None or path.parent.is_dir() or model.count("/") < 2):
        raise InvalidModel(f"there is no file {model}{near(path)}")
    if name is None:
        raise InvalidModel(
            f"model {model!r} is neither {EMBEDDED!r}, nor a folder or file here, nor a hub id such as 'owner/name' or "
            "'owner/name:Q4_K_M'"
        )
    return fetch(model, name, revision, cache)


def on_disk(model: str) -> Path | None:
    """The embedded model's folder, or what `model` is the path of: a folder or a GGUF file. None for other names."""
    if model == EMBEDDED:
        return embedded()
    path = Path(model).expanduser()
    is_model = bool(model) and (path.is_dir() or (path.is_file() and (path.suffix == ".gguf" or is_gguf(path))))
    return path if is_model else None


def fetch(model: str, name: ModelName, revision: str | None, cache: str | None) -> Path:
    """The folder or file of a name; `model` is how it was written. Raises as `locate`."""
    if name.source == "hub":
        try:
            return hub.fetch(name, revision, cache)
        except Unavailable:
            held = ollama_store.find(name)
            if held is None:
                raise
            return held.blob
    held = ollama_store.find(name)
    if held is not None:
        return held.blob
    mapped = on_hub(name)
    if mapped is None:
        raise InvalidModel(unknown(model, name))
    try:
        return hub.fetch(mapped, revision, cache)
    except Unavailable as error:
        raise Unavailable(f"{model} is not in Ollama's store on this machine, and on the hub: {error}") from None


def unknown(model: str, name: ModelName) -> str:
    """Why a name of Ollama's form is no model here, and what to type instead."""
    message = (
        f"model {model!r} is neither {EMBEDDED!r}, nor a folder or file here, nor a hub id such as 'owner/name', nor "
        f"in Ollama's store ({', '.join(map(str, ollama_store.store_folders()))})."
    )
    if close := nearest(model, [EMBEDDED]):
        return message + close
    tags = ollama_store.tags_of(name)
    if tags:
        return (
            f"{message} There it has the tags {', '.join(tags)}: name one as {name.name.removeprefix('library/')}:TAG."
        )
    return (
        f"{message} `ollama pull {name.name.removeprefix('library/')}{name.tag and ':'}{name.tag}` puts it there; or "
        f"find GGUF files of it at https://huggingface.co/models?library=gguf&search={name.name.rpartition('/')[2]} "
        "and name them as OWNER/NAME:Q4_K_M"
    )


def near(path: Path) -> str:
    """What a missing GGUF file's folder has instead, for messages."""
    there = sorted(each.name for each in path.parent.glob("*.gguf")) if path.parent.is_dir() else []
    return f": {path.parent} has {', '.join(there[:5])}" if there else f", and no GGUF file in {path.parent}"


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
