"""MXFP4 (OCP Microscaling Formats 2023): floats of 4 bits, and a power of two for every 32 columns of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import Matrix, QuantizedWeight, WeightSlot, bias_of, bias_slots
from quire.layers.quantization.integers import packed_dim
from quire.layers.quantization.scaled import check_aligned
from quire.ops.base import Ops
from quire.ops.integer import pack_floats
from quire.ops.operands import Gate

GROUP = 32
"""Columns that share a scale."""

TYPICAL = 2.9
"""Root of the mean square of the numbers that 4 bits stand for."""


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """Stored as weight_packed, uint8 [out, in / 2], the even column's number in the low bits, and weight_scale, uint8
    [out, in / 32], e for 2^(e - 127)."""

    unit = GROUP

    def store(self, matrix: Matrix, ops: Ops) -> Mxfp4Storage:
        """See `Layout`."""
        return Mxfp4Storage(matrix, ops)


class Mxfp4Storage:
    """Kept at its bits, in the layout of the kernels.

    A checkpoint's tensors are [out, ..] even where its plain ones are [in, out].
    """

    def __init__(self, matrix: Matrix, ops: Ops) -> None:
        name = matrix.parts[0].name
        if matrix.columns % GROUP:
            raise InvalidModel(f"{name} has {matrix.columns} columns: MXFP4 needs a multiple of {GROUP}")
        check_aligned(matrix.shard, GROUP, name)
        rows, columns = matrix.local_shape
        self.matrix, self.ops, self.bias = matrix, ops, bias_of(matrix)
        self.raw, self.exponents = (
            torch.empty(rows, columns // each, dtype=torch.uint8, device=matrix.device) for each in (2, GROUP)
        )
        self.quantized: QuantizedWeight | None = None

    def slots(self) -> list[WeightSlot]:
        """Slots of numbers, exponents and biases."""
        matrix, places, row = self.matrix, list[WeightSlot](), 0
        usual = 127 + round(math.log2(matrix.columns**-0.5 / TYPICAL))
        for name, rows, kept in matrix.parts:
            own = slice(row, row + kept.stop - kept.start)
            row = own.stop
            for suffix, each, whole, mean, std in (
                ("weight_packed", 2, self.raw, 0, 1e6),
                ("weight_scale", GROUP, self.exponents, usual, 0.0),
            ):
                shape, cut = (rows, matrix.columns // each), (kept, packed_dim(matrix.shard, each))
                places.append(
                    WeightSlot(f"{name}.{suffix}", shape, cut, whole[own], mean=mean, std=std, stored_dtype=torch.uint8)
                )
        return places + bias_slots(matrix, self.bias)

    def finalize(self) -> None:
        """Bring numbers and exponents into the layout of the kernels."""
        if bool((self.exponents == 255).any()):
            name = self.matrix.parts[0].name
            raise InvalidModel(f"{name}.weight_scale holds numbers that cannot be scales: the checkpoint is corrupt")
        codes = torch.stack((self.raw & 15, self.raw >> 4), -1).flatten(1)
        self.quantized = QuantizedWeight(self.ops, self.ops.arranged(pack_floats(codes, self.exponents)), self.bias)
        del self.raw, self.exponents

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        assert self.quantized is not None
        return self.quantized.apply(x, gate)
