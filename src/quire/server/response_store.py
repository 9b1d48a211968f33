"""Stored responses: within a bound, each key's apart, in memory or in files of which each is whole or not there."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.errors import InvalidConfig, TooLarge, escape_control
from quire.frontend.offload import LARGE
from quire.observability.observer import FrontendObserver
from quire.server.error_responses import NotFound
from quire.server.folder import WriteFailed, durable_write, lock, make_private, replace_file, usable

log = logging.getLogger("uvicorn.error")

FORMAT = 1
"""Version of the folder's layout and of its files."""

OPTION = "--state-dir"

UNFINISHED = ("queued", "in_progress")

INTERRUPTED = "the server ended before this response was complete"

_ID = re.compile(r"resp_[0-9a-f]{32}")
_SUFFIX = ".response"
_SALT_BYTES = 32
_LONGEST_HEAD = 1 << 16

# Bytes that an entry takes besides its content, about.
_PER_ENTRY = 512


class Content(NamedTuple):
    """The parts of a stored response, encoded: the input and the output as lists of items (or the input's text), the
    rest of the response object, and its events, compressed."""

    input: bytes
    output: bytes
    response: bytes
    events: bytes = b""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a stored response without reading it.

    owner: whose key stored it. previous: the id of the response that it continues. earlier: bytes of items of all
    responses before it. sizes, checksum: of its content.
    """

    id: str
    owner: str
    created: int
    status: str
    background: bool = False
    previous: str | None = None
    earlier: int = 0
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    checksum: int = 0

    @property
    def bytes(self) -> int:
        """What it counts within the bound."""
        return sum(self.sizes) + _PER_ENTRY

    @property
    def items(self) -> int:
        """Bytes of the items of the conversation up to here."""
        return self.earlier + self.sizes[0] + self.sizes[1]


class _Damaged(Exception):
    """A file does not match its checksum."""


class _Medium(Protocol):
    """Where contents are kept."""

    def write(self, entry: Entry, content: Content) -> None:
        """Keep a content in place of the last one. Raises WriteFailed, with the last one kept."""

    def read(self, entry: Entry) -> Content:
        """The content as it was written last. Raises _Damaged, and LookupError where there is none."""

    def remove(self, id: str) -> None:
        """Keep it no longer. Raises WriteFailed."""


class _Memory:
    def __init__(self) -> None:
        self._contents: dict[str, Content] = {}

    def write(self, entry: Entry, content: Content) -> None:
        self._contents[entry.id] = content

    def read(self, entry: Entry) -> Content:
        return self._contents[entry.id]

    def remove(self, id: str) -> None:
        self._contents.pop(id, None)


class _Folder:
    """A file each: a line with the entry, then the parts of the content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with usable(folder, OPTION):
            make_private(folder)

    def _path(self, id: str) -> Path:
        assert _ID.fullmatch(id), id
        return self._folder / (id + _SUFFIX)

    def write(self, entry: Entry, content: Content) -> None:
        # Not synced: what a killed process has written stays, and a power failure costs the last seconds.
        data = b"".join((msgspec.json.encode(entry), b"\n", *content))
        replace_file(self._path(entry.id), data, sync=False)

    def read(self, entry: Entry) -> Content:
        # The file's own head is used: the response may have been written again since `entry` was looked up.
        try:
            head, _, body = self._path(entry.id).read_bytes().partition(b"\n")
            written = msgspec.json.decode(head, type=Entry)
        except FileNotFoundError:
            raise LookupError from None
        except OSError as error:
            raise _Damaged(error.strerror) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Damaged(str(error)) from error
        known = written.id == entry.id and written.owner == entry.owner
        if not known or sum(written.sizes) != len(body) or zlib.crc32(body) != written.checksum:
            raise _Damaged("it does not match its checksum")
        parts, end = [], 0
        for size in written.sizes:
            parts.append(body[end : end + size])
            end += size
        return Content(*parts)

    def remove(self, id: str) -> None:
        with durable_write():
            self._path(id).unlink(missing_ok=True)

    def entries(self) -> Iterator[Entry]:
        """The entries of all files. What is damaged is logged by its id; other files are ignored."""
        for path in self._folder.iterdir():
            if not _ID.fullmatch(path.stem) or not path.is_file():
                continue
            if path.suffix == ".new":
                path.unlink()
            elif path.suffix == _SUFFIX:
                try:
                    yield _entry(path)
                except (_Damaged, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    log.warning("%s cannot be read, and is missing: %s", path.stem, escape_control(str(error)))


def _entry(path: Path) -> Entry:
    """The entry in a file's first line. Raises _Damaged, OSError or DecodeError."""
    with path.open("rb") as file:
        head = file.readline(_LONGEST_HEAD)
    entry = msgspec.json.decode(head, type=Entry)
    if entry.id != path.stem:
        raise _Damaged("its id differs from its file name")
    if not head.endswith(b"\n") or path.stat().st_size != len(head) + sum(entry.sizes):
        raise _Damaged("it is not complete")
    return entry


class ResponseStore:
    """Responses by key and id. Blocking where there is a folder; may be used from any thread.

    most, most_bytes: at most this many, and this many bytes, are kept; 0: none. Beyond, the key that takes the largest
    share loses its response that was not used for the longest time. Responses in progress are not evicted. folder:
    where they are kept; None: in memory.
    """

    def __init__(
        self,
        most: int = 1000,
        most_bytes: int = 128 << 20,
        folder: Path | None = None,
        observer: FrontendObserver | None = None,
    ) -> None:
        """Raises InvalidConfig where the folder cannot be used, or another server uses it."""
        self.most = most
        self.bytes = self._num = 0
        self._most_bytes = most_bytes
        self._observer = observer or FrontendObserver()
        self._mutex = threading.Lock()
        self._owned: dict[str, OrderedDict[str, Entry]] = {}
        self._owned_bytes: dict[str, int] = {}
        self._lock: FileIO | None = None
        self._medium: _Medium = _Memory()
        self.salt = secrets.token_bytes(_SALT_BYTES)
        if folder is not None:
            with ExitStack() as undo:
                self._lock = undo.enter_context(lock(folder, "responses", FORMAT, OPTION))
                self._open(folder)
                undo.pop_all()
        self._report()

    def _open(self, folder: Path) -> None:
        with usable(folder, OPTION):
            self.salt = _salt(folder / "salt")
            self._medium = files = _Folder(folder / "responses")
            known = sorted(files.entries(), key=lambda entry: (entry.created, entry.id))
        for entry in known:
            self._index(entry)
        for entry in known:
            if entry.status in UNFINISHED:
                self._mark_interrupted(entry)
        self._evict()

    # ---------------------------------------------------------------- looking up

    @property
    def read_cost(self) -> int:
        """The cost of reading or writing the smallest one (`frontend.offload`)."""
        return 0 if self._lock is None else LARGE

    def __len__(self) -> int:
        return self._num

    def find(self, id: str, owner: str, param: str = "id") -> Entry:
        """The entry. Takes the same time however many there are. Raises NotFound, naming `param`."""
        entry = self._owned.get(owner, OrderedDict()).get(id)
        if entry is None:
            raise _missing(id, param)
        return entry

    def read(self, entry: Entry, param: str = "id") -> Content:
        """The content. Raises NotFound where it is gone meanwhile, or damaged."""
        try:
            return self._medium.read(entry)
        except LookupError:
            self._forget(entry)
            raise _missing(entry.id, param) from None
        except _Damaged as error:
            log.warning("%s cannot be read, and is missing: %s", entry.id, error)
            self._forget(entry)
            raise _missing(entry.id, param) from error

    def conversation(self, entry: Entry) -> list[dict[str, Any]]:
        """All items up to the end of this response's output. Its responses count as used now.

        Raises NotFound where one before it is not stored any more.
        """
        param = "previous_response_id"
        chain, seen = [entry], {entry.id}
        # Each once: in a damaged folder a response may continue itself.
        while (before := chain[-1].previous) is not None and before not in seen:
            seen.add(before)
            try:
                chain.append(self.find(before, entry.owner, param))
            except NotFound as error:
                raise NotFound(
                    f"{entry.id} continues {before}, which is no longer stored: send the whole conversation as input",
                    param=param,
                    code=error.code,
                ) from None
        items: list[dict[str, Any]] = []
        for one in reversed(chain):
            content = self.used(one, param)
            items += as_items(msgspec.json.decode(content.input)) + msgspec.json.decode(content.output)
        return items

    def used(self, entry: Entry, param: str) -> Content:
        """The content of a response that counts as used now. Raises NotFound."""
        content = self.read(entry, param)
        with self._mutex, suppress(KeyError):
            self._owned[entry.owner].move_to_end(entry.id)
        return content

    # ---------------------------------------------------------------- changing

    def put(self, entry: Entry, content: Content) -> None:
        """Keep a response in place of one of the same id. Raises WriteFailed, and TooLarge beyond the bound."""
        entry = msgspec.structs.replace(
            entry,
            sizes=(len(content.input), len(content.output), len(content.response), len(content.events)),
            checksum=zlib.crc32(b"".join(content)),
        )
        if entry.bytes > self._most_bytes:
            raise TooLarge(
                f"a response of {entry.bytes} bytes cannot be stored: this server stores {self._most_bytes} in all "
                "(--max-stored-bytes)",
                param="store",
                code="too_large_to_store",
            )
        self._medium.write(entry, content)
        self._index(entry)
        self._evict()

    def delete(self, entry: Entry) -> None:
        """Forget a response. Raises WriteFailed, with nothing changed."""
        self._medium.remove(entry.id)
        self._forget(entry)

    def close(self) -> None:
        """Release the folder. May be called again."""
        if self._lock is not None:
            self._lock.close()

    def _index(self, entry: Entry) -> None:
        with self._mutex:
            self._unindex(entry)
            self._owned.setdefault(entry.owner, OrderedDict())[entry.id] = entry
            self._owned_bytes[entry.owner] = self._owned_bytes.get(entry.owner, 0) + entry.bytes
            self.bytes += entry.bytes
            self._num += 1
            self._report()

    def _unindex(self, entry: Entry) -> None:
        owned = self._owned.get(entry.owner, OrderedDict())
        if (old := owned.pop(entry.id, None)) is None:
            return
        self.bytes -= old.bytes
        self._num -= 1
        self._owned_bytes[entry.owner] -= old.bytes
        if not owned:
            del self._owned[entry.owner], self._owned_bytes[entry.owner]

    def _forget(self, entry: Entry) -> None:
        with self._mutex:
            self._unindex(entry)
            self._report()

    def _evict(self) -> None:
        """Remove what is beyond the bound."""
        while True:
            with self._mutex:
                if len(self) <= self.most and self.bytes <= self._most_bytes:
                    return
                if (victim := self._victim()) is None:
                    return
                self._unindex(victim)
                self._observer.on_evicted_response()
                self._report()
            try:
                self._medium.remove(victim.id)
            except WriteFailed as error:
                log.error("%s is evicted, but its file remains: %s", victim.id, error)

    def _victim(self) -> Entry | None:
        """The longest unused response of the key that takes the largest share of the bound."""

        def share(owner: str) -> float:
            return max(len(self._owned[owner]) / max(self.most, 1), self._owned_bytes[owner] / self._most_bytes)

        for owner in sorted(self._owned, key=share, reverse=True):
            for entry in self._owned[owner].values():
                if entry.status not in UNFINISHED:
                    return entry
        return None

    def _report(self) -> None:
        # With the mutex held, or the numbers of two threads could arrive in the other order.
        self._observer.on_stored_responses(len(self), self.bytes)

    def _mark_interrupted(self, entry: Entry) -> None:
        """A response that was in progress when the last server ended has failed."""
        try:
            content = self.read(entry)
            response = msgspec.json.decode(content.response)
            response |= {"status": "failed", "error": {"code": "server_error", "message": INTERRUPTED}}
            failed = msgspec.structs.replace(entry, status="failed")
            self.put(failed, content._replace(response=msgspec.json.encode(response)))
        except (NotFound, WriteFailed, TooLarge, msgspec.DecodeError) as error:
            log.warning("%s was in progress, and is missing: %s", entry.id, error)
            self._forget(entry)


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input, which may be one text."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _missing(id: str, param: str) -> NotFound:
    # One message for all reasons: it must not say what other keys have.
    return NotFound(
        f"no response {id[:64]!r} is stored for this key: it was evicted, deleted, not to be stored (store: false), or "
        "never existed",
        param=param,
        code="response_not_found",
    )


def _salt(path: Path) -> bytes:
    """The salt of the folder's owners, made once. Raises InvalidConfig and OSError."""
    try:
        salt = path.read_bytes()
    except FileNotFoundError:
        salt = secrets.token_bytes(_SALT_BYTES)
        try:
            replace_file(path, salt, sync=True)
        except WriteFailed as error:
            raise InvalidConfig(f"{OPTION}: {path}: {error}") from error
    if len(salt) != _SALT_BYTES:
        raise InvalidConfig(f"{OPTION}: {path} is damaged: choose another folder, or delete this one")
    return salt
