"""Where these tests run: on the card if there is one, else in the interpreter."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import pytest
import torch

from quire.layers.quantization.scaled import quantize
from quire.ops.operands import QuantizedMatrix
from quire.ops.quantized import E4M3, float8_tokens
from quire.ops.triton.launch import HOPPER, DeviceInfo

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

NEEDS_HOPPER = pytest.mark.skipif(
    DEVICE.type != "cuda" or DeviceInfo.of(DEVICE).capability != HOPPER, reason="only Hopper GPUs have its instructions"
)

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


def float8_matrix(
    outputs: int, inputs: int, width: int, exact: torch.Tensor | None = None, height: int = 1
) -> QuantizedMatrix:
    """`exact` or random numbers in e4m3, with a scale for every `width` columns of a row, 0: for the whole row, and for
    every `height` rows."""
    exact = torch.randn(outputs, inputs, device=DEVICE) if exact is None else exact
    numbers, scale = quantize(exact, E4M3, (height, width or inputs))
    scale = scale.repeat_interleave(height, 0)[:outputs].contiguous()
    return QuantizedMatrix(numbers, scale, width or inputs, height=height)


def held_by_float8(x: torch.Tensor, width: int) -> torch.Tensor:
    """What e4m3 holds of x, float32, see `float8_tokens`."""
    numbers, steps = float8_tokens(x, width)
    return numbers.float() * steps.repeat_interleave(width or x.shape[1], 1)[:, : x.shape[1]]
