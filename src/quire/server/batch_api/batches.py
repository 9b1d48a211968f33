"""OpenAI's Batches: requests in a file, answered in the background, each exactly once, over any number of restarts."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import InvalidRequest, Overloaded
from quire.frontend.offload import offload
from quire.server.access import refuse_cross_site
from quire.server.batch_api.files import document, listing
from quire.server.batch_api.store import Store, new_id, newest_first, whole_lines
from quire.server.error_responses import json_response
from quire.server.folder import WriteFailed, durable_write
from quire.server.limits import Limits, read_body
from quire.server.schemas import parse

BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
MOST_LINES = 50_000

# Batches that are not finished.
MOST_WAITING = 100

# Batches: beyond, the oldest finished ones are deleted, since clients cannot delete them.
MOST_KEPT = 10_000

# Characters of a custom_id: all of them are kept in memory, to find duplicates.
MOST_ID = 512

# Errors of one input file that are reported.
_MOST_ERRORS = 100

_WINDOWS: Mapping[str, int] = {"24h": 24 * 3600}

# The suffix of a journal, the field with the file that it becomes, and the count of its lines.
_JOURNALS = ((".output", "output_file_id", "completed"), (".errors", "error_file_id", "failed"))

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
    """A line of a journal."""

    custom_id: str


_answered = msgspec.json.Decoder(_Answered).decode


class Batches:
    """Batches and their journals. endpoints: that lines may ask for.

    A running batch has two journals beside its document, ID.output and ID.errors, with a line for each answered
    request. A request is answered when its line is complete, and is never repeated after that.
    """

    def __init__(self, store: Store, files: Store, limits: Limits, endpoints: Collection[str]) -> None:
        self.store = store
        self.files = files
        self._limits = limits
        self._endpoints = endpoints

    def routes(self) -> list[Route]:
        """All paths of batches."""
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.listed, methods=["GET"]),
            Route("/v1/batches/{id}", self.about, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    # ---------------------------------------------------------------- routes

    async def create(self, request: Request) -> Response:
        """`POST /v1/batches`."""
        body = await read_body(request, self._limits)
        fields = await offload(len(body), lambda: parse(body, BatchRequest, self._limits))
        if fields.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise InvalidRequest(f"endpoint must be one of {known}", param="endpoint")
        seconds = _WINDOWS.get(fields.completion_window)
        if seconds is None:
            raise InvalidRequest("completion_window must be 24h", param="completion_window")
        if self.files.get(fields.input_file_id)["purpose"] != "batch":
            raise InvalidRequest("input_file_id must be a file with the purpose batch", param="input_file_id")
        _check_metadata(fields.metadata or {})
        if len(self.unfinished()) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} batches are waiting, which is the limit", retry_after=60)
        now = int(time.time())
        batch = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": fields.endpoint,
            "errors": None,
            "input_file_id": fields.input_file_id,
            "completion_window": fields.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + seconds,
            **dict.fromkeys(f"{state}_at" for state in ("in_progress", "finalizing", "cancelling", *FINAL_STATUSES)),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": fields.metadata,
        }
        self.store.put(batch)
        if len(self.store) > MOST_KEPT:
            for old in newest_first(filter(_finished, self.store.all()))[MOST_KEPT - 1 :]:
                # The new one runs: a client that was refused would begin it again. The next one tries again.
                with suppress(WriteFailed):
                    self.store.delete(old["id"])
        return json_response(batch)

    async def listed(self, request: Request) -> Response:
        """`GET /v1/batches`."""
        return await listing(request, self.store, 100, default=20)

    async def about(self, request: Request) -> Response:
        """`GET /v1/batches/{id}`."""
        return json_response(self.store.get(request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/batches/{id}/cancel`."""
        refuse_cross_site(request.scope)
        batch = self.store.get(request.path_params["id"])
        with self.store.lock:
            if batch["status"] in ("validating", "in_progress"):
                self.set_status(batch, "cancelling")
            elif batch["status"] != "cancelling":
                raise InvalidRequest(f"{batch['id']} is already {batch['status']}", param="id", code="batch_over")
        return json_response(batch)

    # ---------------------------------------------------------------- for the runner

    def set_status(self, batch: dict[str, Any], status: str, **changes: Any) -> None:
        """Change the status, on disk first. Raises WriteFailed, with nothing changed."""
        self.store.put(batch, **{"status": status, f"{status}_at": int(time.time())}, **changes)

    def unfinished(self) -> list[dict[str, Any]]:
        """Batches that are not finished, the oldest first."""
        return newest_first(batch for batch in self.store.all() if not _finished(batch))[::-1]

    def reading(self, file: str) -> str | None:
        """The id of an unfinished batch that reads `file`."""
        return next((batch["id"] for batch in self.unfinished() if batch["input_file_id"] == file), None)

    def lines(self, batch: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
        """(number, line) of the input, without blank lines. Blocking: runs in a thread."""
        with self.files.path(batch["input_file_id"], ".data").open("rb") as file:
            number = 0
            # Some editors begin files with a byte order mark.
            if file.read(3) != codecs.BOM_UTF8:
                file.seek(0)
            while ahead := file.peek():
                blank = len(ahead) - len(ahead.lstrip())
                # Many blank lines at once, since there may be millions.
                if skipped := ahead.rfind(b"\n", 0, blank) + 1:
                    number += file.read(skipped).count(b"\n")
                    continue
                number += 1
                line = file.readline(self._limits.max_body_bytes + 1)
                if line.strip():
                    yield number, line

    def check(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Validate the input: sets the batch's total, and returns its errors, if any. Blocking: runs in a thread."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()

        def add_error(code: str, message: str, line: int | None = None) -> None:
            errors.append({"code": code, "message": message, "param": None, "line": line})

        for number, line in self.lines(batch):
            why = self._wrong(batch, line, seen)
            if why is not None and len(errors) < _MOST_ERRORS:
                add_error("invalid_line", why, number)
            if len(seen) > MOST_LINES or len(errors) >= _MOST_ERRORS:
                break
        if len(seen) > MOST_LINES:
            add_error("too_many", f"at most {MOST_LINES} lines")
        if not seen and not errors:
            add_error("empty_file", "there are no requests in it")
        batch["request_counts"]["total"] = len(seen)
        return {"object": "list", "data": errors} if errors else None

    def _wrong(self, batch: dict[str, Any], line: bytes, seen: set[str]) -> str | None:
        """What is wrong with a line of the input, None if nothing is. seen: custom ids, to which its own is added."""
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
        """The custom ids in the journals, which are truncated to their complete lines. Sets the counts.

        Blocking: runs in a thread.
        """
        done: set[str] = set()
        for suffix, _, count in _JOURNALS:
            before = len(done)
            done |= {_answered(line).custom_id for line in whole_lines(self.store.path(batch["id"], suffix))}
            batch["request_counts"][count] = len(done) - before
        return done

    def record_answer(self, batch: dict[str, Any], custom_id: str, status: int, body: Any, request_id: str) -> None:
        """Record the answer to one request, in one write. Blocking: runs in a thread."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._record(batch, status < 400, custom_id, response=response, error=None)

    def record_error(self, batch: dict[str, Any], custom_id: str, code: str, message: str) -> None:
        """Record that one request was not answered. Blocking: runs in a thread."""
        self._record(batch, False, custom_id, response=None, error={"code": code, "message": message})

    def _record(self, batch: dict[str, Any], good: bool, custom_id: str, **result: Any) -> None:
        line = msgspec.json.encode({"id": new_id("batch_req_"), "custom_id": custom_id, **result})
        self.store.add(batch["id"], ".output" if good else ".errors", line + b"\n")
        batch["request_counts"]["completed" if good else "failed"] += 1

    def finish(self, batch: dict[str, Any], status: str) -> None:
        """Make the journals files. May be killed anywhere and begun again. Blocking: runs in a thread.

        A batch that is being cancelled is cancelled, whatever it was going to be when this was asked for. Raises
        WriteFailed.
        """
        journals = [(name, self.store.path(batch["id"], suffix)) for suffix, name, _ in _JOURNALS]
        ids = {name: new_id("file-") for name, journal in journals if batch[name] is None and journal.exists()}
        with self.store.lock:
            if batch["status"] == "cancelling":
                status = "cancelled"
            self.set_status(batch, "finalizing", finishes_as=status, **ids)
        for name, journal in journals:
            id = batch[name]
            if id is not None and journal.exists():
                with durable_write(), journal.open("rb") as file:
                    os.fsync(file.fileno())
                made = document(id, journal.stat().st_size, f"{journal.name}.jsonl", "batch_output")
                self.files.put(made, journal)
        self.set_status(batch, status, finishes_as=msgspec.UNSET)


def _finished(batch: dict[str, Any]) -> bool:
    return batch["status"] in FINAL_STATUSES


def _check_metadata(given: Mapping[str, str]) -> None:
    """OpenAI's limits. Raises InvalidRequest."""
    if len(given) > 16:
        raise InvalidRequest("metadata: at most 16 entries", param="metadata")
    if any(len(name) > 64 or len(value) > 512 for name, value in given.items()):
        raise InvalidRequest("metadata: names have at most 64 characters, and values at most 512", param="metadata")
