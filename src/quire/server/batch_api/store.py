"""Documents on disk and data beside them, replaced atomically: whenever the process is killed, they are complete."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import escape_control
from quire.server.error_responses import NotFound
from quire.server.folder import durable_write, make_private, open_private, replace_file, usable, write_all
from quire.server.folder import lock as lock_folder

log = logging.getLogger("uvicorn.error")

_ID = re.compile(r"[a-z]+[-_][0-9a-f]{24}")

# Version of the folder's layout and documents, in its file `lock`; a folder without one has version 1.
FORMAT = 1

# The option that names the folder.
OPTION = "--batch-dir"


def new_id(kind: str) -> str:
    """A new id that begins with `kind`."""
    return kind + secrets.token_hex(12)


class Document(msgspec.Struct):
    """The fields that every document has."""

    id: str
    created_at: int


class Store:
    """Documents of one kind in a folder: `ID.json`, and `ID.data` if it has data. what: the kind, for messages.

    Blocking, but never for long: documents are small. Used from one process only, by any of its threads; `lock` is for
    changes that depend on a document's fields. Other files in the folder are ignored. `bytes`: of all data, by the
    documents' fields.
    """

    def __init__(self, folder: Path, what: str) -> None:
        """Raises InvalidConfig if the folder cannot be used."""
        self._folder = folder
        self._what = what
        self._known: dict[str, dict[str, Any]] = {}
        self.lock = threading.RLock()
        with usable(folder, OPTION):
            make_private(folder)
            ours = [path for path in sorted(folder.iterdir()) if _ID.fullmatch(path.stem) and path.is_file()]
            for path in ours:
                self._load(path)
        self.bytes = sum(map(_bytes, self._known.values()))

    def _load(self, path: Path) -> None:
        """Read a document found at the start, or delete a file that an unfinished write or upload left."""
        document = path.with_suffix(".json")
        if path.suffix in (".new", ".part") or (path.suffix == ".data" and not document.exists()):
            path.unlink()
            return
        # Earlier versions wrote files that others could read.
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        if path == document:
            try:
                known = msgspec.json.decode(path.read_bytes())
                if msgspec.convert(known, Document).id != path.stem:
                    raise msgspec.ValidationError("its id differs from its file name")
                if "bytes" in known and not path.with_suffix(".data").exists():
                    # Killed within `put`, which its caller repeats.
                    return
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("%s is not a %s, and is ignored: %s", path, self._what, escape_control(str(error)))
            else:
                self._known[known["id"]] = known

    def get(self, id: str) -> dict[str, Any]:
        """The document. Raises NotFound."""
        if id not in self._known:
            raise no_document(self._what, id)
        return self._known[id]

    def __len__(self) -> int:
        return len(self._known)

    def put(self, document: dict[str, Any], data: Path | None = None, /, **changes: Any) -> None:
        """Write a document with these changes, UNSET for a field to be removed.

        On disk and in memory, the old one is replaced once the new one is complete. data: a file that is moved and
        becomes its data, which is there when others can see the document. Raises WriteFailed, with nothing changed.
        """
        with self.lock:
            whole = {name: value for name, value in {**document, **changes}.items() if value is not msgspec.UNSET}
            replace_file(self.path(whole["id"], ".json"), msgspec.json.encode(whole), sync=True)
            if data is not None:
                # After the document: at a start, data without one are deleted.
                with durable_write():
                    data.replace(self.path(whole["id"], ".data"))
            self.bytes += _bytes(whole) - _bytes(self._known.get(whole["id"]))
            for name in document.keys() - whole.keys():
                del document[name]
            document.update(whole)
            self._known[whole["id"]] = document

    def add(self, id: str, suffix: str, line: bytes) -> None:
        """Append a line to a journal, completely or not at all. Raises WriteFailed."""
        with durable_write(), open_private(self.path(id, suffix), "ab") as file:
            end = file.tell()
            try:
                write_all(file, line)
            except OSError:
                file.truncate(end)
                raise

    def delete(self, id: str) -> None:
        """Delete a document and its data. Raises NotFound, and WriteFailed, with nothing changed."""
        with self.lock:
            known = self.get(id)
            with durable_write():
                self.path(id, ".json").unlink(missing_ok=True)
            self.bytes -= _bytes(known)
            del self._known[id]
            with durable_write():
                self.path(id, ".data").unlink(missing_ok=True)

    def all(self) -> list[dict[str, Any]]:
        """All documents, in no order."""
        return list(self._known.values())

    def path(self, id: str, suffix: str) -> Path:
        """The path of a document's file. suffix: `.data`; `.part`, incomplete data, which is deleted at a start; or
        that of a journal, to which lines are appended, also after a restart."""
        assert _ID.fullmatch(id), id
        return self._folder / (id + suffix)


def no_document(what: str, id: str) -> NotFound:
    """The error where there is no document of this id. what: its kind."""
    return NotFound(f"there is no {what} {id[:64]!r}", param="id", code="not_found")


def _bytes(document: dict[str, Any] | None) -> int:
    """Bytes of a document's data: a file takes at least one block of the disk."""
    return 0 if document is None else max(document.get("bytes", 0), 4096)


def newest_first(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Documents by the time of their creation."""
    return sorted(documents, key=lambda one: (one["created_at"], one["id"]), reverse=True)


def lock(folder: Path) -> FileIO:
    """Lock the folder of batches (`folder.lock`): two servers would answer every line twice. Raises InvalidConfig."""
    return lock_folder(folder, "batches", FORMAT, OPTION)


def whole_lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a journal; an incomplete last one, left by a kill, is removed."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            yield line
        file.truncate(end)
