"""OpenAI's Batches: many requests in a file, answered in the gaps, each exactly once, over any number of restarts."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import InvalidRequest, Overloaded
from quire.frontend.offload import offload
from quire.server.batch_api.files import document, limit_of, listing
from quire.server.batch_api.store import Store, durable_write, new_id, newest_first, whole_lines
from quire.server.hosts import refuse_cross_site
from quire.server.limits import Limits, read_body
from quire.server.schemas import parse

MOST_LINES = 50_000
MOST_WAITING = 100
"""Batches that are not over."""

MOST_KEPT = 10_000
"""Batches: beyond, the oldest that are over are forgotten, for they are nobody's to delete."""

MOST_ID = 512
"""Characters of a custom_id: all of them are held together, to find one that is there twice."""

_TOLD = 100
"""Errors of one input file that are told."""

_WINDOW = {"24h": 24 * 3600}.get

_FILES = ((".output", "output_file_id"), (".errors", "error_file_id"))
"""What a journal becomes."""

FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")


class BatchRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class Line(msgspec.Struct, kw_only=True):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Answered(msgspec.Struct):
    """What has to be known of a line of a journal."""

    custom_id: str


_answered = msgspec.json.Decoder(_Answered).decode


class Batches:
    """Batches and their journals. endpoints: what lines may ask for.

    Of a running batch there are two journals beside its document: ID.output and ID.errors, a line for each answered
    request. A request is answered when its line is there whole, and never asked again.
    """

    def __init__(self, store: Store, files: Store, limits: Limits, endpoints: Collection[str]) -> None:
        self.store, self.files, self._limits, self._endpoints = store, files, limits, endpoints

    def routes(self) -> list[Route]:
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.listed, methods=["GET"]),
            Route("/v1/batches/{id}", self.about, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    # ---------------------------------------------------------------- routes

    async def create(self, request: Request) -> Response:
        body = await read_body(request, self._limits)
        asked = await offload(len(body), lambda: parse(body, BatchRequest, self._limits))
        if asked.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise InvalidRequest(f"endpoint must be one of {known}", param="endpoint")
        seconds = _WINDOW(asked.completion_window)
        if seconds is None:
            raise InvalidRequest("completion_window must be 24h", param="completion_window")
        if self.files.get(asked.input_file_id)["purpose"] != "batch":
            raise InvalidRequest("input_file_id must be a file with the purpose batch", param="input_file_id")
        _check_metadata(asked.metadata or {})
        if len(self.unfinished()) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} batches are waiting, and no more may", retry_after=60)
        now = int(time.time())
        batch = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": asked.endpoint,
            "errors": None,
            "input_file_id": asked.input_file_id,
            "completion_window": asked.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + seconds,
            **dict.fromkeys(f"{state}_at" for state in ("in_progress", "finalizing", "cancelling", *FINAL_STATUSES)),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": asked.metadata,
        }
        self.store.put(batch)
        if len(self.store) > MOST_KEPT:
            for old in newest_first(filter(_over, self.store.all()))[MOST_KEPT - 1 :]:
                self.store.forget(old["id"])
        return _json(batch)

    async def listed(self, request: Request) -> Response:
        return await listing(self.store, limit_of(request, 100), request.query_params.get("after"))

    async def about(self, request: Request) -> Response:
        return _json(self.store.get(request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        refuse_cross_site(request.scope)
        batch = self.store.get(request.path_params["id"])
        with self.store.lock:
            if batch["status"] in ("validating", "in_progress"):
                self.set_status(batch, "cancelling")
            elif batch["status"] != "cancelling":
                raise InvalidRequest(f"{batch['id']} is {batch['status']} already", param="id", code="batch_over")
        return _json(batch)

    # ---------------------------------------------------------------- what the runner needs

    def set_status(self, batch: dict[str, Any], status: str, **changes: Any) -> None:
        """Into another state, on disk before anything follows from it. Raises Unkept; then it is in the old one."""
        self.store.put(batch, **{"status": status, f"{status}_at": int(time.time())}, **changes)

    def unfinished(self) -> list[dict[str, Any]]:
        """The oldest first."""
        return newest_first(batch for batch in self.store.all() if not _over(batch))[::-1]

    def reading(self, file: str) -> str | None:
        """The id of an unfinished batch that reads `file`."""
        return next((batch["id"] for batch in self.unfinished() if batch["input_file_id"] == file), None)

    def lines(self, batch: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
        """(number, line) of the input, without blank ones. Blocking: runs in a thread."""
        with self.files.data(batch["input_file_id"]).open("rb") as file:
            number = 0
            if file.read(3) != codecs.BOM_UTF8:  # some editors begin files with it
                file.seek(0)
            while ahead := file.peek():
                blank = len(ahead) - len(ahead.lstrip())
                if skipped := ahead.rfind(b"\n", 0, blank) + 1:  # many at once, for there may be millions
                    number += file.read(skipped).count(b"\n")
                    continue
                number += 1
                line = file.readline(self._limits.max_body_bytes + 1)
                if line.strip():
                    yield number, line

    def check(self, batch: dict[str, Any]) -> None:
        """Looks through the input: sets its total, or what is wrong with it. Blocking: runs in a thread."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        for number, line in self.lines(batch):
            why = self._wrong(batch, line, seen)
            if why is not None and len(errors) < _TOLD:
                errors.append({"code": "invalid_line", "message": why, "param": None, "line": number})
            if len(seen) > MOST_LINES or len(errors) >= _TOLD:
                break
        if len(seen) > MOST_LINES:
            errors.append({"code": "too_many", "message": f"at most {MOST_LINES} lines", "param": None, "line": None})
        if not seen and not errors:
            errors.append({"code": "empty_file", "message": "there are no requests in it", "param": None, "line": None})
        batch["errors"] = {"object": "list", "data": errors} if errors else None
        batch["request_counts"]["total"] = len(seen)

    def _wrong(self, batch: dict[str, Any], line: bytes, seen: set[str]) -> str | None:
        if len(line) > self._limits.max_body_bytes:
            return f"a line has at most {self._limits.max_body_bytes} bytes"
        try:
            one = msgspec.json.decode(line, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"not a request: {error}"
        if len(one.custom_id) > MOST_ID:
            return f"custom_id has at most {MOST_ID} characters"
        if one.custom_id in seen:
            return f"custom_id {one.custom_id[:64]!r} is there twice"
        seen.add(one.custom_id)
        if one.method != "POST":
            return "method must be POST"
        return None if one.url == batch["endpoint"] else f"url must be {batch['endpoint']}, as the batch's endpoint"

    def answered(self, batch: dict[str, Any]) -> set[str]:
        """The custom ids in the journals, which are cut back to their whole lines. Sets the counts. Blocking: runs in
        a thread."""
        done: set[str] = set()
        for suffix, count in ((".output", "completed"), (".errors", "failed")):
            before = len(done)
            done |= {_answered(line).custom_id for line in whole_lines(self._journal(batch, suffix))}
            batch["request_counts"][count] = len(done) - before
        return done

    def record_answer(self, batch: dict[str, Any], custom_id: str, status: int, body: Any, request_id: str) -> None:
        """One request is answered: one write. Blocking: runs in a thread."""
        good = status < 400
        response = {"status_code": status, "request_id": request_id, "body": body}
        line = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": None}
        self._add(batch, ".output" if good else ".errors", line)
        batch["request_counts"]["completed" if good else "failed"] += 1

    def record_error(self, batch: dict[str, Any], custom_id: str, code: str, message: str) -> None:
        """One request was never asked."""
        error = {"code": code, "message": message}
        line = {"id": new_id("batch_req_"), "custom_id": custom_id, "response": None, "error": error}
        self._add(batch, ".errors", line)
        batch["request_counts"]["failed"] += 1

    def _add(self, batch: dict[str, Any], suffix: str, line: dict[str, Any]) -> None:
        self.store.add(batch["id"], suffix, msgspec.json.encode(line) + b"\n")

    def _journal(self, batch: dict[str, Any], suffix: str) -> Any:
        return self.store.journal(batch["id"], suffix)

    def finish(self, batch: dict[str, Any], status: str) -> None:
        """Journals become files. May be killed anywhere and begun again. Blocking: runs in a thread. Raises Unkept."""
        made = {
            name: new_id("file-")
            for suffix, name in _FILES
            if batch[name] is None and self._journal(batch, suffix).exists()
        }
        self.set_status(batch, "finalizing", finishes_as=status, **made)
        for suffix, name in _FILES:
            journal, id = self._journal(batch, suffix), batch[name]
            if id is None:
                continue
            target = self.files.data(id)
            if journal.exists():
                with durable_write(), journal.open("rb") as file:
                    os.fsync(file.fileno())
                self.files.put(document(id, journal.stat().st_size, f"{batch['id']}{suffix}.jsonl", "batch_output"))
                journal.replace(target)
        self.set_status(batch, status, finishes_as=msgspec.UNSET)


def _over(batch: dict[str, Any]) -> bool:
    return batch["status"] in FINAL_STATUSES


def _check_metadata(given: Mapping[str, str]) -> None:
    """OpenAI's bounds. Raises InvalidRequest."""
    if len(given) > 16:
        raise InvalidRequest("metadata: at most 16 entries", param="metadata")
    if any(len(name) > 64 or len(value) > 512 for name, value in given.items()):
        raise InvalidRequest(
            "metadata: names have at most 64 characters, and what they name at most 512", param="metadata"
        )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
