"""Models that are kept on this machine: what the hub's cache has, whether it is whole, and removing it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import InvalidModel
from quire.weights import ollama_store
from quire.weights.hub import Variant, cache_folder, choose, files_below, snapshot_of, variants_of
from quire.weights.names import ModelName

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

PIECE = 1 << 22


class CachedModel(NamedTuple):
    """A model that is kept. name: what `quire serve` takes. size: bytes. used: seconds since the epoch, when it was
    last read. place: hub, or Ollama's store."""

    name: str
    format: str
    size: int
    used: float
    place: str
    path: Path


class Removal(NamedTuple):
    """Files of the cache that go. links: their names in revisions. blobs: contents that nothing else needs. folders:
    whole folders of a repository, or of revisions of it. freed: bytes."""

    links: tuple[Path, ...]
    blobs: tuple[Path, ...]
    folders: tuple[Path, ...]
    freed: int


class CachedFile(NamedTuple):
    """A file of a revision: its name in the repository, its link, and its content, which revisions may share."""

    name: str
    link: Path
    blob: Path


def cached_models(cache: str | None = None) -> list[CachedModel]:
    """Everything that is kept, what was used last first."""
    found = [model for folder in _repositories(cache) for model in _models_of(folder)]
    found += [
        CachedModel(each.name, "gguf", each.size, each.blob.stat().st_atime, "ollama", each.blob)
        for each in ollama_store.models()
    ]
    return sorted(found, key=lambda model: (-model.used, model.name))


def _repositories(cache: str | None) -> list[Path]:
    root = cache_folder(cache)
    return sorted(path for path in root.glob("models--*--*") if path.is_dir())


def name_of(repository: Path) -> str:
    """'owner/name' of models--owner--name."""
    return repository.name.removeprefix("models--").replace("--", "/", 1)


def files_of(repository: Path, revision: str | None = None) -> list[CachedFile]:
    """The files of all revisions, or of one. Raises InvalidModel for a revision that is not kept."""
    snapshots = _folders(repository / "snapshots")
    if revision is not None:
        folder = snapshot_of(name_of(repository), revision, str(repository.parent))
        if folder is None:
            raise InvalidModel(f"revision {revision} of {name_of(repository)} is not in the cache")
        snapshots = [folder]
    return [
        CachedFile(name, folder / name, (folder / name).resolve())
        for folder in snapshots
        for name in files_below(folder)
    ]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _models_of(repository: Path) -> Iterator[CachedModel]:
    """What one repository has: each of its GGUF models, its other weights, and what is not whole."""
    name, files = name_of(repository), files_of(repository)
    names = {file.name for file in files}
    variants = variants_of(names)
    labels = [variant.label for variant in variants]
    for variant in variants:
        own = [file for file in files if file.name in variant.files]
        lone = variant.label and labels.count(variant.label) == 1
        label = f"{name}:{variant.label}" if lone else f"{name}/{variant.files[0]}"
        whole = len(variant.files) == variant.num_parts
        yield _model(label, "gguf" if whole else "gguf, parts missing", own)
    others = [file for file in files if not file.name.endswith(".gguf")]
    kinds = {Path(file.name).suffix for file in others} & {*WEIGHTS}
    if kinds or not variants:
        kind = "safetensors" if ".safetensors" in kinds else "pytorch" if kinds else "no weights"
        yield _model(name, kind, others, repository)
    partial = [path for path in (repository / "blobs").glob("*.incomplete") if path.is_file()]
    if partial:
        sizes, times = zip(*((path.stat().st_size, path.stat().st_mtime) for path in partial), strict=True)
        yield CachedModel(name, "incomplete", sum(sizes), max(times), "hub", repository)


def _model(name: str, format: str, files: Sequence[CachedFile], place: Path | None = None) -> CachedModel:
    blobs = {file.blob: file.blob.stat() for file in files}
    size, used = (
        sum(each.st_size for each in blobs.values()),
        max((each.st_atime for each in blobs.values()), default=0.0),
    )
    return CachedModel(name, format, size, used, "hub", place or files[0].link)


