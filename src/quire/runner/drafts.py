"""Where drafts come from. A verify span is the only path: no speculation is a drafter of depth 0."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.runner.rows import Ints, RowState


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
