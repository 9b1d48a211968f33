"""Blocks of GGUF's quantized types, as in ggml-common.h and ggml-quants.c: to whole numbers with their scales, to
float32, and to the matrices that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.integer import floats_of, pack_floats, pack_integers, pack_superblocks
from quire.ops.operands import IntegerMatrix


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


class ValueBlocks(NamedTuple):
    """N blocks of a type that kernels have no layout for, as float32 [N, n]."""

    numbers: Tensor

    def values(self) -> Tensor:
        """float32 [N, n]."""
        return self.numbers


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


def fifth_bits(raw: Tensor) -> Tensor:
    """4 bytes of 32 bits, then 16 bytes of low halves: the numbers 0 to 31, uint8 [N, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    fifth = ((raw[:, :4, None] >> shifts) & 1).flatten(1)
    return torch.cat((raw[:, 4:] & 15, raw[:, 4:] >> 4), 1) | (fifth << 4)


def q5_0(raw: Tensor) -> Blocks:
    """d float16, 32 fifth bits, then 16 bytes as in Q4_0: d (q - 16)."""
    return Blocks(fifth_bits(raw[:, 2:]).view(torch.int8) - 16, float16(raw[:, :2]))


def q4_1(raw: Tensor) -> ValueBlocks:
    """d and m float16, then 16 bytes as in Q4_0: d q + m."""
    about = float16(raw[:, :4]).float()
    return ValueBlocks(torch.cat((raw[:, 4:] & 15, raw[:, 4:] >> 4), 1).float() * about[:, :1] + about[:, 1:])


def q5_1(raw: Tensor) -> ValueBlocks:
    """d and m float16, 32 fifth bits, then 16 bytes as in Q4_0: d q + m."""
    about = float16(raw[:, :4]).float()
    return ValueBlocks(fifth_bits(raw[:, 4:]).float() * about[:, :1] + about[:, 1:])


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 4-bit numbers of IQ4_NL and IQ4_XS stand for."""


def iq4_numbers(packed: Tensor) -> Tensor:
    """Bytes [N, 16 g] of groups of 32 as in Q4_0 -> int8 [N, 32 g]."""
    grouped = packed.view(len(packed), -1, 16)
    codes = torch.cat((grouped & 15, grouped >> 4), 2).flatten(1)
    return torch.tensor(IQ4_VALUES, dtype=torch.int8, device=packed.device)[codes.int()]


def iq4_nl(raw: Tensor) -> Blocks:
    """d float16, then 16 bytes as in Q4_0: d times `IQ4_VALUES`."""
    return Blocks(iq4_numbers(raw[:, 2:].contiguous()), float16(raw[:, :2]))


def iq4_xs(raw: Tensor) -> Blocks:
    """d float16, upper bits of eight scales, their lower halves, 128 bytes: d (s - 32) times `IQ4_VALUES`."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device)
    upper = ((raw[:, 2:4, None] >> shifts) & 3).flatten(1) << 4
    lower = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), 2).flatten(1)
    scales = ((lower | upper).view(torch.int8) - 32).repeat_interleave(2, 1)
    factor = float16(raw[:, :2])
    both = torch.cat((factor, torch.zeros_like(factor)), 1)
    return Blocks(iq4_numbers(raw[:, 8:].contiguous()), both, scales.view(torch.uint8), signed=True)


def quarters_of(packed: Tensor) -> Tensor:
    """64 bytes -> numbers of 2 bits, uint8 [N, 256]: of 32 bytes the lowest bits first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed.view(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


def q2_k(raw: Tensor) -> ValueBlocks:
    """16 bytes of 4-bit scales and minima, 64 of 2-bit numbers, d and dmin float16: d s q - dmin m."""
    about, scale = raw[:, :16], float16(raw[:, 80:]).float()
    grouped = quarters_of(raw[:, 16:80].contiguous()).float().view(len(raw), 16, 16)
    own, least = (about & 15).float() * scale[:, :1], (about >> 4).float() * scale[:, 1:]
    return ValueBlocks((grouped * own[..., None] - least[..., None]).flatten(1))


def q3_k(raw: Tensor) -> Blocks:
    """32 bytes of third bits, 64 of lower two bits, 12 of sixteen 6-bit scales, d float16: d (s - 32) (q - 4)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    third = ((raw[:, None, :32] >> shifts) & 1).flatten(1) << 2
    numbers = (quarters_of(raw[:, 32:96].contiguous()) | third).view(torch.int8) - 4
    low, high = raw[:, 96:104], raw[:, 104:108]
    upper = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 1) << 4
    scales = (torch.cat((low & 15, low >> 4), 1) | upper).view(torch.int8) - 32
    factor = float16(raw[:, 108:])
    return Blocks(numbers, torch.cat((factor, torch.zeros_like(factor)), 1), scales.view(torch.uint8), signed=True)


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


PACKED: Mapping[str, Callable[[Tensor], Blocks | FloatBlocks]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q5_0": q5_0,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
"""Types that kernels read: bytes [N, bytes a block] -> what they stand for."""

BLOCKS: Mapping[str, Callable[[Tensor], Blocks | FloatBlocks | ValueBlocks]] = {
    **PACKED,
    "Q4_1": q4_1,
    "Q5_1": q5_1,
    "Q2_K": q2_k,
}
"""All types in blocks."""
