"""Integers of 4 or 8 bits, with a scale and a zero point for every group of columns of a row.

AWQ, GPTQ and compressed-tensors lay them out in their own ways; all are converted to one form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.quantization.base import Matrix, MatrixPart, QuantizedWeight, WeightSlot, bias_of, bias_slots
from quire.layers.quantization.scaled import check_aligned, check_scale, unpack
from quire.ops.base import Ops
from quire.ops.operands import Gate, QuantizedMatrix
from quire.types import UNLIMITED

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's kernels want the eight numbers of an int32: number i lies at place AWQ_ORDER[i]."""


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """How a checkpoint stores such a matrix.

    layout: "awq", qweight [in, out / 8], the eight numbers of an int32 in AWQ's order; "gptq", qweight [in / 8, out]
    and g_idx; "packed", weight_packed [out, in / 8] (compressed-tensors). group: columns that share a scale, UNLIMITED
    for all. zeros: whether there are zero points; without, 8 is zero, or 128 of 8 bits. more: what is added to stored
    zero points (GPTQ's first version stores them less 1). ordered: whether there is a g_idx.
    """

    layout: Literal["awq", "gptq", "packed"]
    group: int
    zeros: bool = True
    more: int = 0
    ordered: bool = False
    bits: int = 4

    @property
    def each(self) -> int:
        """Numbers in an int32."""
        return 32 // self.bits

    @property
    def unit(self) -> int:
        """See `Layout`: groups stay whole."""
        return self.each if self.group == UNLIMITED else math.lcm(self.each, self.group)

    def store(self, matrix: Matrix, ops: Ops) -> IntegerStorage:
        """See `Layout`."""
        return IntegerStorage(matrix, ops, self)


class IntegerStorage:
    """Read from a checkpoint, each part by itself. Scales are kept for all groups, whatever columns the rank keeps."""

    def __init__(self, matrix: Matrix, ops: Ops, halving: IntegerScheme) -> None:
        if matrix.transposed:
            raise InvalidModel(f"{matrix.parts[0].name}: a quantised matrix stored [in, out] is not supported")
        self.matrix, self.ops, self.scheme = matrix, ops, halving
        self.bias = bias_of(matrix)
        self.parts = [IntegerTensors(part, matrix, halving) for part in matrix.parts]
        self.quantized: QuantizedWeight | None = None

    def slots(self) -> list[WeightSlot]:
        """Slots of every part's tensors, and of the biases."""
        return [place for part in self.parts for place in part.places()] + bias_slots(self.matrix, self.bias)

    def finalize(self) -> None:
        """Unpack the parts and pack them as one matrix, two numbers of 4 bits a byte."""
        groups = self.parts[0].groups()
        for part in self.parts[1:]:
            if not torch.equal(part.groups(), groups):
                raise InvalidModel(
                    f"{part.name} and {self.parts[0].name} order their columns differently, and are multiplied as one"
                )
        weight = torch.cat([part.bytes() for part in self.parts])
        scale, zero = (torch.cat([part.scales()[i] for part in self.parts]).contiguous() for i in (0, 1))
        quantized = QuantizedMatrix(weight, scale, zero=zero, groups=groups)
        self.quantized = QuantizedWeight(self.ops, self.ops.arranged(quantized), self.bias)
        self.parts.clear()

    def apply(self, x: Tensor, gate: Gate = "") -> Tensor:
        """As `WeightStorage.apply`."""
        assert self.quantized is not None
        return self.quantized.apply(x, gate)


