"""Random matrices of integers of every kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.ops.integer import pack_floats, pack_integers, pack_rows, pack_superblocks
from quire.ops.operands import IntegerMatrix
from quire.ops.triton.launch import DeviceInfo
from tests.ops.triton.device import DEVICE

KINDS = pytest.mark.parametrize(
    ("kind", "group"),
    [
        *(("zeros", 128), ("zeros", 64), ("zeros", 32), ("nibbles", 32), ("bytes", 32), ("rows", 128)),
        *(
            ("byte zeros", 128),
            ("byte zeros", 32),
            ("floats", 32),
            ("large floats", 32),
            ("q4_k", 32),
            ("q5_k", 32),
            ("q6_k", 16),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"of {value}",
)


def made(kind: str, group: int, outputs: int, inputs: int, half: bool = True) -> IntegerMatrix:
    """A random matrix. Superblocks have a multiple of 256 inputs, and at least so many as asked for."""
    if kind.startswith("q"):
        return superblocks(kind, group, outputs, -(-inputs // 256) * 256)
    count, dtype = -(-inputs // group), torch.float16 if half else torch.bfloat16
    scale = (torch.rand(outputs, count, device=DEVICE) + 0.1).to(dtype).float()
    if kind in ("bytes", "byte zeros", "rows"):
        numbers = torch.randint(-128, 128, (outputs, inputs), device=DEVICE).to(torch.int8)
        if kind == "rows":
            return pack_rows(numbers, scale[:, :1] / 17)
        zero = torch.randint(-128, 129, (outputs, count), device=DEVICE) if kind == "byte zeros" else None
        return pack_integers(numbers, group, scale / 16, zero=zero, half=half)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    if kind.endswith("floats"):
        least = 120 if kind == "large floats" else 116
        exponents = torch.randint(least, least + 12, (outputs, count), dtype=torch.uint8, device=DEVICE)
        exponents[:, ::7] = 0
        return pack_floats(numbers, exponents)
    if kind == "zeros":
        zero = torch.randint(0, 17, (outputs, count), device=DEVICE)
        return pack_integers(numbers, group, scale, zero=zero, half=half)
    return pack_integers(numbers, group, scale, half=half)


def taking(
    takes: Callable[[Tensor, IntegerMatrix, DeviceInfo], bool], hopper: DeviceInfo, count: int
) -> Callable[..., bool]:
    """Whether a kernel takes a product: of `count` rows and a large 4-bit matrix on a Hopper card, where no other is
    named. The matrix has no memory."""

    def taken(kind: str = "zeros", group: int = 128, outputs: int = 28672, inputs: int = 4096,
              rows: int = count, dtype: torch.dtype = torch.bfloat16, card: DeviceInfo = hopper) -> bool:  # fmt: skip
        x, small = torch.zeros(rows, inputs, dtype=dtype, device=DEVICE), made(kind, group, 64, 512)
        weight = torch.empty(inputs * small.bits // 256, outputs, 32, dtype=torch.uint8, device="meta")
        return takes(x, small._replace(inputs=inputs, weight=weight), card)

    return taken


def superblocks(kind: str, group: int, outputs: int, inputs: int) -> IntegerMatrix:
    """A random matrix as GGUF has them."""
    supers = (torch.rand(outputs, inputs // 256, 2, device=DEVICE) / 64 + 0.002).half()
    low, high = (-128, 128) if kind == "q6_k" else (0, 64)
    scales = torch.randint(low, high, (outputs, inputs // 16), device=DEVICE).to(torch.int8).view(torch.uint8)
    low, high, dtype = {"q4_k": (0, 16, torch.uint8), "q5_k": (0, 32, torch.int8), "q6_k": (-32, 32, torch.int8)}[kind]
    numbers = torch.randint(low, high, (outputs, inputs), device=DEVICE).to(dtype)
    return pack_superblocks(numbers, group, scales, supers)


def off(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    return float((got.float() - want.float()).norm() / want.float().norm())
