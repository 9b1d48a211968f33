"""Products with quantized matrices in plain torch: the matrix is dequantized, then multiplied. The oracle of the
kernels.

Every supported format has one of two layouts. Scaled: one number per byte (int8, or e4m3: float8 with four bits of
exponent and three of mantissa, Micikevicius et al. 2022), and a scale for every `width` columns of a row. INT4: two
numbers per byte, the even column's in the low bits, with a scale and a zero point for every group of columns of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from quire.ops.base import Gate

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale as e4m3; numbers beyond its range become its largest."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


INT8_MAX = 127.0


def dequantize_scaled(weight: Tensor, scale: Tensor, width: int, offset: int = 0) -> Tensor:
    """weight [out, in] times its scale [out, G] -> float32. Column c has scale number (c + offset) // width."""
    exact = weight.float()
    if scale.shape[1] == 1:
        return exact.mul_(scale)
    column = (torch.arange(weight.shape[1], device=weight.device) + offset) // width
    return exact.mul_(scale.index_select(1, column))


def dequantize_int4(weight: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    """weight uint8 [out, in / 2], scale and zero [out, G], groups [in]: of each column -> (w - zero) scale, float32."""
    numbers = torch.stack((weight & 15, weight >> 4), -1).flatten(1).float()
    return numbers.sub_(zero.float().index_select(1, groups)).mul_(scale.index_select(1, groups))


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] -> (int8 [T, in], float32 [T, 1]): each token by its own largest number, halves to even."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    return (exact / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


LEAST = 32
"""Rows that a card's library wants for products of integers, at least."""


def at_least(rows: int, x: Tensor) -> Tensor:
    """x with rows of zeros appended until there are `rows`."""
    return torch.nn.functional.pad(x, (0, 0, 0, max(0, rows - len(x))))


class DequantizingOps(ABC):
    """The quantized products of `Ops`, by dequantizing the matrix at each call."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Gate = "") -> Tensor:
        """See
        `Ops.linear`."""

    def scaled_linear(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        width: int,
        offset: int = 0,
        bias: Tensor | None = None,
        gate: Gate = "",
    ) -> Tensor:
        """See `Ops.scaled_linear`."""
        return self.linear(x, dequantize_scaled(weight, scale, width, offset).to(x.dtype), bias, gate)

    def int4_linear(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        groups: Tensor,
        bias: Tensor | None = None,
        gate: Gate = "",
    ) -> Tensor:
        """See `Ops.int4_linear`."""
        return self.linear(x, dequantize_int4(weight, scale, zero, groups).to(x.dtype), bias, gate)

    def int8_linear(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Ops.int8_linear`."""
        rounded, steps = quantize_tokens(x)
        if x.is_cuda and any(size % 8 for size in weight.shape):
            sums = self.linear(rounded.float(), weight.float())
        else:
            sums = torch._int_mm(at_least(LEAST if x.is_cuda else 0, rounded), weight.t())[: len(x)].float()
        out = (sums * steps * scale.t()).to(x.dtype)
        return out if bias is None else out + bias
