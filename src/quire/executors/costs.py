"""How long a step takes: a line in tokens fed and K/V read. Used to simulate, to predict, and to size chunks."""

from __future__ import annotations

from typing import NamedTuple


class StepCost(NamedTuple):
    """Seconds of a step: base + per_token * tokens fed + per_kv * positions attended to.

    The default costs nothing: the engine's own time is then all there is to measure.
    """

    base: float = 0.0
    per_token: float = 0.0
    per_kv: float = 0.0

    def seconds(self, tokens: int, kv: int = 0) -> float:
        return self.base + self.per_token * tokens + self.per_kv * kv


FREE = StepCost()
