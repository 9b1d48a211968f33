"""The live page's data: frames of JSON, and the broadcaster that sends them to viewers.

`EngineLiveView` makes frames in the engine's process, `RequestTimeline` in a server whose answers come from upstreams.
A frame has the events since the last one. Now and then one is `whole`: it also has the state of everything, so that a
viewer can begin with it. Times are whole microseconds since `base`; requests go by number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.client import LiveViewClient, OnFrame
from quire.engine.engine import Engine
from quire.engine.events import Completed, Observer, StepRecord
from quire.errors import Overloaded
from quire.observability.explain import details, explain, explanation, short, state_of, summary_of
from quire.observability.history import History, Note, RequestHistory
from quire.types import Request, is_answer_of

FRAME_INTERVAL = 0.15
"""Seconds between two frames."""
WHOLE_INTERVAL = 15.0
"""Seconds after which a frame is whole though no viewer needs it."""
MAX_STEPS = 96
"""Steps in a frame; the rest is counted."""
MAX_EVENTS = 4096
"""Events of requests in a frame, and requests in a whole one; the rest is counted."""
MAX_BLOCKS = 1 << 14
"""Blocks on the page's map, the first ones: a larger map cannot be read."""
MAX_EXPLAINED = 64
"""Answers of a request that are explained together; the rest is counted. Of each, the engine's loop takes time."""
RECENT = 64
"""Finished requests in a whole frame."""
LINGER = 3
"""Frames in which the blocks of a finished request are sent again: its last step may still be in flight."""
MAX_FINISHED = 1024
"""Finished requests that a `RequestTimeline` keeps."""
MAX_TOKEN_TIMES = 4096
"""Token times that a `RequestTimeline` keeps of a request."""
MAX_VIEWER_FRAMES = 20
"""Frames a viewer may be behind: three seconds."""
KEEPALIVE_INTERVAL = 15.0
"""Seconds after which a viewer gets an empty frame, to show that the connection lives."""
MAX_VIEWERS = 64

_encode = msgspec.json.Encoder().encode


class _Frames:
    """Makes frames of the events since the last one, at most `MAX_EVENTS`; none while there is no viewer."""

    def __init__(self, base: float) -> None:
        self.base, self.epoch = base, time.time()
        self.watched = False
        self._whole = False
        self._last_whole = float("-inf")
        self._clear()

    def _at(self, seconds: float | None) -> int | None:
        return None if seconds is None else int((seconds - self.base) * 1e6)

    def _add(self, what: str, at: float, *rest: Any) -> None:
        if self.watched and len(self._events) < MAX_EVENTS:
            self._events.append([what, self._at(at), *rest])
        else:
            self._omitted += self.watched

    def _clear(self) -> None:
        self._events: list[list[Any]] = []
        self._omitted = 0

    def _frame(self, at: float, whole: dict[str, Any] | None, **parts: Any) -> tuple[bytes, bool]:
        """A frame, and whether it is whole."""
        frame = {"at": self._at(at), "events": self._events, **parts}
        if self._omitted:
            frame["omitted"] = self._omitted
        if whole is not None:
            self._whole, self._last_whole = False, at
            frame["whole"] = whole
        self._clear()
        return _encode(frame), whole is not None

    def _state(self, facts: dict[str, Any], alive: list[Any], ended: Iterable[Any]) -> dict[str, Any]:
        """What a whole frame has more, but for blocks."""
        shown = [*list(ended)[-RECENT:], *alive]
        requests = [self._request(entry) for entry in shown[:MAX_EVENTS]]
        complete = len(shown) <= MAX_EVENTS
        return {"epoch": self.epoch, "facts": facts, "pages": [], "requests": requests, "complete": complete}

    def _new(self, entry: RequestHistory) -> tuple[Any, ...]:
        request = entry.request
        return entry.number, request.id, entry.prompt_tokens, request.max_new_tokens, request.priority

    def _request(self, entry: RequestHistory) -> dict[str, Any]:
        """A request's state in a whole frame."""
        return {
            "new": ["new", self._at(entry.submitted), *self._new(entry)],
            "state": state_of(entry),
            "opened": self._at(entry.opened),
            "first": self._at(entry.first),
            "ended": self._at(entry.ended),
            "finish": entry.finish,
            "hit": entry.cached,
            "made": entry.generated,
            "preempted": entry.preemptions,
        }


