"""Where drafts come from. A verify span is the only path: no speculation is a drafter of depth 0.

Drafts by prompt look-up: what followed the last time the text ended like this (Saxena 2023).

Drafts by a small model: a second forward over the same page tables, with K/V tensors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.model_runner.batch import ragged
from quire.model_runner.results import Model
from quire.model_runner.row_state import Ints, RowState, StepShape
from quire.model_runner.sampling.sampler import Sampler
from quire.ops.ragged import LayerKV
from quire.scheduler.plan import Span


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


def follow(history: npt.NDArray[np.int32], at: int, count: int) -> npt.NDArray[np.int32]:
    """`count` tokens of the history from `at` on, its last one repeated past its end."""
    return history[np.minimum(np.arange(at, at + count), len(history) - 1)]


def lookup(history: npt.NDArray[np.int32], longest: int, shortest: int) -> int:
    """Where the tokens begin that followed the latest earlier occurrence of the longest known suffix.

    len(history) when no suffix of `shortest` tokens was seen before.
    """
    size = found = len(history)
    ends = np.flatnonzero(history[:-1] == history[-1])
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[history[ends - length + 1] == history[size - length]]
        if not len(ends):
            break
        if length >= shortest:
            found = int(ends[-1]) + 1
    return found


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
