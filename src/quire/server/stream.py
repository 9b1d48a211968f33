"""Server-sent events over ASGI, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from quire.backends.base import Backend, Call, Delta
from quire.errors import QuireError
from quire.server.chunks import KEEP_ALIVE

T = TypeVar("T")
D_contra = TypeVar("D_contra", contravariant=True)

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def deltas(backend: Backend, calls: Sequence[Call], n: int) -> AsyncGenerator[list[Delta], None]:
    """The answers to all calls, as they come; the choices of call i are numbered from i * n.

    Closing it ends all calls, and so does an error in any of them. Raises what `Backend.stream` raises.
    """
    return backend.stream(calls[0]) if len(calls) == 1 else _together(backend, calls, n)


async def _together(backend: Backend, calls: Sequence[Call], n: int) -> AsyncGenerator[list[Delta], None]:
    news: asyncio.Queue[list[Delta] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(backend, call, i * n, news)) for i, call in enumerate(calls)]
    try:
        left = len(tasks)
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(backend: Backend, call: Call, first: int, news: asyncio.Queue[list[Delta] | Exception | None]) -> None:
    try:
        async with aclosing(backend.stream(call)) as stream:
            async for ready in stream:
                news.put_nowait([delta._replace(index=first + delta.index) for delta in ready])
        news.put_nowait(None)
    except Exception as error:
        news.put_nowait(error)


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

    def opening(self) -> bytes: ...

    def of(self, delta: D_contra) -> bytes: ...

    def closing(self) -> bytes: ...

    def failed(self, error: Exception) -> bytes: ...


class EventStream(Generic[D_contra]):
    """An ASGI answer that streams a job.

    The status goes out with the first delta, so that a refusal still gets one of its own; but after `keep_alive`
    seconds of silence it goes out with a comment. Later errors become an event. Deltas that are ready together
    leave in one write, so a slow reader costs fewer writes, not more memory.
    """

    def __init__(
        self, said: AsyncGenerator[list[D_contra], None], chunks: Writer[D_contra], *, keep_alive: float
    ) -> None:
        self._said, self._chunks, self._keep_alive = said, chunks, keep_alive
        self._started = self._spoke = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body = scope["send"]
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _stop(pump, watch)

    async def _pump(self, send: Send) -> None:
        of = self._chunks.of
        try:
            async with aclosing(self._said) as said:
                async for ready in said:
                    data = b"".join(map(of, ready))
                    if data or not self._started:
                        await self._send(send, data)
            last = self._chunks.closing()
        except Exception as error:
            if not self._started:
                raise
            await self._end(send, self._chunks.failed(error))
            if not isinstance(error, QuireError):
                raise  # to the log
        else:
            await self._end(send, last)

    async def _watch(self, receive: Receive, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(self._keep_alive):
                    await until_gone(receive)
                return
            except TimeoutError:
                if not self._spoke:
                    await self._send(send, KEEP_ALIVE)
                self._spoke = False

    async def _send(self, send: Send, data: bytes) -> None:
        self._spoke = True
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            data = self._chunks.opening() + data
        await self._body({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, send: Send, data: bytes) -> None:
        if not self._started:
            await self._send(send, b"")
        await self._body({"type": "http.response.body", "body": data, "more_body": False})
