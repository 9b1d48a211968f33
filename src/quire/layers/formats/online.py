"""Quantised here: loaded as plain numbers, rounded when all of them are there."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.formats.base import Format, Matrix, Stored
from quire.layers.formats.plain import Plain
from quire.layers.formats.scaled import Scaled, Scaling, quantise
from quire.ops.base import Gate, Ops


class Online:
    """A format: matrices of the model's body as `scaling` says, embeddings, heads and routers as `plain` does."""

    def __init__(self, scaling: Scaling, plain: Format) -> None:
        self.scaling, self.plain = scaling, plain

    def __call__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> Stored:
        if shared is not None or matrix.delicate:
            return self.plain(matrix, ops, shared)
        return Rounded(matrix, ops, self.scaling)


class Rounded(Plain):
    """Plain until sealed. Each part has blocks of its own."""

    def __init__(self, matrix: Matrix, ops: Ops, scaling: Scaling) -> None:
        super().__init__(matrix, ops)
        self.scaling = scaling

    def seal(self) -> None:
        down, across = self.scaling.block
        numbers, scales, row = torch.empty_like(self.weight, dtype=self.scaling.dtype), list[torch.Tensor](), 0
        for part in self.matrix.parts:
            own = self.weight[row : row + part.cut.stop - part.cut.start]
            rounded, scale = quantise(own, self.scaling.dtype, self.scaling.block)
            numbers[row : row + len(own)] = rounded
            scales.append(scale[torch.arange(len(own), device=own.device) // down])
            row += len(own)
        scale = torch.cat(scales).contiguous()
        self.quantised = Scaled(self.ops, numbers, scale, self.bias, width=across, activations=self.scaling.activations)
        del self.weight

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        return super().apply(x, gate) if self.quantised is None else self.quantised.apply(x, gate)
