"""Drafts by a model's layer for multi-token prediction (`models/mtp.py`), made on the host's rows or on a device.

The layer is fed after each step what the step fed, each token replaced by the next, and the step's hidden states. So
its K/V is there for the same positions as the model's, in the same blocks, and the block table, the prefix cache and
preemption hold for both; what rejected drafts wrote is overwritten, as the model's is. The first draft comes from the
last position whose next token is known; for each further one the layer is fed the draft and its own output.

K/V of position p depends on the token at p + 1: of a cached block's last position it is that of the sequence which
wrote it. Where another one goes on from there with another token, drafts are a little worse, and answers the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState, StepInputs
from quire.model_runner.graphs import GraphKey, padding
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.features import RANDOM, TRUNCATED
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.speculative import DraftContext, Proposer
from quire.model_runner.step_io import build_batch, slice_batch
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import Plan, Span


class NextTokenModel(Protocol):
    """What a runner needs of the layer, see `models.mtp.NextTokenLayer`."""

    def forward(self, batch: RaggedBatch, hidden: Tensor, kv: Sequence[LayerKV]) -> Tensor:
        """[R, hidden] of the batch's output indices; writes K/V."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V], which the caller may change."""


class MTPDrafter:
    """A `Drafter`. kv: of the layer, with as many blocks as the model's. Samples each draft as `ModelDrafter`."""

    reads_hidden = True

    def __init__(
        self,
        layer: NextTokenModel,
        kv: Sequence[LayerKV],
        *,
        vocab_size: int,
        num_drafts: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.layer, self.kv, self.num_rows = layer, kv, rows
        self.num_drafts, self.device = num_drafts, device
        self.sampler = Sampler(vocab_size, scores=False)
        self.hidden: Tensor | None = None
        """[rows, hidden] what each row's next draft reads."""

    def follow(self, rows: RowState, shape: StepShape, before: Ints, hidden: Tensor | None) -> None:
        """Feed what the step fed; keep the output at the last position whose next token is known."""
        assert hidden is not None
        start = before[shape.row]
        last = shape.query_start[:-1] + np.maximum(rows.num_computed[shape.row] - start, 1) - 1
        self._feed(rows, shape, before, hidden, last)

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        """One forward for each draft but the first."""
        most = int(num_drafts.max(initial=0))
        out = np.zeros((len(which), most), dtype=np.int32)
        for i in range(most):
            active = np.flatnonzero(num_drafts > i)
            row = which[active]
            shape = StepShape.of(tuple(Span(r, 1, 1, 1) for r in row.tolist()))
            if i:
                before = np.maximum(rows.num_known - 2 + i, 0)
                self._feed(rows, shape, before, self._hidden_of(row), shape.query_start[:-1])
            logits = self.layer.logits(self._hidden_of(row))
            shape = replace(shape, sample_offset=np.full(len(row), i))
            out[active, i] = self.sampler(logits, rows, shape).tokens
            rows.tokens[row, rows.num_known[row] + i] = out[active, i]
        return out

    def _feed(
        self, rows: RowState, shape: StepShape, before: Ints, hidden: Tensor, last: npt.NDArray[np.int32]
    ) -> None:
        """Feed each span from position `before` of its row on; the output at token `last` [S] becomes the row's."""
        following = before[shape.token_row] + shape.token_offset + 1
        tokens = rows.tokens[shape.token_row, np.minimum(following, rows.tokens.shape[1] - 1)].astype(np.int64)
        batch = replace(
            build_batch(rows, shape, self.device, before),
            tokens=torch.from_numpy(np.maximum(tokens, 0)).to(self.device),
            output_indices=torch.from_numpy(last.astype(np.int32)).to(self.device),
            states=None,
        )
        made = self.layer.forward(batch, hidden, self.kv)
        if self.hidden is None:
            self.hidden = made.new_zeros(self.num_rows, made.shape[1])
        self.hidden[torch.from_numpy(shape.row).to(self.device)] = made

    def _hidden_of(self, row: Ints) -> Tensor:
        assert self.hidden is not None
        return self.hidden[torch.from_numpy(row).to(self.device)]

    def reset(self) -> None:
        """Rows are fed again from their beginning."""


class MTPProposer(Proposer):
    """A `Proposer`, as `MTPDrafter`: torch's operations between those of `DeviceSteps`, so that all of it can be
    captured. tokens: the most that a step feeds."""

    reads_hidden = True

    def __init__(
        self,
        layer: NextTokenModel,
        kv: Sequence[LayerKV],
        *,
        num_drafts: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.layer, self.kv = layer, kv
        self.num_drafts = num_drafts
        self.tokens = torch.zeros(padding(rows), dtype=torch.int32, device=device)
        self.step_hidden: Tensor | None = None
        """[T, hidden] what the model made of the step's tokens."""
        self.hidden: Tensor | None = None
        """[S, hidden] what the next draft of each chain reads."""

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """Nothing to note: the layer is fed whatever is fed."""

    def keep(self, hidden: Tensor) -> None:
        """Copy the step's hidden states to a fixed address."""
        if self.step_hidden is None or len(self.step_hidden) < len(hidden):
            self.step_hidden = hidden.new_zeros(hidden.shape)
        self.step_hidden[: len(hidden)].copy_(hidden)

    def follow(self, shape: StepShape) -> list[GraphKey]:
        """The layer's forward over the step's batch."""
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
        following(state, state.step, batch)
        outputs = last_known(state, key.spans).clamp(max=key.tokens - 1)
        made = self.layer.forward(replace(batch, output_indices=outputs), self.step_hidden[: key.tokens], self.kv)
        if self.hidden is None:
            self.hidden = made.new_zeros(state.spans, made.shape[1])
        self.hidden[: key.spans].copy_(made)

    def _draft(self, key: GraphKey, context: DraftContext) -> None:
        assert self.hidden is not None
        state, steps, spans, inputs = context.state, context.steps, key.spans, context.state.draft
        tokens, hidden = self.tokens[:spans], self.hidden[:spans]
        for i in range(key.max_query):
            if i < 2:
                # Draft 0 needs no forward, and draft 1 is of the position that `advance` counts for it.
                inputs.num_computed.copy_((state.columns["known"] - 1).clamp(min=0))
            steps.prepare_draft(state, spans, spans, i)
            made = hidden[inputs.token_span[:spans].long().clamp(0, spans - 1)]
            if i:
                batch = slice_batch(context.batch, spans, spans, 1, query_start=inputs.query_start)
                steps.prepare_inputs(state, inputs, batch, context.max_model_len)
                following(state, inputs, batch)
                made = self.layer.forward(batch, made, self.kv)
            steps.advance(state, inputs, spans, made, hidden)
            steps.sample(state, inputs, self.layer.logits(hidden), tokens, key.features)
            steps.write_drafts(state, tokens)

    def block_bytes(self) -> int:
        """Bytes of K/V of one block of the layer."""
        return sum(each.k[0].nbytes + each.v[0].nbytes for each in self.kv)

    def reset(self) -> None:
        """Rows are fed again from their beginning."""


def following(state: DeviceState, inputs: StepInputs, batch: RaggedBatch) -> None:
    """Replace the tokens of a batch, which `prepare_inputs` has filled, by those after them in their histories."""
    count = len(batch.tokens)
    fed = torch.arange(count, device=state.device) < inputs.counts[0]
    row = inputs.span_row[torch.where(fed, inputs.token_span[:count], 0).long()].long()
    at = (batch.positions + 1).clamp(max=state.history_width - 1)
    batch.tokens.copy_(torch.where(fed, state.history[row, at], 0).clamp(min=0))


def last_known(state: DeviceState, chains: int) -> Tensor:
    """[chains] int32: of each chain's tokens in the step, which has been verified, the last whose next is known."""
    step = state.step
    first = state.chain[:chains].clamp(0, len(step.sample_row) - 1).long()
    kept = state.columns["known"][step.sample_row[first].long()] - step.sample_position[first]
    exists = torch.arange(chains, device=state.device) < step.counts[3]
    return torch.where(exists, step.sample_indices[first] + (kept - 1).clamp(min=0), 0).int()
