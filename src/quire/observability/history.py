"""What was decided about each request, kept as it happens: a few marks a request, never a step's worth of work.

An observer that is always there. `explain` makes sentences of it when somebody asks; nothing here is text.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from quire.engine.events import Completed, StepRecord
from quire.scheduler.kv_cache import KVCacheManager
from quire.types import FinishReason, Request

MOST_NOTES = 64
"""Notes kept of one request; the rest is counted."""


class Note(NamedTuple):
    """Something that happened to a request at `at` (engine clock) in step `step`.

    what: as `Decision.what`, chunk or failed. by: who or what for. n: tokens. width, fed: of the step, sequences and
    tokens in all.
    """

    at: float
    step: int
    what: str
    by: str = ""
    n: int = 0
    width: int = 0
    fed: int = 0


class Wait(NamedTuple):
    """The head of the queue, `id`, could not be opened from `begin` to `end`, for want of `missing`."""

    begin: float
    end: float
    id: str
    missing: str


class RequestHistory:
    """One request from its submission on. Times are the engine clock's; `times` has one for each token made."""

    __slots__ = (
        "cached",
        "chunks",
        "ended",
        "finish",
        "first",
        "held",
        "hits",
        "lost",
        "made",
        "notes",
        "number",
        "opened",
        "preemptions",
        "request",
        "resumed",
        "submitted",
        "times",
        "tokens",
        "unnoted",
        "waiting",
    )

    def __init__(self, number: int, request: Request, now: float) -> None:
        self.number, self.request, self.submitted = number, request, now
        self.opened: float | None = None
        self.resumed: float | None = None
        """When it got the place on the device at which it had its first token, or the last one while it has none."""
        self.first: float | None = None
        self.ended: float | None = None
        self.finish: FinishReason | None = None
        self.hits = self.cached = self.chunks = self.preemptions = self.unnoted = 0
        """hits: tokens of the pages it holds that were cached when it last got a place; cached: of its prompt, then."""
        self.waiting = True
        self.held: list[int] = []
        """Pages it holds, prefix hits first."""
        self.notes: list[Note] = []
        self.times = array("d")
        self.tokens = array("q", request.prompt)
        """The prompt, and the answer once it has ended; what others' prefixes are compared with."""
        self.lost: dict[int, tuple[float, str]] = {}
        """By page index: when somebody else took that page, and who."""

    def note(self, note: Note) -> None:
        if len(self.notes) < MOST_NOTES:
            self.notes.append(note)
        else:
            self.unnoted += 1


class History:
    """Stories of the requests that are here, and of the last that ended: at most `keep`, and `tokens` in all."""

    def __init__(self, *, keep: int = 512, tokens: int = 1 << 22, waits: int = 4096) -> None:
        self.requests: dict[str, RequestHistory] = {}
        self.ended: deque[RequestHistory] = deque()
        self.waits: deque[Wait] = deque(maxlen=waits)
        self.writers: dict[int, tuple[RequestHistory, int]] = {}
        """By page: whose tokens are in it, and which of that request's pages it is."""
        self.dropped: list[int] = []
        """Pages of those whom the last step preempted."""
        self.emptied = float("-inf")
        """When the prefix cache was: not later than in the step planned then."""
        self._resets = 0
        self._keep, self._most, self._kept = keep, tokens, 0
        self._rows: dict[int, RequestHistory] = {}
        self._spans: object = None
        self._partial = False
        self._number = 0
        self.page_size = 1

    def attach(self, kv: KVCacheManager) -> None:
        """Which pages the plans speak of; before the first step."""
        self.page_size = kv.block_size

    # ---------------------------------------------------------------- what the engine tells

    def on_submit(self, request: Request, now: float) -> None:
        self._number += 1
        self.requests[request.id] = RequestHistory(self._number, request, now)

    def on_step(self, record: StepRecord) -> None:
        plan, stories, now = record.plan, self.requests, record.committed
        self.dropped = []
        if record.gauges.prefix_cache_resets != self._resets:
            self._resets, self.emptied = record.gauges.prefix_cache_resets, record.planned
        if record.decisions:
            self._decided(record)
        if plan.new_blocks:
            self._grown(record)
        if plan.spans is not self._spans:
            self._spans = plan.spans
            self._partial = any(not span.num_samples for span in plan.spans)
        if self._partial:
            self._chunked(record)
        for event in record.events:
            if event[1]:
                story = stories[event[0]]
                if story.first is None:
                    story.first = now
                for _ in event[1]:
                    story.times.append(now)
        for ended in record.ended:
            self.on_end(ended)

    def on_end(self, ended: Completed) -> None:
        story = self.requests[ended.id]
        story.ended, story.finish, story.waiting = ended.finished, ended.finish, False
        story.tokens.extend(ended.tokens)
        self.ended.append(story)
        self._kept += len(story.tokens)
        while len(self.ended) > self._keep or (self._kept > self._most and len(self.ended) > 1):
            old = self.ended.popleft()
            self._kept -= len(old.tokens)
            if self.requests.get(old.request.id) is old:  # the id may have come again
                del self.requests[old.request.id]
            old.tokens, old.times = array("q"), array("d")

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        self.writers.clear()
        for id in suspects:
            story = self.requests[id]
            story.note(Note(now, 0, "failed", reason))
            story.held, story.waiting = [], True

    # ---------------------------------------------------------------- folding a step

    def _decided(self, record: StepRecord) -> None:
        opened = iter(record.plan.new_sequences)
        for what, id, by, n in record.decisions:
            story = self.requests.get(id)
            if what == "opened":
                row = next(opened).row
                if story is None or story.ended is not None:
                    continue
                story.held, story.hits, story.waiting = [], n, False
                if story.first is None:
                    story.cached, story.resumed = n, record.planned
                self._rows[row] = story
                if story.opened is None:
                    story.opened = record.planned
            elif story is None or story.ended is not None:
                continue
            elif what == "waits":
                self._waited(record, id, by)
                continue
            elif what == "preempted":
                self.dropped += story.held
                story.held, story.waiting = [], True
                story.preemptions += 1
            story.note(Note(record.planned, record.number, what, by, n, len(record.seqs)))

    def _waited(self, record: StepRecord, id: str, missing: str) -> None:
        if self.waits and self.waits[-1][2:] == (id, missing):
            self.waits[-1] = self.waits[-1]._replace(end=record.committed)
        else:
            self.waits.append(Wait(record.planned, record.committed, id, missing))

    def _grown(self, record: StepRecord) -> None:
        writers, size = self.writers, self.page_size
        for row, pages in record.plan.new_blocks:
            story = self._rows.get(row)
            if story is None:
                continue
            held = story.held
            for page in pages:
                index = len(held)
                held.append(page)
                if index * size >= story.hits:
                    before = writers.get(page)
                    if before is not None:
                        before[0].lost[before[1]] = record.planned, story.request.id
                    writers[page] = story, index

    def _chunked(self, record: StepRecord) -> None:
        """Prompts that this step fed in part."""
        spans = record.plan.spans
        for span, seq in zip(spans, record.seqs, strict=True):
            if not span.num_samples and (story := self.requests.get(seq.request.id)) is not None:
                story.chunks += 1
                fed = sum([s.num_tokens for s in spans])
                story.note(Note(record.planned, record.number, "chunk", n=span.num_tokens, width=len(spans), fed=fed))
