"""Products of a few rows, with what stands around them, against the same made of plain operations."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from quire.ops.operands import Gate, QuantizedMatrix
from quire.ops.quantized import E4M3
from quire.ops.reference import ReferenceOps
from quire.ops.triton import quantized_gemm
from quire.ops.triton.gemv import (
    COUNTERS,
    GemmConfig,
    cut,
    gemm_config,
    gemv_linear,
    num_runs,
    padded_rows,
    scaled_gemm_config,
    vectors,
)
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from tests.ops.triton.device import DEVICE, in_eight_bits

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
VECTOR, WIDE, MATRIX = GemmConfig(1, 4, 256, 2), GemmConfig(4, 2, 256, 2), GemmConfig(16, 16, 64, 4, 3)
BLOCKS, APART = GemmConfig(1, 8, 64, 1), GemmConfig(3, 4, 32, 2)
AHEAD, TALL = GemmConfig(16, 16, 32, 4, 3, 64), GemmConfig(16, 16, 64, 4, 3)
RUNS, RUNS_AHEAD = GemmConfig(16, 16, 32, 4, 3, splits=4), GemmConfig(16, 16, 32, 4, 3, 64, 2)
ARRIVED = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["", "silu", "gelu"])
@pytest.mark.parametrize(
    ("how", "rows"),
    [(VECTOR, 1), (WIDE, 3), (BLOCKS, 1), (APART, 3), (MATRIX, 2), (MATRIX, 16), (AHEAD, 5), (TALL, 40)],
    ids=["vector", "few", "blocks", "apart", "two", "sixteen", "ahead", "forty"],
)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 192), (10, 100)], ids=["even", "odd"])
def test_a_product_with_bias_gate_and_scale(
    outputs: int, inputs: int, how: GemmConfig, rows: int, gate: Gate, bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
    shift = torch.randn(outputs, device=DEVICE) if bias else None
    got = gemv_linear(x, weight, shift, how, CARD, gate)
    torch.testing.assert_close(got, REFERENCE.linear(x, weight, shift, gate), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("gate", ["gelu_erf", "clamped", "relu", "relu2"])
@pytest.mark.parametrize(("how", "rows"), [(VECTOR, 1), (MATRIX, 2), (RUNS, 3)], ids=["vector", "tile", "runs"])
def test_every_gate(how: GemmConfig, rows: int, gate: Gate) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 256, device=DEVICE), torch.randn(24, 256, device=DEVICE)
    bias = torch.randn(24, device=DEVICE)
    got = gemv_linear(x, weight, bias, how, CARD, gate, arrived=ARRIVED)
    torch.testing.assert_close(got, REFERENCE.linear(x, weight, bias, gate), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(
    ("how", "rows"),
    [(VECTOR, 1), (BLOCKS, 1), (APART, 3), (MATRIX, 2), (AHEAD, 5), (TALL, 40)],
    ids=["one", "blocks", "apart", "two", "ahead", "forty"],
)
def test_a_matrix_of_eight_bits(how: GemmConfig, rows: int, gate: Gate) -> None:
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, 192, device=DEVICE), torch.randn(24, device=DEVICE)
    weight, scale = torch.randn(24, 192, device=DEVICE).to(E4M3), torch.rand(24, 1, device=DEVICE) + 0.1
    got = gemv_linear(x, weight, bias, how, CARD, gate, scale)
    want = REFERENCE.quantized_linear(x, QuantizedMatrix(weight, scale, 192), bias, gate)
    assert float((got - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("how", [VECTOR, BLOCKS, APART], ids=["one", "blocks", "apart"])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 192), (10, 168)], ids=["even", "odd"])
def test_a_matrix_with_scales_of_runs(outputs: int, inputs: int, how: GemmConfig, gate: Gate) -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(how.rows, inputs, device=DEVICE), in_runs(outputs, inputs, 32)
    bias = torch.randn(outputs, device=DEVICE)
    got = gemv_linear(x, matrix.weight, bias, how, CARD, gate, matrix.scale, run=32)
    want = REFERENCE.quantized_linear(x, matrix, bias, gate)
    assert float((got - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize(("run", "offset", "left"), [(128, 0, False), (128, 64, True), (96, 0, True)])
def test_one_row_is_left_to_the_matrix_units_where_runs_are_not_whole(
    run: int, offset: int, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(run + offset)
    x, matrix = torch.randn(1, 512, device=DEVICE, dtype=torch.bfloat16), in_runs(24, 640, run)
    matrix = matrix._replace(weight=matrix.weight[:, :512].contiguous(), offset=offset)
    units = Mock(return_value=x)
    monkeypatch.setattr(quantized_gemm, "quantized_linear", units)
    got = TritonOps(DEVICE).quantized_linear(x, matrix)
    assert units.called is left
    if not left:
        want = REFERENCE.quantized_linear(x.float(), matrix)
        assert float((got.float() - want).norm() / want.norm()) < 1e-2


def in_runs(outputs: int, inputs: int, run: int) -> QuantizedMatrix:
    """A random matrix of which each `run` columns of a row have a scale."""
    weight = torch.randn(outputs, inputs, device=DEVICE).to(E4M3)
    return QuantizedMatrix(weight, torch.rand(outputs, -(-inputs // run), device=DEVICE) + 0.1, run)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "eight-bits"])
@pytest.mark.parametrize(("how", "rows"), [(RUNS, 3), (RUNS_AHEAD, 5), (RUNS, 40)], ids=["three", "ahead", "forty"])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 256), (10, 100)], ids=["even", "odd"])
def test_inputs_cut_into_runs_add_up(
    outputs: int, inputs: int, how: GemmConfig, rows: int, scaled: bool, gate: Gate, bias: bool
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
    shift, scale = torch.randn(outputs, device=DEVICE) if bias else None, torch.rand(outputs, 1, device=DEVICE) + 0.1
    want = REFERENCE.linear(x, weight, shift, gate)
    if scaled:
        weight = weight.to(E4M3)
        want = REFERENCE.quantized_linear(x, QuantizedMatrix(weight, scale, inputs), shift, gate)
    for _ in range(2):
        got = gemv_linear(x, weight, shift, how, CARD, gate, scale if scaled else None, ARRIVED)
        assert float((got - want).norm() / want.norm()) < 1e-3
        assert not ARRIVED.any(), "counters are left as they were found"


def test_a_run_prefetches_no_more_than_the_shortest_has() -> None:
    assert cut(RUNS, 256, 2) == (64, 4, 0)
    assert cut(RUNS, 100, 2) == (32, 4, 0)
    assert cut(RUNS_AHEAD, 256, 2) == (128, 2, 64)
    assert cut(RUNS_AHEAD, 96, 2) == (64, 2, 0)
    assert cut(RUNS, 256, COUNTERS + 1) == (256, 1, 0), "as many tiles have no counters"


def test_small_matrices_are_cut_into_runs_until_there_are_programs_enough() -> None:
    assert [(gemm_config(16, outputs, 3072) or VECTOR).splits for outputs in (1024, 4096, 8192)] == [4, 1, 1]
    assert [num_runs(wanted, 4096) for wanted in (0, 1, 3, 6, 100)] == [1, 1, 2, 4, 8]
    assert [num_runs(8, inputs) for inputs in (256, 1024, 2048)] == [1, 2, 4], "no run is shorter than 512"


@pytest.mark.parametrize("rows", [1, 2])
def test_multiply_adds_leave_no_input_over_and_fit_into_registers(rows: int) -> None:
    for inputs in (128, 896, 1152, 2048, 2560, 3072, 3584, 4864, 5120, 6912, 8960, 9728, 11008, 12288, 18944, 27648):
        how = padded_rows(rows, inputs)
        assert inputs % how.inputs == 0
        if vectors(1024, inputs) >= rows:
            assert inputs * how.outputs <= 128 * 32 * how.warps, "numbers a thread, two to a register"
    assert padded_rows(1, 14336).inputs == 16384, "nearly a power of two, and many: taken whole"
    assert padded_rows(1, 1001).inputs == 1024, "too many blocks: taken whole"


@pytest.mark.parametrize("gated", [False, True])
def test_multiply_adds_of_eight_bits_leave_no_input_over(gated: bool) -> None:
    for inputs in (1024, 2560, 3584, 4096, 5120, 12288, 14336, 17408, 18944):
        how = scaled_gemm_config(1, 4096, inputs, gated)
        assert how is not None and not how.stages and inputs % how.inputs == 0
        runs = scaled_gemm_config(1, 4096, inputs, gated, 128)
        assert runs is not None and not runs.stages and inputs % runs.inputs == 0 and runs.inputs % 128 == 0
        assert scaled_gemm_config(2, 4096, inputs, gated, 128) is None, "scales of runs: see `quantized_gemm`"
    assert scaled_gemm_config(1, 4096, 5120, gated, 1024) is None, "a tile ends within a run"


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_matrices_in_eight_bits_keep_a_gpu_busy_whatever_their_shape(rows: int) -> None:
    for outputs, inputs in ((6144, 4096), (4096, 4096), (4096, 12288)):
        how = scaled_gemm_config(rows, outputs, inputs)
        assert how is not None
        programs = -(-outputs // how.outputs) * how.splits
        assert 128 <= programs <= 512, "about as many as an H200 runs at once"
        assert how.inputs <= inputs // how.splits
    assert scaled_gemm_config(17, 6144, 4096) is None, "more are rounded: see `rounded_gemm`"


def test_large_and_small_numbers_keep_their_exponent_in_half_precision() -> None:
    x = torch.tensor([[6e5, 1.0, 1e-3, -3e-6]], device=DEVICE)
    weight, scale = torch.eye(4, 256, device=DEVICE).to(E4M3), torch.ones(4, 1, device=DEVICE)
    got = gemv_linear(torch.nn.functional.pad(x, (0, 252)), weight, None, MATRIX, CARD, "", scale)
    torch.testing.assert_close(got, x, rtol=1e-3, atol=5e-7)


def test_many_rows_are_left_to_the_library() -> None:
    assert gemm_config(17, 4096, 4096) is None
    assert gemm_config(65, 14336, 4096, gated=True) is None
    assert gemm_config(64, 14336, 4096, gated=True) is not None
    assert all(gemm_config(rows, 4096, 4096) is not None for rows in (1, 2, 16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (1024, 2048), (2048, 8192), (1024, 3072), (896, 18944)])
def test_bfloat16_on_the_gpu(rows: int, gate: Gate, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5
    how = gemm_config(rows, outputs // (2 if gate else 1), inputs, gate != "")
    assert how is not None
    got = gemv_linear(x.bfloat16(), weight.bfloat16(), None, how, CARD, gate).float()
    want = REFERENCE.linear(x.bfloat16().float(), weight.bfloat16().float(), None, gate)
    assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (2048, 14336), (1024, 5120)])
def test_eight_bits_on_the_gpu(rows: int, gate: Gate, outputs: int, inputs: int) -> None:
    x, stored, scale = in_eight_bits(rows, outputs, inputs)
    how = scaled_gemm_config(rows, outputs // (2 if gate else 1), inputs, gate != "")
    assert how is not None
    want = REFERENCE.quantized_linear(x.float(), QuantizedMatrix(stored, scale, inputs), None, gate)
    first, *more = (gemv_linear(x, stored, None, how, CARD, gate, scale, ARRIVED) for _ in range(20))
    assert float((first.float() - want).norm() / want.norm()) < 1e-2
    assert all(torch.equal(first, again) for again in more), "the last program adds up in the same order"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (2048, 512), (2112, 7168), (1024, 5120)])
def test_one_row_with_scales_of_runs_on_the_gpu(gate: Gate, outputs: int, inputs: int) -> None:
    torch.manual_seed(outputs)
    x, matrix = torch.randn(1, inputs, device=DEVICE, dtype=torch.bfloat16), in_runs(outputs, inputs, 128)
    how = scaled_gemm_config(1, outputs // (2 if gate else 1), inputs, gate != "", 128)
    assert how is not None
    got = gemv_linear(x, matrix.weight, None, how, CARD, gate, matrix.scale, ARRIVED, 128)
    want = REFERENCE.quantized_linear(x.float(), matrix, None, gate)
    assert float((got.float() - want).norm() / want.norm()) < 1e-2
