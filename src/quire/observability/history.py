"""The history of requests: what was decided about each, a few notes a request. `explain` makes sentences of it."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.events import Completed, Observer, StepRecord
from quire.scheduler.kv_cache import KVCacheManager
from quire.scheduler.sequence import Transfer
from quire.scheduler.snapshots import NoSnapshots
from quire.types import Request

MOST_NOTES = 64
"""Notes kept of a request; the rest is counted."""


class Note(NamedTuple):
    """An event of a request at `at`, the engine clock's time, in step `step`.

    what: a `Decision`'s kind, chunk or failed. by: the other request, or the reason. n: tokens.
    width, fed: sequences and tokens of the step.
    """

    at: float
    step: int
    what: str
    by: str = ""
    n: int = 0
    width: int = 0
    fed: int = 0


class Wait(NamedTuple):
    """The head of the queue, `id`, waited from `begin` to `end` for `missing`."""

    begin: float
    end: float
    id: str
    missing: str


@dataclass(slots=True, eq=False)
class RequestHistory:
    """One request's history. Times are the engine clock's."""

    number: int
    request: Request
    submitted: float
    prompt_tokens: int = field(init=False)
    opened: float | None = None
    resumed: float | None = None
    """When it was last scheduled before its first token."""
    first: float | None = None
    ended: float | None = None
    finish: str | None = None
    hits: int = 0
    """Tokens found in the prefix cache when it was last scheduled."""
    cached: int = 0
    """Tokens found there when it was scheduled at `resumed`."""
    diverged_at: int | None = None
    """`Sequence.diverged_at` then."""
    from_host: int = 0
    """Of those tokens, how many came back from host memory."""
    from_disk: int = 0
    from_remote: int = 0
    """From a prefill engine."""
    transfer: Transfer | None = None
    """What came of asking one."""
    chunks: int = 0
    preemptions: int = 0
    generated: int = 0
    waiting: bool = True
    held: list[int] = field(default_factory=list)
    """Blocks it holds, cached ones first."""
    notes: list[Note] = field(default_factory=list)
    unnoted: int = 0
    times: array[float] = field(default_factory=lambda: array("d"))
    """When each of its tokens was generated."""
    tokens: array[int] = field(init=False)
    """The prompt, and the answer once it has ended, for comparison with other prompts."""
    lost: dict[int, tuple[float, str]] = field(default_factory=dict)
    """By index of a block: when the block was given to another request, and its id."""

    def __post_init__(self) -> None:
        self.tokens = array("q", self.request.prompt)
        self.prompt_tokens = len(self.tokens)

    def note(self, note: Note) -> None:
        """Keep a note, or count it."""
        if len(self.notes) < MOST_NOTES:
            self.notes.append(note)
        else:
            self.unnoted += 1


class History(Observer):
    """An observer: the history of live requests, and of the last finished ones, at most `keep` with `tokens` in all."""

    def __init__(self, *, keep: int = 512, tokens: int = 1 << 22, waits: int = 4096) -> None:
        self.requests: dict[str, RequestHistory] = {}
        self.ended: deque[RequestHistory] = deque()
        self.waits: deque[Wait] = deque(maxlen=waits)
        self.writers: dict[int, tuple[RequestHistory, int]] = {}
        """By block: the request that wrote it, and its index there."""
        self.dropped: list[int] = []
        """Blocks of the requests that the last step preempted."""
        self.emptied = float("-inf")
        """When the first step after the last reset of the prefix cache was planned."""
        self._resets = 0
        self._keep, self._most, self._kept = keep, tokens, 0
        self._rows: dict[int, RequestHistory] = {}
        self._spans: object = None
        self._partial = False
        self._number = 0
        self.block_size, self.recurrent = 1, False

    def attach(self, kv: KVCacheManager) -> None:
        """Set the block size, and whether prefixes need states; before the first step."""
        self.block_size, self.recurrent = kv.block_size, not isinstance(kv.snapshots, NoSnapshots)

    # ---------------------------------------------------------------- observer

    def on_submit(self, request: Request, now: float) -> None:
        """A request was submitted."""
        self._number += 1
        self.requests[request.id] = RequestHistory(self._number, request, now)

    def on_step(self, record: StepRecord) -> None:
        """A step was committed."""
        plan, entries, now = record.plan, self.requests, record.committed
        self.dropped = []
        if record.gauges.prefix_cache_resets != self._resets:
            self._resets, self.emptied = record.gauges.prefix_cache_resets, record.planned
        if record.decisions:
            self._add_decisions(record)
        if plan.new_blocks:
            self._add_blocks(record)
        if plan.spans is not self._spans:
            self._spans = plan.spans
            self._partial = any(not span.num_samples for span in plan.spans)
        if self._partial:
            self._add_chunks(record)
        for event in record.events:
            if event[1]:
                entry = entries[event[0]]
                if entry.first is None:
                    entry.first = now
                entry.generated += len(event[1])
                for _ in event[1]:
                    entry.times.append(now)
        for ended in record.ended:
            self.on_end(ended)

    def on_end(self, ended: Completed) -> None:
        """A request finished; drop the oldest finished ones beyond the limits."""
        entry = self.requests[ended.id]
        entry.ended, entry.finish, entry.waiting = ended.finished, ended.finish, False
        entry.tokens.extend(ended.tokens)
        self.ended.append(entry)
        self._kept += len(entry.tokens)
        while len(self.ended) > self._keep or (self._kept > self._most and len(self.ended) > 1):
            old = self.ended.popleft()
            self._kept -= len(old.tokens)
            # Another request may have the same id by now.
            if self.requests.get(old.request.id) is old:
                del self.requests[old.request.id]
            old.tokens, old.times = array("q"), array("d")

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """A step failed: these requests start again, and no block keeps its content."""
        self.writers.clear()
        for id in suspects:
            entry = self.requests[id]
            entry.note(Note(now, 0, "failed", reason))
            entry.held, entry.waiting = [], True

    # ---------------------------------------------------------------- one step

    def _add_decisions(self, record: StepRecord) -> None:
        opened = iter(record.plan.new_sequences)
        sequences = {seq.row: seq for seq in record.seqs} if record.plan.new_sequences else {}
        for what, id, by, n in record.decisions:
            entry = self.requests.get(id)
            row = next(opened).row if what == "opened" else -1
            if entry is None or entry.ended is not None:
                continue
            if what == "opened":
                entry.held, entry.hits, entry.waiting = [], n, False
                if entry.first is None:
                    entry.cached, entry.resumed = n, record.planned
                    if (seq := sequences.get(row)) is not None:
                        entry.diverged_at = seq.diverged_at
                        entry.from_host, entry.from_disk = seq.num_from_host, seq.num_from_disk
                        entry.from_remote, entry.transfer = seq.num_from_remote, seq.transfer
                self._rows[row] = entry
                if entry.opened is None:
                    entry.opened = record.planned
            elif what == "waits":
                self._add_wait(record, id, by)
                continue
            elif what == "preempted":
                self.dropped += entry.held
                entry.held, entry.waiting = [], True
                entry.preemptions += 1
            entry.note(Note(record.planned, record.number, what, by, n, len(record.seqs)))

    def _add_wait(self, record: StepRecord, id: str, missing: str) -> None:
        if self.waits and self.waits[-1][2:] == (id, missing):
            self.waits[-1] = self.waits[-1]._replace(end=record.committed)
        else:
            self.waits.append(Wait(record.planned, record.committed, id, missing))

    def _add_blocks(self, record: StepRecord) -> None:
        writers, size = self.writers, self.block_size
        for row, pages in record.plan.new_blocks:
            entry = self._rows.get(row)
            if entry is None:
                continue
            held = entry.held
            for page in pages:
                index = len(held)
                held.append(page)
                if index * size >= entry.hits:
                    before = writers.get(page)
                    if before is not None:
                        before[0].lost[before[1]] = record.planned, entry.request.id
                    writers[page] = entry, index

    def _add_chunks(self, record: StepRecord) -> None:
        """Note prompts that this step fed in part."""
        spans = record.plan.spans
        for span, seq in zip(spans, record.seqs, strict=True):
            if not span.num_samples and (entry := self.requests.get(seq.request.id)) is not None:
                entry.chunks += 1
                fed = sum([s.num_tokens for s in spans])
                entry.note(Note(record.planned, record.number, "chunk", n=span.num_tokens, width=len(spans), fed=fed))
