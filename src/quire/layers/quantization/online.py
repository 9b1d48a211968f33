"""Quantised here: loaded as plain numbers, rounded when all of them are there."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.quantization.base import Format, Matrix, WeightStorage
from quire.layers.quantization.plain import Plain
from quire.layers.quantization.scaled import ScaledWeight, ScaleScheme, quantize
from quire.ops.base import Gate, Ops


class OnlineQuantization:
    """A format: matrices of the model's body as `scaling` says, embeddings, heads and routers as `plain` does."""

    def __init__(self, scaling: ScaleScheme, plain: Format) -> None:
        self.scheme, self.plain = scaling, plain

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> WeightStorage:
        if shared is not None or matrix.keep_precision:
            return self.plain(matrix, ops, shared)
        return OnlineQuantized(matrix, ops, self.scheme)


class OnlineQuantized(Plain):
    """Plain until sealed. Each part has blocks of its own."""

    def __init__(self, matrix: Matrix, ops: Ops, scaling: ScaleScheme) -> None:
        super().__init__(matrix, ops)
        self.scheme = scaling

    def finalize(self) -> None:
        down, across = self.scheme.block
        numbers, scales, row = torch.empty_like(self.weight, dtype=self.scheme.dtype), list[torch.Tensor](), 0
        for part in self.matrix.parts:
            own = self.weight[row : row + part.shard.stop - part.shard.start]
            rounded, scale = quantize(own, self.scheme.dtype, self.scheme.block)
            numbers[row : row + len(own)] = rounded
            scales.append(scale[torch.arange(len(own), device=own.device) // down])
            row += len(own)
        scale = torch.cat(scales).contiguous()
        self.quantized = ScaledWeight(
            self.ops, numbers, scale, self.bias, width=across, activations=self.scheme.activations
        )
        del self.weight

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        return super().apply(x, gate) if self.quantized is None else self.quantized.apply(x, gate)
