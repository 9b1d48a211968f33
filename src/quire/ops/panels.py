"""Matrices as the CPU's kernels read them: in panels of 16 outputs, of floats or of integers with scales.

`PanelMatrix` is the layout of `native/kernels.h`: a vector holds neighbouring outputs, so that nothing is added
up within one, scales of a group of columns are one load, and a panel of bfloat16 pairs is a tile of AMX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL_ROWS = 16
"""Outputs of a panel."""

UNIT = 32
"""What columns are padded to a multiple of: a tile of AMX has as many."""


SUPERBLOCK = 256
"""Columns of a superblock."""

AT_ONCE = 1 << 18
"""Bytes of rows that are packed at a time, within a core's cache."""


class PanelKind(IntEnum):
    """What a panel holds for k columns: float32 [k, 16]; bfloat16 [k / 2, 16, 2]; int8 [k / 4, 16, 4]; or words of 32
    bits [k / 8, 16], column i of 8 in bits 4 i to 4 i + 3; or numbers + 32 of 6 bits, [k / 16, 3, 16] words, see
    `native/kernels.h`; or float8_e4m3fn [k / 4, 16, 4]."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    INT6 = 4
    FLOAT8 = 5


class ScaleKind(IntEnum):
    """Scales: floats; or of superblocks, bytes times float16 numbers of 256 columns, unsigned with minima or signed."""

    F16 = 0
    BF16 = 1
    F32 = 2
    U8 = 3
    I8 = 4

    @property
    def in_superblocks(self) -> bool:
        """Whether scales lie within the panels."""
        return self in (ScaleKind.U8, ScaleKind.I8)

    def head(self, group: int) -> int:
        """Bytes of scales before each 256 columns of a panel, whose groups have `group` columns."""
        if not self.in_superblocks:
            return 0
        return PANEL_ROWS * (4 + SUPERBLOCK // group * (2 if self is ScaleKind.U8 else 1))


PLAIN: Mapping[torch.dtype, PanelKind] = MappingProxyType(
    {torch.float32: PanelKind.F32, torch.bfloat16: PanelKind.BF16}
)
"""Kinds of unquantized matrices."""


class Zeros(Protocol):
    """Allocates a tensor of zeros."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros [*shape]."""


