"""Mixture of experts (Shazeer et al. 2017; Jiang et al. 2024): a router, and MLPs of which each token uses a few.

Tokens are sorted by expert, each expert multiplies its run of rows, and results are added up per token. Shapes do not
depend on where tokens go, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.linear import ColumnParallelLinear, ParallelGroup
from quire.layers.quantization.base import WeightStorage
from quire.ops.base import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts of a layer: `num_experts` MLPs of inner `width`, of which each token uses `num_experts_per_token`.

    normalize_weights: the weights of the used experts are scaled to sum to 1. dense_layers: layers with one MLP
    instead.
    """

    num_experts: int
    num_experts_per_token: int
    width: int
    normalize_weights: bool = True
    dense_layers: frozenset[int] = frozenset()

    def checked(self) -> MoEConfig:
        """Itself. Raises InvalidModel for numbers that contradict each other."""
        if not 1 <= self.num_experts_per_token <= self.num_experts or not self.width:
            raise InvalidModel(
                f"config.json: {self.num_experts_per_token} of {self.num_experts} experts of width {self.width} "
                "cannot be used"
            )
        return self


class ExpertWeights(Protocol):
    """One matrix of every expert of a layer."""

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows ends[e - 1] to ends[e] of x [N, in] go through expert e -> [N, out]. ends [E] int32, ascending."""


class GroupedExperts:
    """Unquantized matrices in one tensor [E, out, in]: one grouped product for all experts."""

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self.weight, self.grouped = weight, ops.grouped_linear

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.grouped(x, self.weight, ends)


class UngroupedExperts:
    """Matrices of any format, one product each. On a GPU, which must not be waited for, every expert computes every
    row."""

    def __init__(self, experts: Sequence[WeightStorage]) -> None:
        self.experts = experts

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        if x.is_cuda:
            return self._everywhere(x, ends)
        stops = ends.tolist()
        runs = zip(self.experts, [0, *stops], stops, strict=False)
        return torch.cat([expert.apply(x[start:stop]) for expert, start, stop in runs if start < stop])

    def _everywhere(self, x: Tensor, ends: Tensor) -> Tensor:
        owner = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)[:, None]
        parts = (torch.where(owner == e, expert.apply(x), 0) for e, expert in enumerate(self.experts))
        total = next(parts)
        for part in parts:
            total = total + part
        return total


class MoE:
    """router [hidden -> E], gate and up fused, down; routing weights are a float32 softmax over all experts."""

    def __init__(
        self,
        router: ColumnParallelLinear,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        mixture: MoEConfig,
        activation: Callable[[Tensor], Tensor],
        parallel: ParallelGroup,
        ops: Ops,
    ) -> None:
        self.router, self.gate_up, self.down, self.config = router, gate_up, down, mixture
        self.activation, self.all_reduce, self.combine = activation, parallel.all_reduce, ops.combine_experts

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        used = self.config.num_experts_per_token
        shares, chosen = self.router(x).float().softmax(-1).topk(used, dim=-1)
        owner, order = chosen.flatten().sort(stable=True)
        everyone = torch.arange(self.config.num_experts, device=x.device, dtype=owner.dtype)
        ends = torch.searchsorted(owner, everyone, right=True).int()
        made = self.down(self.activation(self.gate_up(x[order // used], ends)), ends)
        back = torch.empty_like(made)
        back[order] = made
        return self.all_reduce(
            self.combine(back.view(-1, used, back.shape[-1]), shares, whole=self.config.normalize_weights)
        )
