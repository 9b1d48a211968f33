"""What the live page is told: frames of JSON, made in the engine's process while somebody watches, and only then.

A frame holds what happened since the last one. Now and then one is `whole`: it also says how everything stands, so
that a viewer can begin with it. Times are whole microseconds since the window was made; requests go by number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count, takewhile
from typing import Any

import msgspec

from quire.engine.client import LiveViewClient, OnFrame
from quire.engine.engine import Engine
from quire.engine.events import Completed, StepRecord
from quire.errors import Overloaded
from quire.observability.explain import explain, state_of, summary_of
from quire.observability.history import History, RequestHistory
from quire.types import Request

EVERY = 0.15
"""Seconds between two frames."""

WHOLE_EVERY = 15.0
"""Seconds after which a frame is whole though nobody asked."""

MOST_STEPS = 96
"""Steps in a frame; the rest is counted."""

MOST_TOLD = 4096
"""Waiting requests and requests' events in a frame; the rest is counted."""

MOST_PAGES = 1 << 14
"""Pages that are told of, the first ones: a map of more cannot be read."""

RECENT = 64
"""Ended requests in a whole frame."""

LINGER = 3
"""Frames for which the pages of a request that left are looked at: its last step may still be in flight."""

_encode = msgspec.json.Encoder().encode


