"""Runs batches: a few lines at a time, at background priority."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route

from quire.errors import Interrupted, Overloaded, QuireError, Unavailable
from quire.server import error_responses
from quire.server.batch_api.batches import BATCH_ENDPOINTS, Batches, Line
from quire.server.batch_api.files import Files
from quire.server.batch_api.store import Store, lock
from quire.server.folder import WriteFailed
from quire.server.limits import Limits

log = logging.getLogger("uvicorn.error")

T = TypeVar("T")

# (endpoint, body) -> the answer, generated at background priority. Raises what the endpoint would refuse with.
Answer = Callable[[str, bytes], Awaitable[dict[str, Any]]]

# Seconds between looks for work, and before a request is repeated that the server was too busy for.
_PAUSE = 0.25

# Seconds before writing is tried again after the disk failed.
_DISK = 5.0

# Times that a line whose answer was interrupted is repeated, alone, before it counts as the cause.
_TRIES = 3


class BatchService:
    """Files and batches in a folder that only this server uses. width: lines that are answered at the same time.

    Runs one batch after the other. An answer that did not come from the model (the engine was restarted, the server is
    shutting down) is not recorded, and its line is repeated, by this server or by the next one; unless it is this line
    that makes the engine fail.
    """

    def __init__(self, folder: Path, answer: Answer, limits: Limits, *, width: int) -> None:
        """Raises InvalidConfig if the folder cannot be used, or another server uses it."""
        with ExitStack() as undo:
            self._lock = undo.enter_context(lock(folder))
            files = Store(folder / "files", "file")
            self._batches = Batches(Store(folder / "batches", "batch"), files, limits, BATCH_ENDPOINTS)
            undo.pop_all()
        self._files = Files(files, self._batches.reading)
        self._answer = answer
        self._width = width
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._alone = asyncio.Lock()

    def routes(self) -> list[Route]:
        """All paths of files and batches."""
        return [*self._files.routes(), *self._batches.routes()]

    async def start(self) -> None:
        """Begin to answer lines, once the backend is ready."""
        self._task = asyncio.create_task(self._run(), name="batches")

    async def stop(self) -> None:
        """Stop before the backend drains: lines in progress are left for the next start. May be called again."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        # What is left to do there is short, answers that are to be recorded among it.
        await asyncio.to_thread(self._thread.shutdown)
        self._lock.close()

    async def _blocking(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work`, which reads or writes files, in the one thread for that. It is completed even where its
        caller is cancelled, and before the next."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *args))

    async def _run(self) -> None:
        while True:
            for batch in self._batches.unfinished():
                try:
                    await self._batch(batch)
                # Other batches, and clients, must not be affected by this one.
                except Exception as error:
                    if (failed := _write_failed(error)) is not None:
                        log.error("%s is waiting: %s", batch["id"], failed)
                        await asyncio.sleep(_DISK)
                        continue
                    log.exception("%s failed", batch["id"])
                    why = {"code": "server_error", "message": error_responses.INTERNAL, "param": None, "line": None}
                    with contextlib.suppress(WriteFailed):
                        self._batches.set_status(batch, "failed", errors={"object": "list", "data": [why]})
            await asyncio.sleep(_PAUSE)

    async def _batch(self, batch: dict[str, Any]) -> None:
        batches = self._batches
        if batch["status"] == "finalizing":
            return await self._blocking(batches.finish, batch, batch["finishes_as"])
        done = await self._blocking(batches.answered, batch)
        if batch["status"] == "validating":
            if errors := await self._blocking(batches.check, batch):
                return batches.set_status(batch, "failed", errors=errors)
            # It may have been cancelled meanwhile.
            if batch["status"] == "validating":
                batches.set_status(batch, "in_progress")
        await self._lines(batch, done)
        ended = "cancelled" if batch["status"] == "cancelling" else "completed"
        counts = batch["request_counts"]
        if ended == "completed" and _expired(batch) and counts["total"] > counts["completed"] + counts["failed"]:
            ended = "expired"
            await self._blocking(self._record_missed, batch)
        return await self._blocking(batches.finish, batch, ended)

    async def _lines(self, batch: dict[str, Any], done: set[str]) -> None:
        """Run `width` workers over one iterator of lines, until it ends, or the batch does."""
        left = self._left(batch, done)
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(self._worker(batch, left)) for _ in range(self._width)]
            group.create_task(self._watch(batch, work))

    def _left(self, batch: dict[str, Any], done: set[str]) -> Iterator[Line]:
        for _, line in self._batches.lines(batch):
            one = msgspec.json.decode(line, type=Line)
            if one.custom_id not in done:
                yield one

    async def _watch(self, batch: dict[str, Any], work: list[asyncio.Task[None]]) -> None:
        while not all(task.done() for task in work):
            if batch["status"] != "in_progress" or _expired(batch):
                for task in work:
                    task.cancel()
                return
            await asyncio.wait(work, timeout=_PAUSE)

    async def _worker(self, batch: dict[str, Any], left: Iterator[Line]) -> None:
        while (line := await self._blocking(next, left, None)) is not None:
            status, body = await self._one(batch["endpoint"], bytes(line.body))
            request_id = f"req_{uuid.uuid4().hex}"
            await self._blocking(self._batches.record_answer, batch, line.custom_id, status, body, request_id)

    async def _one(self, endpoint: str, body: bytes) -> tuple[int, Any]:
        """The status and the body of a line's answer.

        A line that makes the engine fail whenever it is asked must not do so for ever.
        """
        try:
            return await self._ask(endpoint, body)
        except Interrupted:
            # By this line, or by one that ran at the same time: interrupted lines are repeated one after another.
            async with self._alone:
                for _ in range(_TRIES - 1):
                    with contextlib.suppress(Interrupted):
                        return await self._ask(endpoint, body)
                try:
                    return await self._ask(endpoint, body)
                except Interrupted as error:
                    return _error_answer(error)

    async def _ask(self, endpoint: str, body: bytes) -> tuple[int, Any]:
        """Raises Interrupted."""
        while True:
            try:
                return 200, await self._answer(endpoint, body)
            except Interrupted:
                raise
            except (Unavailable, Overloaded):
                await asyncio.sleep(_PAUSE)
            except Exception as error:
                if not isinstance(error, QuireError):
                    log.exception("a line of a batch failed")
                return _error_answer(error)

    def _record_missed(self, batch: dict[str, Any]) -> None:
        done = self._batches.answered(batch)
        for line in self._left(batch, done):
            self._batches.record_error(
                batch, line.custom_id, "batch_expired", "the completion window was over before its turn"
            )


def _error_answer(error: Exception) -> tuple[int, Any]:
    return getattr(error, "status", 500), msgspec.json.decode(error_responses.of(error))


def _write_failed(error: Exception) -> WriteFailed | None:
    """The error of the disk, if there is no other."""
    while isinstance(error, ExceptionGroup) and len({type(one) for one in error.exceptions}) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, WriteFailed) else None


def _expired(batch: dict[str, Any]) -> bool:
    return time.time() > (batch["expires_at"] or math.inf)
