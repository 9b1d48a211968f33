"""Where drafts come from. A verify span is the only path: no speculation is a drafter of depth 0."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.runner.rows import Ints, Rows


class Drafter(Protocol):
    """Guesses the tokens that follow a row's history.

    depth: tokens it drafts a step, the same for every row: a plan fixes shapes before it knows values, so a drafter
    with less to say fills up with anything. A wrong draft costs time, never an answer.
    """

    depth: int

    def propose(self, rows: Rows, which: Ints) -> npt.NDArray[np.int32]:
        """[Q, depth] drafts for store rows `which` [Q], each row's history being `tokens[row, :known[row]]`."""


class NoDrafts:
    """No speculation."""

    depth = 0

    def propose(self, rows: Rows, which: Ints) -> npt.NDArray[np.int32]:
        return np.zeros((len(which), 0), dtype=np.int32)