@dataclass(slots=True, eq=False)
class PanelMatrix:
    """A matrix [outputs, inputs].

    weight: uint8 [panels, bytes]. scale [panels, G, 16]: of groups of `group` columns; None in superblocks, whose
    scales lie within `weight`, see `native/kernels.h`. zero: bfloat16 zero points of groups. values: float32 [16], what
    INT4's numbers stand for. order: int64 [in], columns of x in the matrix's order; None: as they are. which: the rows
    this stands for, None for all; those of some are for `values_of` only. handle: what the kernels are called with,
    made at the first call.
    """

    kind: PanelKind
    outputs: int
    inputs: int
    padded: int
    weight: Tensor
    group: int = 0
    scale_kind: ScaleKind = ScaleKind.F16
    scale: Tensor | None = None
    zero: Tensor | None = None
    values: Tensor | None = None
    order: Tensor | None = None
    which: Tensor | None = None
    handle: Any = field(default=None, repr=False)

    @classmethod
    def empty(cls, outputs: int, inputs: int, dtype: torch.dtype, zeros: Zeros = torch.zeros) -> PanelMatrix:
        """An unquantized matrix, whose rows `write` fills. dtype: float32 or bfloat16. zeros: allocates."""
        padded = -(-inputs // UNIT) * UNIT
        panels = -(-outputs // PANEL_ROWS)
        weight = zeros(panels, padded * PANEL_ROWS * dtype.itemsize, dtype=torch.uint8)
        return cls(PLAIN[dtype], outputs, inputs, padded, weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and their scales."""
        return sum(each.nbytes for each in (self.weight, self.scale, self.zero) if each is not None)

    @property
    def has_integers(self) -> bool:
        """Whether all its rows are whole numbers with scales, and their columns in order."""
        kinds = PanelKind.INT8, PanelKind.INT4, PanelKind.INT6
        return self.kind in kinds and self.order is None and self.which is None

    @property
    def head(self) -> int:
        """See `ScaleKind.head`."""
        return self.scale_kind.head(self.group)

    def write(self, first: int, rows: Tensor) -> None:
        """Fill rows from number `first` on, a multiple of 16, of a matrix whose numbers are stored as they are:
        unquantized, int8, or of 4 bits, two in a byte."""
        missing = (self.padded - self.inputs) * rows.shape[1] // self.inputs
        some = max(1, AT_ONCE // (rows.shape[1] * rows.itemsize * PANEL_ROWS)) * PANEL_ROWS
        for at in range(0, len(rows), some):
            piece = rows[at : at + some]
            short = -len(piece) % PANEL_ROWS
            words = (F.pad(piece, (0, missing, 0, short)) if missing or short else piece).view(torch.int32)
            turned = words.view(-1, PANEL_ROWS, words.shape[1]).transpose(1, 2)
            into = self.weight[(first + at) // PANEL_ROWS :][: len(turned)]
            into.view(torch.int32).view(turned.shape).copy_(turned)

    def rows(self, which: slice | Tensor) -> PanelMatrix:
        """Some of its rows; a tensor [T] holds their numbers."""
        if self.which is None and isinstance(which, Tensor):
            return replace(self, which=which, handle=None)
        numbers = torch.arange(self.outputs) if self.which is None else self.which
        return replace(self, which=numbers[which], handle=None)

    def values_of(self) -> Tensor:
        """The numbers that it represents, float32 [outputs, inputs], or of the rows it stands for."""
        which = torch.arange(self.outputs) if self.which is None else self.which
        panel, place = which // PANEL_ROWS, which % PANEL_ROWS
        numbers = self._numbers(panel, place)
        scale, less = self._scales(panel, place)
        if scale is not None:
            numbers.view(len(which), -1, self.group).mul_(scale[..., None])
        if less is not None:
            numbers.view(len(which), -1, self.group).sub_(less[..., None])
        ordered = numbers[:, : self.inputs]
        return ordered if self.order is None else torch.empty_like(ordered).index_copy_(1, self.order, ordered)

    def _numbers(self, panel: Tensor, place: Tensor) -> Tensor:
        runs = self.padded // SUPERBLOCK if self.head else 1
        found = self.weight.view(torch.int32).view(len(self.weight), runs, -1, PANEL_ROWS)
        words = found[panel, :, self.head // (4 * PANEL_ROWS) :, place].flatten(1)
        if self.kind is PanelKind.F32:
            return words.view(torch.float32)
        if self.kind is PanelKind.BF16:
            return words.view(torch.bfloat16).float()
        if self.kind is PanelKind.INT8:
            return words.view(torch.int8).float()
        if self.kind is PanelKind.FLOAT8:
            return words.view(torch.float8_e4m3fn).float()
        stored = words.view(torch.uint8)
        if self.kind is PanelKind.INT6:
            return sixes_of(stored)
        assert self.values is not None
        return self.values[torch.stack((stored & 15, stored >> 4), -1).flatten(1).int()]

    def _scales(self, panel: Tensor, place: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.head:
            return self._superblock_scales(panel, place)
        if self.scale is None:
            return None, None
        scale = self.scale[panel, :, place].float()
        zero = None if self.zero is None else self.zero[panel, :, place].float()
        return scale, None if zero is None else zero * scale

    def _superblock_scales(self, panel: Tensor, place: Tensor) -> tuple[Tensor, Tensor | None]:
        heads = self.weight.view(len(self.weight), self.padded // SUPERBLOCK, -1)[..., : self.head]
        by = torch.unflatten(heads[..., : 4 * PANEL_ROWS].view(torch.float16), -1, (2, PANEL_ROWS))
        each = torch.unflatten(heads[..., 4 * PANEL_ROWS :], -1, (SUPERBLOCK // self.group, -1, PANEL_ROWS))
        each = each if self.scale_kind is ScaleKind.U8 else each.view(torch.int8)
        scale = each[panel, ..., 0, place].float() * by[panel, :, :1, place].float()
        if self.scale_kind is ScaleKind.I8:
            return scale.flatten(1), None
        return scale.flatten(1), (each[panel, ..., 1, place].float() * by[panel, :, 1:, place].float()).flatten(1)


def sixes_of(stored: Tensor) -> Tensor:
    """stored uint8 [rows, 12 * runs]: of 16 columns each, see INT6 -> float32 [rows, 16 * runs]."""
    runs = stored.view(len(stored), -1, 12)
    low = torch.stack((runs[..., :8] & 15, runs[..., :8] >> 4), -1).flatten(2)
    upper = torch.stack([runs[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    high = torch.cat((upper[..., :2].flatten(2), upper[..., 2:].flatten(2)), -1)
    return (low | high << 4).flatten(1).float() - 32


def superblock_panels(numbers: Tensor, factors: Tensor, scales: Tensor) -> Tensor:
    """numbers uint8 [panels, bytes], see `pack_numbers`; factors float16 [out, 2 * S], of scales and minima in turn;
    scales uint8 [out, G], of each group its scale and, where there are some, its minimum -> `PanelMatrix.weight`."""
    count = factors.shape[1] // 2
    parts = panels_of(factors).view(torch.uint8), panels_of(scales), numbers
    return torch.cat([each.reshape(len(numbers), count, -1) for each in parts], -1).flatten(1)


def panels_of(values: Tensor) -> Tensor:
    """values [out, G] -> [panels, G, 16], zeros after the last output."""
    filled = F.pad(values, (0, 0, 0, -len(values) % PANEL_ROWS))
    return filled.view(-1, PANEL_ROWS, values.shape[1]).transpose(1, 2).contiguous()


def pack_numbers(numbers: Tensor) -> Tensor:
    """numbers [out, in], in a multiple of 8, int8, or of 4 bits in uint8 -> `PanelMatrix.weight`."""
    if numbers.dtype is torch.uint8:
        numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    words = numbers.contiguous().view(torch.int32)
    return panels_of(words).view(torch.uint8).view(-(-len(words) // PANEL_ROWS), -1)
