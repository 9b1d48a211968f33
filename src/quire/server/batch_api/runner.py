"""Runs batches: a few lines at a time, behind everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from quire.errors import Interrupted, Overloaded, QuireError, Unavailable
from quire.server import error_responses
from quire.server.batch_api.batches import Batches, Line
from quire.server.batch_api.store import WriteFailed

log = logging.getLogger("uvicorn.error")

T = TypeVar("T")
Answer = Callable[[str, bytes], Awaitable[dict[str, Any]]]
"""(endpoint, body) -> the answer, made in the gaps. Raises as the endpoint would."""

_PAUSE = 0.25
"""Seconds between looks for work, and before a server that is busy is asked again."""

_DISK = 5.0
"""Seconds before a disk that took nothing is tried again."""

_TRIES = 3
"""Times that a line whose answer was interrupted is asked again, by itself, before it counts as what interrupts."""


class BatchRunner:
    """One batch after the other, `width` of its lines at once.

    An answer that did not come from the model (the engine was restarted, the server is shutting down) is not noted, and
    its line is asked again, by this server or the next; unless it is the line that the engine cannot bear.
    """

    def __init__(self, batches: Batches, answer: Answer, *, width: int) -> None:
        self._batches, self._answer, self._width = batches, answer, width
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._alone = asyncio.Lock()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="batches")

    async def stop(self) -> None:
        """Lines in the middle are left for the next start."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _blocking(self, work: Callable[..., T], *args: Any) -> T:
        """What reads and writes files, in the one thread that does: one after the other, also where callers leave."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _run(self) -> None:
        while True:
            for batch in self._batches.unfinished():
                try:
                    await self._batch(batch)
                except Exception as error:  # its own fault alone: others go on, and so do people
                    if (full := _unkept(error)) is not None:
                        log.error("%s waits: %s", batch["id"], full)
                        await asyncio.sleep(_DISK)
                        continue
                    log.exception("%s failed", batch["id"])
                    why = _error("server_error", "the server met an error of its own; its log says more")
                    with contextlib.suppress(WriteFailed):
                        self._batches.set_status(batch, "failed", errors=why)
            await asyncio.sleep(_PAUSE)

    async def _batch(self, batch: dict[str, Any]) -> None:
        batches = self._batches
        if batch["status"] == "finalizing":
            return await self._blocking(batches.finish, batch, batch["finishes_as"])
        done = await self._blocking(batches.answered, batch)
        if batch["status"] == "validating":
            await self._blocking(batches.check, batch)
            if batch["errors"]:
                return batches.set_status(batch, "failed")
            if batch["status"] == "validating":  # it may have been cancelled meanwhile
                batches.set_status(batch, "in_progress")
        await self._lines(batch, done)
        ended = "cancelled" if batch["status"] == "cancelling" else "completed"
        if ended == "completed" and _expired(batch) and batch["request_counts"]["total"] > _answered(batch):
            ended = "expired"
            await self._blocking(self._missed, batch)
        return await self._blocking(batches.finish, batch, ended)

    async def _lines(self, batch: dict[str, Any], done: set[str]) -> None:
        """`width` workers over one iterator of lines, until it ends, or the batch does."""
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
        """A line that stops the engine each time it is asked must not stop it for ever."""
        try:
            return await self._asked(endpoint, body)
        except Interrupted:  # by itself, or by one beside it: who was interrupted goes on one at a time
            async with self._alone:
                for _ in range(_TRIES - 1):
                    with contextlib.suppress(Interrupted):
                        return await self._asked(endpoint, body)
                try:
                    return await self._asked(endpoint, body)
                except Interrupted as error:
                    return _failed(error)

    async def _asked(self, endpoint: str, body: bytes) -> tuple[int, Any]:
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
                return _failed(error)

    def _missed(self, batch: dict[str, Any]) -> None:
        done = self._batches.answered(batch)
        for line in self._left(batch, done):
            self._batches.record_error(
                batch, line.custom_id, "batch_expired", "the completion window was over before its turn"
            )


def _failed(error: Exception) -> tuple[int, Any]:
    return getattr(error, "status", 500), msgspec.json.decode(error_responses.of(error))


def _unkept(error: Exception) -> WriteFailed | None:
    """What the disk said, if that is all that went wrong."""
    while isinstance(error, ExceptionGroup) and len({type(one) for one in error.exceptions}) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, WriteFailed) else None


def _expired(batch: dict[str, Any]) -> bool:
    return time.time() > (batch["expires_at"] or math.inf)


def _answered(batch: dict[str, Any]) -> int:
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


def _error(code: str, message: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": message, "param": None, "line": None}]}
