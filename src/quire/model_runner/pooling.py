"""Hidden states of a prompt made into one vector, while its chunks go by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from quire.model_runner.row_state import RowState, StepShape
from quire.scheduler.plan import Plan
from quire.types import Pooling


class PromptPooler:
    """The rows that are to be pooled, and of those that want a mean the sum of the hidden states fed so far.

    What it is fed and what it gives stay where they are, and nothing here waits: a step may be pooled while the ones
    before it are under way. Where no row pools, none is looked at.
    """

    def __init__(self) -> None:
        self._how: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}

    def apply_plan(self, plan: Plan) -> None:
        """What a plan opens. Whoever wants a mean begins at its first token."""
        for one in plan.new_sequences:
            self._drop(one.row)
            if one.sampling.pooling is not None:
                self._how[one.row] = one.sampling.pooling

    def wants_all(self, shape: StepShape) -> bool:
        """Whether more hidden states are wanted than those that are sampled at."""
        return bool(self._how) and any(self._how.get(span.row) == "mean" for span in shape.spans)

    def feed(self, rows: RowState, shape: StepShape, hidden: Tensor | None, picked: Tensor | None) -> dict[int, Tensor]:
        """Vectors [H] of the prompts that end in this step, by span, float32 and nobody else's.

        hidden [T, H]: of the tokens fed, if `wants_all`. picked [R, H]: of those that are sampled at, if any are.
        """
        made: dict[int, Tensor] = {}
        for s, span in enumerate(shape.spans if self._how else ()):
            how = self._how.get(span.row)
            if how == "mean":
                assert hidden is not None
                start = int(shape.query_start[s])
                part = hidden[start : start + span.num_tokens].float().sum(0)
                self._sums[span.row] = part + self._sums[span.row] if span.row in self._sums else part
            if how is not None and span.num_samples:
                assert picked is not None
                last = int(shape.first_sample[np.searchsorted(shape.sampling_spans, s)]) + span.num_samples - 1
                mean = how == "mean"
                made[s] = (
                    self._sums[span.row] / int(rows.prompt_length[span.row]) if mean else picked[last].float().clone()
                )
                self._drop(span.row)
        return made

    def _drop(self, row: int) -> None:
        self._how.pop(row, None)
        self._sums.pop(row, None)

    def reset(self) -> None:
        """Forget every row."""
        self._how.clear()
        self._sums.clear()


def vectors(made: Mapping[int, Tensor]) -> dict[int, bytes]:
    """What a Result tells of them: float32, little-endian."""
    return {s: one.cpu().numpy().astype(np.dtype("<f4")).tobytes() for s, one in made.items()}
