"""What both runners do with logits and samples: prompt log-probabilities, masks by row, and the Result of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.logprobs import score
from quire.model_runner.sampling.sampler import BROKEN, Sampled
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.scheduler.plan import NO_TOKEN_ALLOWED, Mask, Plan, Result
from quire.types import TokenLogprobs

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


def result(
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
