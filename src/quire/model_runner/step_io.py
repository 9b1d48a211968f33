"""What both runners do before and after a forward: the batch that is fed, and what becomes the step's Result.

Array arithmetic only: no Python per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.sampler import BROKEN, Sampled, score_tokens
from quire.model_runner.score_table import ScoreTable
from quire.ops.ragged import NO_LONG_SPANS, LayerKV, LongSpans, RaggedBatch, StateSlots
from quire.scheduler.plan import NO_TOKEN_ALLOWED, Mask, Plan, Result
from quire.types import TokenLogprobs

_CHUNK = 1 << 24
"""Logits held at once for prompt log-probabilities, in numbers: 64 MiB."""


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Hidden states [T, hidden] of the tokens fed; writes their K/V."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V], which the caller may change."""


def build_batch(rows: RowState, shape: StepShape, device: torch.device, length: Ints | None = None) -> RaggedBatch:
    """The batch of a step: span s feeds `(history + drafts)[length : length + n]` of its row.

    A row past its limit may reach past its blocks, where the table has the null block, and past the model's context,
    where positions stay at the last one: what it computes is not used. length: where spans begin, by row, if that is
    not what the rows have computed (a draft model is at another position).
    """
    size = rows.block_size
    start = (rows.num_computed if length is None else length)[shape.row]
    kv_len = start + shape.num_tokens
    position = start[shape.token_span] + shape.token_offset
    block = rows.block_table[shape.token_row, position // size].astype(np.int64)
    longest = int(kv_len.max())
    host = (
        rows.tokens[shape.token_row, position].astype(np.int64),
        np.minimum(position, rows.max_model_len - 1),
        block * size + position % size,
        shape.query_start,
        kv_len.astype(np.int32),
        rows.block_table[shape.row, : -(-longest // size)],
    )
    tokens, positions, slots, query_start, lengths, table = (torch.from_numpy(a).to(device) for a in host)
    states = None
    # What drafts keeps K/V alone, and the states and snapshots of rows are those of the step.
    if rows.recurrent and length is None:
        states = StateSlots(*(torch.from_numpy(each).to(device) for each in rows.state_slots(shape)))
    sizes = size, shape.max_query, longest
    return RaggedBatch(tokens, positions, slots, query_start, lengths, table, *sizes, states=states)


def empty_batch(state: DeviceState, rows: RowState, tokens: int, *, shifted: bool = False) -> RaggedBatch:
    """A batch of the most that a step has, at fixed addresses, which `DeviceSteps.prepare_inputs` fills. shifted:
    tokens are rotated by other positions than their own, see `shift_positions`."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=state.device)

    slots = None
    if rows.recurrent:
        slots = StateSlots(zeros(state.spans), state.part("state_target"), state.part("state_snapshot"))
    return RaggedBatch(
        tokens=zeros(tokens),
        positions=zeros(tokens),
        slots=zeros(tokens),
        query_start=state.step.query_start,
        kv_len=zeros(state.spans, dtype=torch.int32),
        page_table=zeros(state.spans, state.num_table_columns, dtype=torch.int32),
        page_size=rows.block_size,
        max_query=tokens,
        max_kv=rows.max_model_len,
        rope_positions=zeros(1, tokens) if shifted else None,
        states=slots,
    )


def shift_positions(state: DeviceState, batch: RaggedBatch) -> None:
    """Fill the positions [1, T] by which a step's tokens are rotated, behind images: see `RowState.rope_shift`."""
    if batch.rope_positions is None:
        return
    inputs = state.step
    # Of padding there may be spans of earlier steps.
    row = inputs.span_row[inputs.token_span[: len(batch.tokens)].long()]
    torch.add(batch.positions, state.columns["rope_shift"][row.long()], out=batch.rope_positions[0])


def slice_batch(
    whole: RaggedBatch,
    tokens: int,
    spans: int,
    max_query: int,
    outputs: Tensor | None = None,
    query_start: Tensor | None = None,
    long_spans: LongSpans = NO_LONG_SPANS,
) -> RaggedBatch:
    """The first `tokens` and `spans` of a batch. outputs: as `output_indices`. query_start: in place of the batch's,
    for a draft model, which has no states."""
    start = whole.query_start if query_start is None else query_start
    states = None if query_start is not None else whole.states
    if states is not None:
        states = StateSlots(states.source[:spans], states.target[:tokens], states.snapshot[:tokens])
    return RaggedBatch(
        tokens=whole.tokens[:tokens],
        positions=whole.positions[:tokens],
        slots=whole.slots[:tokens],
        query_start=start[: spans + 1],
        kv_len=whole.kv_len[:spans],
        page_table=whole.page_table[:spans],
        page_size=whole.page_size,
        max_query=max_query,
        max_kv=whole.max_kv,
        output_indices=outputs,
        rope_positions=None if whole.rope_positions is None else whole.rope_positions[:, :tokens],
        long_spans=long_spans,
        states=states,
    )


class PromptScores(NamedTuple):
    """Scores [N, SCORE_WIDTH] int32 of prompt tokens, on their way to the host. spans: (span, targets, wanted), of
    which each has as many lines as targets: the tokens scored, and how many likeliest tokens are wanted beside each."""

    host: Tensor
    spans: list[tuple[int, npt.NDArray[np.int32], int]]

    def read(self) -> dict[int, Sequence[TokenLogprobs]]:
        """By span, once the scores have arrived."""
        # A caller may keep them: not in pinned memory.
        table, out, begin = self.host.numpy().copy(), dict[int, Sequence[TokenLogprobs]](), 0
        for s, targets, wanted in self.spans:
            out[s] = ScoreTable(table[begin : begin + len(targets)], targets, wanted)
            begin += len(targets)
        return out


def scored_positions(shape: StepShape, s: int, num_computed: int, prompt_length: int) -> tuple[int, int]:
    """The positions, from and to, whose next token's log-probability span `s` gives: of its logits those that are not
    sampled from, within the prompt. num_computed: tokens of its row before the step."""
    _, n, sampled, logits = shape.spans[s]
    return num_computed + n - logits, min(num_computed + n - sampled, prompt_length - 1)


def score_prompt(
    model: Model, rows: RowState, shape: StepShape, s: int, hidden: Tensor, vocab: int
) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt tokens that follow those span `s` feeds, computed in bounded pieces.

    rows: as they were when the step was fed. hidden [T, hidden]: of every token fed.
    """
    row = shape.spans[s].row
    computed = int(rows.num_computed[row])
    begin, end = scored_positions(shape, s, computed, int(rows.prompt_length[row]))
    first = int(shape.query_start[s]) - computed
    num_top = rows.features.prompt_logprobs[row] or 0
    piece = max(1, _CHUNK // vocab)
    out: list[TokenLogprobs] = []
    for at in range(begin, end, piece):
        stop = min(at + piece, end)
        part = model.logits(hidden[first + at : first + stop]).float().cpu()
        targets = rows.tokens[row, at + 1 : stop + 1].astype(np.intp)
        out += score_tokens(part, targets, np.full(stop - at, num_top))
    return out


def step_result(
    plan: Plan,
    shape: StepShape,
    sampled: Sampled,
    keep: Ints,
    failed: Ints,
    scores: Mapping[int, Sequence[TokenLogprobs]],
    rows: RowState,
) -> Result:
    """The Result of a step. keep [Q]: how many samples each sampling span keeps; failed [Q]: which failed it, or -1."""
    flat = sampled.tokens.tolist()
    masked = plan.masked_spans
    drafts = [rows.drafts_of(shape.spans[s].row) for s in masked] if plan.num_drafts else [[]] * len(masked)
    if shape.one_sample_each and not sampled.errors:
        alone = {s: [score] for s, score in sampled.logprobs.items()}
        return Result([[token] for token in flat], drafts, alone, dict(scores))
    tokens: list[list[int]] = [[] for _ in shape.spans]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    samples, first, kept = shape.sampling_spans.tolist(), shape.first_sample.tolist(), keep.tolist()
    for s, at, count in zip(samples, first, kept, strict=True):
        tokens[s] = flat[at : at + count]
        if at in sampled.logprobs:
            logprobs[s] = [sampled.logprobs[r] for r in range(at, at + count)]
    errors = {samples[q]: sampled.errors[int(failed[q])] for q in np.flatnonzero(failed >= 0).tolist()}
    return Result(tokens, drafts, logprobs, dict(scores), errors)


def first_samples(plan: Plan, shape: StepShape) -> list[int]:
    """The first sample of each masked span."""
    if shape.one_sample_each:
        return list(plan.masked_spans)
    at = np.searchsorted(shape.sampling_spans, np.array(plan.masked_spans, dtype=np.intp))
    first: list[int] = shape.first_sample[at].tolist()
    return first


def masks_by_sample(plan: Plan, shape: StepShape, given: Sequence[Sequence[Mask]] | None) -> list[tuple[int, Mask]]:
    """(sample, its mask) for every sample of a masked span."""
    spans = zip(first_samples(plan, shape), given or (), strict=True)
    return [(first + i, mask) for first, masks in spans for i, mask in enumerate(masks)]


def sampled_from_host(host_tokens: npt.NDArray[np.int32] | None) -> Sampled:
    """The tokens that the device sampled, and which samples have none (-1: broken logits, -2: nothing is allowed)."""
    tokens = np.zeros(0, np.intp) if host_tokens is None else host_tokens.astype(np.intp)
    bad = (tokens == -1) | (tokens == -2)
    failed = np.flatnonzero(bad).tolist() if bad.any() else ()
    errors = {r: BROKEN if tokens[r] == -1 else NO_TOKEN_ALLOWED for r in failed}
    return Sampled(tokens, bad, errors, {})
