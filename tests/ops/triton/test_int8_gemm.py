"""Products of int8 activations with int8 weights against the reference, whose sums are exact, too."""

from __future__ import annotations

import pytest
import torch

from quire.ops.base import Gate
from quire.ops.quantized import quantize_tokens
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import GemmConfig
from quire.ops.triton.int8_gemm import int8_gemm_config, int8_linear, quantize_rows
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()


def matrix(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and the rows' scales."""
    weight = torch.randint(-127, 128, (outputs, inputs), device=DEVICE).to(torch.int8)
    return weight, torch.rand(outputs, 1, device=DEVICE) / 127


def test_tokens_are_rounded_as_the_reference_rounds_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 200, device=DEVICE) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1.0, 1e-30], device=DEVICE)[:, None]
    x[4] = torch.arange(200, device=DEVICE) - 99.5  # halves of steps
    x[4, 0] = 127.0
    got, steps = quantize_rows(x, CARD)
    want, scale = quantize_tokens(x)
    assert torch.equal(got, want)
    assert torch.equal(steps, scale[:, 0])


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 200), (20, 72, 256), (70, 40, 100)])
def test_products_are_those_of_the_reference(rows: int, outputs: int, inputs: int, gate: Gate) -> None:
    torch.manual_seed(rows)
    (weight, scale), x = matrix(outputs, inputs), torch.randn(rows, inputs, device=DEVICE)
    bias = torch.randn(outputs, device=DEVICE)
    want = REFERENCE.int8_linear(x.cpu(), weight.cpu(), scale.cpu(), bias.cpu(), gate).to(DEVICE)
    torch.testing.assert_close(TritonOps(DEVICE).int8_linear(x, weight, scale, bias, gate), want, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch_and_any_tiling() -> None:
    torch.manual_seed(0)
    (weight, scale), x = matrix(48, 128), torch.randn(70, 128, device=DEVICE)
    whole = BatchInvariantTritonOps(DEVICE).int8_linear(x, weight, scale)
    for rows in (slice(3, 4), slice(5, 25)):
        assert torch.equal(BatchInvariantTritonOps(DEVICE).int8_linear(x[rows], weight, scale), whole[rows])
    for rows in (1, 16, 17, 64, 65):
        how = int8_gemm_config(rows, gated=False)
        assert torch.equal(int8_linear(x[:3], weight, scale, None, how, CARD), whole[:3])
    assert int8_gemm_config(65, gated=True) == GemmConfig(128, 64, 128, 8, 3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 100, 300])
def test_half_precision_on_the_gpu(rows: int, dtype: torch.dtype, gate: Gate) -> None:
    torch.manual_seed(rows)
    (weight, scale), x = matrix(6144, 4096), (torch.randn(rows, 4096, device=DEVICE) / 32).to(dtype)
    bias, ops = torch.randn(6144, device=DEVICE).to(dtype), TritonOps(DEVICE)
    got = ops.int8_linear(x, weight, scale, bias, gate)
    rounded, steps = quantize_tokens(x)
    want = REFERENCE.linear(rounded.float() * steps, weight.float() * scale, bias.float(), gate)
    assert float((got.float() - want).norm() / want.norm()) < 1e-2
    assert torch.equal(ops.int8_linear(x, weight, scale, bias, gate), got)
