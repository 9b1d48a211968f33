"""Products with quantized matrices in plain torch: the matrix is dequantized, then multiplied. The oracle of the
kernels.

Every supported format has one of two layouts. Scaled: one number per byte (int8, or e4m3: float8 with four bits of
exponent and three of mantissa, Micikevicius et al. 2022), and a scale for every `width` columns of a row. Grouped: one
number per byte or two, the even column's in the low bits, with a scale and a zero point for every group of columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.integer import dequantize_integers
from quire.ops.operands import (
    AnyMatrix,
    ExpertMatrices,
    IntegerMatrix,
    MixedMatrix,
)
from quire.ops.panels import PanelMatrix

Each = TypeVar("Each")

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


class Float8(NamedTuple):
    """A format of K/V in 8 bits. most: its largest number. error: the largest median relative error of values that it
    holds, whose own are half of this: those that underflow have far more."""

    dtype: torch.dtype
    most: float
    error: float


FLOAT8: Mapping[str, Float8] = MappingProxyType(
    {"fp8": Float8(E4M3, E4M3_MAX, 0.06), "fp8_e5m2": Float8(torch.float8_e5m2, 57344.0, 0.12)}
)
"""By the names of `--kv-cache-dtype`: three bits of mantissa, or two and a wider range."""

FLOAT8_MAX: Mapping[torch.dtype, float] = MappingProxyType({each.dtype: each.most for each in FLOAT8.values()})


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype = E4M3) -> Tensor:
    """x / scale in float8; numbers beyond its range become its largest."""
    most = FLOAT8_MAX[dtype]
    return (x.float() / scale).clamp(-most, most).to(dtype)


INT8_MAX = 127.0


def dequantize(matrix: AnyMatrix) -> Tensor:
    """The numbers of a matrix, float32 [out, in]."""
    if isinstance(matrix, IntegerMatrix):
        return dequantize_integers(matrix)
    if isinstance(matrix, MixedMatrix):
        return torch.cat([dequantize(part) for part in matrix.parts])
    if isinstance(matrix, PanelMatrix):
        return matrix.values_of()
    weight, scale = matrix.weight, matrix.scale
    if matrix.zero is not None and matrix.groups is not None:
        numbers = (torch.stack((weight & 15, weight >> 4), -1).flatten(1) if matrix.is_int4 else weight).float()
        zero = matrix.zero.float().index_select(1, matrix.groups)
        return numbers.sub_(zero).mul_(scale.index_select(1, matrix.groups))
    exact = weight.float()
    if scale.shape[1] == 1:
        return exact.mul_(scale)
    column = (torch.arange(weight.shape[1], device=weight.device) + matrix.offset) // matrix.width
    return exact.mul_(scale.index_select(1, column))


def expert_matrices(matrix: ExpertMatrices, count: int) -> Sequence[AnyMatrix]:
    """The matrices of `count` experts."""
    if isinstance(matrix, IntegerMatrix):
        return [matrix.expert(e) for e in range(count)]
    rows = len(matrix.weight) // count
    return [matrix.rows(slice(first, first + rows)) for first in range(0, count * rows, rows)]


def with_biases(matrices: Iterable[Each], biases: Tensor | None) -> Iterator[tuple[Each, Tensor | None]]:
    """The matrices of experts, each with its bias."""
    return zip(matrices, repeat(None) if biases is None else biases, strict=False)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (int8 [T, in], float32 [T, 1]): each token by its own largest number, halves to even."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    return (exact / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


LEAST_FLOAT8 = 1e-30
"""The least that tokens in float8 are scaled by: E4M3_MAX times its inverse is finite."""


def float8_tokens(x: Tensor, width: int = 0) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (e4m3 [T, in], float32 [T, runs]): each run of `width` numbers of a token by its own largest; 0: the
    whole token."""
    inputs = x.shape[1]
    width = width or inputs
    runs = F.pad(x.float(), (0, -inputs % width)).view(len(x), -(-inputs // width), width)
    largest = runs.abs().amax(-1, keepdim=True).clamp(min=LEAST_FLOAT8)
    # A number by a tensor would be the number times its inverse, which is rounded once more.
    inverse = torch.full_like(largest, E4M3_MAX) / largest
    return (runs * inverse).to(E4M3).flatten(1)[:, :inputs], largest[..., 0] / E4M3_MAX


EXACT = 1024
"""Columns of int8 whose products float32 adds up exactly, in any order: 127 * 128 * 1024 < 2 ** 24."""


@cache
def adds_exactly() -> bool:
    """Whether torch multiplies integers right on this CPU: without VNNI, sums of two products are cut to 16 bits."""
    largest = torch.full((33, 72), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 72 * 127 * 127).all())


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a int8 [T, in], b int8 [out, in], on a CPU -> their exact product, float32 [T, out]."""
    if adds_exactly() and a.shape[1] > 1:  # of a single column torch's product is wrong on any
        return torch._int_mm(a, b.t()).float()
    total = torch.zeros(len(a), len(b), dtype=torch.int32)
    for x, y in zip(torch.split(a, EXACT, 1), torch.split(b, EXACT, 1), strict=True):
        total += F.linear(x.float(), y.float()).int()
    return total.float()


LEAST = 32
"""Rows that a card's library wants for products of integers, at least."""
