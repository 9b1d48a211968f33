"""Drafts by a model's layers for multi-token prediction (`models/mtp.py`), made on the host's rows or on a device.

The first layer is fed after each step what the step fed, each token replaced by the next, and the step's hidden states.
So its K/V is there for the same positions as the model's, in the same blocks, and the block table, the prefix cache and
preemption hold for both; what rejected drafts wrote is overwritten, as the model's is. The layer after it is fed the
same tokens, each a position further to the left, and the first one's outputs there, of which the one before the span
was kept from the step before; and so on. The first draft is the first layer's output at the last position whose next
token is known. For each further one the next layer is fed the drafts so far, at as many positions up to that one; where
there are no more layers, the last one is fed a draft and its own output.

K/V of position p in layer j depends on tokens up to p + 1 + j: of a cached block's last positions it is that of the
sequence which wrote it. Where another one goes on from there with other tokens, drafts are a little worse, and answers
the same. No layer is fed positions before the first that its row computes, since nothing is known of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState
from quire.model_runner.graphs import GraphKey, padding
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.features import RANDOM, TRUNCATED
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.speculative import DraftContext, Proposer
from quire.model_runner.step_io import build_batch, slice_batch
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import Plan, Span


class NextTokenModel(Protocol):
    """What a runner needs of a layer, see `models.mtp.NextTokenLayer`."""

    def forward(self, batch: RaggedBatch, hidden: Tensor, kv: Sequence[LayerKV]) -> Tensor:
        """[R, hidden] of the batch's output indices; writes K/V."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V], which the caller may change."""


class Places(NamedTuple):
    """Where the tokens of a batch are, by its `query_start`. span [T]; offset [T] in it; fed [T]: no padding."""

    span: Tensor
    offset: Tensor
    fed: Tensor

    @staticmethod
    def of(query_start: Tensor, tokens: int) -> Places:
        """query_start [S+1]: of spans. tokens: T."""
        at = torch.arange(tokens, device=query_start.device, dtype=query_start.dtype)
        span = torch.searchsorted(query_start[1:], at, right=True).clamp(max=len(query_start) - 2)
        return Places(span, at - query_start[span], at < query_start[-1])


