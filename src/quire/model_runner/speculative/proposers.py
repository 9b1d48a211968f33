"""Drafting on the device: as `drafts`, but for rows that the host knows a step late: it says what, the device does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState
from quire.model_runner.device_steps import DeviceSteps
from quire.model_runner.graphs import GraphKey, bucket_seqs, bucket_tokens, padding
from quire.model_runner.results import Model
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.features import RANDOM, TRUNCATED
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import Plan


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
