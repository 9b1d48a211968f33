"""The host-side row store that CPU, ONNX and gRPC executors share: per-row state as a fold over plans. No torch.

Everything lives in numpy columns indexed by row, so that a step over many rows is a few gathers. A row's drafts are
kept right behind its history, so what a span feeds is one slice: `tokens[row, length : length + n]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.core.plan import Open, Plan, Span
from quire.errors import StepFailed
from quire.runner.traits import Traits
from quire.values import MANY

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What follows from the spans alone, and therefore is the same, object and all, in every step of steady decode.

    Letters: S spans, T tokens fed, R sampled rows (all spans' `rows`, back to back), Q spans that sample.
    """

    spans: tuple[Span, ...]
    row: Ints
    """[S] store row of each span."""
    n: Ints
    """[S] tokens it feeds."""
    rows: Ints
    """[S] rows it samples."""
    query_start: npt.NDArray[np.int32]
    """[S+1]"""
    token_span: Ints
    """[T] which span a token belongs to..."""
    token_at: Ints
    """[T] ...and its place in it."""
    token_row: Ints
    """[T]"""
    fed: Ints
    """Spans with rows = 0: prompt chunks."""
    samples: Ints
    """[Q] spans with rows > 0..."""
    sampled_row: Ints
    """[Q] ...and their store rows."""
    first: Ints
    """[Q] where each one's sampled rows begin."""
    picked: Ints
    """[R] the fed token whose hidden state gives the logits."""
    row_row: Ints
    """[R] store row."""
    depth: Ints
    """[R] 0 for a span's first sampled row, 1 for the one behind its first draft..."""
    last: npt.NDArray[np.bool_]
    """[R] whether it is its span's last: no draft follows."""
    scored: tuple[int, ...]
    """Spans that want logits of known tokens too (prompt log-probabilities)."""
    max_query: int
    even: bool
    """Every span samples one row: decode, and last chunks."""

    @staticmethod
    def of(spans: tuple[Span, ...]) -> Shape:
        table = np.array(spans, dtype=np.intp).reshape(-1, 4)
        row, n, rows, logits = (np.ascontiguousarray(column) for column in table.T)
        start = np.zeros(len(spans) + 1, dtype=np.intp)
        np.cumsum(n, out=start[1:])
        token_span = np.repeat(np.arange(len(spans)), n)
        samples = np.flatnonzero(rows)
        first = np.zeros(len(samples), dtype=np.intp)
        np.cumsum(rows[samples][:-1], out=first[1:])
        row_span = np.repeat(samples, rows[samples])
        depth = np.arange(len(row_span)) - np.repeat(first, rows[samples])
        return Shape(
            spans=spans,
            row=row,
            n=n,
            rows=rows,
            query_start=start.astype(np.int32),
            token_span=token_span,
            token_at=np.arange(int(start[-1])) - start[token_span],
            token_row=row[token_span],
            fed=np.flatnonzero(rows == 0),
            samples=samples,
            sampled_row=row[samples],
            first=first,
            picked=start[row_span + 1] - rows[row_span] + depth,
            row_row=row[row_span],
            depth=depth,
            last=depth == rows[row_span] - 1,
            scored=tuple(np.flatnonzero(logits > rows).tolist()),
            max_query=int(n.max(initial=0)),
            even=bool((rows == 1).all()),
        )


