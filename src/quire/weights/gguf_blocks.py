"""GGUF's quantised blocks as the numbers they mean, in float32. Definitions: ggml's ggml-common.h and ggml-quants.c."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def half(raw: Tensor) -> Tensor:
    """Bytes [N, 2 n] -> float32 [N, n]: the float16 they are."""
    return raw.contiguous().view(torch.float16).float()


def q8_0(raw: Tensor) -> Tensor:
    """d float16, then 32 int8: d q."""
    return raw[:, 2:].view(torch.int8).float() * half(raw[:, :2])


def q4_0(raw: Tensor) -> Tensor:
    """d float16, then 16 bytes, low halves the first 16 numbers: d (q - 8)."""
    numbers = torch.cat((raw[:, 2:] & 15, raw[:, 2:] >> 4), 1)
    return (numbers.float() - 8) * half(raw[:, :2])


def q4_k(raw: Tensor) -> Tensor:
    """d and dmin float16, 12 bytes of eight 6-bit scales and minima, 128 bytes of 4-bit numbers: d s q - dmin m."""
    about, packed = raw[:, 4:16], raw[:, 16:]
    low, high = about[:, :8] & 63, about[:, 8:]
    upper = (about[:, :8] >> 6) << 4
    scales = torch.cat((low[:, :4], (high & 15) | upper[:, :4]), 1).float() * half(raw[:, :2])
    minima = torch.cat((low[:, 4:], (high >> 4) | upper[:, 4:]), 1).float() * half(raw[:, 2:4])
    pairs = packed.view(-1, 4, 32)
    numbers = torch.stack((pairs & 15, pairs >> 4), 2).view(-1, 8, 32).float()
    return (numbers * scales[..., None] - minima[..., None]).flatten(1)


def q6_k(raw: Tensor) -> Tensor:
    """128 bytes of low halves, 64 of upper two bits, 16 int8 scales, d float16: d s (q - 32)."""
    low, high = raw[:, :128].view(-1, 2, 64), raw[:, 128:192].view(-1, 2, 32)
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * half(raw[:, 208:])
    fours = torch.stack((low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4), 2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    twos = (high[:, :, None] >> shifts) & 3
    numbers = (fours | (twos << 4)).reshape(-1, 16, 16).float() - 32
    return (numbers * scales[..., None]).flatten(1)


BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k}
)
"""Bytes [N, bytes a block] -> float32 [N, numbers a block]."""
