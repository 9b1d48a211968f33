"""Models on the Hugging Face hub: which of a repository's GGUF files are meant, and their download.

Files are kept in the hub's own cache, by huggingface_hub.
"""

from __future__ import annotations

import errno
import glob
import importlib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.option import amount
from quire.errors import InvalidModel, Unavailable
from quire.weights.names import ModelName

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.bpe", "*.tiktoken")
"""Files of a repository that are downloaded: never code."""

PICKLED = ("pytorch_model.bin", "pytorch_model-*.bin")
"""Downloaded too where there is nothing else. They are read with `weights_only`, so that nothing in them runs."""

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_K", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "MXFP4", "BF16", "F16", "F32")
"""Which of a repository's GGUF files is taken where none is named: the first of these that is there."""

_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_LABEL = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:i?q\d(?:_[a-z0-9]+)*|tq\d_\d|bf16|fp?16|fp?32|mxfp4(?:_moe)?))(?![a-z0-9])",
    re.IGNORECASE,
)
_LONG: Mapping[str, str] = {"FP16": "F16", "FP32": "F32", "MXFP4_MOE": "MXFP4"}


class Variant(NamedTuple):
    """A GGUF model of a repository. label: its type, as its name has it ('Q4_K_M'), '' where it has none. files: its
    parts in order. num_parts: of which it has to consist."""

    label: str
    files: tuple[str, ...]
    num_parts: int


def split_of(file: str) -> tuple[str, int, int]:
    """(name without its part, number of the part, number of parts) of 'model-00001-of-00003.gguf'; one part where the
    name has none."""
    found = _SPLIT.search(file)
    if not found:
        return file.removesuffix(".gguf"), 1, 1
    return file[: found.start()], int(found[1]), int(found[2])


def label_of(stem: str) -> str:
    """The type that a file's name ends with, or else its folder's: 'Q4_K_M'."""
    found = _LABEL.findall(stem)
    label = found[-1].upper() if found else ""
    return _LONG.get(label, label)


def variants_of(files: Iterable[str]) -> list[Variant]:
    """The GGUF models among files, without projectors of images and importance matrices."""
    groups: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for file in files:
        if file.endswith(".gguf") and not _BESIDE.search(file.rpartition("/")[2]):
            stem, number, count = split_of(file)
            groups.setdefault((stem, count), []).append((number, file))
    return [
        Variant(label_of(stem), tuple(file for _, file in sorted(parts)), count)
        for (stem, count), parts in sorted(groups.items())
    ]


def choose(name: ModelName, files: Sequence[str]) -> Variant:
    """The GGUF model of a repository that a name means. Raises InvalidModel, naming those there are."""
    if name.file:
        return _named_file(name, files)
    found = variants_of(files)
    if not found:
        raise InvalidModel(f"{name.name} has no GGUF files, and so no {name.tag or 'type'}: leave the tag out")
    tag = "" if name.tag == "latest" else _LONG.get(name.tag.upper(), name.tag.upper())
    by_label: dict[str, list[Variant]] = {}
    for each in found:
        by_label.setdefault(each.label, []).append(each)
    if tag and tag not in by_label:
        tag = f"UD-{tag}"
    if not tag:
        tag = next((label for label in PREFERRED if label in by_label), found[0].label if len(found) == 1 else "")
    if tag not in by_label:
        asked = f"no GGUF file of type {name.tag}" if name.tag else f"GGUF files of {len(found)} types, none the usual"
        raise InvalidModel(f"{name.name} has {asked}: name one as {name.name}:TYPE, of {_shown(by_label)}")
    return _only(name, by_label[tag])


def _named_file(name: ModelName, files: Sequence[str]) -> Variant:
    stem, _, count = split_of(name.file)
    parts = sorted(file for file in files if file.endswith(".gguf") and split_of(file)[::2] == (stem, count))
    if name.file not in files:
        there = [file for file in files if file.endswith(".gguf")]
        raise InvalidModel(f"{name.name} has no file {name.file}: there are {_few(there) or 'no GGUF files'}")
    return Variant(label_of(stem), tuple(parts), count)


def _only(name: ModelName, found: Sequence[Variant]) -> Variant:
    """Raises InvalidModel where several models have one type, or parts are missing."""
    if len(found) > 1:
        there, of = [f"{name.name}/{each.files[0]}" for each in found], found[0].label and f" of type {found[0].label}"
        raise InvalidModel(f"{name.name} has {len(found)} models{of}: name one of {_few(there)}")
    if len(found[0].files) != found[0].num_parts:
        have = f"{len(found[0].files)} of {found[0].num_parts} parts"
        raise InvalidModel(f"{name.name} has {have} of {found[0].files[0]}: choose another file")
    return found[0]


def _shown(by_label: Mapping[str, Sequence[Variant]]) -> str:
    labels = sorted(label for label in by_label if label)
    return ", ".join(labels) or _few([found.files[0] for each in by_label.values() for found in each])


