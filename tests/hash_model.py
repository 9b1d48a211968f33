"""An executor whose "K/V" is the token in the slot and whose next token hashes everything read through the page table.

Its recurrent state is a hash of all tokens fed, in order; a snapshot of it has a slot of its own. Any misplaced page,
stale slot, wrong position, bad rollback, early reuse or wrong state changes the output or trips a stamp. It
really holds results back, as a GPU does: steps run when their result is awaited (or at once, when eager). No torch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any

from quire.engine.executor import Description
from quire.errors import StepFailed
from quire.scheduler.plan import Mask, NewSequence, Plan, Result, Span
from quire.types import TokenLogprobs

VOCAB = 97
POISON = 96
"""A prompt with this token makes every step it is fed in fail."""
SICK = 95
"""A row whose newest fed token is this one answers with an error of its own."""
NO_PAGE = -7


UNWRITTEN = -1
"""A state that was never written."""


def state_after(state: int, token: int | None) -> int:
    """The recurrent state, which is 0 before the first token."""
    return hash((state, token))


def next_token(
    seen: Sequence[int | None], key: tuple[int, int] = (0, 0), mask: Mask = None, state: int | None = None
) -> int:
    """The model: a hash of everything seen, of (seed, choice) and of the state, walked on to the next allowed token.

    state: None of a model without recurrent layers.
    """
    token = hash((key, *seen) if state is None else (key, state, *seen)) % 94
    while mask is not None and not mask[token >> 3] >> (token & 7) & 1:
        token = (token + 1) % 94
    return token


def logprob(seen: Sequence[int | None], token: int) -> TokenLogprobs:
    """A made-up log-probability that depends on everything seen."""
    return TokenLogprobs(token, -(hash((*seen, token)) % 1000) / 100, 1)


@dataclass
class Row:
    """What a device keeps of a row: a fold over plans."""

    opened: NewSequence
    uid: int
    history: list[int]
    length: int
    table: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    state: int = 0
    """After `length` tokens."""


class HashHandle:
    def __init__(self, device: HashDevice, plan: Plan) -> None:
        self.device, self.plan = device, plan
        self.given: dict[int, Sequence[Mask]] | None = None
        self.fed = False
        self.got: Result | None = None
        self.failure: StepFailed | None = None
        self.uids: list[tuple[int, list[int]]] = []
        self.views: list[tuple[Row, int, list[int], list[int]]] = []

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        if self.device.eager and self.failure is None:
            assert self.fed, "the forward did not run ahead of its masks"
        self.given = dict(zip(self.plan.masked_spans, masks, strict=True))
        if self.device.eager:
            self.device.run()

    def is_done(self) -> bool:
        return self.got is not None

    def result(self) -> Result:
        return self.device.read(self)


class HashDevice:
    """`hot` pages are those that launched, unread steps may still write: no other sequence may get them.

    snapshots: slots of states; None: the model has no recurrent layers. groups: with several, as with several stages,
    a row must not be fed again before what it sampled has been read.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        drafts: int = 0,
        eager: bool = False,
        rows: int = 64,
        seed: str = "",
        snapshots: int | None = None,
        groups: int = 1,
    ) -> None:
        self.groups = groups
        self.size, self.eager, self.pages, self.places = page_size, eager, pages, rows
        self.num_snapshots, self.restored = snapshots, 0
        self.rng = random.Random(seed)
        self.hiccup: Callable[[], bool] = lambda: False
        self.generation = 0
        self.steps = self.fed_tokens = self.stray_writes = self.deepest = self.resets = 0
        self.uid = 0
        self._empty()

    def _empty(self) -> None:
        self.mem: dict[tuple[int, int], int] = {}
        self.snapshots: dict[int, int] = {}
        self.rows: dict[int, Row] = {}
        self.owner: dict[int, int] = {}
        self.queue: deque[HashHandle] = deque()
        self.unread: deque[HashHandle] = deque()
        self.known: dict[int, int] = {}
        self.tables: dict[int, tuple[int, list[int]]] = {}

    # ---------------------------------------------------------------- the executor

    def describe(self) -> Description:
        return Description(
            num_blocks=self.pages,
            block_size=self.size,
            num_rows=self.places,
            max_model_len=1 << 20,
            vocab_size=VOCAB,
            recurrent=self.num_snapshots is not None,
            num_snapshots=self.num_snapshots or 0,
        )

    def close(self) -> None:
        pass

    def reset(self) -> None:
        self.resets += 1
        self._empty()

    def launch(self, plan: Plan) -> HashHandle:
        if self.hiccup():
            raise StepFailed("a hiccup at launch")
        handle, hot = HashHandle(self, plan), self.hot()
        for o in plan.new_sequences:
            self.uid += 1
            self.tables[o.row] = (self.uid, [])
            self.known[self.uid] = o.num_computed
            assert not o.snapshot or o.row in {s.row for s in plan.spans}, (
                "a snapshot that is read by no span of its plan"
            )
        for row, pages in plan.new_blocks:
            assert not hot & set(pages), "a page was given out while a step in flight may write it"
            assert 0 not in pages, "the spare page was given out"
            self.tables[row][1].extend(pages)
        assert len({s.row for s in plan.spans}) == len(plan.spans), "one row, two spans"
        if self.groups > 1:
            unknown = {self.tables[s.row][0] for h in self.unread for s in h.plan.spans if s.num_samples}
            assert not unknown & {self.tables[s.row][0] for s in plan.spans}, "a row is fed before its sample is known"
        handle.uids = [self.tables[s.row] for s in plan.spans]
        self.queue.append(handle)
        self.unread.append(handle)
        self.steps += 1
        self.deepest = max(self.deepest, len(self.unread))
        self.fed_tokens += sum(s.num_tokens for s in plan.spans)
        if self.eager:
            self.run()
        return handle

    def read(self, handle: HashHandle) -> Result:
        assert handle is self.unread[0], "results are read in order"
        self.run()
        if handle.failure is not None:
            raise handle.failure
        assert handle.got is not None, "deadlock: sampling waits for masks that can not come"
        self.unread.popleft()
        for (uid, _), s, got in zip(handle.uids, handle.plan.spans, handle.got.tokens, strict=True):
            self.known[uid] += s.num_tokens - max(s.num_samples, 1) + 1 + max(len(got) - 1, 0)
        return handle.got

    def hot(self) -> set[int]:
        out: set[int] = set()
        low = dict(self.known)
        for handle in self.unread:
            for (uid, table), s in zip(handle.uids, handle.plan.spans, strict=True):
                out.update(table[low[uid] // self.size :])
                low[uid] += s.num_tokens - max(s.num_samples, 1) + 1
        return out

    # ---------------------------------------------------------------- the stream, in order, as far as it can

    def run(self) -> None:
        while self.queue:
            handle = self.queue[0]
            if not handle.fed:
                self._forward(handle)
                handle.fed = True
            if handle.failure is not None or (handle.plan.masked_spans and handle.given is None):
                return  # a failed step stops the stream: only a reset helps
            self._sample(handle)
            self.queue.popleft()

    def _forward(self, handle: HashHandle) -> None:
        plan = handle.plan
        for o in plan.new_sequences:
            row = self.rows[o.row] = Row(o, 0, list(o.tokens), o.num_computed)
            if o.snapshot:
                row.state = self.snapshots.get(o.snapshot, UNWRITTEN)
                self.restored += 1
        for row, pages in plan.new_blocks:
            self.rows[row].table += pages
        for s, (uid, _) in zip(plan.spans, handle.uids, strict=True):
            r = self.rows[s.row]
            r.uid = r.uid or uid
            assert r.uid == uid, "a span for a row that was opened again"
        for row, pages in plan.new_blocks:
            for page in pages:
                self.owner[page] = self.rows[row].uid
        for s in plan.spans:  # all writes first, as one ragged forward does
            r = self.rows[s.row]
            feed = (r.history + r.drafts)[r.length : r.length + s.num_tokens]
            assert s.num_tokens >= max(1, s.num_samples), "logits come only from fed tokens"
            assert s.num_logits in (s.num_samples, s.num_tokens), "logits are of the sampled rows, or of all"
            uncomputed = len(r.history) - r.length
            assert s.num_samples == max(0, s.num_tokens - uncomputed + 1) and len(feed) == s.num_tokens, (
                "host and device disagree on a shape"
            )
            for i, token in enumerate(feed):
                self._write(r, r.length + i, token)
            # As a draft that is not accepted does, those of the span write states that nothing goes on from.
            states = list(accumulate(feed, state_after, initial=r.state))
            handle.views.append((r, r.length, feed, states))
            if POISON in feed:
                handle.failure = StepFailed("a kernel failed")
        assert len({slot for _, _, slot in plan.snapshots}) == len(plan.snapshots), "two states for one slot"
        for j, length, slot in plan.snapshots:
            assert 1 <= slot <= (self.num_snapshots or 0), "a slot that is not there"
            self.snapshots[slot] = handle.views[j][3][length]

    def _write(self, r: Row, position: int, token: int) -> None:
        page, offset = divmod(position, self.size)
        if page < len(r.table):
            assert self.owner[r.table[page]] == r.uid, "a write into a page that belongs to another"
            self.mem[r.table[page], offset] = token
        else:
            self.stray_writes += 1  # past the table: the spare page takes it

    def seen(self, r: Row, upto: int) -> list[int | None]:
        """K/V of positions below `upto`, through the page table."""
        places = (divmod(p, self.size) for p in range(upto))
        return [self.mem.get((r.table[p], o)) if p < len(r.table) else NO_PAGE for p, o in places]

    def state_of(self, r: Row) -> int | None:
        return None if self.num_snapshots is None else r.state

    def _sample(self, handle: HashHandle) -> None:
        result = Result([], [], {}, {}, {})
        for j, (s, (r, start, feed, states)) in enumerate(zip(handle.plan.spans, handle.views, strict=True)):
            got: list[int] = []
            end = start + s.num_tokens
            if s.num_logits > s.num_samples:
                known = (*r.history, None)
                result.prompt_logprobs[j] = [
                    logprob(self.seen(r, p + 1), known[p + 1] or 0) for p in range(start, end - s.num_samples)
                ]
            if s.num_samples == 0:
                r.length, r.state = end, states[-1]
                result.tokens.append(got)
                continue
            if SICK in feed:
                result.errors[j] = "the model produced NaN logits"
            masks = handle.given[j] if handle.given and j in handle.given else [None] * s.num_samples
            assert len(masks) == s.num_samples, "one mask a sampled row"
            found: list[TokenLogprobs] = []
            for i in range(s.num_samples):  # verify; with zero drafts this is plain decode
                seen, r.state = self.seen(r, end - s.num_samples + i + 1), states[s.num_tokens - s.num_samples + i + 1]
                got.append(next_token(seen, (r.opened.seed, r.opened.choice), masks[i], self.state_of(r)))
                found.append(logprob(seen, got[-1]))
                if i < s.num_samples - 1 and feed[len(feed) - s.num_samples + 1 + i] != got[-1]:
                    break
            if r.opened.sampling.logprobs is not None:
                result.logprobs[j] = found
            r.history += got
            r.length = len(r.history) - 1
            result.tokens.append([] if j in result.errors else got)
            r.drafts = self._propose(r, handle.plan.num_drafts[j] if handle.plan.num_drafts else 0)
            if j in handle.plan.masked_spans:
                result.draft_tokens.append(list(r.drafts))
        handle.got = result

    def _propose(self, r: Row, depth: int) -> list[int]:
        drafts: list[int] = []
        key, state = (r.opened.seed, r.opened.choice), r.state
        for _ in range(depth):
            good, known = self.rng.random() < 0.6, r.history + drafts
            state = state_after(state, known[-1])
            drafts.append(next_token(known, key, None, None if self.num_snapshots is None else state) if good else 0)
        return drafts


def naive(
    prompt: Sequence[int],
    max_new: int,
    stop: frozenset[int],
    key: tuple[int, int],
    mask_after: Any,
    recurrent: bool = False,
) -> list[int]:
    """What the answer must be: no pages, no batch, no cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new:
        mask = mask_after(tokens[len(prompt) :]) if mask_after else None
        tokens.append(next_token(tokens, key, mask, reduce(state_after, tokens, 0) if recurrent else None))
        if tokens[-1] in stop:
            break
    return tokens


__all__ = ["POISON", "SICK", "UNWRITTEN", "VOCAB", "HashDevice", "Span", "logprob", "naive", "next_token"]
