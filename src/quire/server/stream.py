"""Server-sent events over ASGI, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.frontend.interface import Backend, Call, Delta, ResultStream
from quire.frontend.offload import offload
from quire.server.chunks import KEEP_ALIVE
from quire.server.eager_start import start_eagerly

T = TypeVar("T")
D = TypeVar("D")
D_contra = TypeVar("D_contra", contravariant=True)

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def answer_all(backend: Backend, calls: Sequence[Call], n: int) -> ResultStream[Delta]:
    """The answers to all calls, as they come; the choices of call i are numbered from i * n.

    Closing it ends all calls, and so does an error in any of them. Raises what `Backend.answer` raises.
    """
    return backend.answer(calls[0]) if len(calls) == 1 else _MergedStream(backend, calls, n)


class _MergedStream:
    def __init__(self, backend: Backend, calls: Sequence[Call], n: int) -> None:
        self._parts: list[tuple[int, ResultStream[Delta]]] = []
        backend.admit(len(calls) * n)
        with ExitStack() as undo:
            undo.callback(self.close)
            for i, call in enumerate(calls):
                self._parts.append((i * n, backend.answer(call)))
            undo.pop_all()

    def subscribe(self, news: Callable[[], None]) -> None:
        for _, part in self._parts:
            part.subscribe(news)

    def take(self) -> list[Delta] | None:
        ready: list[Delta] = []
        over = True
        for first, part in self._parts:
            try:
                some = part.take()
            except QuireError:
                if ready:  # that first: it is raised again
                    return ready
                raise
            over = over and some is None
            ready += [delta._replace(index=first + delta.index) for delta in some or ()]
        return None if over else ready

    def close(self) -> None:
        for _, part in self._parts:
            part.close()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client left first; then `work` is cancelled, and has ended."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _stop(task, gone)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Writer(Protocol[D_contra]):
    """What a stream's parts look like as bytes (`chunks.Chunks`, of deltas)."""

    @property
    def edges(self) -> int: ...

    def cost(self, ready: Sequence[D_contra]) -> int: ...

    def opening(self) -> bytes: ...

    def of(self, delta: D_contra) -> bytes: ...

    def closing(self) -> bytes: ...

    def failed(self, error: Exception) -> bytes: ...


class EventStream(Generic[D]):
    """An ASGI answer that streams what `begin` begins.

    The status goes out with the first delta, so that a refusal still gets one of its own; but after `keep_alive`
    seconds of silence it goes out with a comment. Later errors become an event. What is ready is written at once, by
    whoever brings it; while a reader is slow a task waits for it, and deltas that are ready then leave in one write,
    so a slow reader costs fewer writes, not more memory.
    """

    def __init__(self, begin: Callable[[], ResultStream[D]], chunks: Writer[D], *, keep_alive: float) -> None:
        self._begin, self._chunks, self._keep_alive = begin, chunks, keep_alive
        self._started = self._spoke = False
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._head, self._body = send, scope["send"]
        self._over: asyncio.Future[Exception | None] = loop.create_future()
        with closing(self._begin()) as said:
            self._take = said.take
            gone = asyncio.ensure_future(until_gone(receive))
            self._timer = loop.call_later(self._keep_alive, self._tick)
            try:
                said.subscribe(self._write)
                self._write()
                await asyncio.wait((self._over, gone), return_when=asyncio.FIRST_COMPLETED)
                if self._over.done() and (error := self._over.result()) is not None:
                    raise error
            finally:
                self._timer.cancel()
                self._over.cancel()
                await _stop(gone, *([] if self._writing is None else [self._writing]))

    def _write(self, first: bytes = b"") -> None:
        if self._writing is None and not self._over.done():
            self._writing = start_eagerly(self._tell(first))

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._tick)
        if not self._spoke:
            self._write(KEEP_ALIVE)
        self._spoke = False

    async def _tell(self, first: bytes) -> None:
        """Write `first`, and then what is ready until nothing is."""
        chunks = self._chunks
        try:
            if first:
                await self._send(first)
            while ready := self._take():
                data = await offload(chunks.cost(ready), partial(self._of, ready))
                if data or not self._started:
                    await self._send(data)
            if ready is None:
                await self._end(await offload(chunks.edges, chunks.closing))
                self._over.set_result(None)
        except Exception as error:
            self._over.set_result(await self._failed(error))
        self._writing = None

    def _of(self, ready: Sequence[D]) -> bytes:
        return b"".join(map(self._chunks.of, ready))

    async def _failed(self, error: Exception) -> Exception | None:
        """End with an error: as an event where the status has gone out. What is raised, if it is not told, or for the
        log."""
        if not self._started:
            return error
        try:
            await self._end(await offload(self._chunks.edges, partial(self._chunks.failed, error)))
        except Exception as worse:
            return worse
        return None if isinstance(error, QuireError) else error

    async def _send(self, data: bytes) -> None:
        self._spoke = True
        if not self._started:
            self._started = True
            await self._head({"type": "http.response.start", "status": 200, "headers": HEADERS})
            data = await offload(self._chunks.edges, self._chunks.opening) + data
        await self._body({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, data: bytes) -> None:
        if not self._started:
            await self._send(b"")
        await self._body({"type": "http.response.body", "body": data, "more_body": False})
