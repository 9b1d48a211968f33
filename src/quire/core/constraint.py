"""What tokens a sequence may have next. Structured output is a Constraint; having none is FREE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.core.plan import Mask


class Constraint(Protocol):
    """Asked once a sampling step, while the forward pass of that very step runs."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """The mask after `output`, then after each of `drafts` in turn: 1 + len(drafts) masks.

        `output` are the tokens made so far, all committed. A draft that breaks the constraint ends the walk;
        masks past it are never used and may be None.
        """


class Free:
    """No constraint: the scheduler recognises FREE and plans no masks at all."""

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        return [None] * (1 + len(drafts))


FREE = Free()
