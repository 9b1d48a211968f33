"""What the live page is told: frames of JSON, made in the engine's process while somebody watches, and only then.

A frame holds what happened since the last one. Now and then one is `whole`: it also says how everything stands, so
that a viewer can begin with it. Times are whole microseconds since the window was made; requests go by number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count, takewhile
from typing import Any

import msgspec

from quire.engine.engine import Engine
from quire.engine.events import Completed, StepRecord
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
