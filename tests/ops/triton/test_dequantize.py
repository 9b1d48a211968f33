"""Quantised matrices restored whole."""

from __future__ import annotations

import pytest
import torch

from quire.ops.operands import QuantizedMatrix
from quire.ops.quantized import E4M3
from quire.ops.quantized import dequantize as dequantized
from quire.ops.reference import ReferenceOps
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.quantized_gemm import dequantize
from tests.ops.triton.device import DEVICE

CARD = DeviceInfo.of(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize(("width", "offset"), [(600, 0), (128, 0), (32, 16)], ids=["rows", "blocks", "cut-blocks"])
def test_one_byte_per_number(width: int, offset: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(20, 600, device=DEVICE) * 20).round().to(dtype)
    scale = torch.rand(20, 1 if width == 600 else -(-(600 + offset) // width), device=DEVICE)
    got = dequantize(QuantizedMatrix(weight, scale, width, offset), 600, torch.float32, CARD)
    assert torch.equal(got, dequantized(QuantizedMatrix(weight, scale, width, offset)))


def test_half_a_byte_per_number() -> None:
    torch.manual_seed(0)
    weight = torch.randint(0, 256, (20, 300), dtype=torch.uint8, device=DEVICE)
    scale, zero = torch.rand(20, 5, device=DEVICE), torch.randint(0, 16, (20, 5), device=DEVICE)
    groups = torch.randint(0, 5, (600,), device=DEVICE)
    got = dequantize(QuantizedMatrix(weight, scale, zero=zero, groups=groups), 600, torch.float32, CARD)
    assert torch.equal(got, dequantized(QuantizedMatrix(weight, scale, zero=zero, groups=groups)))


def test_prompts_are_multiplied_by_the_dequantized_matrix() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64, device=DEVICE).bfloat16(), torch.randint(-99, 99, (24, 64), device=DEVICE)
    scale = torch.rand(24, 2, device=DEVICE)
    got = TritonOps(DEVICE).quantized_linear(x, QuantizedMatrix(weight.to(torch.int8), scale, 32))
    want = ReferenceOps().quantized_linear(x, QuantizedMatrix(weight.to(torch.int8), scale, 32))
    assert float((got - want).norm() / want.norm()) < 1e-2
