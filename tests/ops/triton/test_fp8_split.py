"""Products with a matrix in eight bits by way of float8, which must round nothing of a bfloat16 x."""

from __future__ import annotations

import pytest
import torch

from quire.ops.base import Gate, QuantizedMatrix
from quire.ops.quantized import E4M3
from quire.ops.reference import ReferenceOps
from quire.ops.triton import quantized_gemm
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from tests.ops.triton.device import DEVICE, in_eight_bits

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
ONE = torch.ones((), device=DEVICE)


def test_two_numbers_of_eight_bits_are_one_of_sixteen() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 250, device=DEVICE) * torch.logspace(-3, 3, 9, device=DEVICE)[:, None]
    x[3] *= torch.logspace(-4, 0, 250, device=DEVICE)
    x = x.bfloat16().float()
    halves, unit = quantized_gemm.fp8_split(x, CARD)
    high, low = halves.view(9, 2, 250).float().unbind(1)
    off = ((high + low / 16) * unit[:, None] - x).abs()
    most = x.abs().amax(1, keepdim=True)
    assert torch.equal(off[x.abs() > most / 4096], torch.zeros_like(off[x.abs() > most / 4096])), "to the bit"
    assert float((off / most).max()) < 2**-20
    assert float(high.abs().max()) <= 256 and float(low.abs().max()) <= 256


def test_a_row_of_zeros_stays_one() -> None:
    halves, unit = quantized_gemm.fp8_split(torch.zeros(1, 32, device=DEVICE), CARD)
    assert not halves.float().any() and float(unit) > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["", "silu", "gelu"])
@pytest.mark.parametrize("at_once", [7, 64])
def test_a_product_with_bias_gate_and_scale(
    gate: Gate, bias: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_gemm, "ROWS_AT_ONCE", at_once)
    torch.manual_seed(0)
    x = torch.randn(20, 192, device=DEVICE).bfloat16().float()
    weight, scale = torch.randn(48, 192, device=DEVICE).to(E4M3), torch.rand(48, 1, device=DEVICE) + 0.1
    shift = torch.randn(48, device=DEVICE) if bias else None
    got = quantized_gemm.fp8_linear(x, weight, scale, shift, ONE, CARD, gate)
    want = REFERENCE.quantized_linear(x, QuantizedMatrix(weight, scale, 192), shift, gate)
    assert float((got - want).norm() / want.norm()) < (1e-5 if DEVICE.type == "cpu" else 1e-3)


def test_unsupported_gpus_and_shapes_use_other_products() -> None:
    weight = torch.zeros(48, 192)
    assert quantized_gemm.supports_fp8(weight, DeviceInfo(1, (9, 0))) and quantized_gemm.supports_fp8(
        weight, DeviceInfo(1, (8, 9))
    )
    assert not quantized_gemm.supports_fp8(weight, DeviceInfo(1, (8, 6)))
    assert not quantized_gemm.supports_fp8(weight[:, :100], DeviceInfo(1, (9, 0))) and not quantized_gemm.supports_fp8(
        weight[:40], DeviceInfo(1, (9, 0))
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [17, 64, 256, 1500])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (2048, 14336)])
def test_eight_bits_on_the_gpu(rows: int, gate: Gate, outputs: int, inputs: int) -> None:
    x, stored, scale = in_eight_bits(rows, outputs, inputs)
    want = REFERENCE.quantized_linear(x.float(), QuantizedMatrix(stored, scale, inputs), None, gate)
    got = TritonOps(DEVICE).quantized_linear(x, QuantizedMatrix(stored, scale, inputs), None, gate)
    assert float((got.float() - want).norm() / want.norm()) < (2.5e-3 if not gate else 4e-3)
