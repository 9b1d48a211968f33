"""Who shares a layer's work. `Solo` shares it with nobody: no tensor parallelism is a group of one.

How a matrix is cut among ranks: by columns of the model (its outputs) or by rows (its inputs).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import WeightStorage
from quire.ops.base import Gate


class ParallelGroup(Protocol):
    """A tensor-parallel group (Shoeybi et al. 2019). `rank` is from 0 to `size` - 1."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, on every rank."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x side by side along the last dimension, in rank order."""


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


def shard_of(count: int, parallel: ParallelGroup, what: str, unit: int = 1) -> slice:
    """This rank's part of `count` things of `unit` rows each.

    Fewer things than ranks (K/V heads) are held by several ranks each. Raises InvalidModel when neither divides.
    """
    size = parallel.size
    if count % size and size % count:
        raise InvalidModel(f"{count} {what} cannot be divided among {size} devices: use a divisor of {count}")
    each = max(1, count // size)
    first = parallel.rank * count // size
    return slice(first * unit, (first + each) * unit)


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
