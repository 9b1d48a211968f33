"""Rows on the host, for the CPU and ONNX executors and gRPC servers: state per row, changed by plans and results. No
torch.

Columns are numpy arrays indexed by row, so that a step over many rows is a few gathers. A row's drafts follow its
history, so what a span feeds is one slice: `tokens[row, length : length + n]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import StepFailed
from quire.model_runner.sampling.features import SamplingFeatures
from quire.scheduler.plan import ImageSpan, NewSequence, Plan, Span
from quire.token_masks import token_array
from quire.types import UNLIMITED

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class StepShape:
    """What follows from the spans alone, and is therefore the same object in every step of steady decode.

    Letters: S spans, T tokens fed, R samples (all spans' `num_samples`, one span after the other), Q spans that sample.
    """

    spans: tuple[Span, ...]
    row: Ints
    """[S] row of each span."""
    num_tokens: Ints
    """[S] tokens that it feeds."""
    num_samples: Ints
    """[S] samples that it takes."""
    query_start: npt.NDArray[np.int32]
    """[S+1]"""
    token_span: Ints
    """[T] span of each token."""
    token_offset: Ints
    """[T] index of each token in its span."""
    token_row: Ints
    """[T]"""
    prompt_spans: Ints
    """Spans without samples: prompt chunks."""
    sampling_spans: Ints
    """[Q] spans with samples."""
    sampling_row: Ints
    """[Q] their rows."""
    first_sample: Ints
    """[Q] index of each one's first sample."""
    sample_indices: Ints
    """[R] index of the fed token whose hidden state gives the logits."""
    sample_row: Ints
    """[R] row."""
    sample_offset: Ints
    """[R] 0 for a span's first sample, 1 for the one after its first draft, and so on."""
    is_last_sample: npt.NDArray[np.bool_]
    """[R] whether no draft follows in its span."""
    scored_spans: tuple[int, ...]
    """Spans that need logits of known tokens too (prompt log-probabilities)."""
    max_query: int
    one_sample_each: bool
    """Every span has one sample: decode, and last chunks."""

    @staticmethod
    def of(spans: tuple[Span, ...]) -> StepShape:
        """The shape of some spans."""
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
        return StepShape(
            spans=spans,
            row=row,
            num_tokens=n,
            num_samples=rows,
            query_start=start.astype(np.int32),
            token_span=token_span,
            token_offset=np.arange(int(start[-1])) - start[token_span],
            token_row=row[token_span],
            prompt_spans=np.flatnonzero(rows == 0),
            sampling_spans=samples,
            sampling_row=row[samples],
            first_sample=first,
            sample_indices=start[row_span + 1] - rows[row_span] + depth,
            sample_row=row[row_span],
            sample_offset=depth,
            is_last_sample=depth == rows[row_span] - 1,
            scored_spans=tuple(np.flatnonzero(logits > rows).tolist()),
            max_query=int(n.max(initial=0)),
            one_sample_each=bool((rows == 1).all()),
        )


class RowState:
    """History, length, block table, sampling parameters, seed and drafts of each row. Changed by plans and `advance`
    only.

    num_rows: sequences at once. max_model_len: longest sequence, in tokens. block_size: tokens per block. max_drafts:
    the most drafts of a step. recurrent: whether rows have states, see `state_slots`. Memory of the columns is not
    touched until it is used, so unused capacity costs nothing.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, max_drafts: int = 0, *, recurrent: bool = False
    ) -> None:
        self.num_rows, self.block_size, self.max_drafts = num_rows, block_size, max_drafts
        self.recurrent = recurrent
        self.max_history = max_model_len + max_drafts + 1
        """A history of this length belongs to a row past its limit and is not extended."""
        self.max_model_len = max_model_len
        width = self.max_history + max_drafts + 1
        self.tokens = np.zeros((num_rows, width), dtype=np.int32)
        self.block_table = np.zeros((num_rows, -(-width // block_size) + 1), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.intp)
        self.num_known = np.zeros(num_rows, dtype=np.intp)
        self.num_computed = np.zeros(num_rows, dtype=np.intp)
        self.prompt_length = np.zeros(num_rows, dtype=np.intp)
        self.num_drafted = np.zeros(num_rows, dtype=np.intp)
        self.state = np.zeros(num_rows, dtype=np.int64)
        """[rows] slot of the state that a row goes on from; 0: it begins."""
        self.is_new = np.ones(num_rows, dtype=np.bool_)
        """[rows] whether the row was opened after a drafter last fed it."""
        self.images: dict[int, tuple[ImageSpan, ...]] = {}
        """Those of rows that have any."""
        self.rope_shift = np.zeros(num_rows, dtype=np.int32)
        """[rows] what is added to positions behind a prompt's images before tokens are rotated by them."""
        self.features = SamplingFeatures(num_rows)
        self.shape = StepShape.of(())
        self.snapshots: Sequence[tuple[int, int, int]] = ()
        """`Plan.snapshots` of the last plan."""
        self.epoch = 0
        """Incremented when the shape or its rows change: what was derived from them is stale."""

    def apply_plan(self, plan: Plan) -> StepShape:
        """Apply what a plan opens and extends; returns the shape of its spans. Raises StepFailed if they are
        impossible."""
        epoch = self.epoch
        shape = self.apply_changes(plan)
        if self.epoch != epoch:
            self.check(shape)
        return shape

    def apply_changes(self, plan: Plan) -> StepShape:
        """`apply_plan` for look-ahead, before results are known: spans are not compared with their rows yet."""
        for one in plan.new_sequences:
            self._open(one)
        for row, pages in plan.new_blocks:
            held = self.num_blocks[row]
            self.block_table[row, held : held + len(pages)] = pages
            self.num_blocks[row] += len(pages)
        self.snapshots = plan.snapshots
        same = plan.spans is self.shape.spans or plan.spans == self.shape.spans
        if not same:
            self.shape = StepShape.of(plan.spans)
        if plan.new_sequences or not same:
            self.epoch += 1
        return self.shape

    def _open(self, one: NewSequence) -> None:
        row, size = one.row, len(one.tokens)
        if not 0 <= row < self.num_rows:
            raise StepFailed(f"the plan opens row {row}, and there are {self.num_rows}")
        if not one.num_computed < size <= self.max_model_len:
            raise StepFailed(
                f"row {row} opens with {size} tokens, {one.num_computed} computed, of {self.max_model_len}"
            )
        self.tokens[row, :size] = token_array(one.tokens)
        self.num_known[row], self.num_computed[row], self.prompt_length[row] = size, one.num_computed, one.prompt_length
        self.block_table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = self.num_drafted[row] = 0
        self.is_new[row] = True
        self.state[row] = self.num_states + one.snapshot if one.snapshot else 0
        self.images.pop(row, None)
        self.rope_shift[row] = 0
        if one.images:
            self.images[row] = one.images
        self.features.open(one)

    def check(self, shape: StepShape) -> None:
        """Raises StepFailed unless every span feeds tokens that its row has."""
        remaining = self.num_known[shape.row] - self.num_computed[shape.row]
        wrong = shape.num_samples != np.maximum(0, shape.num_tokens - remaining + 1)
        wrong |= (shape.num_tokens < 1) | (shape.num_samples > 1 + self.num_drafted[shape.row])
        if wrong.any():
            span = shape.spans[int(np.argmax(wrong))]
            raise StepFailed(
                f"plan and rows disagree: {span} for a row with {remaining[np.argmax(wrong)]} tokens to feed"
            )

    def advance(
        self,
        shape: StepShape,
        sampled: Ints,
        bad: npt.NDArray[np.bool_],
        draft_matches: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Ints, Ints]:
        """Advance each row by what its span fed and sampled. sampled [R], bad [R]: samples without an answer.

        A draft is accepted when it is the token sampled at its position (sample-and-match), so the answer is the same
        with any drafts. draft_matches [R]: whether the draft after a sample was accepted, where the device has compared
        them. Returns how many of its samples each sampling span keeps [Q], those before a bad one, and which sample
        failed it [Q] (-1: none). The drafts of the next step are written after the history.
        """
        self.advance_chunks(shape)
        return self.advance_samples(shape, sampled, bad, draft_matches)

    def advance_chunks(self, shape: StepShape) -> None:
        """The part of `advance` that waits for no sample: prompt chunks."""
        if not len(shape.prompt_spans):
            return
        chunked = shape.row[shape.prompt_spans]
        self.num_computed[chunked] += shape.num_tokens[shape.prompt_spans]
        if self.recurrent:
            self.state[chunked] = self.first_state(chunked)

    def advance_samples(
        self,
        shape: StepShape,
        sampled: Ints,
        bad: npt.NDArray[np.bool_],
        draft_matches: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Ints, Ints]:
        """The rest of `advance`."""
        row, first = shape.sampling_row, shape.first_sample
        position = self.num_known[shape.sample_row] + shape.sample_offset
        if len(first) == len(sampled) and not bad.any():
            # One sample each: there are no drafts.
            num_kept, failed = np.ones_like(first), np.full_like(first, -1)
        else:
            match = (
                ~shape.is_last_sample & (self.tokens[shape.sample_row, position] == sampled)
                if draft_matches is None
                else draft_matches
            )
            num_kept = np.minimum.reduceat(np.where(match, UNLIMITED, shape.sample_offset), first) + 1
            fault = np.minimum.reduceat(np.where(bad, shape.sample_offset, UNLIMITED), first)
            failed = np.where(fault < num_kept, first + fault, -1)
            num_kept = np.minimum(num_kept, fault)
        self.tokens[shape.sample_row, position] = sampled
        num_known = np.minimum(self.num_known[row] + num_kept, self.max_history)
        self.num_known[row] = num_known
        self.num_computed[row] = num_known - 1
        if self.recurrent:
            self.state[row] = self.first_state(row) + np.maximum(num_kept, 1) - 1
        return num_kept, failed

    @property
    def num_states(self) -> int:
        """Slots of all rows' states: each row has one for each sample that a span may take. Snapshots follow them."""
        return self.num_rows * (1 + self.max_drafts) * self.recurrent

    def first_state(self, row: Ints) -> npt.NDArray[np.int64]:
        """The first slot of rows."""
        return (1 + row * (1 + self.max_drafts)).astype(np.int64)

    def state_targets(self, shape: StepShape) -> npt.NDArray[np.int64]:
        """[T] `StateSlots.target`: the state after each sampled position of a span is kept, since any of its drafts may
        be the last that is accepted; of a prompt chunk, that after its end."""
        kept = np.maximum(shape.num_samples, 1)
        which = shape.token_offset - (shape.num_tokens - kept)[shape.token_span]
        return np.where(which < 0, 0, self.first_state(shape.token_row) + which)

    def snapshot_slots(self, shape: StepShape) -> dict[int, int]:
        """The slots that the last plan's snapshots are written to, by token of the step."""
        start = shape.query_start
        return {int(start[s]) + length - 1: self.num_states + slot for s, length, slot in self.snapshots}

    def state_slots(self, shape: StepShape) -> tuple[npt.NDArray[np.int64], ...]:
        """`StateSlots`, by field."""
        snapshot = np.zeros(len(shape.token_span), dtype=np.int64)
        for token, slot in self.snapshot_slots(shape).items():
            snapshot[token] = slot
        return self.state[shape.row], self.state_targets(shape), snapshot

    def set_drafts(self, row: Ints, drafts: npt.NDArray[np.int32], depth: Ints) -> None:
        """Write drafts [Q, k] after the history of rows [Q], of which the first `depth` [Q] count."""
        if drafts.shape[1]:
            at = self.num_known[row][:, None] + np.arange(drafts.shape[1])
            self.tokens[row[:, None], at] = drafts
        self.num_drafted[row] = depth

    def drafts_of(self, row: int) -> list[int]:
        """The drafts that a row feeds next."""
        known = self.num_known[row]
        return [int(t) for t in self.tokens[row, known : known + self.num_drafted[row]]]

    def reset(self) -> None:
        """Forget every row."""
        self.num_blocks[:] = 0
        self.block_table[:] = 0
        self.num_known[:] = 0
        self.num_computed[:] = 0
        self.images.clear()
        self.features.reset()
        self.shape = StepShape.of(())
        self.epoch += 1