class EngineLiveView(_Frames, Observer):
    """Makes an engine's frames: an observer, which must come after `history`, and the engine's `LiveView`."""

    def __init__(self, history: History) -> None:
        super().__init__(time.monotonic())
        self.history = history
        self._last = float("-inf")
        self._leaving: list[tuple[int, list[int]]] = []
        self._waiting = ""
        self._resets = 0

    def _clear(self) -> None:
        super()._clear()
        self._steps: list[list[Any]] = []
        self._touched: set[int] = set()
        self._spans: object = None
        self._skipped = 0

    def _number(self, id: str) -> int:
        entry = self.history.requests.get(id)
        return 0 if entry is None else entry.number

    # ---------------------------------------------------------------- observer

    def on_submit(self, request: Request, now: float) -> None:
        """A request was submitted."""
        self._add("new", now, *self._new(self.history.requests[request.id]))

    def on_step(self, record: StepRecord) -> None:
        """A step was committed."""
        if not self.watched:
            return
        self._add_decisions(record)
        for _, blocks in record.plan.new_blocks:
            self._touched.update(blocks)
        if record.plan.spans is not self._spans:
            self._add_first_tokens(record)
        self._add_step(record)
        for ended in record.ended:
            self.on_end(ended)

    def on_end(self, ended: Completed) -> None:
        """A request finished."""
        # A long one may have been dropped from the history as it ended.
        entry = self.history.requests.get(ended.id)
        if self.watched and entry is not None:
            self._leaving.append((LINGER, entry.held))
            self._add("end", ended.finished, entry.number, ended.finish, len(ended.tokens))

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """A step failed: the next frame is whole."""
        self._whole = self.watched
        self._add("failed", now, [self.history.requests[id].number for id in suspects], reason)

    def _add_step(self, record: StepRecord) -> None:
        if len(self._steps) >= MAX_STEPS:
            self._skipped += 1
            return
        spans: list[list[int]] | int = 0
        if record.plan.spans is not self._spans:
            self._spans, entries = record.plan.spans, self.history.requests
            spans = [
                [entry.number, span.num_tokens, span.num_samples]
                for span, seq in zip(record.plan.spans, record.seqs, strict=True)
                if (entry := entries.get(seq.request.id)) is not None
            ]
        times = self._at(record.planned), self._at(record.launched), self._at(record.committed)
        self._steps.append([record.number, *times, spans, sum([len(event[1]) for event in record.events])])

    def _add_decisions(self, record: StepRecord) -> None:
        at = record.planned
        for what, id, by, n in record.decisions:
            number = self._number(id)
            if not number:
                continue
            if what == "waits":
                if self._waiting != id + by:
                    self._waiting = id + by
                    self._add("wait", at, number, by)
            elif what == "opened":
                self._add("open", at, number, n)
            elif what == "sat-out":
                self._add("sat", at, number)
            else:
                self._add("hold" if what == "follows" else "out", at, number, self._number(by), n)
                if what == "preempted":
                    self._leaving.append((LINGER, self.history.dropped))

    def _add_first_tokens(self, record: StepRecord) -> None:
        """Requests that got their first token. There are none in a step whose spans equal the last step's."""
        now, entries = record.committed, self.history.requests
        for event in record.events:
            entry = entries.get(event[0]) if event[1] else None
            if entry is not None and entry.first == now:
                self._add("first", now, entry.number)

    # ---------------------------------------------------------------- frames

    def watch(self, on: bool) -> None:
        """Make frames from now on, a whole one first; or no more."""
        if on != self.watched:
            self._clear()
            self._leaving = []
        self.watched = self._whole = on
        self._last = float("-inf")

    def frame(self, engine: Engine, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        """The next frame, and whether it is whole; None when it is not due. last: the engine is idle after this."""
        if not self.watched or not (last or now - self._last >= FRAME_INTERVAL):
            return None
        if engine.scheduler.kv.num_resets != self._resets:
            self._resets = engine.scheduler.kv.num_resets
            self._whole = True
        if not (self._whole or self._steps or self._events or self._leaving):
            return None
        self._last = now
        whole = self._whole or now - self._last_whole >= WHOLE_INTERVAL
        parts: dict[str, Any] = {"now": self._now(engine), "steps": self._steps}
        if self._skipped:
            parts["skipped"] = self._skipped
        if not whole:
            return self._frame(now, None, **parts, pages=self._changed_blocks(engine))
        self._waiting = ""
        return self._frame(now, self._everything(engine), **parts)

    def explain(self, id: str, now: float) -> bytes:
        """Explanations of a request's answers, of one prompt's, or of one answer, as JSON; `null` for an unknown id.

        Without an id: a summary of every request in the history, newest first.
        """
        entries = self.history.requests
        if not id:
            newest_first = sorted(entries.values(), key=lambda entry: -entry.number)
            return bytes(_encode({"requests": [summary_of(entry, now) for entry in newest_first]}))
        found = [id] if id in entries else [own for own in entries if is_answer_of(own, id)]
        if not found:
            return b"null"
        answers = [explain(self.history, own, now) for own in found[:MAX_EXPLAINED]]
        return bytes(_encode(explanation(id, answers, len(found) - len(answers))))

    def _now(self, engine: Engine) -> dict[str, Any]:
        gauges, stats = engine.gauges(), engine.stats
        return {
            "running": gauges.running,
            "waiting": gauges.waiting,
            "used": gauges.used_blocks,
            "free": gauges.free_blocks,
            "evictions": gauges.evictions,
            "preemptions": gauges.preemptions,
            "queried": gauges.prefix_queried,
            "hit": gauges.prefix_hit,
            "generated": stats.num_generated_tokens,
            "prompted": stats.num_prompt_tokens,
            "steps": stats.num_steps,
            "requests": stats.num_finished,
            "drafted": gauges.draft_totals,
        }

    def _changed_blocks(self, engine: Engine) -> list[list[int]]:
        touched = self._touched
        for _, blocks in self._leaving:
            touched.update(blocks)
        self._leaving = [(frames - 1, blocks) for frames, blocks in self._leaving if frames > 1]
        return [self._block(engine, block) for block in touched if block <= MAX_BLOCKS]

    def _block(self, engine: Engine, block: int) -> list[int]:
        """[block, sequences that hold it (0: cached, -1: free), request that wrote it, its index there]."""
        pool = engine.scheduler.kv.block_pool
        refs = pool.ref_counts[block]
        if not refs and not pool.prefix_cache.contains(block):
            return [block, -1, 0, 0]
        entry, index = self.history.writers.get(block, (None, 0))
        return [block, refs, 0 if entry is None else entry.number, index]

    def _everything(self, engine: Engine) -> dict[str, Any]:
        kv, scheduler, description = engine.scheduler.kv, engine.scheduler, engine.description
        pool = kv.block_pool
        blocks = min(pool.num_blocks, MAX_BLOCKS)
        facts = {
            "pages": blocks,
            "all_pages": pool.num_blocks,
            "page_size": kv.block_size,
            "seats": scheduler.max_num_seqs,
            "budget": scheduler.max_num_batched_tokens,
            "max_model_len": description.max_model_len,
            "device": description.device,
            "dtype": description.dtype,
            "lookahead": engine.lookahead,
            "drafts": description.num_drafts,
        }
        alive = [entry for entry in self.history.requests.values() if entry.ended is None]
        refs, cached = pool.ref_counts, pool.prefix_cache.contains
        pages = [self._block(engine, block) for block in range(1, blocks + 1) if refs[block] or cached(block)]
        return self._state(facts, alive, self.history.ended) | {"pages": pages}


@dataclass(slots=True, eq=False)
class _UpstreamRequest(RequestHistory):
    """A request that upstreams answer; its notes are the attempts, by server. answer_id: the upstream's, '' if none."""

    answer_id: str = ""


class RequestTimeline(_Frames):
    """The live page where answers come from upstreams: a `RequestObserver`, and a `LiveViewClient` for a `Broadcaster`.

    Frames are like an engine's, without steps and blocks. about: what the page says of the server. servers: the
    addresses of the upstreams, which the page shows side by side.
    """

    def __init__(self, about: str, clock: Callable[[], float] = time.monotonic, *, servers: Sequence[str] = ()) -> None:
        super().__init__(clock())
        self.about, self.clock, self.servers = about, clock, servers
        self._running: dict[int, _UpstreamRequest] = {}
        self._ended: deque[_UpstreamRequest] = deque(maxlen=MAX_FINISHED)
        self._number = self._generated = self._prompted = 0
        self._on_frame: OnFrame = lambda frame, whole: None
        self._timer: asyncio.Handle | None = None

    # ---------------------------------------------------------------- observer

    def on_ask(self, id: str, most: int, now: float) -> int:
        """A request arrived, for at most `most` tokens. Returns its number."""
        self._number += 1
        request = Request(id=id, prompt=(), max_new_tokens=most)
        entry = self._running[self._number] = _UpstreamRequest(self._number, request, now)
        self._add("new", now, *self._new(entry))
        return self._number

    def on_sent(self, number: int, where: str, now: float) -> None:
        """The request was sent to a server."""
        entry = self._running[number]
        entry.waiting = False
        if entry.opened is None:
            entry.opened = now
        entry.notes.append(Note(now, 0, "opened", where))
        self._add("open", now, number, 0)

    def on_made(self, number: int, tokens: int, now: float) -> None:
        """The request got more tokens."""
        entry = self._running[number]
        if entry.first is None:
            entry.first = now
            self._add("first", now, number)
        entry.generated += tokens
        self._generated += tokens
        if len(entry.times) < MAX_TOKEN_TIMES:
            entry.times.append(now)
        if self.watched:
            self._fresh[number] = self._fresh.get(number, 0) + tokens

    def on_end(self, number: int, known_as: str, reason: str, prompt: int, tokens: int, now: float) -> None:
        """The request ended. known_as: the upstream's id of the answer, '' if there was none."""
        entry = self._running.pop(number)
        self._generated += tokens - entry.generated
        self._prompted += prompt
        entry.ended, entry.finish, entry.answer_id = now, reason, known_as
        entry.prompt_tokens, entry.generated = prompt, tokens
        self._fresh.pop(number, None)
        self._add("end", now, number, reason, tokens)
        self._ended.append(entry)

    # ---------------------------------------------------------------- frames

    def on_frames(self, on_frame: OnFrame) -> None:
        """Call `on_frame` with every frame, and whether it is whole."""
        self._on_frame = on_frame

    def watch(self, on: bool) -> None:
        """Make frames from now on, a whole one first; or no more."""
        if on and not self.watched:
            self._clear()
        self.watched = self._whole = on
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._tick) if on else None

    async def explain(self, id: str) -> bytes:
        """The explanation of a request as JSON, `null` for an unknown id; without an id a summary of every request."""
        newest_first = sorted([*self._running.values(), *self._ended], key=lambda entry: -entry.number)
        if not id:
            return bytes(_encode({"requests": [summary_of(entry, self.clock()) for entry in newest_first]}))
        found = next((entry for entry in newest_first if id in (entry.request.id, entry.answer_id)), None)
        return b"null" if found is None else bytes(_encode(explanation(id, [self._explain(found)], 0)))

    def _tick(self) -> None:
        now = self.clock()
        whole = self._whole or now - self._last_whole >= WHOLE_INTERVAL
        if whole or self._events or self._fresh:
            self._events += [["made", self._at(now), number, n] for number, n in self._fresh.items()]
            everything = self._everything() if whole else None
            self._on_frame(*self._frame(now, everything, now=self._now(), steps=[], pages=[]))
        self._timer = asyncio.get_running_loop().call_later(FRAME_INTERVAL, self._tick)

    def _clear(self) -> None:
        super()._clear()
        self._fresh: dict[int, int] = {}
        """Tokens of each request since the last frame."""

    def _now(self) -> dict[str, int]:
        empty = ("waiting", "used", "free", "evictions", "preemptions", "queried", "hit", "steps", "drafted")
        made = {"running": len(self._running), "generated": self._generated, "prompted": self._prompted}
        return {**dict.fromkeys(empty, 0), **made, "requests": self._number}

    def _everything(self) -> dict[str, Any]:
        empty = ("pages", "all_pages", "page_size", "seats", "budget", "max_model_len", "lookahead", "drafts")
        facts = {**dict.fromkeys(empty, 0), "device": "", "dtype": "", "about": self.about}
        facts["servers"] = list(self.servers)
        return self._state(facts, list(self._running.values()), self._ended)

    def _explain(self, entry: _UpstreamRequest) -> dict[str, Any]:
        begin, first = entry.submitted, entry.first
        until = self.clock() if entry.ended is None else entry.ended
        events = [_event(0.0, "submitted", "came in")]
        for attempt, (at, _, what, where, *_) in enumerate(entry.notes):
            again = ", for the one before took no connection" if attempt else ""
            events.append(_event(at - begin, what, f"sent to {where}{again}"))
        if first is not None:
            events.append(_event(first - begin, "first_token", f"first token after {first - begin:.3f} s"))
        if entry.ended is not None:
            events.append(_event(until - begin, "finished", f"{entry.finish}, with {entry.generated} tokens generated"))
        where = f"{until - begin:.3f} s in all, most of it at {entry.notes[-1].by}" if entry.notes else "not sent on"
        return details(
            entry,
            until,
            prefill=short((first or until) - (entry.opened or until)),
            cached_tokens=0,
            prefix={"hit_tokens": 0, "prompt_tokens": entry.prompt_tokens, "why": "the upstream knows"},
            chunks=1,
            waits=[],
            events=events,
            summary=where,
        )