class EngineLiveView:
    """An observer that packs frames, and the engine's `Window`. History must be told before this is."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.base, self.epoch = time.monotonic(), time.time()
        self.watched = False
        self._whole = False
        self._last, self._last_whole = float("-inf"), float("-inf")
        self._leaving: list[tuple[int, list[int]]] = []
        self._waiting = ""
        self._resets = 0
        self._clear()

    def _clear(self) -> None:
        self._steps: list[list[Any]] = []
        self._told: list[list[Any]] = []
        self._touched: set[int] = set()
        self._spans: object = None
        self._skipped = self._untold = 0

    def _at(self, seconds: float | None) -> int | None:
        return None if seconds is None else int((seconds - self.base) * 1e6)

    # ---------------------------------------------------------------- the observer

    def on_submit(self, request: Request, now: float) -> None:
        if self.watched:
            self._tell(_new(self.history.requests[request.id], self._at))

    def on_step(self, record: StepRecord) -> None:
        if not self.watched:
            return
        if record.decisions:
            self._decided(record)
        for row_pages in record.plan.new_blocks:
            self._touched.update(row_pages[1])
        if record.plan.spans is not self._spans:
            self._first(record)
        self._step(record)
        for ended in record.ended:
            self.on_end(ended)

    def on_end(self, ended: Completed) -> None:
        if self.watched:
            story = self.history.requests.get(ended.id)
            if story is not None:  # long ones may be forgotten as soon as they end
                self._leaving.append((LINGER, story.held))
                self._tell(["end", self._at(ended.finished), story.number, ended.finish, len(ended.tokens)])

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        if self.watched:
            self._whole = True
            self._tell(["failed", self._at(now), [self.history.requests[id].number for id in suspects], reason])

    def _tell(self, event: list[Any]) -> None:
        if len(self._told) < MOST_TOLD:
            self._told.append(event)
        else:
            self._untold += 1

    def _step(self, record: StepRecord) -> None:
        if len(self._steps) >= MOST_STEPS:
            self._skipped += 1
            return
        spans: list[list[int]] | int = 0
        if record.plan.spans is not self._spans:
            self._spans, stories = record.plan.spans, self.history.requests
            spans = [
                [story.number, span.num_tokens, span.num_samples]
                for span, seq in zip(record.plan.spans, record.seqs, strict=True)
                if (story := stories.get(seq.request.id)) is not None
            ]
        times = self._at(record.planned), self._at(record.launched), self._at(record.committed)
        self._steps.append([record.number, *times, spans, sum([len(event[1]) for event in record.events])])

    def _decided(self, record: StepRecord) -> None:
        at = self._at(record.planned)
        for what, id, by, n in record.decisions:
            story = self.history.requests.get(id)
            if story is None:
                continue
            if what == "waits":
                if self._waiting != id + by:
                    self._waiting = id + by
                    self._tell(["wait", at, story.number, by])
                continue
            if what == "preempted":
                other = self.history.requests.get(by)
                self._leaving.append((LINGER, self.history.dropped))
                self._tell(["out", at, story.number, 0 if other is None else other.number, n])
            elif what == "opened":
                self._tell(["open", at, story.number, n])
            elif what == "follows":
                leader = self.history.requests.get(by)
                self._tell(["hold", at, story.number, 0 if leader is None else leader.number, n])
            else:
                self._tell(["sat", at, story.number])

    def _first(self, record: StepRecord) -> None:
        """Requests whose first token this step brought: its spans differ from the last step's."""
        now, stories = record.committed, self.history.requests
        for event in record.events:
            story = stories.get(event[0]) if event[1] else None
            if story is not None and story.first == now:
                self._tell(["first", self._at(now), story.number])

    # ---------------------------------------------------------------- the window

    def watch(self, on: bool) -> None:
        """Somebody watches and wants to begin; or nobody does any more."""
        if on != self.watched:
            self._clear()
            self._leaving = []
        self.watched, self._whole = on, on
        self._last = float("-inf")

    def frame(self, engine: Engine, now: float, *, last: bool) -> tuple[bytes, bool] | None:
        """The next frame, and whether it is whole; None when it is not time. last: the engine falls idle after this."""
        if not self.watched or not (last or now - self._last >= EVERY):
            return None
        if engine.scheduler.kv.num_resets != self._resets:
            self._resets, self._whole = engine.scheduler.kv.num_resets, True
        if not (self._whole or self._steps or self._told or self._leaving):
            return None
        self._last = now
        whole = self._whole or now - self._last_whole >= WHOLE_EVERY
        frame = {"at": self._at(now), "now": self._now(engine), "steps": self._steps, "told": self._told}
        if self._skipped:
            frame["skipped"] = self._skipped
        if self._untold:
            frame["untold"] = self._untold
        if whole:
            self._whole, self._last_whole = False, now
            frame["whole"] = self._everything(engine)
            self._waiting = ""
        else:
            frame["pages"] = self._pages(engine)
        self._clear()
        return _encode(frame), whole

    def explain(self, id: str, now: float) -> bytes:
        """The stories of a call's answers, or of one of them, as JSON; `null` if there are none. No id: a line for
        every request known, newest first."""
        stories = self.history.requests
        if not id:
            numbered = sorted(stories.values(), key=lambda s: -s.number)
            return bytes(_encode({"requests": [summary_of(story, now) for story in numbered]}))
        answers = takewhile(stories.__contains__, (f"{id}-{choice}" for choice in count()))
        found = [id] if id in stories else list(answers)
        if not found:
            return b"null"
        return bytes(_encode({"id": id, "answers": [explain(self.history, own, now) for own in found]}))

    def _now(self, engine: Engine) -> dict[str, Any]:
        gauges, ledger = engine.gauges(), engine.stats
        return {
            "running": gauges.running,
            "waiting": gauges.waiting,
            "used": gauges.used_blocks,
            "free": gauges.free_blocks,
            "evictions": gauges.evictions,
            "preemptions": gauges.preemptions,
            "queried": gauges.prefix_queried,
            "hit": gauges.prefix_hit,
            "generated": ledger.num_generated_tokens,
            "prompted": ledger.num_prompt_tokens,
            "steps": ledger.num_steps,
            "requests": ledger.num_finished,
            "drafted": gauges.draft_totals,
        }

    def _pages(self, engine: Engine) -> list[list[int]]:
        touched = self._touched
        for _, pages in self._leaving:
            touched.update(pages)
        self._leaving = [(left - 1, pages) for left, pages in self._leaving if left > 1]
        return [self._page(engine, page) for page in touched if page <= MOST_PAGES]

    def _page(self, engine: Engine, page: int) -> list[int]:
        """[page, holders (0: kept for its contents, -1: blank), whose tokens, which of that request's pages]."""
        pool = engine.scheduler.kv.block_pool
        refs = pool.ref_counts[page]
        if not refs and not pool.prefix_cache.contains(page):
            return [page, -1, 0, 0]
        story, index = self.history.writers.get(page, (None, 0))
        return [page, refs, 0 if story is None else story.number, index]

    def _everything(self, engine: Engine) -> dict[str, Any]:
        kv, scheduler, stories = engine.scheduler.kv, engine.scheduler, self.history.requests
        pool, about = kv.block_pool, engine.description
        alive = [story for story in stories.values() if story.ended is None]
        ended = list(self.history.ended)[-RECENT:]
        pages = min(pool.num_blocks, MOST_PAGES)
        return {
            "epoch": self.epoch,
            "facts": {
                "pages": pages,
                "all_pages": pool.num_blocks,
                "page_size": kv.block_size,
                "seats": scheduler.max_num_seqs,
                "budget": scheduler.max_num_batched_tokens,
                "max_model_len": about.max_model_len,
                "device": about.device,
                "dtype": about.dtype,
                "lookahead": engine.lookahead,
                "drafts": about.num_drafts,
            },
            "pages": [
                self._page(engine, page)
                for page in range(1, pages + 1)
                if pool.ref_counts[page] or pool.prefix_cache.contains(page)
            ],
            "requests": [_standing(story, self._at) for story in (*ended, *alive)][:MOST_TOLD],
            "complete": len(ended) + len(alive) <= MOST_TOLD,
        }