def _few(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---------------------------------------------------------------- download


class Listing(NamedTuple):
    """Files of a repository with their sizes, 0 where unknown. online: the hub said so, not the cache."""

    sizes: Mapping[str, int]
    online: bool


def fetch(name: ModelName, revision: str | None = None, cache: str | None = None) -> Path:
    """A repository's folder, or the first file of its GGUF model, in `cache` (by default the hub's own), downloaded
    first where needed.

    Raises InvalidModel for what the hub does not have, Unavailable where it cannot be reached or the disk is full.
    """
    revision = name.revision or revision
    if name.tag or name.file:
        return fetch_gguf(name, revision, cache)
    listing = list_files(name.name, revision, cache)
    plain = any(file.endswith(".safetensors") and "/" not in file for file in listing.sizes)
    if variants_of(listing.sizes) and not plain:
        return fetch_gguf(name, revision, cache, listing)
    return download(name.name, WANTED if plain else (*WANTED, *PICKLED), revision, cache)


def fetch_gguf(
    name: ModelName, revision: str | None = None, cache: str | None = None, listing: Listing | None = None
) -> Path:
    """The first file of a repository's GGUF model. Raises as `fetch`."""
    listing = listing or list_files(name.name, revision, cache)
    try:
        chosen = choose(name, sorted(listing.sizes))
    except InvalidModel as error:
        if listing.online:
            raise
        raise Unavailable(f"{error} (of what is in the cache: the hub is offline or cannot be reached)") from None
    if listing.online:
        check_room(name.name, sum(listing.sizes[file] for file in chosen.files), chosen, revision, cache)
    patterns = [glob.escape(file) for file in chosen.files]
    return download(name.name, patterns, revision, cache) / chosen.files[0]


def download(name: str, patterns: Sequence[str], revision: str | None, cache: str | None) -> Path:
    """The folder of a repository with the files that match, downloaded where they are missing."""
    # The client takes a fifth of a second to import, which other models need not wait for.
    hub = importlib.import_module("huggingface_hub")
    with explained(name, cache):
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(patterns)))


def list_files(name: str, revision: str | None, cache: str | None) -> Listing:
    """What a repository holds: as the hub says, or where it cannot be reached, what is cached. Raises as `fetch`."""
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    with explained(name, cache):
        try:
            about = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
            return Listing({file.rfilename: file.size or 0 for file in about.siblings or ()}, online=True)
        except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except _network_errors() as error:
            folder = snapshot_of(name, revision, cache)
            if folder is None:
                raise errors.LocalEntryNotFoundError(str(error)) from None
            return Listing(dict.fromkeys(files_below(folder), 0), online=False)


def _network_errors() -> tuple[type[Exception], ...]:
    """What the hub's client lets through where there is no connection: it uses httpx, since its version 2 httpx2."""
    clients = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return (OSError, *(client.HTTPError for client in clients if client is not None))


def files_below(folder: Path) -> list[str]:
    """Files of a folder and those in it, by their paths from there."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def cache_folder(cache: str | None) -> Path:
    """Where models are kept: `cache`, or the hub's own."""
    return Path(cache or importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE).expanduser()


def snapshot_of(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The cached folder of a revision, None where there is none."""
    root = cache_folder(cache) / f"models--{name.replace('/', '--')}"
    reference = root / "refs" / (revision or "main")
    commit = reference.read_text("utf-8").strip() if reference.is_file() else revision
    folder = root / "snapshots" / (commit or "")
    return folder if commit and folder.is_dir() else None


def check_room(name: str, size: int, chosen: Variant, revision: str | None, cache: str | None) -> None:
    """Raise Unavailable where the disk has no room for what is still to be downloaded."""
    there = snapshot_of(name, revision, cache)
    have = sum((there / file).stat().st_size for file in chosen.files if there and (there / file).is_file())
    folder = cache_folder(cache)
    existing = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    free = shutil.disk_usage(existing).free
    if size - have > free:
        raise Unavailable(_no_room(name, f"{amount(size - have)} to download, and {amount(free)} free in {folder}"))


def _no_room(name: str, why: str) -> str:
    return (
        f"there is no room for {name}: {why}. `quire list` shows what is kept, `quire rm MODEL` removes it, and "
        "--download-dir or HF_HOME names another disk"
    )


def _unreachable() -> str:
    """Why the hub is not asked, with what to change."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it to download it"
    return f"the hub at {constants.ENDPOINT} cannot be reached: see to the network, or set HTTPS_PROXY"


@contextmanager
def explained(name: str, cache: str | None) -> Iterator[None]:
    """The hub client's errors as ours."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except errors.GatedRepoError:
        raise InvalidModel(f"{name} is gated: accept its terms on the hub and log in (`hf auth login`)") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise InvalidModel(f"the hub has no model {name!r}, or it is private and you are not logged in") from None
    except errors.RevisionNotFoundError:
        raise InvalidModel(f"{name} has no such branch, tag or commit (--revision)") from None
    except errors.LocalEntryNotFoundError:
        raise Unavailable(
            f"{name} is not in the local hub cache, and {_unreachable()}. {cache_folder(cache)} was looked in (HF_HOME "
            f"names another). Where there is a network, `hf download {name} --local-dir FOLDER` makes a folder to serve"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Unavailable(_no_room(name, f"the disk of {cache_folder(cache)} is full")) from None
        raise Unavailable(f"{name} could not be downloaded: {error}") from None
    except _network_errors() as error:
        raise Unavailable(f"{name} could not be downloaded: {error}") from None
