"""Mixture of experts (Shazeer et al. 2017; Jiang et al. 2024): a router, and MLPs of which each token uses a few.

Tokens are sorted by expert, each expert multiplies its run of rows, and results are added up per token. Shapes do not
depend on where tokens go, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.linear import ColumnParallelLinear, ParallelGroup
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


ExpertLinear = Callable[[Tensor, Tensor], Tensor]
"""One matrix of every expert of a layer: (x [N, in], ends [E] int32, ascending) -> [N, out], where rows ends[e - 1] to
ends[e] of x go through expert e."""


class MoE:
    """router [hidden -> E], gate and up fused, down; routing weights are a float32 softmax over all experts."""

    def __init__(
        self,
        router: ColumnParallelLinear,
        gate_up: ExpertLinear,
        down: ExpertLinear,
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