_At = Callable[[float | None], int | None]


def _new(story: RequestHistory, at: _At) -> list[Any]:
    request = story.request
    return [
        "new",
        at(story.submitted),
        story.number,
        request.id,
        len(request.prompt),
        request.max_new_tokens,
        request.priority,
    ]


def _standing(story: RequestHistory, at: _At) -> dict[str, Any]:
    """A request as a viewer who has just come needs it."""
    return {
        "new": _new(story, at),
        "state": state_of(story),
        "opened": at(story.opened),
        "first": at(story.first),
        "ended": at(story.ended),
        "finish": story.finish,
        "hit": story.cached,
        "made": len(story.times),
        "preempted": story.preemptions,
    }


KEPT = 1024
"""Requests that are remembered after their end."""

MOST_TIMES = 4096
"""Moments of tokens that are remembered of a request."""


class _RequestTrack:
    """One request. Times are moments of the clock; times: of its tokens; names: what it goes by."""

    def __init__(self, id: str, number: int, most: int, now: float) -> None:
        self.id, self.number, self.most, self.came = id, number, most, now
        self.names = [id]
        self.sent: list[tuple[float, str]] = []
        self.first: float | None = None
        self.ended: float | None = None
        self.finish: str | None = None
        self.prompt = self.made = 0
        self.times: list[float] = []

    @property
    def state(self) -> str:
        if self.ended is not None:
            return "finished"
        if not self.sent:
            return "waiting"
        return "prefill" if self.first is None else "decode"


