"""Drafts by prompt look-up: what followed the last time the text ended like this (Saxena 2023)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.runner.rows import Ints, RowState


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
