"""Documents on disk, replaced as a whole, and data beside them: whoever is killed, what is there is whole."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.errors import InvalidConfig, InvalidRequest, Unavailable

_ID = re.compile(r"[a-z]+[-_][0-9a-f]{24}")


class UnknownFile(InvalidRequest):
    """There is no such file or batch."""

    status = 404


class Unkept(Unavailable):
    """What was to be written could not be: the disk is full, or gone. It may come back."""


@contextmanager
def kept() -> Iterator[None]:
    """Raises Unkept where writing within fails."""
    try:
        yield
    except OSError as error:
        raise Unkept(f"this server's disk cannot take it: {error.strerror}", code="storage") from error


def new_id(kind: str) -> str:
    return kind + secrets.token_hex(12)


class Store:
    """Documents of one kind in a folder: `ID.json`, with `ID.data` beside where there is any.

    Blocking, but never for long: documents are small. Used from one process only.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._folder, self._what = folder, what
        folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.json")):
            document = msgspec.json.decode(path.read_bytes())
            self._known[document["id"]] = document
        self.bytes = sum(map(_bytes, self._known.values()))
        """All data kept, by the documents' own word."""
        for path in folder.iterdir():
            if path.suffix in (".new", ".part") or (path.suffix == ".data" and path.stem not in self._known):
                path.unlink()  # of a write or an upload that was killed

    def get(self, id: str) -> dict[str, Any]:
        """The document. Raises UnknownFile."""
        if id not in self._known:
            raise UnknownFile(f"there is no {self._what} {id[:64]!r}", param="id", code="not_found")
        return self._known[id]

    def __len__(self) -> int:
        return len(self._known)

    def put(self, document: dict[str, Any]) -> None:
        """Keep it: the old one is there until the new one is, whole. Raises Unkept."""
        path = self._path(document["id"], ".new")
        with kept(), path.open("wb") as file:
            file.write(msgspec.json.encode(document))
            file.flush()
            os.fsync(file.fileno())
            path.replace(path.with_suffix(".json"))
        self.bytes += _bytes(document) - _bytes(self._known.get(document["id"]))
        self._known[document["id"]] = document

    def add(self, id: str, suffix: str, line: bytes) -> None:
        """A line more in a journal, whole or not at all. Raises Unkept."""
        with kept(), self._path(id, suffix).open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) < len(line):  # as much as there was room for
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def forget(self, id: str) -> None:
        self.bytes -= _bytes(self.get(id))
        del self._known[id]
        self._path(id, ".json").unlink(missing_ok=True)
        self._path(id, ".data").unlink(missing_ok=True)

    def newest(self, keep: Callable[[dict[str, Any]], bool] = bool) -> list[dict[str, Any]]:
        """Those that are to be kept, or all; the newest first."""
        kept = filter(keep, self._known.values())
        return sorted(kept, key=lambda one: (one["created_at"], one["id"]), reverse=True)

    def data(self, id: str) -> Path:
        """Where its data is."""
        return self._path(id, ".data")

    def part(self, id: str) -> Path:
        """Where data is written that is not whole yet. Deleted at a start, unlike a journal."""
        return self._path(id, ".part")

    def journal(self, id: str, suffix: str) -> Path:
        """Where lines are added one by one, over several lives of the server."""
        return self._path(id, suffix)

    def _path(self, id: str, suffix: str) -> Path:
        assert _ID.fullmatch(id), id
        return self._folder / (id + suffix)


def _bytes(document: dict[str, Any] | None) -> int:
    """Of its data: the smallest file takes a block of the disk."""
    return 0 if document is None else max(document.get("bytes", 0), 4096)


def page_of(
    documents: list[dict[str, Any]], limit: int, after: str | None, keep: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """OpenAI's list object: at most `limit` of the documents kept, those after the one with the id `after`."""
    kept = [one for one in documents if keep(one)]
    if after is not None:
        ids = [one["id"] for one in kept]
        if after not in ids:
            raise InvalidRequest(f"after: there is no {after[:64]!r} in this list", param="after")
        kept = kept[ids.index(after) + 1 :]
    data = kept[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(kept) > limit,
    }


class Lock:
    """One server a folder: two would answer every line twice. Held until the process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidConfig if another process has it, or the folder cannot be had."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo:
                self._file: BinaryIO = undo.enter_context((folder / "lock").open("wb"))
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                undo.pop_all()
        except BlockingIOError:
            raise InvalidConfig(f"another server uses {folder}: choose another --batch-dir") from None
        except OSError as error:
            raise InvalidConfig(f"--batch-dir {folder}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a journal; a last one that was cut short by a kill is cut off."""
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
