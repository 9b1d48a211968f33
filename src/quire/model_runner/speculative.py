"""Where drafts come from. A verify span is the only path: no speculation is a drafter of depth 0.

Drafts by prompt look-up: what followed the last time the text ended like this (Saxena 2023).

Drafts by a small model: a second forward over the same page tables, with K/V tensors of its own.

Drafting on the device: as `drafts`, but for rows that the host knows a step late: it says what, the device does.
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
from quire.model_runner.device_steps import DeviceSteps, follow, lookup
from quire.model_runner.graphs import GraphKey, bucket_seqs, bucket_tokens, padding
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.features import RANDOM, TRUNCATED
from quire.model_runner.sampling.sampler import Sampler
from quire.model_runner.step_io import Model, build_batch
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import Plan, Span


class Drafter(Protocol):
    """Guesses the tokens that follow a row's history.

    depth: the most tokens it drafts. A plan fixes shapes before it knows values, so a drafter with less to say than it
    was asked for fills up with anything. A wrong draft costs time, never an answer.
    """

    num_drafts: int

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        """[Q, largest depth] drafts for store rows `which` [Q], the first `depth` [Q] of each wanted.

        Each row's history is `tokens[row, :known[row]]`. Called after every step that was asked for drafts.
        """

    def reset(self) -> None:
        """The device's rows and K/V are lost."""


class NoDrafts:
    """No speculation."""

    num_drafts = 0

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        return np.zeros((len(which), 0), dtype=np.int32)

    def reset(self) -> None:
        """Nothing is kept."""


class NgramDrafter:
    """Looks for the longest suffix, `longest` down to `shortest` tokens, that a row's history has seen before.

    Of several places the latest counts. Where there is none, the last token is repeated: any token will do.
    """

    def __init__(self, num_drafts: int, *, longest: int = 4, shortest: int = 2) -> None:
        self.num_drafts, self.longest, self.shortest = num_drafts, longest, shortest

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        out = np.zeros((len(which), int(num_drafts.max(initial=0))), dtype=np.int32)
        for q, (row, wanted) in enumerate(zip(which.tolist(), num_drafts.tolist(), strict=True)):
            history = rows.tokens[row, : rows.num_known[row]]
            out[q, :wanted] = follow(history, lookup(history, self.longest, self.shortest), wanted)
        return out

    def reset(self) -> None:
        """Histories are the rows'."""


_PIECE = 512
"""Tokens of one row's history fed at a time while the draft catches up."""


class ModelDrafter:
    """Samples each draft as the target will sample it: same settings, same noise (Gumbel coupling), its own logits.

    kv: one LayerKV a layer of the draft, as many pages as the target's, so that one page table serves both. A row that
    was not drafted for, or whose prefix came from the cache, is caught up with before it is drafted for again: `done`
    counts the positions whose draft K/V is of the right tokens. K/V of pages shared by rows is written again with what
    it was, for their tokens are the same.
    """

    def __init__(
        self, model: Model, kv: Sequence[LayerKV], *, vocab_size: int, num_drafts: int, rows: int, device: torch.device
    ) -> None:
        self.model, self.kv, self.num_drafts, self.device = model, kv, num_drafts, device
        self.done = np.zeros(rows, dtype=np.intp)
        self.sampler = Sampler(vocab_size)
        self.shape = StepShape.of(())

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        most = int(num_drafts.max(initial=0))
        out = np.zeros((len(which), most), dtype=np.int32)
        live = which[num_drafts > 0]
        self.done[live] = np.where(rows.is_new[live], 0, np.minimum(self.done[live], rows.num_known[live] - 1))
        rows.is_new[live] = False
        self._catch_up(rows, live)
        for i in range(most):
            going = np.flatnonzero(num_drafts > i)
            row = which[going]
            upto = rows.num_known[row] + i
            out[going, i] = rows.tokens[row, upto] = self._sample(rows, row, upto - self.done[row], i)
            self.done[row] = upto
        return out

    def _sample(self, rows: RowState, row: Ints, n: Ints, i: int) -> npt.NDArray[np.int32]:
        """Feed each row its next n tokens; draft number i of each."""
        spans = tuple(Span(r, k, 1, 1) for r, k in zip(row.tolist(), n.tolist(), strict=True))
        if spans != self.shape.spans:
            self.shape = StepShape.of(spans)
        shape = replace(self.shape, sample_offset=np.full(len(row), i))
        hidden = self._feed(rows, shape)
        logits = self.model.logits(hidden[torch.from_numpy(shape.sample_indices).to(self.device)])
        return self.sampler(logits, rows, shape).tokens.astype(np.int32)

    def _catch_up(self, rows: RowState, live: Ints) -> None:
        """Feed what is behind by more than a piece, row by row, without logits."""
        for row in live.tolist():
            while rows.num_known[row] - self.done[row] > _PIECE:
                self._feed(rows, StepShape.of((Span(row, _PIECE, 0, 0),)))
                self.done[row] += _PIECE

    def _feed(self, rows: RowState, shape: StepShape) -> torch.Tensor:
        return self.model.forward(build_batch(rows, shape, self.device, self.done), self.kv)

    def reset(self) -> None:
        self.done[:] = 0


