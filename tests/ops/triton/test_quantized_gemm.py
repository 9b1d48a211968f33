"""Products with quantised matrices against the matrix restored whole, then multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops.operands import Gate, QuantizedMatrix
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import COUNTERS, GemmConfig
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.quantized_gemm import num_splits, quantized_gemm_config, quantized_linear
from tests.ops.triton.device import DEVICE, held_by_float8

CARD, REFERENCE, E4M3 = DeviceInfo.of(DEVICE), ReferenceOps(), torch.float8_e4m3fn
ARRIVED = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
HOW = pytest.mark.parametrize(
    ("how", "rows"), [(GemmConfig(2, 4, 128, 2), 2), (GemmConfig(16, 16, 32, 4, 3), 20)], ids=["few", "many"]
)
GATES = pytest.mark.parametrize("gate", ["", "silu"])


def numbers(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a bias, and the matrix to be stored."""
    torch.manual_seed(rows)
    shapes = (rows, inputs), (outputs,), (outputs, inputs)
    x, bias, weight = (torch.randn(shape, device=DEVICE) for shape in shapes)
    return x, bias, weight


@HOW
@GATES
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("width", "offset"), [(100, 0), (32, 0), (32, 16), (30, 0)], ids=["rows", "blocks", "cut-blocks", "odd-blocks"]
)
def test_one_byte_per_number(
    width: int, offset: int, dtype: torch.dtype, gate: Gate, how: GemmConfig, rows: int
) -> None:
    x, bias, exact = numbers(rows, 20, 100)
    groups = 1 if width == 100 else -(-(100 + offset) // width)
    weight = (exact * 20).round().to(dtype) if dtype is torch.int8 else exact.to(dtype)
    scale = torch.rand(20, groups, device=DEVICE) + 0.1
    want = REFERENCE.quantized_linear(x, QuantizedMatrix(weight, scale, width, offset), bias, gate)
    got = quantized_linear(x, QuantizedMatrix(weight, scale, width, offset), bias, how, CARD, ARRIVED, gate)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)


@HOW
@GATES
def test_half_a_byte_per_number(gate: Gate, how: GemmConfig, rows: int) -> None:
    x, bias, _ = numbers(rows, 20, 96)
    weight = torch.randint(0, 256, (20, 48), dtype=torch.uint8, device=DEVICE)
    scale, zero = torch.rand(20, 3, device=DEVICE) + 0.1, torch.randint(0, 16, (20, 3), device=DEVICE)
    groups = torch.randint(0, 3, (96,), device=DEVICE)
    want = REFERENCE.quantized_linear(x, QuantizedMatrix(weight, scale, zero=zero, groups=groups), bias, gate)
    got = quantized_linear(x, QuantizedMatrix(weight, scale, zero=zero, groups=groups), bias, how, CARD, ARRIVED, gate)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)


@GATES
@pytest.mark.parametrize("width", [500, 32], ids=["rows", "blocks"])
def test_inputs_cut_into_runs_add_up_whichever_program_ends_last(width: int, gate: Gate) -> None:
    x, bias, exact = numbers(20, 40, 500)
    how, wide = GemmConfig(16, 16, 32, 4, 3), replace(CARD, sms=64)
    assert (
        num_splits(how, 6, 500, wide) == 2
        and num_splits(how, 6, 5000, wide) == 8
        and num_splits(how, 500, 5000, wide) == 1
    )
    scale = torch.rand(40, -(-500 // width), device=DEVICE) + 0.1
    weight = exact.to(E4M3)
    want = REFERENCE.quantized_linear(x, QuantizedMatrix(weight, scale, width), bias, gate)
    for _ in range(2):
        got = quantized_linear(x, QuantizedMatrix(weight, scale, width), bias, how, wide, ARRIVED, gate)
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)
        assert not ARRIVED.any(), "counters are left as they were found"


def test_many_rows_are_multiplied_by_the_dequantized_matrix() -> None:
    assert quantized_gemm_config(257, 4096, 4096) is None
    assert all(quantized_gemm_config(rows, 4096, 4096) is not None for rows in (1, 2, 3, 64, 256))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 100])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("width", [4096, 128], ids=["rows", "blocks"])
def test_bfloat16_on_the_gpu(width: int, rows: int, gate: Gate) -> None:
    x, _, exact = numbers(rows, 6144, 4096)
    exact *= torch.logspace(-6, 0, 4096, base=2, device=DEVICE)  # small ones, subnormal in e4m3, among large ones
    scale = exact.abs().view(6144, -1, width).amax(2) / 448
    matrix = QuantizedMatrix((exact / scale.repeat_interleave(width, 1)).to(E4M3), scale / 64, width)
    ops = TritonOps(DEVICE)
    got = ops.quantized_linear(x.bfloat16(), matrix, None, gate).float()
    assert not ops.arrived.any()
    held = x.bfloat16().float()
    if ops.rounds(matrix) and ops.rounds_rows(x.bfloat16()):
        held = held_by_float8(held, 0 if width == 4096 else width)
    want = REFERENCE.quantized_linear(held, matrix, None, gate)
    assert float((got - want).norm() / want.norm()) < 1e-2