class RequestTimeline:
    """Hears of requests (a `LaneObserver`) and shows them to an `Broadcaster` (it is its `Panes`).

    about: what the page says of the server. Frames are made only while somebody watches.
    """

    def __init__(self, about: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.about, self.clock = about, clock
        self.base, self.epoch = clock(), time.time()
        self._running: dict[int, _RequestTrack] = {}
        self._ended: deque[_RequestTrack] = deque()
        self._names: dict[str, _RequestTrack] = {}
        self._number = self._generated = self._prompted = 0
        self._told: list[list[Any]] = []
        self._fresh: dict[int, int] = {}
        self._untold = 0
        self._watched, self._whole = False, False
        self._last_whole = float("-inf")
        self._on_frame: OnFrame = lambda frame, whole: None
        self._timer: asyncio.TimerHandle | None = None

    def _at(self, seconds: float | None) -> int | None:
        return None if seconds is None else int((seconds - self.base) * 1e6)

    # ---------------------------------------------------------------- what happens

    def on_ask(self, id: str, most: int, now: float) -> int:
        self._number += 1
        lane = _RequestTrack(id, self._number, most, now)
        self._running[lane.number] = self._names[id] = lane
        self._tell(self._new(lane))
        return lane.number

    def on_sent(self, lane: int, where: str, now: float) -> None:
        self._running[lane].sent.append((now, where))
        self._tell(["open", self._at(now), lane, 0])

    def on_made(self, lane: int, tokens: int, now: float) -> None:
        of = self._running[lane]
        if of.first is None:
            of.first = now
            self._tell(["first", self._at(now), lane])
        of.made += tokens
        self._generated += tokens
        if len(of.times) < MOST_TIMES:
            of.times.append(now)
        if self._watched:
            self._fresh[lane] = self._fresh.get(lane, 0) + tokens

    def on_end(self, lane: int, known_as: str, reason: str, prompt: int, tokens: int, now: float) -> None:
        of = self._running.pop(lane)
        self._generated += tokens - of.made
        self._prompted += prompt
        of.ended, of.finish, of.prompt, of.made = now, reason, prompt, tokens
        if known_as:
            of.names.append(known_as)
            self._names[known_as] = of
        self._fresh.pop(lane, None)
        self._tell(["end", self._at(now), lane, reason, tokens])
        self._ended.append(of)
        if len(self._ended) > KEPT:
            gone = self._ended.popleft()
            for name in gone.names:
                if self._names.get(name) is gone:
                    del self._names[name]

    def _tell(self, event: list[Any]) -> None:
        if not self._watched:
            return
        if len(self._told) < MOST_TOLD:
            self._told.append(event)
        else:
            self._untold += 1

    # ---------------------------------------------------------------- the panes

    def on_frames(self, on_frame: OnFrame) -> None:
        self._on_frame = on_frame

    def watch(self, on: bool) -> None:
        if on and not self._watched:
            self._clear()
        self._watched = self._whole = on
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if on:
            self._timer = asyncio.get_running_loop().call_soon(self._tick)  # type: ignore[assignment]

    async def explain(self, id: str) -> bytes:
        if not id:
            known = sorted({*self._running.values(), *self._ended}, key=lambda lane: -lane.number)
            return bytes(_encode({"requests": [self._brief(lane) for lane in known]}))
        lane = self._names.get(id)
        return b"null" if lane is None else bytes(_encode({"id": id, "answers": [self._story(lane)]}))

    def _tick(self) -> None:
        now = self.clock()
        whole = self._whole or now - self._last_whole >= WHOLE_EVERY
        if whole or self._told or self._fresh:
            self._on_frame(self._frame(now, whole), whole)
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._tick)

    def _frame(self, now: float, whole: bool) -> bytes:
        told = [*self._told, *(["made", self._at(now), number, n] for number, n in self._fresh.items())]
        frame: dict[str, Any] = {"at": self._at(now), "now": self._now(), "steps": [], "told": told, "pages": []}
        if self._untold:
            frame["untold"] = self._untold
        if whole:
            self._whole, self._last_whole = False, now
            frame["whole"] = self._everything()
        self._clear()
        return bytes(_encode(frame))

    def _clear(self) -> None:
        self._told, self._fresh, self._untold = [], {}, 0

    def _now(self) -> dict[str, int]:
        empty = ("waiting", "used", "free", "evictions", "preemptions", "queried", "hit", "steps", "drafted")
        made = {"running": len(self._running), "generated": self._generated, "prompted": self._prompted}
        return {**dict.fromkeys(empty, 0), **made, "requests": self._number}

    def _everything(self) -> dict[str, Any]:
        nothing = ("pages", "all_pages", "page_size", "seats", "budget", "max_model_len", "lookahead", "drafts")
        shown = [*list(self._ended)[-RECENT:], *self._running.values()][:MOST_TOLD]
        return {
            "epoch": self.epoch,
            "facts": {**dict.fromkeys(nothing, 0), "device": "", "dtype": "", "about": self.about},
            "pages": [],
            "requests": [self._standing(lane) for lane in shown],
            "complete": len(self._running) + RECENT <= MOST_TOLD,
        }

    def _new(self, lane: _RequestTrack) -> list[Any]:
        return ["new", self._at(lane.came), lane.number, lane.id, lane.prompt, lane.most, 0]

    def _standing(self, lane: _RequestTrack) -> dict[str, Any]:
        return {
            "new": self._new(lane),
            "state": lane.state,
            "opened": self._at(lane.sent[0][0]) if lane.sent else None,
            "first": self._at(lane.first),
            "ended": self._at(lane.ended),
            "finish": lane.finish,
            "hit": 0,
            "made": lane.made,
            "preempted": 0,
        }

    # ---------------------------------------------------------------- a request's story

    def _brief(self, lane: _RequestTrack) -> dict[str, Any]:
        until = self.clock() if lane.ended is None else lane.ended
        return {
            "id": lane.id,
            "number": lane.number,
            "state": lane.state,
            "finish_reason": lane.finish,
            "prompt_tokens": lane.prompt,
            "cached_tokens": 0,
            "generated_tokens": lane.made,
            "preemptions": 0,
            "seconds": {
                "queued": round((lane.sent[0][0] if lane.sent else until) - lane.came, 6),
                "first_token": None if lane.first is None else round(lane.first - lane.came, 6),
                "total": round(until - lane.came, 6),
            },
        }

    def _story(self, lane: _RequestTrack) -> dict[str, Any]:
        brief, came = self._brief(lane), lane.came
        until = self.clock() if lane.ended is None else lane.ended
        sent, first = (lane.sent[0][0] if lane.sent else until), lane.first
        events = [_event(0.0, "submitted", "came in")]
        for i, (at, where) in enumerate(lane.sent):
            says = f"sent to {where}" if i == 0 else f"sent to {where}, for the one before took no connection"
            events.append(_event(at - came, "opened", says))
        if first is not None:
            events.append(_event(first - came, "first_token", f"first token after {first - came:.3f} s"))
        if lane.ended is not None:
            events.append(_event(until - came, "finished", f"{lane.finish}, with {lane.made} tokens made"))
        spans = {"prefill": (first or until) - sent, "decode": None if first is None else until - first}
        spans = {name: None if span is None else round(span, 6) for name, span in spans.items()}
        says = f"{until - came:.3f} s in all, most of it at {lane.sent[-1][1]}" if lane.sent else "not sent on"
        return {
            **brief,
            "max_tokens": lane.most,
            "priority": 0,
            "choice": 0,
            "seconds": {**brief["seconds"], **spans},
            "prefix": {"hit_tokens": 0, "prompt_tokens": lane.prompt, "why": "the upstream knows"},
            "chunks": 1,
            "preemptions": 0,
            "waits": [],
            "events": events,
            "events_left_out": 0,
            "token_times": [round(at - came, 6) for at in lane.times],
            "summary": says,
        }


