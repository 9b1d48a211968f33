"""Responses with state: those that continue stored ones, those that run in the background, and what clients may do with
stored ones afterwards."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import InvalidRequest, QuireError, TooLarge, Unavailable
from quire.frontend.interface import Delta, ResultStream
from quire.frontend.offload import offload
from quire.server.access import refuse_cross_site
from quire.server.calls import Job
from quire.server.error_responses import JSON, NotFound, json_response
from quire.server.folder import WriteFailed
from quire.server.item_references import Input, Referred, input_id, missing, resolved
from quire.server.limits import Limits
from quire.server.listing import oldest_first, page
from quire.server.response_store import INTERRUPTED, Content, Entry, ResponseStore, as_items
from quire.server.responses import ResponseChunks, ResponsesRequest
from quire.server.stream import EVENTS, Chunks, EventStream, event

log = logging.getLogger("uvicorn.error")

T = TypeVar("T")

_json = msgspec.json.Encoder().encode

# Seconds before a complete background response is written again after the disk failed.
_DISK = 5.0

# Events that a reader takes at a time.
_MOST_EVENTS = 1024

_CANCELLED, _DELETED, _SHUTDOWN = "cancelled", "deleted", "shutdown"


class Earlier(NamedTuple):
    """The conversation that a request continues. entry: its last response, None if it begins one. size: of its items,
    and of the responses whose items the input refers to.

    items: reads them; None where nothing is stored. resolve: the input with items in place of references. Both are
    blocking, and raise NotFound for what is gone meanwhile.
    """

    entry: Entry | None
    size: int
    items: Callable[[], list[dict[str, Any]]] | None
    resolve: Callable[[Input], Input]


class Record:
    """A response that is to be stored."""

    def __init__(self, store: ResponseStore, owner: str, job: Job, earlier: Entry | None) -> None:
        request: ResponsesRequest = job.request
        self._store = store
        self.id = job.id
        self._input = _json(request.input)
        self._entry = Entry(
            id=job.id,
            owner=owner,
            created=job.created,
            status="in_progress",
            background=bool(request.background),
            previous=None if earlier is None else earlier.id,
            earlier=0 if earlier is None else earlier.items,
        )
        self.cost = max(len(self._input), store.read_cost)

    def save(self, response: dict[str, Any], events: Sequence[bytes] = ()) -> None:
        """Store it as it is now. Blocking. Raises WriteFailed, and TooLarge beyond the bound."""
        content = Content(
            self._input,
            _json(response["output"]),
            _json({**response, "output": None}),
            zlib.compress(b"".join(events), 1) if events else b"",
        )
        self._store.put(msgspec.structs.replace(self._entry, status=response["status"]), content)

    def forget(self) -> None:
        """Store it no longer. Blocking. Raises WriteFailed."""
        self._store.delete(self._entry)

    def keep(self, response: dict[str, Any]) -> bool:
        """Store it, and whether that succeeded: an answer is not lost because it could not be stored."""
        try:
            self.save(response)
        except (WriteFailed, TooLarge) as error:
            log.error("%s is not stored: %s", self.id, error)
            return False
        return True


def _stored_object(content: Content) -> bytes:
    """The response object of a stored response."""
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(content.response, type=dict[str, msgspec.Raw])
    fields["output"] = msgspec.Raw(content.output)
    return _json(fields)


# ---------------------------------------------------------------- in the background


class Background:
    """A response that is generated whether or not a client reads it. Its events stay, numbered from 0."""

    def __init__(self, record: Record, chunks: ResponseChunks, results: ResultStream[Delta]) -> None:
        self.events: list[bytes] = []
        self.over = False
        self.readers: set[Follower] = set()
        self._record = record
        self._chunks = chunks
        self._results = results
        self._news = asyncio.Event()
        self._why: str | None = None
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[], object]) -> None:
        """Begin to read results. on_end: called when the response is complete and stored."""
        self.task = asyncio.create_task(self._run(), name=self._record.id)
        self.task.add_done_callback(lambda task: on_end())

    async def stop(self, why: str) -> None:
        """End it, and return when it has ended; unless it is only cancelled, also when nothing writes it any more."""
        if self._why is None or why != _CANCELLED:
            self._why = why
        self._news.set()
        if why == _CANCELLED:
            await self._ended.wait()
        elif self.task is not None:
            await asyncio.wait((self.task,))

    async def shown(self) -> bytes:
        """The response object as it is now, encoded. It is complete once it is stored, and can be continued."""
        async with self._turn:
            chunks, over = self._chunks, self.over
            return await offload(chunks.edge_cost, lambda: _json(chunks.last if over else chunks.shown()))

    async def _run(self) -> None:
        error: Exception | None = None
        try:
            with closing(self._results):
                await self._read()
        except Exception as failure:
            error = failure
            if not isinstance(error, QuireError):
                log.exception("%s failed", self._record.id)
        # Decided here, once: whatever ends it while the end is written comes too late for an answer that is complete.
        why = self._why if self._chunks.finish is None else None
        if why == _SHUTDOWN or self._chunks.finish == "abort":
            error = Unavailable(INTERRUPTED)
        async with self._turn:
            cost = max(self._chunks.edge_cost, self._record.cost)
            last = await offload(cost, partial(self._end, error, stopped=why is not None))
        events = [*self.events, *last]
        saved = await self._save(events)
        self.over = True
        self._publish(last)
        self._ended.set()
        while not saved and self._why not in (_SHUTDOWN, _DELETED):
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _DISK)
            saved = await self._save(events)

    async def _read(self) -> None:
        """Encode results as they come, until the end or `stop`. Raises what ends them."""
        self._results.subscribe(self._news.set)
        while self._why is None and (ready := self._results.take()) is not None:
            if ready:
                async with self._turn:
                    self._publish(await offload(self._chunks.cost(ready), partial(self._encode, ready)))
            else:
                self._news.clear()
                await self._news.wait()

    def _encode(self, ready: Sequence[Delta]) -> list[bytes]:
        return _split(b"".join(map(self._chunks.encode, ready)))

    def _end(self, error: Exception | None, *, stopped: bool) -> list[bytes]:
        if error is not None:
            return _split(self._chunks.failed(error))
        return _split(self._chunks.cancelled() if stopped else self._chunks.closing())

    def _publish(self, events: list[bytes]) -> None:
        self.events += events
        for reader in list(self.readers):
            reader.news()

    async def _save(self, events: list[bytes]) -> bool:
        """Store it, and whether the disk took it."""
        try:
            await offload(self._record.cost, partial(self._save_once, events))
        except WriteFailed as error:
            log.error("%s is complete, and cannot be written: %s", self._record.id, error)
            return False
        return True

    def _save_once(self, events: list[bytes]) -> None:
        """What is too large to be stored fails by name."""
        response = self._chunks.last
        try:
            self._record.save(response, events)
        except TooLarge as error:
            log.error("%s is not stored: %s", self._record.id, error)
            failure = {"code": "server_error", "message": str(error)}
            try:
                self._record.save({**response, "status": "failed", "output": [], "error": failure})
            except TooLarge:
                # Not even that: without it, clients would wait for a response in progress for ever.
                self._record.forget()


def _split(events: bytes) -> list[bytes]:
    """Encoded events one by one. JSON has no line breaks of its own."""
    return [one + b"\n\n" for one in events.split(b"\n\n")[:-1]]


class Follower:
    """A `ResultStream` of a background response's events, from number `at` on. Closing it does not end the response."""

    def __init__(self, running: Background, at: int) -> None:
        self._running = running
        self._at = at
        self.news: Callable[[], None] = lambda: None

    def subscribe(self, news: Callable[[], None]) -> None:
        """See ResultStream."""
        self.news = news
        self._running.readers.add(self)

    def take(self) -> list[bytes] | None:
        """See ResultStream."""
        ready = self._running.events[self._at : self._at + _MOST_EVENTS]
        self._at += len(ready)
        return ready or (None if self._running.over else [])

    def close(self) -> None:
        """See ResultStream."""
        self._running.readers.discard(self)


