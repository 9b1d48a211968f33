"""The small steps around a forward by Triton kernels, sampling included: see `DeviceSteps` for what each one does."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState, StepInputs
from quire.model_runner.device_steps import DROPPED
from quire.model_runner.sampling.features import (
    ALLOWED,
    BANNED,
    BIASED,
    MASKED,
    PENALISED,
    RANDOM,
    SCORED,
    TRUNCATED,
)
from quire.ops.operands import VocabularyPart
from quire.ops.ragged import RaggedBatch
from quire.ops.triton import step
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.logprobs import score
from quire.ops.triton.sampler import RequestedFeatures, RowHistories, SamplingTensors, sample


class Views(NamedTuple):
    """A `DeviceState` as the kernels take it."""

    state: DeviceState
    step: step.DeviceRows
    draft: step.DeviceRows
    settings: SamplingTensors
    histories: RowHistories


class TritonSteps:
    """`DeviceSteps` by kernels."""

    def __init__(self, device: torch.device, *, dependent: bool = True) -> None:
        """dependent: use programmatic dependent launch where the GPU has it."""
        self.card = DeviceInfo.of(device, dependent)
        self.views: Views | None = None
        self.tally = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def scatter(self, data: Tensor, places: Tensor, values: Tensor) -> None:
        """data[places] = values."""
        step.scatter(data, places, values)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """out = source."""
        step.copy(out, source)

    def prepare_inputs(self, state: DeviceState, inputs: StepInputs, batch: RaggedBatch, longest: int) -> None:
        """Fill the batch."""
        step.prepare_inputs(self._rows(state, inputs), batch, longest, self.card)

    def advance(self, state: DeviceState, inputs: StepInputs, spans: int, hidden: Tensor, out: Tensor) -> None:
        """Advance rows and select hidden states."""
        step.advance(self._rows(state, inputs), spans, hidden, out, self.card)

    def sample(
        self,
        state: DeviceState,
        inputs: StepInputs,
        logits: Tensor,
        tokens: Tensor,
        features: int,
        scores: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        """Sample without a sort, see `ops.triton.sampler`."""
        rows, views = self._rows(state, inputs), self._views(state)
        count = len(tokens)
        if features & PENALISED and not len(self.tally):
            self.tally = self.tally.new_zeros(state.max_samples, logits.shape[1])
        sample(
            logits,
            rows.sample_row[:count],
            rows.sample_position[:count],
            views.histories,
            views.settings,
            self.card,
            requested_features(features),
            tally=self.tally,
            out=tokens,
            scores=scores,
            part=part,
        )

    def score(self, logits: Tensor, tokens: Tensor, wanted: Tensor, scores: Tensor) -> None:
        """Score without a sort, see `ops.triton.logprobs`."""
        rows = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        score(logits, tokens, rows, wanted, scores, self.card)

    def verify(self, state: DeviceState, tokens: Tensor) -> None:
        """Append tokens up to the first rejected draft."""
        step.verify(self._views(state).step, tokens, DROPPED, self.card)

    def lookup(self, state: DeviceState, chains: int, depth: int, longest: int, shortest: int) -> None:
        """Drafts from each row's own history."""
        step.lookup(self._views(state).step, chains, depth, longest, shortest, self.card)

    def prepare_draft(self, state: DeviceState, chains: int, tokens: int, at: int) -> None:
        """Fill `state.draft`."""
        views = self._views(state)
        step.prepare_draft(views.step, views.draft, chains, tokens, at, self.card)

    def write_drafts(self, state: DeviceState, tokens: Tensor) -> None:
        """Write drafts to histories."""
        step.write_drafts(self._views(state).draft, tokens, self.card)

    def _rows(self, state: DeviceState, inputs: StepInputs) -> step.DeviceRows:
        views = self._views(state)
        return views.draft if inputs is state.draft else views.step

    def _views(self, state: DeviceState) -> Views:
        """Made once for a state, whose memory stays where it is."""
        if self.views is None or self.views.state is not state:
            settings = SamplingTensors.of(state.columns)
            histories = RowHistories(
                state.history, state.columns["prompt"], state.masks, state.mask_words, state.mask_index
            )
            self.views = Views(state, rows_of(state, state.step), rows_of(state, state.draft), settings, histories)
        return self.views


class ForcedSteps(TritonSteps):
    """For random weights, whose drafts are never right: accepts each draft with probability `rate`, by its position."""

    def __init__(self, device: torch.device, rate: float, *, dependent: bool = True) -> None:
        super().__init__(device, dependent=dependent)
        self.rate = rate

    def verify(self, state: DeviceState, tokens: Tensor) -> None:
        """Replace tokens by the drafts that count as right, then verify."""
        step.force(self._views(state).step, tokens, self.rate, self.card)
        super().verify(state, tokens)


def requested_features(features: int) -> RequestedFeatures:
    """What the bits of `sampling.features` ask of the kernels."""
    return RequestedFeatures(
        random=bool(features & RANDOM),
        truncated=bool(features & TRUNCATED),
        penalised=bool(features & PENALISED),
        masked=bool(features & MASKED),
        allowed=bool(features & ALLOWED),
        listed=bool(features & (BANNED | BIASED)),
        scored=bool(features & SCORED),
    )


def rows_of(state: DeviceState, inputs: StepInputs) -> step.DeviceRows:
    """Rows and the inputs of a step or of drafting, as the kernels take them."""
    return step.DeviceRows(
        **inputs._asdict(),
        num_known=state.columns["known"],
        block_table=state.block_table,
        history=state.history,
        chain=state.chain,
        wanted_drafts=state.wanted_drafts,
        state=state.columns["state"],
        max_history=state.max_history,
        drafts=state.max_drafts,
    )
