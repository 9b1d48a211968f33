"""Drafts by a small model: a second forward over the same page tables, with K/V tensors of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from quire.core.plan import Span
from quire.ops.ragged import LayerKV
from quire.runner.batch import ragged
from quire.runner.results import Model
from quire.runner.rows import Ints, RowState, StepShape
from quire.runner.sampler import Sampler

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
        return self.model.forward(ragged(rows, shape, self.device, self.done), self.kv)

    def reset(self) -> None:
        self.done[:] = 0
