"""Ollama's models on this machine: manifests that name blobs, of which one is a GGUF file. Read where they lie.

Layout: manifests/HOST/NAMESPACE/NAME/TAG is JSON with layers, and blobs/sha256-DIGEST holds each layer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import InvalidModel
from quire.weights.names import OLLAMA_REGISTRY, ModelName

_KIND = "application/vnd.ollama.image."
_LARGEST = 1 << 22
_UNUSED = ("template", "system", "params", "messages")


class OllamaModel(NamedTuple):
    """A model of the store. unused: layers of its Modelfile that are not applied. size: bytes of the weights."""

    name: str
    blob: Path
    size: int
    unused: tuple[str, ...]


def store_folders() -> list[Path]:
    """Where Ollama keeps models: OLLAMA_MODELS, the user's folder, and that of the service on Linux."""
    own = os.environ.get("OLLAMA_MODELS")
    usual = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    return [Path(own)] if own else usual


def find(name: ModelName) -> OllamaModel | None:
    """The model of a name, None where no store has it. Raises InvalidModel for one that cannot be served."""
    host = OLLAMA_REGISTRY if name.source == "ollama" else "hf.co"
    for folder in store_folders():
        path = folder / "manifests" / host / name.name / (name.tag or "latest")
        if _is_file(path):
            return _read(folder, path)
    return None


def tags_of(name: ModelName) -> list[str]:
    """The tags that stores have of a name."""
    host = OLLAMA_REGISTRY if name.source == "ollama" else "hf.co"
    found = (folder / "manifests" / host / name.name for folder in store_folders())
    return sorted({path.name for folder in found for path in _entries(folder) if _is_file(path)})


def models() -> Iterator[OllamaModel]:
    """All models of the stores that can be read."""
    for folder in store_folders():
        root = folder / "manifests"
        try:
            paths = sorted(path for path in root.glob("*/*/*/*") if path.is_file())
        except OSError:
            continue
        for path in paths:
            try:
                yield _read(folder, path)
            except InvalidModel:
                continue


def shown(path: Path, root: Path) -> str:
    """A manifest's name as Ollama writes it: 'llama3.2:latest', 'hf.co/owner/name:TAG'."""
    host, namespace, name, tag = path.relative_to(root).parts
    before = "" if host == OLLAMA_REGISTRY else f"{host}/"
    before += "" if host == OLLAMA_REGISTRY and namespace == "library" else f"{namespace}/"
    return f"{before}{name}:{tag}"


def _read(folder: Path, path: Path) -> OllamaModel:
    model_name = shown(path, folder / "manifests")
    layers = _layers(path, model_name)
    kinds = [kind for kind, _ in layers]
    if "adapter" in kinds:
        raise InvalidModel(f"{model_name} in Ollama's store has a LoRA adapter: merge it into its model first")
    weights = [digest for kind, digest in layers if kind == "model"]
    if len(weights) != 1:
        raise InvalidModel(f"{model_name} in Ollama's store has {len(weights)} GGUF files, where one is read")
    blob = folder / "blobs" / weights[0].replace(":", "-")
    if not _is_file(blob):
        raise InvalidModel(
            f"{model_name} is in Ollama's store, but not its weights: `ollama pull {model_name}` fetches them again"
        )
    unused = tuple(kind for kind in kinds if kind in _UNUSED)
    return OllamaModel(model_name, blob, blob.stat().st_size, unused + (("projector",) if "projector" in kinds else ()))


def _layers(path: Path, model_name: str) -> list[tuple[str, str]]:
    """Pairs of kind ('model', 'template') and digest."""
    try:
        with path.open("rb") as file:
            held: Any = json.loads(file.read(_LARGEST))
        found = [(str(each["mediaType"]), str(each["digest"])) for each in held["layers"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InvalidModel(f"{path} is no manifest of Ollama: `ollama pull {model_name}` writes it again") from None
    pairs = [(kind.removeprefix(_KIND), digest) for kind, digest in found]
    if any("/" in digest or "\\" in digest or not digest.startswith("sha256:") for _, digest in pairs):
        raise InvalidModel(f"{path} names blobs outside of Ollama's store")
    return pairs


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
