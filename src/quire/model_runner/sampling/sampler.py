"""The host's sampler: logits rows in, tokens out. A pure function of (seed, choice, position) and the row's logits.

Order, as vLLM's: grammar mask, allowed_token_ids, bad words and min_tokens, logit_bias, penalties; then temperature
and truncation (truncation.py); then Gumbel-max with hashed noise (noise.py). What no row asks for is not in the list of
things to run, so a greedy batch is one argmax. Logits on another device are brought here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.model_runner.row_state import RowState, StepShape
from quire.model_runner.sampling.features import RANDOM, SCORED, TRUNCATED
from quire.model_runner.sampling.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, mask
from quire.model_runner.sampling.logprobs import score
from quire.model_runner.sampling.noise import Draw, Floats, Ids, keys
from quire.model_runner.sampling.truncation import Truncation, truncate
from quire.scheduler.plan import NO_TOKEN_ALLOWED, Mask
from quire.types import TokenLogprobs

BROKEN = "the model produced NaN or infinite logits"


class Sampled(NamedTuple):
    """tokens [R]; bad [R]: rows without an answer, and why, by row; logprobs by row, where asked for."""

    tokens: Ids
    bad: npt.NDArray[np.bool_]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


class SamplingPlan(NamedTuple):
    """What the rows of a batch ask for. The same in every step of steady decode."""

    processors: tuple[tuple[LogitsProcessor, Ids], ...]
    scored: Ids
    random_rows: Ids
    truncated: Ids
    """Places in `hot`."""
    temperature: Floats
    """[H, 1]"""
    streams: npt.NDArray[np.uint32]
    settings: Truncation


class Sampler:
    """Samples rows over a vocabulary of `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self.draw = Draw(vocab_size)
        self.vocab_size = vocab_size
        self._plan: SamplingPlan | None = None
        self._plan_for: tuple[int, bytes] = (-1, b"")
        """Epoch and rows that the recipe is for: a drafter samples for some of the rows only."""

    def __call__(
        self, logits: Tensor, rows: RowState, shape: StepShape, masks: Sequence[tuple[int, Mask]] = ()
    ) -> Sampled:
        """logits [R, V] of the shape's sampled rows, used up; masks: (row, allowed) of rows under a grammar."""
        x = np.ascontiguousarray(logits.float().cpu().numpy())
        of = rows.epoch, shape.sample_row.tobytes()
        if self._plan_for != of or self._plan is None:
            self._plan, self._plan_for = sampling_plan(rows, shape, self.vocab_size), of
        edits, scored, hot = self._plan[:3]
        raw = torch.from_numpy(x[scored]) if len(scored) else None
        tokens, peak = _best(x)
        bad = ~np.isfinite(peak)
        errors = dict.fromkeys(np.flatnonzero(bad).tolist(), BROKEN)
        if errors:
            x[bad] = 0.0  # whatever is drawn there is not told; others need no care for it
        if masks or edits:
            mask(x, masks)
            for edit, which in edits:
                edit(x, rows, shape, which)
            tokens, peak = _best(x)
            stuck = np.isneginf(peak) & ~bad
            errors |= dict.fromkeys(np.flatnonzero(stuck).tolist(), NO_TOKEN_ALLOWED)
            bad |= stuck
            x[stuck] = 0.0
        if len(hot):
            tokens[hot] = self._random(x, rows, shape, self._plan)
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            wanted = rows.features.logprobs[shape.sample_row[scored]]
            logprobs = dict(zip(scored.tolist(), score(raw, tokens[scored], wanted), strict=True))
        return Sampled(tokens, bad, errors, logprobs)

    def _random(self, x: Floats, rows: RowState, shape: StepShape, recipe: SamplingPlan) -> Ids:
        hot, cut = recipe.random_rows, recipe.truncated
        drawn = x if len(hot) == len(x) else x[hot]
        if len(cut):
            part = drawn if len(cut) == len(hot) else drawn[cut]
            truncate(part, recipe.settings)
            if part is not drawn:
                drawn[cut] = part
        position = rows.num_known[shape.sample_row[hot]] + shape.sample_offset[hot]
        return self.draw(drawn, recipe.temperature, keys(recipe.streams, position))


def sampling_plan(rows: RowState, shape: StepShape, vocab_size: int) -> SamplingPlan:
    """What the sampled rows of a shape ask for."""
    traits = rows.features
    bits = traits.bits[shape.sample_row]
    hot = np.flatnonzero(bits & RANDOM)
    cut = np.flatnonzero(bits[hot] & TRUNCATED)
    hot_row = shape.sample_row[hot]
    cut_row = hot_row[cut]
    each = ((edit, np.flatnonzero(bits & bit)) for bit, edit in LOGITS_PROCESSORS)
    return SamplingPlan(
        processors=tuple((edit, which) for edit, which in each if len(which)),
        scored=np.flatnonzero(bits & SCORED),
        random_rows=hot,
        truncated=cut,
        temperature=traits.columns["temperature"][hot_row][:, None],
        streams=traits.stream[hot_row],
        settings=Truncation.of(traits.columns, cut_row, vocab_size),
    )


def _best(x: Floats) -> tuple[Ids, Floats]:
    """The greatest logit of each row and where: NaN wins, and among equals the first."""
    best = x.argmax(1)
    return best, x[np.arange(len(best)), best]
