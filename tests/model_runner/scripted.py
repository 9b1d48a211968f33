"""A drafter that knows the answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.model_runner.row_state import Ints, RowState, StepShape


class ScriptedDrafter:
    """Drafts the next tokens of known texts (prompts with their answers), a share of them replaced.

    wrong: draws the token that replaces one.
    """

    reads_hidden = False

    def __init__(
        self, depth: int, texts: Sequence[list[int]], *, share: float, wrong: Callable[[random.Random], int]
    ) -> None:
        self.num_drafts = depth
        self.texts = texts
        self.share = share
        self.wrong = wrong
        self.rng = random.Random(depth)

    def propose(self, rows: RowState, which: Ints, depth: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        out = np.zeros((len(which), self.num_drafts), np.int32)
        for q, row in enumerate(which.tolist()):
            known = int(rows.num_known[row])
            history = rows.tokens[row, :known].tolist()
            found = next((t for t in self.texts if t[:known] == history), [])[known : known + self.num_drafts]
            for i, token in enumerate(found):
                out[q, i] = self.wrong(self.rng) if self.rng.random() < self.share else token
        return out

    def follow(self, rows: RowState, shape: StepShape, before: Ints, hidden: torch.Tensor | None) -> None:
        """The texts are known."""

    def reset(self) -> None:
        """The texts stay."""
