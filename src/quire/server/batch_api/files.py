"""OpenAI's Files, which batches read and write, and their uploads (multipart/form-data, RFC 7578)."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from email.message import Message
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from quire.errors import InvalidRequest, TooLarge
from quire.server.access import refuse_cross_site
from quire.server.batch_api.store import Store, new_id, newest_first, no_document
from quire.server.error_responses import json_response
from quire.server.folder import WriteFailed, durable_write, open_private
from quire.server.listing import oldest_first, page

PURPOSES = ("batch",)
MOST_FILES = 10_000
_LONGEST_NAME = 200

# Bytes that sorting one document, and perhaps encoding it, is worth (`frontend.offload`).
_COST_PER_DOCUMENT = 64

_PART_NAME = re.compile(r'(?:^|;)\s*(name|filename)="((?:[^"\\]|\\.)*)"')
_MAX_PART_HEAD = 4096
_MAX_FIELD = 4096
_MAX_PARTS = 16


class Incoming:
    """Files that are being uploaded, whose bytes count against the space for all files. max_total: that space."""

    def __init__(self, store: Store, max_total: int) -> None:
        self._store = store
        self._max_total = max_total
        self._sizes: dict[Path, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def space(self) -> int:
        """Bytes that may still be written."""
        return max(0, self._max_total - self._store.bytes - sum(self._sizes.values()))

    def begin(self, path: Path) -> None:
        """An upload begins."""
        self._sizes[path] = 0

    def write(self, path: Path, file: BinaryIO, data: bytes) -> None:
        """Append data to an upload. Raises TooLarge."""
        if len(data) > self.space:
            raise TooLarge("there is no space for the file: delete others", param="file", code="no_room")
        self._sizes[path] += len(data)
        file.write(data)

    def end(self, path: Path) -> None:
        """The upload has become a document of the store, or was given up."""
        del self._sizes[path]


class Files:
    """Files in a store. in_use: the unfinished batch that reads a file, if one does. max_size, max_total: bytes."""

    def __init__(
        self, store: Store, in_use: Callable[[str], str | None], *, max_size: int = 200 << 20, max_total: int = 10 << 30
    ) -> None:
        self._store = store
        self._in_use = in_use
        self._max_size = max_size
        self._incoming = Incoming(store, max_total)

    def routes(self) -> list[Route]:
        """All paths of files."""
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.listed, methods=["GET"]),
            Route("/v1/files/{id}", self.about, methods=["GET"]),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """`POST /v1/files`."""
        refuse_cross_site(request.scope)
        if len(self._store) + len(self._incoming) >= MOST_FILES:
            raise InvalidRequest(
                f"there are {MOST_FILES} files, which is the limit: delete some", code="too_many_files"
            )
        space = min(self._max_size, self._incoming.space)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > space + (1 << 16):
            raise TooLarge(f"the file is larger than this server takes ({space} bytes)", code="file_too_large")
        id = new_id("file-")
        path = self._store.path(id, ".part")
        opened: list[BinaryIO] = []

        def open_file() -> Callable[[bytes], None]:
            opened.append(BufferedWriter(open_private(path, "wb")))
            return partial(self._incoming.write, path, opened[0])

        form = Form(boundary(request.headers.get("content-type", "")), open_file, space)
        self._incoming.begin(path)
        try:
            with durable_write():
                await form.read(request.stream())
                document = self._document(id, form.fields, opened)
                await asyncio.to_thread(os.fsync, opened[0].fileno())
                path.replace(self._store.path(id, ".data"))
            try:
                self._store.put(document)
            except WriteFailed:
                self._store.path(id, ".data").unlink()
                raise
        except ClientDisconnect as gone:
            raise InvalidRequest("the client disconnected before its upload was complete") from gone
        finally:
            for file in opened:
                # Raised where buffered data cannot be written.
                with suppress(OSError):
                    file.close()
            path.unlink(missing_ok=True)
            self._incoming.end(path)
        return json_response(document)

    def _document(self, id: str, fields: dict[str, str], opened: list[BinaryIO]) -> dict[str, Any]:
        if not opened:
            raise InvalidRequest("file is required: a part with that name", param="file", code="missing_field")
        if fields.get("purpose") not in PURPOSES:
            raise InvalidRequest("purpose must be batch: no other purpose is supported", param="purpose")
        for name in fields.keys() - {"file", "purpose"}:
            raise InvalidRequest(f"unknown field {name[:64]!r}", param=name[:64], code="unknown_field")
        opened[0].flush()
        return document(id, opened[0].tell(), fields["file"] or "file.jsonl", "batch")

    async def listed(self, request: Request) -> Response:
        """`GET /v1/files`."""
        purpose = request.query_params.get("purpose")
        asc = oldest_first(request)
        keep = bool if purpose is None else (lambda one: one["purpose"] == purpose)
        return await listing(request, self._store, 10_000, keep, default=10_000, oldest_first=asc)

    async def about(self, request: Request) -> Response:
        """`GET /v1/files/{id}`."""
        return json_response(self._store.get(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/files/{id}`."""
        id = request.path_params["id"]
        self._store.get(id)
        if batch := self._in_use(id):
            raise InvalidRequest(f"{id} is in use by {batch}: cancel it first", param="id", code="file_in_use")
        self._store.delete(id)
        return json_response({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """`GET /v1/files/{id}/content`."""
        id = self._store.get(request.path_params["id"])["id"]
        path = self._store.path(id, ".data")
        try:
            about = await asyncio.to_thread(path.stat)
        except FileNotFoundError:
            raise no_document("file", id) from None  # it has just been deleted
        return FileResponse(path, media_type="application/octet-stream", stat_result=about)


def document(id: str, size: int, name: str, purpose: str) -> dict[str, Any]:
    """A file object."""
    return {
        "id": id,
        "object": "file",
        "bytes": size,
        "created_at": int(time.time()),
        "expires_at": None,
        "filename": name[:_LONGEST_NAME],
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


async def listing(
    request: Request,
    store: Store,
    most: int,
    keep: Callable[[dict[str, Any]], bool] = bool,
    *,
    default: int,
    oldest_first: bool = False,
) -> Response:
    """OpenAI's list object: documents for which `keep` is true, the newest first by default.

    Raises InvalidRequest.
    """
    known = store.all()

    def sorted_documents() -> list[dict[str, Any]]:
        documents = [one for one in newest_first(known) if keep(one)]
        return documents[::-1] if oldest_first else documents

    return await page(request, sorted_documents, _COST_PER_DOCUMENT * len(known), most=most, default=default)


# ---------------------------------------------------------------- uploads


def boundary(content_type: str) -> bytes:
    """The delimiter between the parts of an upload. Raises InvalidRequest for another content type."""
    message = Message()
    message["content-type"] = content_type
    given = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(given, str) or not 0 < len(given) <= 70:
        raise InvalidRequest("send the file as multipart/form-data, with a boundary", code="invalid_upload")
    return b"\r\n--" + given.encode("latin-1", "replace")


class Form:
    """Reads one upload. `fields` are its text fields; the part named `file` goes to the function that `open_file`
    returns, piece by piece. delimiter: as `boundary` returns it. max_size: bytes of the file."""

    def __init__(self, delimiter: bytes, open_file: Callable[[], Callable[[bytes], object]], max_size: int) -> None:
        self.fields: dict[str, str] = {}
        self._delimiter = delimiter
        self._open_file = open_file
        self._left = max_size
        # Begins with a line end, so that the first delimiter looks like the others.
        self._data = bytearray(b"\r\n")
        self._sink: Callable[[bytes], object] | None = None
        self._name: str | None = None
        self._text = bytearray()
        self._num_parts = 0
        self._over = False

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """Read the whole body. Raises InvalidRequest if it is malformed, and TooLarge as soon as the file is."""
        async for data in stream:
            if not self._over:
                self._data += data
                while self._step():
                    pass
        if not self._over:
            raise _broken("it ends before the closing boundary")

    def _step(self) -> bool:
        """Consume the current part as far as it is certain. Returns whether another part has begun."""
        length = len(self._delimiter)
        at = self._data.find(self._delimiter)
        self._take(at if at >= 0 else len(self._data) - length)
        if at < 0:
            return False
        self._end_part()
        if self._data[length : length + 2] == b"--":
            self._over = True
            return False
        end = self._data.find(b"\r\n\r\n", length)
        if end < 0:
            if len(self._data) > _MAX_PART_HEAD:
                raise _broken("the headers of a part do not end")
            return False
        self._begin_part(self._data[length:end].decode("utf-8", "replace"))
        del self._data[: end + 4]
        return True

    def _take(self, size: int) -> None:
        """Consume bytes of the current part's content."""
        if size <= 0:
            return
        data = bytes(self._data[:size])
        del self._data[:size]
        if self._sink is not None:
            self._left -= size
            if self._left < 0:
                raise TooLarge("the file is larger than this server takes", param="file", code="file_too_large")
            self._sink(data)
        elif self._name is not None:
            self._text += data
            if len(self._text) > _MAX_FIELD:
                raise TooLarge(f"the field {self._name[:64]!r} is too long", param=self._name[:64])

    def _end_part(self) -> None:
        if self._name is not None and self._sink is None:
            self.fields[self._name] = self._text.decode("utf-8", "replace")
        self._name = None
        self._sink = None
        self._text.clear()

    def _begin_part(self, head: str) -> None:
        self._num_parts += 1
        line = next((x for x in head.split("\r\n") if x.lower().startswith("content-disposition:")), "")
        found = dict(_PART_NAME.findall(line.partition(":")[2]))
        if "name" not in found or self._num_parts > _MAX_PARTS or found["name"] in self.fields:
            raise _broken("its parts must be few and have different names")
        if found["name"] == "file":
            self.fields["file"] = found.get("filename", "")
            self._sink = self._open_file()
        self._name = found["name"]


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(f"the upload cannot be read: {why}", param="file", code="invalid_upload")
