"""Linear layers divided among the ranks of a tensor-parallel group, by outputs (columns) or by inputs (rows).

Without tensor parallelism the group has one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import WeightStorage
from quire.ops.base import Gate


class ParallelGroup:
    """A tensor-parallel group (Shoeybi et al. 2019), `rank` being from 0 to `size` - 1. This one has one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, on every rank."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x side by side along the last dimension, in rank order."""
        return x


def shard_of(count: int, parallel: ParallelGroup, what: str, unit: int = 1) -> slice:
    """This rank's part of `count` things of `unit` rows each.

    Where there are fewer things than ranks (K/V heads), several ranks hold the same one. Raises InvalidModel when
    neither number divides the other.
    """
    size = parallel.size
    if count % size and size % count:
        raise InvalidModel(f"{count} {what} cannot be divided among {size} devices: use a divisor of {count}")
    each = max(1, count // size)
    first = parallel.rank * count // size
    return slice(first * unit, (first + each) * unit)


class ColumnParallelLinear:
    """Outputs are divided: each rank computes its part of them from the whole input. Fused parts stay neighbours."""

    def __init__(self, stored: WeightStorage) -> None:
        self.apply = stored.apply

    def __call__(self, x: Tensor, gate: Gate = "") -> Tensor:
        """x [T, in] -> [T, this rank's outputs], half as many under a gate."""
        return self.apply(x, gate)


class RowParallelLinear:
    """Inputs are divided: the ranks' partial sums are added up."""

    def __init__(self, stored: WeightStorage, parallel: ParallelGroup) -> None:
        self.apply, self.all_reduce = stored.apply, parallel.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, this rank's inputs] -> [T, out], whole on every rank."""
        return self.all_reduce(self.apply(x))


class LMHead:
    """The output embedding, divided by outputs: hidden states to logits, whole on every rank.

    Logits are multiplied by `scale`; then soft_cap c above 0 makes them c * tanh(logit / c), in float32.
    """

    def __init__(
        self, stored: WeightStorage, parallel: ParallelGroup, soft_cap: float = 0.0, scale: float = 1.0
    ) -> None:
        self.apply, self.all_gather, self.soft_cap, self.scale = stored.apply, parallel.all_gather, soft_cap, scale

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, V] in the dtype of the product; the sampler converts them to float32."""
        logits = self.all_gather(self.apply(hidden if self.scale == 1.0 else hidden * self.scale))
        return logits if not self.soft_cap else torch.tanh(logits.float() / self.soft_cap) * self.soft_cap