class _WrittenEvents(Chunks[bytes]):
    """Events that are encoded already."""

    def cost(self, ready: Sequence[bytes]) -> int:
        return sum(map(len, ready))

    def encode(self, delta: bytes) -> bytes:
        return delta

    def failed(self, error: Exception) -> bytes:
        return event(_json({"type": "error", "message": str(error)}))


# ---------------------------------------------------------------- what clients ask for


class ResponseState:
    """The stored responses of a server, and those that run in the background. Used from one event loop."""

    def __init__(self, store: ResponseStore, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._running: dict[str, Background] = {}

    async def run(self, serving: Awaitable[None]) -> None:
        """Wait for `serving`, which closes the backend, then `stop`."""
        try:
            await serving
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End what runs in the background, once the backend is closed. May be called again."""
        await asyncio.gather(*(running.stop(_SHUTDOWN) for running in list(self._running.values())))
        self._store.close()

    # ---------------------------------------------------------------- creating

    def earlier(
        self, request: ResponsesRequest, referred: Mapping[str | None, Referred], owner: str, size: int
    ) -> Earlier:
        """What a request of `size` bytes continues. Takes the same time for any conversation. referred: see
        `item_references.references`.

        Raises InvalidRequest for a response that cannot be continued, and NotFound.
        """
        if request.background and request.store is False:
            raise InvalidRequest("background needs store: true, to be fetched later", param="background")
        if not self._store.most:
            return Earlier(None, 0, None, lambda given: given)
        sources = [(self._source(id, items.first, owner), items.inputs) for id, items in referred.items()]
        cost = sum(max(entry.bytes, self._store.read_cost) for entry, _ in sources)
        resolve = partial(self._resolved, sources)
        size += sum(sum(entry.sizes[0 if inputs else 1 : 2]) for entry, inputs in sources)
        self._check_size("the responses that input refers to", "input", size)
        id = request.previous_response_id
        if id is None:
            return Earlier(None, cost, list, resolve)
        entry = self._store.find(id, owner, "previous_response_id")
        if entry.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"{entry.id} is {entry.status}, and only a complete response can be continued",
                param="previous_response_id",
                code="response_not_complete",
            )
        self._check_size(f"the conversation up to {entry.id}", "previous_response_id", size + entry.items)
        cost += max(entry.items, self._store.read_cost)
        return Earlier(entry, cost, partial(self._store.conversation, entry), resolve)

    def _check_size(self, before: str, param: str, size: int) -> None:
        """Raise InvalidRequest where a request and what it names are too large together."""
        if size > self._limits.max_body_bytes:
            raise InvalidRequest(
                f"{before} and this request have {size} bytes, and this server takes {self._limits.max_body_bytes} "
                "(--max-body-bytes)",
                param=param,
                code="conversation_too_large",
            )

    def _source(self, id: str | None, item: str, owner: str) -> Entry:
        """The response that an item is of. Raises NotFound."""
        try:
            return missing(item) if id is None else self._store.find(id, owner, "input")
        except NotFound:
            missing(item)

    def _resolved(self, sources: Sequence[tuple[Entry, bool]], given: Input) -> Input:
        """See Earlier. sources: responses, and whether items of their inputs are meant, too, which may be much longer
        than outputs: those of an agent have its whole conversation. Blocking."""
        known = dict[str, dict[str, Any]]()
        for entry, inputs in sources:
            content = self._store.used(entry, "input")
            known |= {item["id"]: item for item in _shown_input(entry, content)} if inputs else {}
            known |= {item["id"]: item for item in msgspec.json.decode(content.output)}
        return resolved(given, known)

    def record(self, job: Job, owner: str, earlier: Entry | None) -> Record | None:
        """Where the response of a job is stored, None if it is not to be."""
        if job.request.store is False or not self._store.most:
            return None
        return Record(self._store, owner, job, earlier)

    async def begin(
        self, record: Record, chunks: ResponseChunks, begin: Callable[[], ResultStream[Delta]]
    ) -> Background:
        """Answer in the background. Raises what `begin` raises, WriteFailed and TooLarge."""
        running = Background(record, chunks, results := begin())
        try:
            await offload(max(record.cost, chunks.edge_cost), lambda: record.save(chunks.shown()))
        except BaseException:
            results.close()
            raise
        self._running[record.id] = running
        running.start(lambda: self._running.pop(record.id, None))
        return running

    def follow(self, running: Background, at: int, headers: Mapping[str, str]) -> EventStream[bytes]:
        """A stream of its events from number `at` on."""
        begin = partial(Follower, running, at)
        return EventStream(begin, _WrittenEvents(), keep_alive=self._limits.keep_alive, headers=headers)

    # ---------------------------------------------------------------- routes

    def routes(self) -> list[Route]:
        """The paths of single responses."""
        return [
            Route("/v1/responses/{id}", self.about, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    def _find(self, request: Request) -> Entry:
        return self._store.find(request.path_params["id"], request.scope["owner"])

    async def about(self, request: Request) -> Response | EventStream[bytes]:
        """`GET /v1/responses/{id}`."""
        entry = self._find(request)
        streams, at = _stream_query(request.query_params)
        running = self._running.get(entry.id)
        if streams and not entry.background:
            raise InvalidRequest("only responses with background: true can be streamed afterwards", param="stream")
        if running is not None:
            return self.follow(running, at, {}) if streams else Response(await running.shown(), media_type=JSON)
        if streams:
            return Response(await self._offloaded(entry, partial(_events_from, at)), media_type=EVENTS.decode())
        return Response(await self._offloaded(entry, _stored_object), media_type=JSON)

    async def _offloaded(self, entry: Entry, make: Callable[[Content], T]) -> T:
        """What `make` makes of a stored response."""
        cost = max(entry.bytes, self._store.read_cost)
        return await offload(cost, lambda: make(self._store.read(entry)))

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/{id}/input_items`."""
        entry, asc = self._find(request), oldest_first(request)

        def items() -> list[dict[str, Any]]:
            # Of items with one id, which clients may send, pages have the last.
            shown = {one["id"]: one for one in _shown_input(entry, self._store.read(entry))}
            return list(shown.values()) if asc else list(shown.values())[::-1]

        return await page(request, items, max(entry.bytes, self._store.read_cost), most=100, default=20)

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`: one in progress is cancelled."""
        entry = self._find(request)
        if (running := self._running.get(entry.id)) is not None:
            await running.stop(_DELETED)
        await offload(self._store.read_cost, partial(self._store.delete, entry))
        return json_response({"id": entry.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/responses/{id}/cancel`. One that has ended stays as it is."""
        refuse_cross_site(request.scope)
        entry = self._find(request)
        if not entry.background:
            raise InvalidRequest(
                "only responses with background: true can be cancelled; for others, close the connection",
                param="id",
                code="not_in_background",
            )
        if (running := self._running.get(entry.id)) is not None:
            await running.stop(_CANCELLED)
            return Response(await running.shown(), media_type=JSON)
        return Response(await self._offloaded(entry, _stored_object), media_type=JSON)


def _stream_query(query: Mapping[str, str]) -> tuple[bool, int]:
    """Whether a stream is asked for, and the number of its first event. Raises InvalidRequest."""
    given = query.get("stream", "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise InvalidRequest("stream must be true or false", param="stream")
    after = query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal() or len(after) > 18 or int(after) < -1:
        raise InvalidRequest("starting_after must be the number of an event", param="starting_after")
    streams = given in ("true", "1")
    if not streams and "starting_after" in query:
        raise InvalidRequest("starting_after needs stream=true", param="starting_after")
    return streams, int(after) + 1


def _events_from(at: int, content: Content) -> bytes:
    return b"".join(_split(zlib.decompress(content.events))[at:]) if content.events else b""


def _shown_input(entry: Entry, content: Content) -> Iterator[dict[str, Any]]:
    """The items of a response's input as OpenAI lists them."""
    for i, item in enumerate(as_items(msgspec.json.decode(content.input))):
        yield _shown_item(item, input_id(entry.id, i))


def _shown_item(item: Mapping[str, Any], number: str) -> dict[str, Any]:
    """An item of an input as OpenAI lists it: with an id, a type, and content in parts."""
    kind = item.get("type", "message")
    prefix = {"message": "msg", "reasoning": "rs"}.get(kind, "fc")
    given = {name: value for name, value in item.items() if name != "id" or isinstance(value, str)}
    shown = {"id": f"{prefix}_{number}", "type": kind, **given}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": item["content"]}]
    return shown