# ---------------------------------------------------------------- removing


def plan_removal(name: ModelName, cache: str | None = None, revision: str | None = None) -> Removal:
    """What removing a model would remove: of a whole repository everything, of one GGUF model its files that no other
    revision needs. Raises InvalidModel for what is not in the cache."""
    repository = cache_folder(cache) / f"models--{name.name.replace('/', '--')}"
    if not repository.is_dir():
        raise InvalidModel(f"{name.name} is not in the cache at {repository.parent}: `quire list` shows what is")
    revision = name.revision or revision
    own = files_of(repository, revision)
    every = files_of(repository)
    if not (name.tag or name.file):
        if revision is None:
            return Removal((), (), (repository,), _size(_contents(repository)))
        folder = snapshot_of(name.name, revision, str(repository.parent))
        return _without(every, own, () if folder is None else (folder,))
    chosen = _kept_variant(name, {file.name for file in own})
    return _without(every, [file for file in own if file.name in chosen.files], ())


def _kept_variant(name: ModelName, names: Iterable[str]) -> Variant:
    """Raises InvalidModel where none, or more than one, of the cached GGUF models is meant."""
    try:
        return choose(name, sorted(names))
    except InvalidModel as error:
        raise InvalidModel(f"{error} (of what is in the cache)") from None


def _without(every: Sequence[CachedFile], going: Sequence[CachedFile], folders: tuple[Path, ...]) -> Removal:
    links = {file.link for file in going}
    needed = {file.blob for file in every if file.link not in links}
    blobs = tuple(sorted({file.blob for file in going} - needed))
    return Removal(tuple(sorted(links)), blobs, folders, _size(blobs))


def _contents(repository: Path) -> list[Path]:
    return [path for path in repository.rglob("*") if path.is_file() and not path.is_symlink()]


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def remove(plan: Removal) -> None:
    """Remove what was planned. Raises OSError."""
    for path in (*plan.links, *plan.blobs):
        path.unlink(missing_ok=True)
    for folder in plan.folders:
        shutil.rmtree(folder)


# ---------------------------------------------------------------- checking


def kept_files(place: Path) -> list[CachedFile]:
    """The files of the cache that a located model consists of; none for one that is not in the hub's cache."""
    if place.is_dir():
        return [CachedFile(name, place / name, (place / name).resolve()) for name in files_below(place)]
    folder = next((each for each in place.parents if each.parent.name == "snapshots"), None)
    if folder is None:
        return []
    inside = place.relative_to(folder).as_posix()
    chosen = next(each for each in variants_of(files_below(folder)) if inside in each.files)
    return [CachedFile(name, folder / name, (folder / name).resolve()) for name in chosen.files]


def check_hashes(files: Sequence[CachedFile]) -> int:
    """How many files have the hash that the hub gave them, which names their contents in the cache.

    Raises InvalidModel for one that is damaged, which is removed, so that it is downloaded again.
    """
    checked = 0
    for file in files:
        expected = file.blob.name
        made = _digest(file.blob, len(expected)) if _is_hex(expected) else None
        if made is None:
            continue
        if made != expected:
            file.link.unlink(missing_ok=True)
            file.blob.unlink(missing_ok=True)
            raise InvalidModel(
                f"{file.name} was damaged: its hash is {made}, not {expected}. It has been removed: pull again"
            )
        checked += 1
    return checked


def _is_hex(text: str) -> bool:
    return len(text) in (40, 64) and not set(text) - set("0123456789abcdef")


def _digest(path: Path, length: int) -> str:
    """SHA-256 for 64 digits, git's SHA-1 for 40."""
    made: Any = hashlib.sha256() if length == 64 else hashlib.sha1(usedforsecurity=False)
    if length == 40:
        made.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            made.update(piece)
    return str(made.hexdigest())
