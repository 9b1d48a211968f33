"""Ops by Triton kernels whose launches depend on no batch: each row's result is its own, to the bit.

One tile for every product and one for all of attention, nothing split that would have to be put together, no library
that chooses by shape. Few rows are multiplied in tiles of 64, and a long context is read by one program a K/V head:
that is the price.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.base import Gate
from quire.ops.grouped import by_owner, combine_experts_in_order
from quire.ops.triton import gemv, quantized_gemm
from quire.ops.triton.gemm_configs import GemmConfig
from quire.ops.triton.ops import TritonOps

PRODUCT, RESTORED, EXACT = GemmConfig(64, 64, 128, 4, 4), GemmConfig(64, 64, 64, 4, 3), GemmConfig(16, 32, 64, 4, 3)
"""Of plain matrices, of those restored on the way, and of either in float32, which takes more registers."""


class BatchInvariantTritonOps(TritonOps):
    """See `base.Ops`."""

    def __init__(self, device: torch.device | str = "cuda", *, dependent: bool = True) -> None:
        super().__init__(device, dependent=dependent)
        self.card = replace(self.card, sms=0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        return gemv.product(x, weight, bias, how(x, PRODUCT), self.card, gate)

    def quantised_linear(
        self, x: Tensor, matrix: quantized_gemm.QuantizedMatrix, bias: Tensor | None, gate: Gate
    ) -> Tensor:
        return quantized_gemm.product(x, matrix, bias, how(x, RESTORED), self.card, self.arrived, gate)

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return by_owner(x, weight, ends, self.linear)

    def combine_experts(self, made: Tensor, shares: Tensor, *, whole: bool) -> Tensor:
        return combine_experts_in_order(made, shares, whole=whole)


def how(x: Tensor, usual: GemmConfig) -> GemmConfig:
    return EXACT if x.dtype is torch.float32 else usual
