"""The live page's requests where answers are made elsewhere: frames like the engine's, without steps and blocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from quire.engine.client import OnFrame
from quire.observability.engine_view import EVERY, MOST_TOLD, RECENT, WHOLE_EVERY

KEPT = 1024
"""Requests that are remembered after their end."""

MOST_TIMES = 4096
"""Moments of tokens that are remembered of a request."""

_encode = msgspec.json.Encoder().encode


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
    """Hears of requests (a `LaneObserver`) and shows them to an `Audience` (it is its `Panes`).

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
