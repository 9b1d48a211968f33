"""Numbers as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.formats.base import Matrix, Place, Quantised, bias_of, bias_places
from quire.ops.base import Gate, Ops


class Plain:
    """The numbers as they are, one row an output. In a stack, parts follow each other."""

    quantised: Quantised | None = None

    def __init__(self, matrix: Matrix, ops: Ops, shared: Tensor | None = None) -> None:
        rows, columns = matrix.kept
        self.matrix = matrix
        self.ops = ops
        self.shared = shared is not None
        empty = torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device) if shared is None else shared
        self.weight = empty
        self.bias = bias_of(matrix)

    def places(self) -> list[Place]:
        matrix, places, row = self.matrix, list[Place](), 0
        biases = bias_places(matrix, self.bias)
        for i, (name, rows, cut) in enumerate(matrix.parts):
            own = slice(row, row + cut.stop - cut.start)
            row = own.stop
            if not self.shared:
                shape, cuts = (rows, matrix.columns), (cut, matrix.cut)
                if matrix.transposed:
                    shape, cuts = shape[::-1], cuts[::-1]
                std = matrix.columns**-0.5
                places.append(Place(f"{name}.weight", shape, cuts, self.weight[own], matrix.transposed, std=std))
            places += biases[i : i + 1]
        return places

    def seal(self) -> None:
        return

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        return self.ops.linear(x, self.weight, self.bias, gate)
