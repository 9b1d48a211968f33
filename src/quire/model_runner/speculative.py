"""Drafts for speculative decoding, made on the host (`Drafter`) or on the device (`Proposer`).

Without speculation there is no drafter; verification spans are the same path in either case. N-gram drafts are what
followed the last time that the text ended like this (prompt look-up, Saxena 2023). A draft model is a second forward
over the same block tables, with K/V tensors of its own. On a device, the host learns a row's tokens one step late: it
only says what is drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from quire.model_runner.step_io import Model, build_batch, slice_batch
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import Plan, Span


class Drafter(Protocol):
    """Drafts on the host. num_drafts: the most tokens that it drafts.

    A plan fixes shapes before it knows values, so a drafter with fewer drafts than it was asked for adds any tokens. A
    wrong draft costs time and never changes an answer.
    """

    num_drafts: int
    reads_hidden: bool
    """Whether `follow` reads hidden states."""

    def follow(self, rows: RowState, shape: StepShape, before: Ints, hidden: torch.Tensor | None) -> None:
        """A step has sampled, and its rows have advanced. Called after every step, before `propose`.

        before [rows]: what rows had computed before it. hidden [T, hidden]: of every token that it fed, for a drafter
        with `reads_hidden`; None for others.
        """

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        """[Q, most of num_drafts] drafts for rows `which` [Q], the first `num_drafts` [Q] of each wanted.

        Each row's history is `rows.tokens[row, :rows.num_known[row]]`. Called after every step that wants drafts.
        """

    def reset(self) -> None:
        """Rows and K/V are lost."""


class NgramDrafter:
    """Looks for the longest suffix, `longest` down to `shortest` tokens, that a row's history has seen before.

    Of several places the latest counts. Where there is none, the last token is repeated: any token will do.
    """

    reads_hidden = False

    def __init__(self, num_drafts: int, *, longest: int = 4, shortest: int = 2) -> None:
        self.num_drafts = num_drafts
        self.longest, self.shortest = longest, shortest

    def follow(self, rows: RowState, shape: StepShape, before: Ints, hidden: torch.Tensor | None) -> None:
        """Histories are all that is read."""

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        """Drafts from each row's own history."""
        out = np.zeros((len(which), int(num_drafts.max(initial=0))), dtype=np.int32)
        for q, (row, wanted) in enumerate(zip(which.tolist(), num_drafts.tolist(), strict=True)):
            history = rows.tokens[row, : rows.num_known[row]]
            out[q, :wanted] = follow(history, lookup(history, self.longest, self.shortest), wanted)
        return out

    def reset(self) -> None:
        """Nothing is kept beside the rows."""


_PIECE = 512
"""Tokens of one row's history fed at a time while the draft model catches up."""


class ModelDrafter:
    """Samples each draft as the target will sample it: same settings, same noise (Gumbel coupling), its own logits.

    kv: one LayerKV per layer of the draft model, with as many blocks as the target's, so that one block table serves
    both. `done` counts the positions of each row whose draft K/V is of the right tokens: a row that was not drafted
    for, or whose prefix came from the cache, is fed what it lacks before it is drafted for again. K/V of blocks that
    rows share is overwritten with the same values.
    """

    reads_hidden = False

    def __init__(
        self, model: Model, kv: Sequence[LayerKV], *, vocab_size: int, num_drafts: int, rows: int, device: torch.device
    ) -> None:
        self.model, self.kv = model, kv
        self.num_drafts, self.device = num_drafts, device
        self.done = np.zeros(rows, dtype=np.intp)
        self.sampler = Sampler(vocab_size, scores=False)
        self.shape = StepShape.of(())

    def follow(self, rows: RowState, shape: StepShape, before: Ints, hidden: torch.Tensor | None) -> None:
        """What rows lack is fed once they are drafted for."""

    def propose(self, rows: RowState, which: Ints, num_drafts: Ints) -> npt.NDArray[np.int32]:
        """Drafts from the draft model, one forward each for all rows that want it."""
        most = int(num_drafts.max(initial=0))
        out = np.zeros((len(which), most), dtype=np.int32)
        live = which[num_drafts > 0]
        self.done[live] = np.where(rows.is_new[live], 0, np.minimum(self.done[live], rows.num_known[live] - 1))
        rows.is_new[live] = False
        self._catch_up(rows, live)
        for i in range(most):
            active = np.flatnonzero(num_drafts > i)
            row = which[active]
            position = rows.num_known[row] + i
            out[active, i] = rows.tokens[row, position] = self._sample(rows, row, position - self.done[row], i)
            self.done[row] = position
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
        """Feed rows that lack more than one piece, row by row, without logits."""
        for row in live.tolist():
            while rows.num_known[row] - self.done[row] > _PIECE:
                self._feed(rows, StepShape.of((Span(row, _PIECE, 0, 0),)))
                self.done[row] += _PIECE

    def _feed(self, rows: RowState, shape: StepShape) -> torch.Tensor:
        return self.model.forward(build_batch(rows, shape, self.device, self.done), self.kv)

    def reset(self) -> None:
        """The K/V of no position is right."""
        self.done[:] = 0


class DraftContext(NamedTuple):
    """What a proposer works with. batch: of the largest step; a forward is fed its beginning."""

    state: DeviceState
    steps: DeviceSteps
    batch: RaggedBatch
    max_model_len: int


