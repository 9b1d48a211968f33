"""Numbers as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.quantization.base import Matrix, QuantizedWeight, WeightSlot, bias_of, bias_slots
from quire.ops.base import Gate, Ops


class Plain:
    """The numbers as they are, one row an output. In a stack, parts follow each other."""

    quantized: QuantizedWeight | None = None

    def __init__(self, matrix: Matrix, ops: Ops, tied_weight: Tensor | None = None) -> None:
        rows, columns = matrix.local_shape
        self.matrix = matrix
        self.ops = ops
        self.tied_weight = tied_weight is not None
        empty = (
            torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device) if tied_weight is None else tied_weight
        )
        self.weight = empty
        self.bias = bias_of(matrix)

    def slots(self) -> list[WeightSlot]:
        matrix, places, row = self.matrix, list[WeightSlot](), 0
        biases = bias_slots(matrix, self.bias)
        for i, (name, rows, cut) in enumerate(matrix.parts):
            own = slice(row, row + cut.stop - cut.start)
            row = own.stop
            if not self.tied_weight:
                shape, cuts = (rows, matrix.columns), (cut, matrix.shard)
                if matrix.transposed:
                    shape, cuts = shape[::-1], cuts[::-1]
                std = matrix.columns**-0.5
                places.append(WeightSlot(f"{name}.weight", shape, cuts, self.weight[own], matrix.transposed, std=std))
            places += biases[i : i + 1]
        return places

    def finalize(self) -> None:
        return

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        return self.ops.linear(x, self.weight, self.bias, gate)
