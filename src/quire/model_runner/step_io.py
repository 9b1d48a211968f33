"""Rows and a plan's shape become the RaggedBatch that the model is fed. Array arithmetic only: no per-token Python.

What both runners do with logits and samples: prompt log-probabilities, masks by row, and the Result of a step.

Hidden states of a prompt made into one vector, while its chunks go by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.device_state import DeviceState
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.logprobs import score
from quire.model_runner.sampling.sampler import BROKEN, Sampled
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import NO_TOKEN_ALLOWED, Mask, Plan, Result
from quire.types import Pooling, TokenLogprobs


def build_batch(rows: RowState, shape: StepShape, device: torch.device, length: Ints | None = None) -> RaggedBatch:
    """What each span feeds: `(history + drafts)[length : length + n]`, and where its K/V goes.

    A row past its limit may reach past its pages, where the table says SPARE, and past the model's context, where
    positions stay at the last one: nobody reads what it computes. length: by row, where spans begin, if that is not
    what the rows have computed: a draft model is somewhere else.
    """
    size = rows.block_size
    start = (rows.num_computed if length is None else length)[shape.row]
    kv_len = start + shape.num_tokens
    place = start[shape.token_span] + shape.token_offset
    page = rows.block_table[shape.token_row, place // size].astype(np.int64)
    longest = int(kv_len.max())
    host = (
        rows.tokens[shape.token_row, place].astype(np.int64),
        np.minimum(place, rows.max_model_len - 1),
        page * size + place % size,
        shape.query_start,
        kv_len.astype(np.int32),
        rows.block_table[shape.row, : -(-longest // size)],
    )
    tokens, positions, slots, query_start, lengths, table = (torch.from_numpy(a).to(device) for a in host)
    return RaggedBatch(tokens, positions, slots, query_start, lengths, table, size, shape.max_query, longest)


def empty_batch(arena: DeviceState, rows: RowState, tokens: int) -> RaggedBatch:
    """A batch of the most that a step has, at a fixed place on the arena's device, for `DeviceSteps.stage` to fill."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=arena.device)

    return RaggedBatch(
        tokens=zeros(tokens),
        positions=zeros(tokens),
        slots=zeros(tokens),
        query_start=arena.step.query_start,
        kv_len=zeros(arena.spans, dtype=torch.int32),
        page_table=zeros(arena.spans, arena.num_table_columns, dtype=torch.int32),
        page_size=rows.block_size,
        max_query=tokens,
        max_kv=rows.max_model_len,
    )


def slice_batch(whole: RaggedBatch, tokens: int, spans: int, most: int, wanted: Tensor | None) -> RaggedBatch:
    """The first so many tokens and spans of a batch, none of which has more than `most`."""
    return RaggedBatch(
        tokens=whole.tokens[:tokens],
        positions=whole.positions[:tokens],
        slots=whole.slots[:tokens],
        query_start=whole.query_start[: spans + 1],
        kv_len=whole.kv_len[:spans],
        page_table=whole.page_table[:spans],
        page_size=whole.page_size,
        max_query=most,
        max_kv=whole.max_kv,
        output_indices=wanted,
    )


_CHUNK = 1 << 24
"""Logits held at once for prompt log-probabilities, in numbers: 64 MiB."""


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Hidden states [T, hidden] of the tokens fed; writes their K/V."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V], the caller's to change."""


