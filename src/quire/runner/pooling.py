"""Hidden states of a prompt made into one vector, while its chunks go by."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.runner.rows import Rows, Shape


class Pool:
    """By row, the sum of the hidden states fed since it was opened, which for a mean was at its first token."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def wants_all(self, rows: Rows, shape: Shape) -> bool:
        """Whether more hidden states are wanted than those that are sampled at."""
        pooling = rows.traits.pooling
        return any(pooling[span.row] == "mean" for span in shape.spans)

    def feed(self, rows: Rows, shape: Shape, hidden: Tensor) -> dict[int, bytes]:
        """Vectors of the prompts that end in this step, by span: float32, little-endian.

        rows: as they were when the step was fed. hidden [T, H]: of the tokens fed.
        """
        made: dict[int, bytes] = {}
        for s, span in enumerate(shape.spans):
            how = rows.traits.pooling[span.row]
            if how is None:
                continue
            start = int(shape.query_start[s])
            part = hidden[start : start + span.n].float()
            if how == "mean":
                part = part.sum(0)
                if rows.length[span.row]:
                    part = part + self._sums[span.row]
                self._sums[span.row] = part
                part = part / int(rows.length[span.row] + span.n)
            else:
                part = part[-1]
            if span.rows:
                self._sums.pop(span.row, None)
                made[s] = part.cpu().numpy().astype(np.dtype("<f4")).tobytes()
        return made

    def reset(self) -> None:
        """Forget every row."""
        self._sums.clear()