class Rows:
    """Row state: history, length, page table, sampling, seed, drafts. Opened, extended and fed by plans only.

    count: rows. max_model_len: longest sequence, in tokens. page_size: tokens a page. drafts: tokens drafted a step.
    The columns are zero pages until touched, so capacity that is never used costs nothing.
    """

    def __init__(self, count: int, max_model_len: int, page_size: int, drafts: int = 0) -> None:
        self.count, self.page_size, self.drafts = count, page_size, drafts
        self.ceiling = max_model_len + drafts + 1
        """History longer than this belongs to a row that is past its limit: it is no longer extended."""
        self.max_model_len = max_model_len
        width = self.ceiling + drafts + 1
        self.tokens = np.zeros((count, width), dtype=np.int32)
        self.pages = np.zeros((count, -(-width // page_size) + 1), dtype=np.int32)
        self.held = np.zeros(count, dtype=np.intp)
        self.known = np.zeros(count, dtype=np.intp)
        self.length = np.zeros(count, dtype=np.intp)
        self.prompt = np.zeros(count, dtype=np.intp)
        self.guessed = np.zeros(count, dtype=np.intp)
        self.fresh = np.ones(count, dtype=np.bool_)
        """Opened since a drafter last looked."""
        self.traits = Traits(count)
        self.shape = Shape.of(())
        self.epoch = 0
        """Grows when the shape or who is in it changes: what was derived from them is stale."""

    def fold(self, plan: Plan) -> Shape:
        """Apply what a plan opens and grows; the shape of its spans. Raises StepFailed if they cannot be."""
        epoch = self.epoch
        shape = self.admit(plan)
        if self.epoch != epoch:
            self.check(shape)
        return shape

    def admit(self, plan: Plan) -> Shape:
        """`fold` for whoever runs ahead of results: spans are not yet compared with what their rows have."""
        for one in plan.opened:
            self._open(one)
        for row, pages in plan.grown:
            held = self.held[row]
            self.pages[row, held : held + len(pages)] = pages
            self.held[row] += len(pages)
        same = plan.spans is self.shape.spans or plan.spans == self.shape.spans
        if not same:
            self.shape = Shape.of(plan.spans)
        if plan.opened or not same:
            self.epoch += 1
        return self.shape

    def _open(self, one: Open) -> None:
        row, size = one.row, len(one.tokens)
        if not 0 <= row < self.count:
            raise StepFailed(f"the plan opens row {row}, and there are {self.count}")
        if not one.start < size <= self.max_model_len:
            raise StepFailed(f"row {row} opens with {size} tokens, {one.start} computed, of {self.max_model_len}")
        self.tokens[row, :size] = one.tokens
        self.known[row], self.length[row], self.prompt[row] = size, one.start, one.prompt
        self.pages[row, : self.held[row]] = 0
        self.held[row] = self.guessed[row] = 0
        self.fresh[row] = True
        self.traits.open(one)

    def check(self, shape: Shape) -> None:
        """Raises StepFailed unless every span feeds what its row has."""
        unfed = self.known[shape.row] - self.length[shape.row]
        wrong = shape.rows != np.maximum(0, shape.n - unfed + 1)
        wrong |= (shape.n < 1) | (shape.rows > 1 + self.guessed[shape.row])
        if wrong.any():
            span = shape.spans[int(np.argmax(wrong))]
            raise StepFailed(f"plan and rows disagree: {span} for a row with {unfed[np.argmax(wrong)]} tokens to feed")

    def settle(
        self, shape: Shape, sampled: Ints, bad: npt.NDArray[np.bool_], right: npt.NDArray[np.bool_] | None = None
    ) -> tuple[Ints, Ints]:
        """Advance every row by what its span fed and sampled. sampled [R], bad [R]: rows without an answer.

        A draft is accepted when it is the token sampled at its place (sample-and-match), so the answer is the same
        with any drafts. right [R]: whether the draft behind a row was, where the device has compared them itself.
        Returns how many of its rows each sampling span keeps [Q], those before a bad one, and which sampled row failed
        it [Q] (-1: none). The drafts of the next step are to be written behind the history.
        """
        self.length[shape.row[shape.fed]] += shape.n[shape.fed]
        row, first = shape.sampled_row, shape.first
        place = self.known[shape.row_row] + shape.depth
        if len(first) == len(sampled) and not bad.any():  # one row each: nothing to match
            keep, failed = np.ones_like(first), np.full_like(first, -1)
        else:
            match = ~shape.last & (self.tokens[shape.row_row, place] == sampled) if right is None else right
            keep = np.minimum.reduceat(np.where(match, MANY, shape.depth), first) + 1
            fault = np.minimum.reduceat(np.where(bad, shape.depth, MANY), first)
            failed = np.where(fault < keep, first + fault, -1)
            keep = np.minimum(keep, fault)
        self.tokens[shape.row_row, place] = sampled
        known = np.minimum(self.known[row] + keep, self.ceiling)
        self.known[row] = known
        self.length[row] = known - 1
        return keep, failed

    def draft(self, row: Ints, drafts: npt.NDArray[np.int32], depth: Ints) -> None:
        """Put drafts [Q, k] behind the history of rows [Q], the first `depth` [Q] of each meant."""
        if drafts.shape[1]:
            at = self.known[row][:, None] + np.arange(drafts.shape[1])
            self.tokens[row[:, None], at] = drafts
        self.guessed[row] = depth

    def drafted(self, row: int) -> list[int]:
        """The drafts a row will feed next."""
        known = self.known[row]
        return [int(t) for t in self.tokens[row, known : known + self.guessed[row]]]

    def reset(self) -> None:
        """Forget every row."""
        self.held[:] = 0
        self.pages[:] = 0
        self.known[:] = 0
        self.length[:] = 0
        self.traits.reset()
        self.shape = Shape.of(())
        self.epoch += 1