def score_prompt(
    model: Model, rows: RowState, shape: StepShape, s: int, hidden: Tensor, vocab: int
) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt tokens that follow those span `s` feeds, a bounded piece at a time.

    rows: as they were when the step was fed.
    """
    row, n, sampled, logits = shape.spans[s]
    begin = int(rows.num_computed[row]) + n - logits
    end = min(int(rows.num_computed[row]) + n - sampled, int(rows.prompt_length[row]) - 1)
    first = int(shape.query_start[s]) - int(rows.num_computed[row])
    wanted = rows.features.prompt_logprobs[row] or 0
    piece = max(1, _CHUNK // vocab)
    out: list[TokenLogprobs] = []
    for at in range(begin, end, piece):
        upto = min(at + piece, end)
        part = model.logits(hidden[first + at : first + upto]).float().cpu()
        targets = rows.tokens[row, at + 1 : upto + 1].astype(np.intp)
        out += score(part, targets, np.full(upto - at, wanted))
    return out


def step_result(
    plan: Plan,
    shape: StepShape,
    sampled: Sampled,
    keep: Ints,
    failed: Ints,
    scores: Mapping[int, list[TokenLogprobs]],
    rows: RowState,
) -> Result:
    """What a step tells. keep [Q]: how many rows each sampling span keeps; failed [Q]: which failed it, or -1."""
    flat = sampled.tokens.tolist()
    tokens: list[list[int]]
    drafts = [rows.drafts_of(shape.spans[s].row) for s in plan.masked_spans]
    if shape.one_sample_each and not sampled.errors and not sampled.logprobs:
        return Result([[token] for token in flat], drafts, {}, dict(scores))
    tokens = [[] for _ in shape.spans]
    samples, first, kept = shape.sampling_spans.tolist(), shape.first_sample.tolist(), keep.tolist()
    for s, at, count in zip(samples, first, kept, strict=True):
        tokens[s] = flat[at : at + count]
    told = {
        s: [sampled.logprobs[r] for r in range(at, at + count)]
        for s, at, count in zip(samples, first, kept, strict=True)
        if at in sampled.logprobs
    }
    errors = {samples[q]: sampled.errors[int(failed[q])] for q in np.flatnonzero(failed >= 0).tolist()}
    return Result(tokens, drafts, told, dict(scores), errors)


def masks_by_sample(plan: Plan, shape: StepShape, given: Sequence[Sequence[Mask]] | None) -> list[tuple[int, Mask]]:
    """(sampled row, its mask) for every row of a masked span."""
    out: list[tuple[int, Mask]] = []
    for s, masks in zip(plan.masked_spans, given or (), strict=True):
        at = int(shape.first_sample[np.searchsorted(shape.sampling_spans, s)])
        out += [(at + i, each) for i, each in enumerate(masks)]
    return out


def sampled_from_host(host_tokens: npt.NDArray[np.int32] | None) -> Sampled:
    """What the device sampled, and where it could not."""
    tokens = np.zeros(0, np.intp) if host_tokens is None else host_tokens.astype(np.intp)
    errors = {
        r: BROKEN if tokens[r] == -1 else NO_TOKEN_ALLOWED
        for r in np.flatnonzero((tokens == -1) | (tokens == -2)).tolist()
    }
    bad = np.zeros(len(tokens), np.bool_)
    bad[list(errors)] = True
    return Sampled(tokens, bad, errors, {})


class PromptPooler:
    """The rows that are to be pooled, and of those that want a mean the sum of the hidden states fed so far.

    What it is fed and what it gives stay where they are, and nothing here waits: a step may be pooled while the ones
    before it are under way. Where no row pools, none is looked at.
    """

    def __init__(self) -> None:
        self._how: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}

    def apply_plan(self, plan: Plan) -> None:
        """What a plan opens. Whoever wants a mean begins at its first token."""
        for one in plan.new_sequences:
            self._drop(one.row)
            if one.sampling.pooling is not None:
                self._how[one.row] = one.sampling.pooling

    def wants_all(self, shape: StepShape) -> bool:
        """Whether more hidden states are wanted than those that are sampled at."""
        return bool(self._how) and any(self._how.get(span.row) == "mean" for span in shape.spans)

    def feed(self, rows: RowState, shape: StepShape, hidden: Tensor | None, picked: Tensor | None) -> dict[int, Tensor]:
        """Vectors [H] of the prompts that end in this step, by span, float32 and nobody else's.

        hidden [T, H]: of the tokens fed, if `wants_all`. picked [R, H]: of those that are sampled at, if any are.
        """
        made: dict[int, Tensor] = {}
        for s, span in enumerate(shape.spans if self._how else ()):
            how = self._how.get(span.row)
            if how == "mean":
                assert hidden is not None
                start = int(shape.query_start[s])
                part = hidden[start : start + span.num_tokens].float().sum(0)
                self._sums[span.row] = part + self._sums[span.row] if span.row in self._sums else part
            if how is not None and span.num_samples:
                assert picked is not None
                last = int(shape.first_sample[np.searchsorted(shape.sampling_spans, s)]) + span.num_samples - 1
                mean = how == "mean"
                made[s] = (
                    self._sums[span.row] / int(rows.prompt_length[span.row]) if mean else picked[last].float().clone()
                )
                self._drop(span.row)
        return made

    def _drop(self, row: int) -> None:
        self._how.pop(row, None)
        self._sums.pop(row, None)

    def reset(self) -> None:
        """Forget every row."""
        self._how.clear()
        self._sums.clear()


def pooled_bytes(made: Mapping[int, Tensor]) -> dict[int, bytes]:
    """What a Result tells of them: float32, little-endian."""
    return {s: one.cpu().numpy().astype(np.dtype("<f4")).tobytes() for s, one in made.items()}
