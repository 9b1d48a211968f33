"""Linear layers divided among the ranks of a tensor-parallel group, by outputs (columns) or by inputs (rows).

Without tensor parallelism the group has one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import QuantizedWeight, WeightStorage
from quire.layers.stages import ONE_STAGE, Pipeline
from quire.ops.base import Ops
from quire.ops.operands import Gate, Norm, NormedRows, VocabularyPart


class ParallelGroup:
    """A tensor-parallel group (Shoeybi et al. 2019), `rank` being from 0 to `size` - 1. This one has one rank: what is
    communicated is what was given. Others are in `layers.distributed`. Every rank makes the same calls in one order.

    pipeline: the stage whose layers the group divides. neighbours: ranks of all stages that share this host.
    """

    rank: int = 0
    size: int = 1
    neighbours: int = 1
    pipeline: Pipeline = ONE_STAGE

    def connect(self) -> None:
        """Wait until the ranks have met: before the first exchange of hidden states."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, on every rank, of the same bits."""
        return x

    def add_norm(
        self,
        ops: Ops,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        before: Norm | None,
        scale: float,
        gain: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.add_norm` of the sum of every rank's x. `residual` is the same on every rank."""
        return ops.add_norm(self.all_reduce(x), residual, norm, before, scale, gain)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Every rank's x side by side along the last dimension, in rank order. widths: each rank's last dimension."""
        return x

    def smallest(self, value: int) -> int:
        """The least of every rank's value, in all stages."""
        return value


ONE_RANK = ParallelGroup()
"""The group of layers that every rank computes as a whole."""


def shard_of(count: int, parallel: ParallelGroup, what: str, unit: int = 1) -> slice:
    """This rank's part of `count` things of `unit` rows each: consecutive ones, and of no rank more than one above
    another's.

    Where there are fewer things than ranks (K/V heads), several ranks hold the same one. Raises InvalidModel when they
    cannot be shared out evenly then.
    """
    rank, size = parallel.rank, parallel.size
    if count < size and size % count:
        raise InvalidModel(f"{count} {what} cannot be divided among {size} ranks: use a divisor or a multiple of it")
    first, last = rank * count // size, (rank + 1) * count // size
    return slice(first * unit, max(last, first + 1) * unit)


def widths_of(count: int, size: int) -> tuple[int, ...]:
    """What each of `size` ranks has of `count` things, by `shard_of`."""
    return tuple((rank + 1) * count // size - rank * count // size for rank in range(size))


def heads_divide(heads: int, kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks has as many heads of queries as others, and those of K/V that they read. Where not,
    every rank computes all heads. kv_heads: 0 where K/V of another layer is read."""
    return heads % size == 0 and (not kv_heads or kv_heads % size == 0 or size % kv_heads == 0)


class ColumnParallelLinear:
    """Outputs are divided: each rank computes its part of them from the whole input. Fused parts stay neighbours."""

    def __init__(self, stored: WeightStorage) -> None:
        self.stored, self.apply = stored, stored.apply

    @property
    def reader(self) -> QuantizedWeight | None:
        """What may read a norm as rounded rows; None: a matrix of numbers that are multiplied as they are."""
        weight = self.stored.quantized
        return weight if weight is not None and weight.is_product else None

    def __call__(self, x: Tensor | NormedRows, gate: Gate = "") -> Tensor:
        """x [T, in] -> [T, this rank's outputs], half as many under a gate. Normed rows: made for this matrix."""
        if isinstance(x, Tensor):
            return self.apply(x, gate)
        assert self.stored.quantized is not None
        return self.stored.quantized.multiply_normed(x, gate)


class RowParallelLinear:
    """Inputs are divided: the ranks' partial sums are added up."""

    def __init__(self, stored: WeightStorage, parallel: ParallelGroup) -> None:
        self.stored, self.apply, self.parallel = stored, stored.apply, parallel
        self.all_reduce = parallel.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, this rank's inputs] -> [T, out], whole on every rank."""
        return self.all_reduce(self.apply(x))

    def leave_sum(self) -> ParallelGroup:
        """Return this rank's partial sums from now on. Returns the group over which the caller adds them up."""
        self.all_reduce = ONE_RANK.all_reduce
        return self.parallel


class LMHead:
    """The output embedding, divided by outputs: hidden states to logits, whole on every rank.

    Logits are multiplied by `scale`; then soft_cap c above 0 makes them c * tanh(logit / c), in float32. widths: of
    each rank's part of the vocabulary.
    """

    def __init__(
        self,
        stored: WeightStorage,
        parallel: ParallelGroup,
        widths: Sequence[int],
        soft_cap: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.apply, self.all_gather, self.soft_cap, self.scale = stored.apply, parallel.all_gather, soft_cap, scale
        self.widths, self.parallel = tuple(widths), parallel

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, V] in the dtype of the product; the sampler converts them to float32."""
        return self._capped(self.all_gather(self._product(hidden), self.widths))

    def part(self, unit: int) -> VocabularyPart | None:
        """This rank's part of the vocabulary; None where ranks have no parts, or not of as many tokens, a multiple of
        `unit`."""
        size, width = len(self.widths), self.widths[0]
        if size == 1 or {*self.widths} != {width} or width % unit:
            return None

        def logits(hidden: Tensor) -> Tensor:
            return self._capped(self._product(hidden))

        return VocabularyPart(
            self.parallel.rank * width, size, logits, lambda x: self.all_gather(x, (x.shape[-1],) * size)
        )

    def _product(self, hidden: Tensor) -> Tensor:
        return self.apply(hidden if self.scale == 1.0 else hidden * self.scale)

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if not self.soft_cap else torch.tanh(logits.float() / self.soft_cap) * self.soft_cap