def _event(at: float, what: str, says: str) -> dict[str, Any]:
    return {"at": round(at, 6), "what": what, "says": says, "step": None, "by": None, "tokens": 0}


MAX_VIEWER_FRAMES = 20
"""Frames a viewer may be behind: three seconds."""

KEEPALIVE_INTERVAL = 15.0
"""Seconds after which a viewer gets an empty frame, to show that somebody is there."""

MAX_VIEWERS = 64
"""Viewers at once."""


class _Viewer:
    """asking: it waits for a whole frame. behind: it has missed frames and not read since; it will ask when it does."""

    __slots__ = ("asking", "behind", "frames", "news")

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.asking, self.behind = True, False
        self.news = asyncio.Event()


class Broadcaster:
    """Hands one engine's frames to many viewers: the same bytes to all.

    The engine makes frames only while at least one viewer keeps up. One that stops reading holds at most
    `MAX_VIEWER_FRAMES` frames until it is found behind, and nothing afterwards.
    """

    def __init__(self, panes: LiveViewClient) -> None:
        self._panes = panes
        self._viewers: set[_Viewer] = set()
        self._making = False
        panes.on_frames(self._seen)

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Frames as they come, a whole one first, and again after frames were missed; an empty one after a silence.

        Raises Overloaded.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch already, and no more may", retry_after=10)
        viewer = _Viewer()
        self._viewers.add(viewer)
        try:
            self._look()
            while True:
                if viewer.behind:
                    viewer.behind, viewer.asking = False, True
                    self._look()
                while viewer.frames:
                    yield viewer.frames.popleft()
                if not viewer.behind:
                    viewer.news.clear()
                    try:
                        async with asyncio.timeout(KEEPALIVE_INTERVAL):
                            await viewer.news.wait()
                    except TimeoutError:
                        yield b""
        finally:
            self._viewers.discard(viewer)
            self._rest()

    async def explain(self, id: str) -> bytes:
        """What happened to a request as JSON, `null` if it is not known. Raises Unavailable."""
        return await self._panes.explain(id)

    def _look(self) -> None:
        self._making = True
        self._panes.watch(True)

    def _rest(self) -> None:
        if self._making and all(viewer.behind for viewer in self._viewers):
            self._making = False
            self._panes.watch(False)

    def _seen(self, frame: bytes, whole: bool) -> None:
        for viewer in self._viewers:
            if viewer.behind or (viewer.asking and not whole):
                continue
            viewer.asking = False
            if len(viewer.frames) < MAX_VIEWER_FRAMES:
                viewer.frames.append(frame)
            else:
                viewer.frames.clear()
                viewer.behind = True
            viewer.news.set()
        self._rest()
