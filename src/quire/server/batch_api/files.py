"""OpenAI's Files: what batches read and write."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from quire.errors import InvalidRequest, TooLarge
from quire.frontend.offload import offload
from quire.server.batch_api.multipart import Form, boundary
from quire.server.batch_api.store import Store, WriteFailed, created, durable_write, new_id, newest_first, page_of
from quire.server.hosts import refuse_cross_site

PURPOSES = ("batch",)
MOST_FILES = 10_000
_LONGEST_NAME = 200

_ABOUT = 64
"""Bytes that sorting a document, and perhaps writing it, is worth (backends.offload)."""


class Incoming:
    """Files being uploaded: what has come of each counts at once, however many come together. in_all: bytes."""

    def __init__(self, store: Store, in_all: int) -> None:
        self._store, self._in_all = store, in_all
        self._so_far: dict[Path, int] = {}

    @property
    def room(self) -> int:
        """Bytes that may still come."""
        return max(0, self._in_all - self._store.bytes - sum(self._so_far.values()))

    def write(self, path: Path, file: BinaryIO, data: bytes) -> None:
        """Raises TooLarge."""
        if len(data) > self.room:
            raise TooLarge("this server has no room for the file: delete others", param="file", code="no_room")
        self._so_far[path] = self._so_far.get(path, 0) + len(data)
        file.write(data)

    def over(self, path: Path) -> None:
        """It is a document of the store's, or nothing."""
        self._so_far.pop(path, None)


class Files:
    """Files in a store. in_use: which unfinished batch reads a file, if one does. most, in_all: bytes."""

    def __init__(
        self, store: Store, in_use: Callable[[str], str | None], *, most: int = 200 << 20, in_all: int = 10 << 30
    ) -> None:
        self._store, self._in_use, self._most = store, in_use, most
        self._incoming = Incoming(store, in_all)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.listed, methods=["GET"]),
            Route("/v1/files/{id}", self.about, methods=["GET"]),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        refuse_cross_site(request.scope)
        if len(self._store) >= MOST_FILES:
            raise InvalidRequest(
                f"there are {MOST_FILES} files, and no more may be: delete some", code="too_many_files"
            )
        room = min(self._most, self._incoming.room)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > room + (1 << 16):
            raise TooLarge(f"the file is larger than this server takes ({room} bytes)", code="file_too_large")
        id = new_id("file-")
        path = self._store.part(id)
        opened: list[BinaryIO] = []

        def opens(name: str) -> Callable[[bytes], None]:
            opened.append(BufferedWriter(created(path, "wb")))
            return partial(self._incoming.write, path, opened[0])

        form = Form(boundary(request.headers.get("content-type", "")), opens, room)
        try:
            with durable_write():
                await form.read(request.stream())
                document = self._document(id, form.fields, opened)
                await asyncio.to_thread(os.fsync, opened[0].fileno())
                path.replace(self._store.data(id))
            try:
                self._store.put(document)
            except WriteFailed:
                self._store.data(id).unlink()
                raise
        except ClientDisconnect as gone:
            raise InvalidRequest("the client left before its upload was complete") from gone
        finally:
            for file in opened:
                with suppress(OSError):  # of what did not get onto the disk
                    file.close()
            path.unlink(missing_ok=True)
            self._incoming.over(path)
        return _json(document)

    def _document(self, id: str, fields: dict[str, str], opened: list[BinaryIO]) -> dict[str, Any]:
        if not opened:
            raise InvalidRequest("file is required: a part with that name", param="file", code="missing_field")
        if fields.get("purpose") not in PURPOSES:
            raise InvalidRequest("purpose must be batch: files are for nothing else here", param="purpose")
        for name in fields.keys() - {"file", "purpose"}:
            raise InvalidRequest(f"unknown field {name[:64]!r}", param=name[:64], code="unknown_field")
        opened[0].flush()
        return document(id, opened[0].tell(), fields["file"] or "file.jsonl", "batch")

    async def listed(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order must be asc or desc, not {order[:40]!r}", param="order")
        after = request.query_params.get("after")
        keep = bool if purpose is None else (lambda one: one["purpose"] == purpose)
        return await listing(self._store, limit_of(request, 10_000), after, keep, oldest_first=order == "asc")

    async def about(self, request: Request) -> Response:
        return _json(self._store.get(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._store.get(id)
        if batch := self._in_use(id):
            raise InvalidRequest(f"{id} is in use by {batch}: cancel it first", param="id", code="file_in_use")
        self._store.forget(id)
        return _json({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        id = self._store.get(request.path_params["id"])["id"]
        return FileResponse(self._store.data(id), media_type="application/octet-stream")


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


def limit_of(request: Request, most: int) -> int:
    """How many of a list are wanted. Raises InvalidRequest."""
    given = request.query_params.get("limit")
    if given is None:
        return min(most, 20 if most <= 100 else most)
    with suppress(ValueError):
        if 1 <= int(given) <= most:
            return int(given)
    raise InvalidRequest(f"limit must be a number between 1 and {most}", param="limit")


async def listing(
    store: Store,
    limit: int,
    after: str | None,
    keep: Callable[[dict[str, Any]], bool] = bool,
    *,
    oldest_first: bool = False,
) -> Response:
    """A page of the store's documents (`store.page_of`), the newest first by default."""
    known = store.all()

    def made() -> bytes:
        documents = newest_first(known)
        return msgspec.json.encode(page_of(documents[::-1] if oldest_first else documents, limit, after, keep))

    return Response(await offload(_ABOUT * len(known), made), media_type="application/json")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