class IntegerTensors:
    """The tensors of one part as the checkpoint has them, and how they are read."""

    def __init__(self, part: MatrixPart, matrix: Matrix, halving: IntegerScheme) -> None:
        self.name, self.rows, self.cut = part
        self.columns, self.across, self.scheme = matrix.columns, matrix.shard, halving
        each = halving.each
        if self.columns % 2 and each == 8:
            raise InvalidModel(
                f"{self.name} has {self.columns} columns, which is odd, so they cannot be packed in pairs"
            )
        self.count = -(-self.columns // halving.group)
        layout, kept, wide = halving.layout, self.cut.stop - self.cut.start, self.across.stop - self.across.start
        check_aligned(self.across, each if layout != "awq" else 2, self.name)
        if layout != "packed" or halving.zeros:
            check_aligned(self.cut, each, self.name)

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=matrix.device)

        across_first = {
            "awq": (wide, kept // each),
            "gptq": (wide // each, kept),
            "packed": (kept, wide // each),
        }
        # All of it is filled, so that nothing need be cleared.
        self.weight = torch.empty(across_first[layout], dtype=torch.int32, device=matrix.device)
        packed = layout == "packed"
        self.scale = room(*((kept, self.count) if packed else (self.count, kept)), dtype=torch.float32)
        self.zero = room(*((kept // each, self.count) if packed else (self.count, kept // each)))
        self.order = (torch.arange(self.across.start, self.across.stop, device=matrix.device) // halving.group).int()

    def places(self) -> list[WeightSlot]:
        """Slots of the part's tensors."""
        name, rows, columns, count = self.name, self.rows, self.columns, self.count
        kept, wide, every, each = self.cut, self.across, slice(0, self.count), self.scheme.each
        fewer_rows, fewer_wide = packed_dim(kept, each), packed_dim(wide, each)
        scale, zero, int32 = self.scale, self.zero, torch.int32
        mean, std = columns**-0.5 / 6.0, float(1 << 29)

        def place(
            suffix: str, shape: tuple[int, ...], cut: tuple[slice, ...], into: Tensor, mean: float = 0.0
        ) -> WeightSlot:
            kind = None if into.is_floating_point() else int32
            return WeightSlot(
                f"{name}.{suffix}", shape, cut, into, mean=mean, std=0.0 if mean else std, stored_dtype=kind
            )

        if self.scheme.layout == "packed":
            places = [
                place("weight_packed", (rows, columns // each), (kept, fewer_wide), self.weight),
                place("weight_scale", (rows, count), (kept, every), scale, mean),
            ]
            zeros = place("weight_zero_point", (rows // each, count), (fewer_rows, every), zero)
            return [*places, *([zeros] if self.scheme.zeros else []), *self._order("weight_g_idx")]
        awq = self.scheme.layout == "awq"
        shape, cut = (
            ((columns, rows // each), (wide, fewer_rows)) if awq else ((columns // each, rows), (fewer_wide, kept))
        )
        return [
            place("qweight", shape, cut, self.weight),
            place("qzeros", (count, rows // each), (every, fewer_rows), zero),
            place("scales", (count, rows), (every, kept), scale, mean),
            *self._order("g_idx"),
        ]

    def _order(self, suffix: str) -> list[WeightSlot]:
        if not self.scheme.ordered:
            return []
        return [
            WeightSlot(
                f"{self.name}.{suffix}", (self.columns,), (self.across,), self.order, std=0.0, stored_dtype=torch.int32
            )
        ]

    def groups(self) -> Tensor:
        """Each column's group, [in] int64."""
        if not bool(((self.order >= 0) & (self.order < self.count)).all()):
            raise InvalidModel(f"{self.name}: a column's group is not one of {self.count}: the checkpoint is corrupt")
        return self.order.long()

    def bytes(self) -> Tensor:
        """uint8 [out, in], or [out, in / 2] of 4 bits, the even column's in the low bits."""
        if self.scheme.layout == "packed":  # on all that runs here an int32's low bits come first
            return self.weight.view(torch.uint8)
        numbers = self.numbers()
        return pack_pairs(numbers) if self.scheme.bits == 4 else numbers

    def numbers(self) -> Tensor:
        """[out, in] uint8, of layouts that pack along the outputs or in another order."""
        layout, bits = self.scheme.layout, self.scheme.bits
        return (unpack(self.weight, 4, 1, AWQ_ORDER) if layout == "awq" else unpack(self.weight, bits, 0)).t()

    def scales(self) -> tuple[Tensor, Tensor]:
        """Scales float32 and zero points int16, [out, groups]."""
        check_scale(self.scale, f"{self.name}'s scales")
        layout, bits = self.scheme.layout, self.scheme.bits
        scale = self.scale if layout == "packed" else self.scale.t()
        if not self.scheme.zeros:
            return scale, torch.full_like(scale, 1 << (bits - 1), dtype=torch.int16)
        if layout == "packed":
            return scale, unpack(self.zero, bits, 0).short()
        zero = unpack(self.zero, bits, 1, AWQ_ORDER if layout == "awq" else None).short()
        return scale, (zero + self.scheme.more).t()


def packed_dim(cut: slice, each: int) -> slice:
    """A shard of numbers packed so many to an int32, in int32."""
    return slice(cut.start // each, cut.stop // each)


def pack_pairs(numbers: Tensor) -> Tensor:
    """[out, in] of 0 to 15 -> [out, in / 2] bytes, the even column's in the low bits."""
    return (numbers[:, ::2] | (numbers[:, 1::2] << 4)).contiguous()
