"""A result about a model that is kept on this machine, until a file of the model or the code that found it changes.

Files are known by their names, sizes and times, and by some of their bytes: a copy may have another's time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import quire
from quire.json_files import read_object, replace_object
from quire.weights.gguf import find_gguf, read_gguf

log = logging.getLogger(__name__)

SAMPLES, SAMPLE = 64, 4096
"""Pieces of a file that are read, from its beginning to its end, and bytes of each."""


class KeptResult:
    """A result in the file `path`. version: of all that it depends on."""

    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version = path, version

    def read(self) -> Mapping[str, Any] | None:
        """What was found; None where there is nothing of this version."""
        kept = read_object(self.path)
        found = kept.get("found") if kept.get("version") == self.version else None
        return found if isinstance(found, dict) else None

    def write(self, found: Mapping[str, Any]) -> None:
        """Keep what was found, whole or not at all. Where it cannot be written, the next start looks again."""
        try:
            replace_object(self.path, {"version": self.version, "found": dict(found)})
        except OSError as error:
            log.info("nothing is kept in %s: %s", self.path.parent, error)


def kept_result(name: str, places: Iterable[Path], about: Mapping[str, object]) -> KeptResult:
    """The result called `name` about the models or tokenizers at `places`, in the user's folder of caches.

    about: options and whatever else it depends on; different ones are kept beside each other.
    """
    whole = [str(place.resolve()) for place in places]
    files = [identity(file) for place in whole for file in files_of(Path(place))]
    key = digest({"places": whole, "about": about})
    return KeptResult(cache_folder() / name / f"{key}.json", digest({"files": files, "code": code_version()}))


def cache_folder() -> Path:
    """XDG_CACHE_HOME/quire, ~/.cache/quire by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def digest(value: object) -> str:
    """A short name of a value that JSON has a form for; others count as their text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def files_of(place: Path) -> list[Path]:
    """The files of a model: those of its folder, or the parts of a GGUF file. Raises InvalidModel as `read_gguf`."""
    if place.is_dir():
        return sorted(file for file in place.iterdir() if file.is_file())
    gguf = find_gguf(place)
    return [place] if gguf is None else sorted({gguf, *(info.path for info in read_gguf(gguf).tensors.values())})


def identity(path: Path) -> list[str | int]:
    """Name, size, time, and a digest of some of its bytes."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        seen = hashlib.sha256()
        for at in {max(0, found.st_size - SAMPLE) * i // (SAMPLES - 1): None for i in range(SAMPLES)}:
            seen.update(os.pread(file.fileno(), SAMPLE, at))
    return [path.name, found.st_size, found.st_mtime_ns, seen.hexdigest()]


def code_version() -> list[str | int]:
    """Quire's version, and the newest time of its files that this process has loaded: in a checkout they change."""
    loaded = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "quire"]
    files = [Path(file) for file in loaded if file is not None]
    return [quire.__version__, max((file.stat().st_mtime_ns for file in files), default=0)]