class Proposer(ABC):
    """Drafts on the device, behind the histories there. num_drafts: the most tokens that it drafts."""

    num_drafts = 0
    reads_hidden = False

    @abstractmethod
    def keep(self, hidden: Tensor) -> None:
        """hidden [T, hidden]: of every token that the step feeds, for a proposer with `reads_hidden`."""

    def follow(self, shape: StepShape) -> list[GraphKey]:
        """What is run after every step once it has sampled, before what is drafted."""
        return []

    @abstractmethod
    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """Note that a plan's rows are opened and that its spans will sample."""

    @abstractmethod
    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        """What is run once a step has sampled. wanted_drafts [Q]: drafts for each chain, some above 0. max_tokens:
        tokens that a forward can feed."""

    @abstractmethod
    def run(self, key: GraphKey, context: DraftContext) -> None:
        """Do the work of a key, which depends on the key and on the device's state alone."""

    def block_bytes(self) -> int:
        """Bytes of K/V that one block takes beside the target's."""
        return 0

    @abstractmethod
    def reset(self) -> None:
        """Rows and K/V are lost."""


class NgramProposer(Proposer):
    """Prompt look-up, as `NgramDrafter`."""

    def __init__(self, num_drafts: int, *, longest: int = 4, shortest: int = 2) -> None:
        self.num_drafts = num_drafts
        self.longest, self.shortest = longest, shortest

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        """One look-up for all rows, of as many drafts as there can be."""
        return [GraphKey(padding(len(wanted_drafts)), padding(len(wanted_drafts)), self.num_drafts, 0, "draft")]

    def run(self, key: GraphKey, context: DraftContext) -> None:
        """Look up drafts for the key's chains."""
        context.steps.lookup(context.state, key.spans, key.max_query, self.longest, self.shortest)

    def keep(self, hidden: Tensor) -> None:
        """Histories are all that is read."""

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """Nothing to note: histories are on the device."""

    def reset(self) -> None:
        """Nothing is kept beside the rows."""


class ModelProposer(Proposer):
    """A draft model over the same block tables, as `ModelDrafter`.

    Each draft is sampled with the settings and the noise with which its position will be sampled. A row's column `done`
    counts the tokens whose K/V the draft model has. The host keeps an upper bound of how many it lacks, since that
    fixes shapes: after drafting without a break two at most, one sampled and, where all drafts were right, the last of
    them.
    """

    def __init__(
        self, model: Model, kv: Sequence[LayerKV], *, num_drafts: int, rows: int, device: torch.device
    ) -> None:
        """kv: one LayerKV per layer of the draft model, with as many blocks as the target's. rows: on the device."""
        self.model, self.kv = model, kv
        self.num_drafts = num_drafts
        self.num_missing = np.zeros(rows, dtype=np.intp)
        self.tokens = torch.zeros(padding(rows), dtype=torch.int32, device=device)
        self.hidden: Tensor | None = None

    def keep(self, hidden: Tensor) -> None:
        """Histories are all that is read."""

    def admit(self, plan: Plan, shape: StepShape, rows: RowState) -> None:
        """Count what the draft model has not been fed: a new row's history, and samples."""
        for one in plan.new_sequences:
            self.num_missing[one.row] = len(one.tokens)
        row = shape.sampling_row
        self.num_missing[row] = np.maximum(self.num_missing[row] + shape.num_samples[shape.sampling_spans], 1)

    def keys(self, shape: StepShape, wanted_drafts: Ints, features: int, max_tokens: int) -> list[GraphKey]:
        """Forwards that catch up, if a row lacks more than two tokens, then drafting."""
        row, spans = shape.sampling_row[wanted_drafts > 0], len(wanted_drafts)
        out: list[GraphKey] = []
        if (self.num_missing[row] > 2).any():
            missing = int((self.num_missing[row] - 1).sum())
            while missing > 0:
                fed = bucket_tokens(min(missing, max_tokens))
                out.append(GraphKey(fed, bucket_seqs(spans), fed, 0, "follow"))
                missing -= fed
        self.num_missing[row] = 1 - wanted_drafts[wanted_drafts > 0]
        # Few kinds to capture: rows that ask for less are answered the same.
        features |= RANDOM | TRUNCATED if features else 0
        tokens = padding(2 * padding(spans))
        out.append(GraphKey(tokens, padding(spans), int(wanted_drafts.max()), features, "draft"))
        return out

    def run(self, key: GraphKey, context: DraftContext) -> None:
        """Feed what is missing, or draft: a forward and a sample for each draft."""
        if key.kind == "follow":
            self._feed(key, context, key.tokens, -1, key.max_query)
            return
        tokens, inputs = self.tokens[: key.spans], context.state.draft
        for i in range(key.max_query):
            hidden = self._feed(key, context, key.spans if i else key.tokens, i, 1 if i else 2)
            context.steps.sample(context.state, inputs, self.model.logits(hidden), tokens, key.features)
            context.steps.write_drafts(context.state, tokens)

    def _feed(self, key: GraphKey, context: DraftContext, tokens: int, at: int, max_query: int) -> Tensor:
        """[S, hidden] after each row's last token fed."""
        state, spans = context.state, key.spans
        context.steps.prepare_draft(state, spans, tokens, at)
        batch = slice_batch(context.batch, tokens, spans, max_query, query_start=state.draft.query_start)
        context.steps.prepare_inputs(state, state.draft, batch, context.max_model_len)
        hidden = self.model.forward(batch, self.kv)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(len(self.tokens), hidden.shape[1])
        selected = self.hidden[: min(spans, tokens)]
        context.steps.advance(state, state.draft, spans, hidden, selected)
        return selected

    def block_bytes(self) -> int:
        """Bytes of K/V of one block of the draft model."""
        return sum(pool[0].nbytes for each in self.kv for pool in each.pools)

    def reset(self) -> None:
        """Forget what is missing: there are no rows."""
        self.num_missing[:] = 0
