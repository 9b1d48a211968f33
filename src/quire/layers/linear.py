"""How a matrix is cut among ranks: by columns of the model (its outputs) or by rows (its inputs)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.formats import WeightStorage
from quire.layers.parallel import ParallelGroup
from quire.ops.base import Gate


class ColumnParallelLinear:
    """Outputs cut: every rank makes its own part of them from the whole input. Fused parts stay side by side."""

    def __init__(self, stored: WeightStorage) -> None:
        self.apply = stored.apply

    def __call__(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x [T, in] -> [T, this rank's outputs], half as many under a gate."""
        return self.apply(x, gate)


class RowParallelLinear:
    """Inputs cut: every rank adds its part of the sum."""

    def __init__(self, stored: WeightStorage, parallel: ParallelGroup) -> None:
        self.apply, self.all_reduce = stored.apply, parallel.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, this rank's inputs] -> [T, out], whole on every rank."""
        return self.all_reduce(self.apply(x))


class LMHead:
    """The vocabulary's matrix, outputs cut: hidden states to logits, whole on every rank.

    soft_cap c above 0 makes logits c * tanh(logit / c), in float32.
    """

    def __init__(self, stored: WeightStorage, parallel: ParallelGroup, soft_cap: float = 0.0) -> None:
        self.apply, self.all_gather, self.soft_cap = stored.apply, parallel.all_gather, soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, V] as they were multiplied: who samples widens them."""
        logits = self.all_gather(self.apply(hidden))
        return logits if not self.soft_cap else torch.tanh(logits.float() / self.soft_cap) * self.soft_cap
