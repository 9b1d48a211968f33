"""The host's sampler: logits rows in, tokens out. A pure function of (seed, choice, position) and the row's logits.

Order, as vLLM's: grammar mask, allowed_token_ids, bad words and min_tokens, logit_bias, penalties; then temperature,
min_p, top_k, top_p; then Gumbel-max with hashed noise (noise.py). What no row asks for is not in the list of things to
run, so a greedy batch is one argmax. Logits on another device are brought here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.core.plan import STUCK, Mask
from quire.runner.edits import EDITS, Edit, mask
from quire.runner.logprobs import score
from quire.runner.noise import Draw, Floats, Ids, keys
from quire.runner.rows import Rows, Shape
from quire.runner.traits import CUT, HOT, SCORED
from quire.runner.truncate import Cut, truncate
from quire.values import TokenLogprobs

BROKEN = "the model produced NaN or infinite logits"


class Sampled(NamedTuple):
    """tokens [R]; bad [R]: rows without an answer, and why, by row; logprobs by row, where asked for."""

    tokens: Ids
    bad: npt.NDArray[np.bool_]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


class Recipe(NamedTuple):
    """What the rows of a batch ask for. The same in every step of steady decode."""

    edits: tuple[tuple[Edit, Ids], ...]
    scored: Ids
    hot: Ids
    cut: Ids
    """Places in `hot`."""
    temperature: Floats
    """[H, 1]"""
    streams: npt.NDArray[np.uint32]
    settings: Cut


class Sampler:
    """Samples rows over a vocabulary of `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self.draw = Draw(vocab_size)
        self.vocab_size = vocab_size
        self._recipe: Recipe | None = None
        self._of: tuple[int, bytes] = (-1, b"")
        """Epoch and rows that the recipe is for: a drafter samples for some of the rows only."""

    def __call__(self, logits: Tensor, rows: Rows, shape: Shape, masks: Sequence[tuple[int, Mask]] = ()) -> Sampled:
        """logits [R, V] of the shape's sampled rows, used up; masks: (row, allowed) of rows under a grammar."""
        x = np.ascontiguousarray(logits.float().cpu().numpy())
        of = rows.epoch, shape.row_row.tobytes()
        if self._of != of or self._recipe is None:
            self._recipe, self._of = recipe(rows, shape, self.vocab_size), of
        edits, scored, hot = self._recipe[:3]
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
            errors |= dict.fromkeys(np.flatnonzero(stuck).tolist(), STUCK)
            bad |= stuck
            x[stuck] = 0.0
        if len(hot):
            tokens[hot] = self._random(x, rows, shape, self._recipe)
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            wanted = rows.traits.logprobs[shape.row_row[scored]]
            logprobs = dict(zip(scored.tolist(), score(raw, tokens[scored], wanted), strict=True))
        return Sampled(tokens, bad, errors, logprobs)

    def _random(self, x: Floats, rows: Rows, shape: Shape, recipe: Recipe) -> Ids:
        hot, cut = recipe.hot, recipe.cut
        drawn = x if len(hot) == len(x) else x[hot]
        if len(cut):
            part = drawn if len(cut) == len(hot) else drawn[cut]
            truncate(part, recipe.settings)
            if part is not drawn:
                drawn[cut] = part
        position = rows.known[shape.row_row[hot]] + shape.depth[hot]
        return self.draw(drawn, recipe.temperature, keys(recipe.streams, position))


def recipe(rows: Rows, shape: Shape, vocab_size: int) -> Recipe:
    """What the sampled rows of a shape ask for."""
    traits = rows.traits
    bits = traits.bits[shape.row_row]
    hot = np.flatnonzero(bits & HOT)
    cut = np.flatnonzero(bits[hot] & CUT)
    hot_row = shape.row_row[hot]
    cut_row = hot_row[cut]
    each = ((edit, np.flatnonzero(bits & bit)) for bit, edit in EDITS)
    return Recipe(
        edits=tuple((edit, which) for edit, which in each if len(which)),
        scored=np.flatnonzero(bits & SCORED),
        hot=hot,
        cut=cut,
        temperature=traits.temperature[hot_row][:, None],
        streams=traits.stream[hot_row],
        settings=Cut.of(
            traits.temperature[cut_row], traits.top_k[cut_row], traits.top_p[cut_row], traits.min_p[cut_row], vocab_size
        ),
    )


def _best(x: Floats) -> tuple[Ids, Floats]:
    """The greatest logit of each row and where: NaN wins, and among equals the first."""
    best = x.argmax(1)
    return best, x[np.arange(len(best)), best]