def placed(batch: RaggedBatch, places: Places, begin: Tensor, most: Tensor) -> RaggedBatch:
    """A batch at other positions: spans begin at `begin` [S]; positions [T] are at most `most`."""
    position = torch.where(places.fed, begin[places.span] + places.offset, 0).long()
    size = batch.page_size
    block = batch.page_table[places.span, position // size].long()
    slots = torch.where(places.fed, block * size + position % size, 0)
    return replace(batch, positions=torch.minimum(position, most), slots=slots)


def shift_left(batch: RaggedBatch, first: Tensor, by: int) -> tuple[RaggedBatch, Places, Tensor]:
    """The batch with each token `by` positions to the left, without those that come before position `first` [S] of
    their rows; its places, with offsets that count what was left out; and how many that is of each span [S]."""
    start = batch.query_start
    places = Places.of(start, len(batch.tokens))
    count = start[1:] - start[:-1]
    if not by:
        return batch, places, torch.zeros_like(count)
    begin = batch.kv_len - count - by
    skipped = torch.minimum((first - begin).clamp(min=0), count).to(count.dtype)
    query_start = torch.cat((start[:1], (count - skipped).cumsum(0, dtype=start.dtype)))
    inside = Places.of(query_start, len(batch.tokens))
    places = inside._replace(offset=inside.offset + skipped[inside.span])
    source = torch.where(places.fed, start[places.span] + places.offset, 0).long()
    rotated = batch.rope_positions
    shifted = replace(
        batch,
        tokens=torch.where(places.fed, batch.tokens[source], 0),
        query_start=query_start,
        kv_len=torch.where(count > skipped, batch.kv_len - by, 0),
        rope_positions=None if rotated is None else (rotated[:, source] - by).clamp(min=0),
    )
    return placed(shifted, places, begin, batch.positions[source]), places, skipped


class Outputs(NamedTuple):
    """What a layer made of a batch. hidden [T, hidden]; begin [S]: the index there of each span's first token, as if
    none had been left out; last [S, hidden]: of each span's last token."""

    hidden: Tensor
    begin: Tensor
    last: Tensor

    def of(self, spans: Tensor) -> Outputs:
        """Of some spans only."""
        return Outputs(self.hidden, self.begin[spans], self.last[spans])

    def shifted(self, places: Places, kept: Tensor) -> Tensor:
        """[T, hidden] at the token before each of `places`, of the next layer's batch. kept [S, hidden]: at the one
        before each span."""
        at = (self.begin[places.span] + places.offset - 1).clamp(0, len(self.hidden) - 1).long()
        return torch.where((places.offset > 0)[:, None], self.hidden[at], kept[places.span])


class LayerChain:
    """The layers, and what they keep of each row between steps. kv: of each layer. rows: how many there are."""

    def __init__(self, layers: Sequence[NextTokenModel], kv: Sequence[LayerKV], rows: int) -> None:
        self.layers, self.kv, self.rows = layers, kv, rows
        self.kept: Tensor | None = None
        """[layers, rows, hidden] of each layer, its output at the last token that it was fed whose next is known."""

    def follow(self, batch: RaggedBatch, hidden: Tensor, row: Tensor, first: Tensor, last: Tensor) -> None:
        """Feed what a step fed. batch: its tokens are those after the step's. hidden [T, hidden]: the step's. row [S],
        first [S]: of each span, its row, and the first position that this computes. last [S]: the offset of its last
        token whose next is known."""
        if self.kept is None:
            self.kept = hidden.new_zeros(len(self.layers), self.rows, hidden.shape[1])
        kept, before, last_layer = self.kept[:, row], Outputs(hidden, row, hidden), len(self.layers) - 1
        for j, layer in enumerate(self.layers):
            fed, places, skipped = shift_left(batch, first, j)
            at = (fed.query_start[:-1] + last - skipped).clamp(0, len(hidden) - 1).int()
            wanted = fed if j < last_layer else replace(fed, output_indices=at)
            inputs = before.shifted(places, kept[j - 1]) if j else hidden
            made = layer.forward(wanted, inputs, self.kv[j : j + 1])
            before = Outputs(made, fed.query_start[:-1] - skipped, made)
            self.kept[j, row] = made[at.long()] if j < last_layer else made

    def begin(self, row: Tensor) -> Outputs:
        """What the first drafts of rows [S] are made of."""
        assert self.kept is not None
        kept = self.kept[0, row]
        return Outputs(kept, row, kept)

    def width(self, i: int) -> int:
        """Tokens that draft number `i`, from 1, takes: see `draft`."""
        return i if i < len(self.layers) else 1

    def draft(self, i: int, batch: RaggedBatch, row: Tensor, first: Tensor, before: Outputs) -> Outputs:
        """What draft number `i` is made of, from 1. batch: of `width(i)` drafts, at the positions that the model would
        feed them at, had it fed those before; its tokens are those after. before: of the draft before."""
        j = min(i, len(self.layers) - 1)
        fed, places, skipped = shift_left(batch, first, j)
        assert self.kept is not None
        inputs = before.shifted(places, self.kept[j - 1, row]) if i == j else before.last[places.span]
        made = self.layers[j].forward(fed, inputs, self.kv[j : j + 1])
        last = (fed.query_start[1:] - 1).clamp(min=0).long()
        return Outputs(made, fed.query_start[:-1] - skipped, made[last])

    def logits(self, i: int, last: Tensor) -> Tensor:
        """[S, hidden] of `Outputs.last`, for draft number `i` -> [S, V], which the caller may change."""
        return self.layers[min(i, len(self.layers) - 1)].logits(last)


class MTPDrafter:
    """A `Drafter`. kv: of the layers, with as many blocks as the model's. Samples each draft as `ModelDrafter`."""

    reads_hidden = True

    def __init__(
        self,
        layers: Sequence[NextTokenModel],
        kv: Sequence[LayerKV],
        *,
        vocab_size: int,
        num_drafts: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.chain = LayerChain(layers, kv, rows)
        self.num_drafts, self.device = num_drafts, device
        self.sampler = Sampler(vocab_size, scores=False)
        self.first = np.zeros(rows, dtype=np.int32)
        """[rows] the first position that each row has computed itself."""

    def follow(self, rows: RowState, shape: StepShape, before: Ints, hidden: Tensor | None) -> None:
        """Feed what the step fed."""
        assert hidden is not None
        row, start = shape.row, before[shape.row]
        self.first[row] = np.where(rows.is_new[row], start, self.first[row])
        rows.is_new[row] = False
        last = np.maximum(rows.num_computed[row] - start, 1) - 1
        batch, row_of, first = self._batch(rows, shape, before)
        self.chain.follow(batch, hidden, row_of, first, torch.from_numpy(last).to(self.device))

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        """One forward for each draft but the first."""
        most = int(num_drafts.max(initial=0))
        out = np.zeros((len(which), most), dtype=np.int32)
        made, active = self.chain.begin(torch.from_numpy(which).to(self.device)), np.arange(len(which))
        for i in range(most):
            kept = np.flatnonzero(num_drafts[active] > i)
            active, made = active[kept], made.of(torch.from_numpy(kept).to(self.device))
            row, width = which[active], self.chain.width(i) if i else 1
            shape = StepShape.of(tuple(Span(r, width, 1, 1) for r in row.tolist()))
            if i:
                batch, row_of, first = self._batch(rows, shape, np.maximum(rows.num_known - 1 + i - width, 0))
                made = self.chain.draft(i, batch, row_of, first, made)
            shape = replace(shape, sample_offset=np.full(len(row), i))
            out[active, i] = self.sampler(self.chain.logits(i, made.last), rows, shape).tokens
            rows.tokens[row, rows.num_known[row] + i] = out[active, i]
        return out

    def _batch(self, rows: RowState, shape: StepShape, start: Ints) -> tuple[RaggedBatch, Tensor, Tensor]:
        """Spans from position `start` of their rows on, with the tokens after; their rows; and the first positions of
        these."""
        after = start[shape.token_row] + shape.token_offset + 1
        tokens = rows.tokens[shape.token_row, np.minimum(after, rows.tokens.shape[1] - 1)].astype(np.int64)
        batch = replace(
            build_batch(rows, shape, self.device, start),
            tokens=torch.from_numpy(np.maximum(tokens, 0)).to(self.device),
            states=None,
        )
        row, first = (torch.from_numpy(each).to(self.device) for each in (shape.row, self.first[shape.row]))
        return batch, row, first

    def reset(self) -> None:
        """Rows are fed again from their beginning."""


class MTPProposer(Proposer):
    """A `Proposer`, as `MTPDrafter`: torch's operations between those of `DeviceSteps`, so that all of it can be
    captured. tokens: the most that a step feeds."""

    reads_hidden = True

    def __init__(
        self,
        layers: Sequence[NextTokenModel],
        kv: Sequence[LayerKV],
        *,
        num_drafts: int,
        rows: int,
        device: torch.device,
    ) -> None:
        # Padding has a row of its own.
        self.chain = LayerChain(layers, kv, rows + 1)
        self.num_drafts = num_drafts
        self.tokens = torch.zeros(padding(rows), dtype=torch.int32, device=device)
        self.step_hidden: Tensor | None = None
        """[T, hidden] what the model made of the step's tokens."""

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """Nothing to note: the layers are fed whatever is fed."""

    def keep(self, hidden: Tensor) -> None:
        """Copy the step's hidden states to a fixed address."""
        if self.step_hidden is None or len(self.step_hidden) < len(hidden):
            self.step_hidden = hidden.new_zeros(hidden.shape)
        self.step_hidden[: len(hidden)].copy_(hidden)

    def follow(self, shape: StepShape) -> list[GraphKey]:
        """The layers' forwards over the step's batch."""
        return [GraphKey.of(shape)._replace(kind="follow")]

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        """All drafts of all chains."""
        # Few kinds to capture: rows that ask for less are answered the same.
        features |= RANDOM | TRUNCATED if features else 0
        spans = padding(len(wanted_drafts))
        return [GraphKey(spans, spans, int(wanted_drafts.max()), features, "draft")]

    def run(self, key: GraphKey, context: DraftContext) -> None:
        """Feed the step's batch again, or draft: a forward and a sample for each draft."""
        if key.kind == "follow":
            self._follow(key, context)
        else:
            self._draft(key, context)

    def _follow(self, key: GraphKey, context: DraftContext) -> None:
        assert self.step_hidden is not None
        state = context.state
        batch = slice_batch(context.batch, key.tokens, key.spans, key.max_query)
        row, count = state.step.span_row[: key.spans].long(), batch.query_start[1:] - batch.query_start[:-1]
        batch = following(state, row, batch)
        # The step has been verified: the last token whose next is known is the last, or the last draft accepted.
        known = state.columns["known"][row] - 2 - (batch.kv_len - count)
        last = torch.minimum(known, count - 1).clamp(min=0)
        self.chain.follow(batch, self.step_hidden[: key.tokens], row, state.columns["first"][row], last)

    def _draft(self, key: GraphKey, context: DraftContext) -> None:
        state, steps, spans, inputs = context.state, context.steps, key.spans, context.state.draft
        tokens, made = self.tokens[:spans], None
        for i in range(key.max_query):
            if i < 2:
                # Draft 0 needs no forward, and draft 1 is of the position that `advance` counts for it.
                inputs.num_computed.copy_((state.columns["known"] - 1).clamp(min=0))
            steps.prepare_draft(state, spans, spans, i)
            row = inputs.span_row[:spans].long()
            if made is None:
                made = self.chain.begin(row)
            else:
                batch = slice_batch(context.batch, spans, spans, 1, query_start=inputs.query_start)
                steps.prepare_inputs(state, inputs, batch, context.max_model_len)
                batch = rotated(state, row, following(state, row, widened(batch, self.chain.width(i))))
                made = self.chain.draft(i, batch, row, state.columns["first"][row], made)
            each = made.last[inputs.token_span[:spans].long().clamp(0, spans - 1)]
            wanted = torch.empty_like(each)
            steps.advance(state, inputs, spans, each, wanted)
            steps.sample(state, inputs, self.chain.logits(i, wanted), tokens, key.features)
            steps.write_drafts(state, tokens)

    def block_bytes(self) -> int:
        """Bytes of K/V of one block of the layers."""
        return sum(pool[0].nbytes for each in self.chain.kv for pool in each.pools)

    def reset(self) -> None:
        """Rows are fed again from their beginning."""


def following(state: DeviceState, row: Tensor, batch: RaggedBatch) -> RaggedBatch:
    """The batch with its tokens replaced by those after them in their histories. row [S]: of its spans."""
    places = Places.of(batch.query_start, len(batch.positions))
    at = (batch.positions + 1).clamp(max=state.history_width - 1)
    after = state.history[row[places.span], at].clamp(min=0).long()
    return replace(batch, tokens=torch.where(places.fed, after, 0))


def rotated(state: DeviceState, row: Tensor, batch: RaggedBatch) -> RaggedBatch:
    """The batch, whose tokens are rotated as those of its rows, which may be behind images. row [S]: of its spans."""
    if batch.rope_positions is None:
        return batch
    span = Places.of(batch.query_start, len(batch.positions)).span
    return replace(batch, rope_positions=(batch.positions + state.columns["rope_shift"][row[span]])[None])


def widened(batch: RaggedBatch, width: int) -> RaggedBatch:
    """A batch of one token of each span, with the `width` - 1 before it, too; its tokens are not filled in."""
    if width == 1:
        return batch
    start = batch.query_start * width
    places = Places.of(start, len(batch.tokens) * width)
    most = batch.positions[batch.query_start[places.span].clamp(max=len(batch.positions) - 1).long()]
    wide = replace(batch, query_start=start, max_query=width)
    return placed(wide, places, batch.kv_len - width, most)
