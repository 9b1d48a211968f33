"""Tensor-parallel groups and pipelines of several processes, over torch.distributed: gloo between CPUs, NCCL between
GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from quire.layers.linear import ParallelGroup
from quire.layers.stages import LinkedPipeline
from quire.ops.base import Ops
from quire.ops.capture import PRECOMPILING
from quire.ops.operands import Norm

log = logging.getLogger(__name__)

gather_single: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Every rank's tensor, one after the other: the second name is that of torch before 2.13."""

Reduce = Callable[[Tensor], Tensor]
"""The sum of every rank's tensor, on every rank."""


class SmallReduce(Protocol):
    """Sums of tensors of up to `most` bytes, in float32 and in the order of ranks, and tensors side by side: see
    `ops.triton.all_reduce`."""

    most: int

    def __call__(self, x: Tensor) -> Tensor:
        """As `Reduce`."""

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        before: Norm | None,
        scale: float,
        gain: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.add_norm` of the sum, in one kernel."""

    def gather(self, x: Tensor) -> Tensor:
        """As `ParallelGroup.all_gather`, of ranks that have as wide a tensor, whose rows have up to `most` bytes."""


MakeSmallReduce = Callable[[dist.ProcessGroup, int], SmallReduce]
"""Of a group's rank; every rank calls it, in the same order. Raises RuntimeError where GPUs do not reach each other's
memory."""


class DistributedPipeline(LinkedPipeline):
    """A stage whose neighbours are the ranks of torch.distributed's default group that have the same part of layers.

    Sends return at once: what is sent is kept until it has arrived, at the latest until the next one.
    """

    def __init__(self, rank: int, size: int, world: int) -> None:
        super().__init__(rank // size, world // size)
        self._before, self._next = rank - size, rank + size
        self._sent_last: list[tuple[dist.Work | None, Tensor]] = []

    def _header(self) -> int:
        size = torch.zeros(1, dtype=torch.int64, device=_device())
        dist.recv(size, self._before)
        return int(size)

    def _take(self, into: Tensor) -> None:
        dist.recv(into, self._before)

    def _put(self, x: Tensor | None) -> None:
        for work, _ in self._sent_last:
            if work is not None:
                work.wait()
        sent = [torch.tensor([0 if x is None else x.nbytes], dtype=torch.int64, device=_device())]
        sent += [] if x is None else [x.contiguous()]
        self._sent_last = [(dist.isend(each, self._next), each) for each in sent]


def _device() -> torch.device:
    """Where what is exchanged must be."""
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class DistributedGroup(ParallelGroup):
    """The ranks of one stage among those of torch.distributed's default process group, which `join` initializes. They
    meet in a thread, beside what this rank does until `connect`.

    rank: among all `world` ranks. size: of a stage. neighbours: ranks on this host.

    in_rank_order: sums add up the ranks' tensors in float32, rank 0's first, so that an element's sum does not depend
    on how many elements are sent with it, as it does in a ring. Otherwise the library sums what is not small, which
    moves fewer bytes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        world: int,
        *,
        in_rank_order: bool,
        timeout: timedelta,
        neighbours: int,
        make_small_reduce: MakeSmallReduce | None = None,
        join: Callable[[], None] = lambda: None,
    ) -> None:
        self.size, self.rank, self.neighbours = size, rank % size, neighbours
        self.pipeline = DistributedPipeline(rank, size, world)
        self._group: dist.ProcessGroup | None = None
        self._small: SmallReduce | None = None
        self._reduce: Reduce = self._sum_in_rank_order if in_rank_order else self._library_sum
        # The norm is a kernel of its own in deterministic mode, whose bits do not depend on how many rows there are.
        self._fuses = not in_rank_order
        thread = ThreadPoolExecutor(1, "meeting")
        self._met = thread.submit(self._meet, join, range(0, world, size), timeout, make_small_reduce)
        thread.shutdown(wait=False)

    def _meet(self, join: Callable[[], None], stages: range, timeout: timedelta, make: MakeSmallReduce | None) -> None:
        """stages: first ranks. A communicator takes its memory in its first exchange: before what is free is
        measured."""
        join()
        self._group = dist.group.WORLD
        if len(stages) > 1:
            # Every rank must make every group.
            groups = [dist.new_group([*range(first, first + self.size)], timeout=timeout) for first in stages]
            self._group = groups[self.pipeline.stage]
        self._library_sum(torch.zeros(1, device=_device()))
        self._smallest(0)
        self._small = None if make is None else self._agreed(make)

    def _agreed(self, make: MakeSmallReduce) -> SmallReduce | None:
        """What every rank has made, or nothing where one could not."""
        made = None
        assert self._group is not None
        try:
            made = make(self._group, self.rank)
        except RuntimeError as error:
            log.warning("ranks do not reach each other's memory, so sums are the library's: %s", error)
        return made if self._smallest(made is not None) else None

    def connect(self) -> None:
        """See `ParallelGroup`. Raises what `join` did."""
        self._met.result()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ParallelGroup`."""
        if self._small is not None and x.nbytes <= self._small.most:
            return self._small(x)
        return x if PRECOMPILING.get() is not None else self._reduce(x)

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
        """See `ParallelGroup`."""
        if self._fuses and self._small is not None and x.nbytes <= self._small.most:
            return self._small.add_norm(x, residual, norm, before, scale, gain)
        return super().add_norm(ops, x, residual, norm, before, scale, gain)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See `ParallelGroup`. What the library sends is as wide as the widest rank's."""
        if self._small is not None and len({*widths}) == 1 and widths[0] * x.element_size() <= self._small.most:
            return self._small.gather(x)
        if PRECOMPILING.get() is not None:
            return x.new_empty(*x.shape[:-1], sum(widths))
        missing = max(widths) - x.shape[-1]  # padding by nothing is a copy
        parts = self._gathered(torch.nn.functional.pad(x, (0, missing)) if missing else x)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def smallest(self, value: int) -> int:
        """See `ParallelGroup`."""
        self.connect()
        return self._smallest(value)

    def _smallest(self, value: int) -> int:
        held = torch.tensor(value, dtype=torch.int64, device=_device())
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    def _gathered(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]."""
        parts = x.new_empty((self.size, *x.shape))
        gather_single(parts.view(-1), x.contiguous().view(-1), group=self._group)
        return parts

    def _sum_in_rank_order(self, x: Tensor) -> Tensor:
        first, *rest = self._gathered(x)
        total: Tensor = first.float()
        for part in rest:
            total = total + part
        return total.to(x.dtype)

    def _library_sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total
