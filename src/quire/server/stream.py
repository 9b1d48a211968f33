"""Streams over ASGI, as server-sent events or lines of JSON, and noticing that a client has closed its connection."""

from __future__ import annotations

import asyncio
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.frontend.beam_stream import begin_answer
from quire.frontend.interface import Backend, Call, Delta, ResultStream
from quire.frontend.offload import offload

T = TypeVar("T")
D = TypeVar("D")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENTS = b"text/event-stream; charset=utf-8"
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
HEADERS = ((b"content-type", EVENTS), *_UNBUFFERED)


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Chunks(ABC, Generic[D]):
    """Encodes the stream of one job in the shape of its API, as events. Used by one thread at a time.

    media_type: of the stream. Costs are about how many bytes the work is worth (`frontend.offload`); edge_cost is that
    of `opening` and `closing`.
    """

    media_type: ClassVar[bytes] = EVENTS

    @property
    def edge_cost(self) -> int:
        """The cost of `opening`, and of `closing`."""
        return 0

    def cost(self, ready: Sequence[D]) -> int:
        """The cost of encoding these deltas."""
        return 0

    def opening(self) -> bytes:
        """Events before the first delta."""
        return b""

    @abstractmethod
    def encode(self, delta: D) -> bytes:
        """The events of a delta."""

    def closing(self) -> bytes:
        """Events after the last delta, [DONE] included."""
        return b""

    def keep_alive(self) -> bytes:
        """What is sent where there is nothing to send, which clients pass over: a comment."""
        return KEEP_ALIVE

    @abstractmethod
    def failed(self, error: Exception) -> bytes:
        """Events that end the stream with an error."""


def answer_all(backend: Backend, calls: Sequence[Call], n: int) -> ResultStream[Delta]:
    """The answers to all calls, as they come; the choices of call i are numbered from i * n.

    Closing it ends all calls, and so does an error in any of them. Raises what `Backend.answer` raises.
    """
    return begin_answer(backend, calls[0]) if len(calls) == 1 else _MergedStream(backend, calls, n)


class _MergedStream:
    """The streams of several calls as one `ResultStream`."""

    def __init__(self, backend: Backend, calls: Sequence[Call], n: int) -> None:
        self._parts: list[tuple[int, ResultStream[Delta]]] = []
        backend.admit(sum(call.sampling.n if call.beams is None else call.beams.beam_width for call in calls))
        with ExitStack() as undo:
            undo.callback(self.close)
            for i, call in enumerate(calls):
                self._parts.append((i * n, begin_answer(backend, call)))
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
                # It is raised again by the next call, after what is ready.
                if ready:
                    return ready
                raise
            over = over and some is None
            ready += [delta._replace(index=first + delta.index) for delta in some or ()]
        return None if over else ready

    def close(self) -> None:
        for _, part in self._parts:
            part.close()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client disconnects first: then `work` is cancelled, and has ended."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel(task, gone)


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return when all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Generic[D]):
    """An ASGI response that streams the result of `begin`.

    The status goes out with the first delta, so that a refusal still gets one of its own; after `keep_alive` seconds
    without any it goes out with `Chunks.keep_alive`. Later errors become an event. What is ready is written at once, in
    the call that announces it; while a reader is slow a task waits for it, and deltas that are ready by then are sent
    in one write, so a slow reader costs fewer writes, not more memory.
    """

    def __init__(
        self,
        begin: Callable[[], ResultStream[D]],
        chunks: Chunks[D],
        *,
        keep_alive: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """headers: header fields beside those of every stream."""
        kind = (b"content-type", chunks.media_type)
        self._headers = (kind, *_UNBUFFERED, *((name.encode(), value.encode()) for name, value in headers.items()))
        self._begin = begin
        self._chunks = chunks
        self._keep_alive = keep_alive
        self._started = False
        self._spoke = False
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream until it ends or the client disconnects."""
        loop = asyncio.get_running_loop()
        self._send_head = send
        # The server's own (see access.Guard): middleware looks at heads only.
        self._send_body = scope["send"]
        self._over: asyncio.Future[Exception | None] = loop.create_future()
        with closing(self._begin()) as results:
            self._take = results.take
            gone = asyncio.ensure_future(until_gone(receive))
            self._timer = loop.call_later(self._keep_alive, self._tick)
            try:
                results.subscribe(self._write)
                self._write()
                await asyncio.wait((self._over, gone), return_when=asyncio.FIRST_COMPLETED)
                if self._over.done() and (error := self._over.result()) is not None:
                    raise error
            finally:
                self._timer.cancel()
                self._over.cancel()
                await cancel(gone, *([] if self._writing is None else [self._writing]))

    def _write(self, first: bytes = b"") -> None:
        if self._writing is None and not self._over.done():
            self._writing = start_eagerly(self._write_ready(first))

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._tick)
        if not self._spoke:
            self._write(self._chunks.keep_alive())
        self._spoke = False

    async def _write_ready(self, first: bytes) -> None:
        """Write `first`, and then what is ready until nothing is."""
        chunks = self._chunks
        try:
            if first:
                await self._send(first)
            while ready := self._take():
                data = await offload(chunks.cost(ready), partial(self._encode, ready))
                if data or not self._started:
                    await self._send(data)
            if ready is None:
                await self._end(await offload(chunks.edge_cost, chunks.closing))
                self._over.set_result(None)
        except Exception as error:
            self._over.set_result(await self._failed(error))
        self._writing = None

    def _encode(self, ready: Sequence[D]) -> bytes:
        return b"".join(map(self._chunks.encode, ready))

    async def _failed(self, error: Exception) -> Exception | None:
        """End with an error: as an event where the status has gone out.

        Returns what is to be raised: an error that the client was not sent, or one that belongs into the log.
        """
        if not self._started:
            return error
        try:
            await self._end(await offload(self._chunks.edge_cost, partial(self._chunks.failed, error)))
        except Exception as worse:
            return worse
        return None if isinstance(error, QuireError) else error

    async def _send(self, data: bytes) -> None:
        self._spoke = True
        if not self._started:
            self._started = True
            await self._send_head({"type": "http.response.start", "status": 200, "headers": self._headers})
            data = await offload(self._chunks.edge_cost, self._chunks.opening) + data
        await self._send_body({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, data: bytes) -> None:
        if not self._started:
            await self._send(b"")
        await self._send_body({"type": "http.response.body", "body": data, "more_body": False})


def start_eagerly(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` until it first waits; returns the rest of it as a task, None if there is no rest.

    Most of what a server writes goes out at once: a task for that would cost more than the writing. (Python 3.12 has
    tasks that start eagerly, but makes one object for each.) Raises what `work` raises until it first waits.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return asyncio.ensure_future(_continue(work, awaited))


async def _continue(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _drive(work, awaited)


@types.coroutine
def _drive(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Pass what `work` waits for to the loop, and the result back, as `yield from` does."""
    try:
        while True:
            try:
                result = yield awaited
            except BaseException as error:
                awaited = work.throw(error)
            else:
                awaited = work.send(result)
    except StopIteration:
        return
