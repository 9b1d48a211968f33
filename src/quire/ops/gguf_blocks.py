"""Blocks of GGUF's quantized types, as in ggml-common.h and ggml-quants.c: to whole numbers with their scales, to
float32, and to the matrices that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.base import IntegerMatrix
from quire.ops.integer import floats_of, pack_floats, pack_integers, pack_superblocks


class Blocks(NamedTuple):
    """N blocks of n numbers. numbers [N, n]: 0 to 15 in uint8, or signed in int8. factors float16 [N, 1 or 2].

    scales None: numbers, 8 less if they are uint8, times the factor. Else uint8 [N, n / 16]: scale and minimum of every
    32 numbers in turn, or signed scales of every 16 (`signed`); the first factor is of scales, the second of minima.
    """

    numbers: Tensor
    factors: Tensor
    scales: Tensor | None = None
    signed: bool = False

    def values(self) -> Tensor:
        """float32 [N, n]."""
        scale = self.factors.float()[:, :1]
        if self.scales is None:
            return (self.numbers.float() - 8.0 * (self.numbers.dtype is torch.uint8)) * scale
        if self.signed:
            grouped = self.numbers.float().view(len(scale), -1, 16)
            return (grouped * (self.scales.view(torch.int8).float() * scale)[..., None]).flatten(1)
        least = self.scales[:, 1::2].float() * self.factors.float()[:, 1:]
        grouped = self.numbers.float().view(len(scale), -1, 32)
        return (grouped * (self.scales[:, ::2].float() * scale)[..., None] - least[..., None]).flatten(1)

    def matrix(self, rows: int) -> IntegerMatrix:
        """The matrix of so many rows, each of as many blocks."""
        numbers = self.numbers.view(rows, -1)
        if self.scales is None:
            return pack_integers(numbers, 32, self.factors.float().view(rows, -1))
        group = 16 if self.signed else 32
        return pack_superblocks(numbers, group, self.scales.view(rows, -1), self.factors.view(rows, -1, 2))


class FloatBlocks(NamedTuple):
    """N blocks of 32 floats of 4 bits, codes uint8 [N, 32], and exponents uint8 [N, 1], see `IntegerKind.FLOATS`."""

    codes: Tensor
    exponents: Tensor

    def values(self) -> Tensor:
        """float32 [N, 32]."""
        return floats_of(self.codes) * torch.exp2(self.exponents.float() - 127.0)

    def matrix(self, rows: int) -> IntegerMatrix:
        """The matrix of so many rows, each of as many blocks."""
        return pack_floats(self.codes.view(rows, -1), self.exponents.reshape(rows, -1))


def float16(raw: Tensor) -> Tensor:
    """Bytes [N, 2 n] -> float16 [N, n], of which they are."""
    return raw.contiguous().view(torch.float16)


def q8_0(raw: Tensor) -> Blocks:
    """d float16, then 32 int8: d q."""
    return Blocks(raw[:, 2:].contiguous().view(torch.int8), float16(raw[:, :2]))


def q4_0(raw: Tensor) -> Blocks:
    """d float16, then 16 bytes, low halves the first 16 numbers: d (q - 8)."""
    return Blocks(torch.cat((raw[:, 2:] & 15, raw[:, 2:] >> 4), 1), float16(raw[:, :2]))


def mxfp4(raw: Tensor) -> FloatBlocks:
    """An exponent e, then 16 bytes, low halves the first 16 codes: 2^(e - 127) times what they stand for."""
    return FloatBlocks(torch.cat((raw[:, 1:] & 15, raw[:, 1:] >> 4), 1), raw[:, :1])


def scales_of(about: Tensor) -> Tensor:
    """12 bytes of eight 6-bit scales and minima -> [N, 16], in turn."""
    low, high = about[:, :8] & 63, about[:, 8:]
    upper = (about[:, :8] >> 6) << 4
    scales = torch.cat((low[:, :4], (high & 15) | upper[:, :4]), 1)
    minima = torch.cat((low[:, 4:], (high >> 4) | upper[:, 4:]), 1)
    return torch.stack((scales, minima), 2).flatten(1)


def halves_of(packed: Tensor) -> Tensor:
    """128 bytes -> [N, 8, 32] numbers of 4 bits: 32 in the low halves of 32 bytes, then 32 in the high ones."""
    pairs = packed.view(-1, 4, 32)
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1, 2)


def q4_k(raw: Tensor) -> Blocks:
    """d and dmin float16, 12 bytes of scales and minima, 128 bytes of 4-bit numbers: d s q - dmin m."""
    return Blocks(halves_of(raw[:, 16:]).flatten(1), float16(raw[:, :4]), scales_of(raw[:, 4:16]))


def q5_k(raw: Tensor) -> Blocks:
    """As Q4_K, with 32 bytes before the 4-bit numbers: bit i of byte j is the fifth of number 32 i + j."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    fifth = ((raw[:, None, 16:48] >> shifts) & 1) << 4
    numbers = (halves_of(raw[:, 48:]) | fifth).flatten(1).view(torch.int8)
    return Blocks(numbers, float16(raw[:, :4]), scales_of(raw[:, 4:16]))


def q6_k(raw: Tensor) -> Blocks:
    """128 bytes of low halves, 64 of upper two bits, 16 int8 scales, d float16: d s (q - 32)."""
    low, high = raw[:, :128].view(-1, 2, 64), raw[:, 128:192].view(-1, 2, 32)
    fours = torch.stack((low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4), 2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device)[:, None]
    numbers = (fours | (((high[:, :, None] >> shifts) & 3) << 4)).flatten(1).view(torch.int8) - 32
    factor = float16(raw[:, 208:])
    return Blocks(numbers, torch.cat((factor, torch.zeros_like(factor)), 1), raw[:, 192:208].contiguous(), signed=True)


BLOCKS: Mapping[str, Callable[[Tensor], Blocks | FloatBlocks]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "MXFP4": mxfp4,
}
"""Bytes [N, bytes a block] -> what they stand for."""