class DraftContext(NamedTuple):
    """What a proposer works with. batch: of the largest step; a forward is fed its beginning."""

    state: DeviceState
    steps: DeviceSteps
    batch: RaggedBatch
    max_model_len: int


class Proposer(Protocol):
    """Puts drafts behind histories, there. depth: the most tokens it drafts."""

    num_drafts: int

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """A plan's rows are opened and its spans will sample."""

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        """What to run once a step has sampled. wanted [Q]: drafts for each chain, some above 0. room: tokens a forward
        can feed."""

    def run(self, key: GraphKey, context: DraftContext) -> None:
        """What a key stands for: depends on nothing else but the arena."""

    def block_bytes(self) -> int:
        """Of a page."""

    def reset(self) -> None:
        """The device's rows and K/V are lost."""


class NoProposer:
    """No speculation."""

    num_drafts = 0

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """Nothing is kept."""

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        return []

    def run(self, key: GraphKey, context: DraftContext) -> None:
        """Nothing is asked for."""

    def block_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is kept."""


class NgramProposer(NoProposer):
    """Prompt look-up: see `ngram`."""

    def __init__(self, num_drafts: int, *, longest: int = 4, shortest: int = 2) -> None:
        self.num_drafts, self.longest, self.shortest = num_drafts, longest, shortest

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        return [GraphKey(padding(len(wanted_drafts)), padding(len(wanted_drafts)), self.num_drafts, 0, "draft")]

    def run(self, key: GraphKey, context: DraftContext) -> None:
        context.steps.lookup(context.state, key.spans, key.max_query, self.longest, self.shortest)


class ModelProposer:
    """A draft model over the same page tables: see `drafter.ModelDrafter`.

    Each draft is sampled with the settings and the noise that its place will be sampled with. A row's column `done`
    counts the tokens whose K/V the draft has; the host keeps a bound on how many it lacks, for it fixes shapes. After
    drafting without a break that is two at most: one sampled and, where all drafts were right, the last of them.
    """

    def __init__(
        self, model: Model, kv: Sequence[LayerKV], *, num_drafts: int, rows: int, device: torch.device
    ) -> None:
        """kv: one LayerKV a layer of the draft, as many pages as the target's. rows: places on the device."""
        self.model, self.kv, self.num_drafts = model, kv, num_drafts
        self.num_missing = np.zeros(rows, dtype=np.intp)
        self.tokens = torch.zeros(padding(rows), dtype=torch.int32, device=device)
        self.hidden: Tensor | None = None

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        for one in plan.new_sequences:
            self.num_missing[one.row] = len(one.tokens)
        row = shape.sampling_row
        self.num_missing[row] = np.maximum(self.num_missing[row] + shape.num_samples[shape.sampling_spans], 1)

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        row, spans, out = shape.sampling_row[wanted_drafts > 0], len(wanted_drafts), []
        if (self.num_missing[row] > 2).any():
            missing = int((self.num_missing[row] - 1).sum())
            while missing > 0:
                fed = bucket_tokens(min(missing, max_tokens))
                out.append(GraphKey(fed, bucket_seqs(spans), fed, 0, "follow"))
                missing -= fed
        self.num_missing[row] = 1 - wanted_drafts[wanted_drafts > 0]
        features |= (
            RANDOM | TRUNCATED if features else 0
        )  # few kinds to capture; who asks for less is answered the same
        return [
            *out,
            GraphKey(padding(2 * padding(spans)), padding(spans), int(wanted_drafts.max()), features, "draft"),
        ]

    def run(self, key: GraphKey, context: DraftContext) -> None:
        if key.kind == "follow":
            self._feed(key, context, key.tokens, -1, key.max_query)
            return
        tokens, lane = self.tokens[: key.spans], context.state.draft
        for i in range(key.max_query):
            hidden = self._feed(key, context, key.spans if i else key.tokens, i, 1 if i else 2)
            context.steps.sample(context.state, lane, self.model.logits(hidden), tokens, key.features)
            context.steps.write_drafts(context.state, tokens)

    def _feed(self, key: GraphKey, context: DraftContext, tokens: int, at: int, most: int) -> Tensor:
        """[S, hidden] behind each row's last token fed."""
        state, whole, spans = context.state, context.batch, key.spans
        context.steps.prepare_draft(state, spans, tokens, at)
        batch = replace(
            whole,
            tokens=whole.tokens[:tokens],
            positions=whole.positions[:tokens],
            slots=whole.slots[:tokens],
            query_start=state.draft.query_start[: spans + 1],
            kv_len=whole.kv_len[:spans],
            page_table=whole.page_table[:spans],
            max_query=most,
        )
        context.steps.prepare_inputs(state, state.draft, batch, context.max_model_len)
        hidden = self.model.forward(batch, self.kv)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(len(self.tokens), hidden.shape[1])
        picked = self.hidden[: min(spans, tokens)]
        context.steps.advance(state, state.draft, spans, hidden, picked)
        return picked

    def block_bytes(self) -> int:
        return sum(2 * each.k[0].nbytes for each in self.kv)

    def reset(self) -> None:
        self.num_missing[:] = 0
