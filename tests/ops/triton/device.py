"""Where these tests run: on the card if there is one, else in the interpreter."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import torch

from quire.ops.quantized import E4M3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

T = TypeVar("T")


def moved(record: T) -> T:
    """A dataclass with its tensors on the device."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}  # type: ignore[arg-type]
    return type(record)(**{n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in values.items()})


def placed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor on the device, if there is one."""
    return None if tensor is None else tensor.to(DEVICE)


def in_eight_bits(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows, inputs] bfloat16, a matrix of e4m3 and its rows' scales, all random."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs, device=DEVICE).bfloat16(), torch.randn(outputs, inputs, device=DEVICE)
    scale = weight.abs().amax(1, keepdim=True) / 448
    return x, (weight / scale).to(E4M3), scale
