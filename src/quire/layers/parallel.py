"""Who shares a layer's work. `Solo` shares it with nobody: no tensor parallelism is a group of one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.errors import InvalidModel


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