def _event(at: float, what: str, says: str) -> dict[str, Any]:
    return {"at": short(at), "what": what, "says": says, "step": None, "by": None, "tokens": 0}


class _Viewer:
    """needs_whole: it waits for a whole frame. behind: it missed frames, and has not read since."""

    def __init__(self) -> None:
        self.frames = asyncio.Queue[bytes](MAX_VIEWER_FRAMES)
        self.needs_whole, self.behind = True, False


class Broadcaster:
    """Sends the frames of one `LiveViewClient` to many viewers: the same bytes to all.

    Frames are made only while at least one viewer keeps up. A viewer that stops reading holds at most
    `MAX_VIEWER_FRAMES` frames until it counts as behind, and none afterwards.
    """

    def __init__(self, client: LiveViewClient) -> None:
        self._client = client
        self._viewers: set[_Viewer] = set()
        self._making = False
        client.on_frames(self._broadcast)

    @property
    def viewers(self) -> int:
        """Number of viewers."""
        return len(self._viewers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames as they come, beginning with a whole one, also after missed frames; b"" as keep-alive.

        Raises Overloaded.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers are connected already, which is the limit", retry_after=10)
        viewer = _Viewer()
        self._viewers.add(viewer)
        try:
            self._start()
            while True:
                if viewer.behind:
                    viewer.behind, viewer.needs_whole = False, True
                    self._start()
                try:
                    async with asyncio.timeout(KEEPALIVE_INTERVAL):
                        frame = await viewer.frames.get()
                except TimeoutError:
                    frame = b""
                yield frame
        finally:
            self._viewers.discard(viewer)
            self._stop_if_unread()

    async def explain(self, id: str) -> bytes:
        """The explanation of a request as JSON, `null` for an unknown id. Raises Unavailable."""
        return await self._client.explain(id)

    def _start(self) -> None:
        self._making = True
        self._client.watch(True)

    def _stop_if_unread(self) -> None:
        if self._making and all(viewer.behind for viewer in self._viewers):
            self._making = False
            self._client.watch(False)

    def _broadcast(self, frame: bytes, whole: bool) -> None:
        for viewer in self._viewers:
            if viewer.behind or (viewer.needs_whole and not whole):
                continue
            viewer.needs_whole = False
            viewer.behind = viewer.frames.full()
            if viewer.behind:
                viewer.frames = asyncio.Queue(MAX_VIEWER_FRAMES)
            else:
                viewer.frames.put_nowait(frame)
        self._stop_if_unread()
