"""Tensor-parallel groups of several processes, over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quire.layers.linear import ParallelGroup

gather_single: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Every rank's tensor, one after the other: the second name is that of torch before 2.13."""

Reduce = Callable[[Tensor], Tensor]
"""The sum of every rank's tensor, on every rank."""


class DistributedGroup(ParallelGroup):
    """The ranks of torch.distributed's default process group, which is initialized.

    in_rank_order: sums add up the ranks' tensors in float32, rank 0's first, so that an element's sum does not depend
    on how many elements are sent with it, as it does in a ring. Otherwise the library sums, which moves fewer bytes. A
    faster sum (of symmetric memory, say) would be another `Reduce` in place of these two.
    """

    def __init__(self, *, in_rank_order: bool) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._reduce: Reduce = self._sum_in_rank_order if in_rank_order else _library_sum
        self._device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ParallelGroup`."""
        return self._reduce(x)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See `ParallelGroup`. What is sent is as wide as the widest rank's."""
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[-1]))
        parts = self._gathered(padded)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def smallest(self, value: int) -> int:
        """See `ParallelGroup`."""
        held = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    def _gathered(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]."""
        parts = x.new_empty((self.size, *x.shape))
        gather_single(parts.view(-1), x.contiguous().view(-1))
        return parts

    def _sum_in_rank_order(self, x: Tensor) -> Tensor:
        first, *rest = self._gathered(x)
        total: Tensor = first.float()
        for part in rest:
            total = total + part
        return total.to(x.dtype)


def _library_sum(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total
