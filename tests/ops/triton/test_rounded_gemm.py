"""Products of activations in eight bits against the reference: of int8, whose sums are exact, and of float8, where x
itself is compared with what the format holds of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from quire.ops.operands import Gate, Norm, QuantizedMatrix, RoundedRows
from quire.ops.quantized import E4M3, dequantize, float8_tokens, quantize_tokens
from quire.ops.reference import ReferenceOps
from quire.ops.triton import rounded_gemm
from quire.ops.triton.gemv import COUNTERS, GemmConfig
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.ops.triton.rounded_gemm import (
    LEAST_LIBRARY_ROWS,
    LEAST_NARROW_ROWS,
    MOST_RUN_ROWS,
    NARROW,
    alike,
    multiplies_float8,
    prefers_library,
    round_rows,
    rounded_config,
    rounded_linear,
)
from tests.ops.triton.device import DEVICE, float8_matrix, held_by_float8

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
ARRIVED = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
EXACT = 1e-3 if DEVICE.type == "cuda" else 1e-5
"""Of sums in float32: Hopper's units add up products of float8 with 13 bits after the largest's point."""


def matrix(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Numbers and the rows' scales."""
    weight = torch.randint(-127, 128, (outputs, inputs), device=DEVICE).to(torch.int8)
    return weight, torch.rand(outputs, 1, device=DEVICE) / 127


def off(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def test_tokens_are_rounded_as_the_reference_rounds_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 200, device=DEVICE) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1.0, 1e-30], device=DEVICE)[:, None]
    x[4] = torch.arange(200, device=DEVICE) - 99.5  # halves of steps
    x[4, 0] = 127.0
    got, steps, *_ = round_rows(x, CARD, torch.int8)
    want, scale = quantize_tokens(x)
    assert torch.equal(got, want)
    assert torch.equal(steps[0], scale[:, 0])


@pytest.fixture(params=[1, 1024], ids=["row by row", "rows together"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each row, or for several, as short rows have it."""
    monkeypatch.setattr(rounded_gemm, "AT_ONCE", request.param)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("width", [0, 32, 128], ids=["tokens", "runs", "long-runs"])
def test_tokens_are_rounded_to_float8_by_themselves_or_in_runs(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 200, device=DEVICE) * torch.tensor([1e-3, 1.0, 3e4, 0.0, 1.0, 1e-20], device=DEVICE)[:, None]
    x[4] *= torch.logspace(-5, 0, 200, device=DEVICE)  # many below the least normal number
    got, steps, tokens, _ = round_rows(x, CARD, E4M3, width)
    want, scale = float8_tokens(x, width)
    assert torch.equal(got[:tokens].float(), want.float())
    # On a card the library multiplies by the reciprocal.
    torch.testing.assert_close(steps[:, :tokens].t(), scale, rtol=2.4e-7 if DEVICE.type == "cuda" else 0.0, atol=0.0)
    held = held_by_float8(x, width)
    run = x.abs().amax(1, keepdim=True)
    assert ((held - x).abs() <= torch.maximum(x.abs() / 16, run / 448 / 512)).all(), "half a step of three bits"


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("width", [0, 32], ids=["tokens", "runs"])
@pytest.mark.parametrize("gate", ["silu", "clamped", "relu2"])
def test_gates_are_applied_while_rows_are_rounded(gate: Gate, width: int) -> None:
    torch.manual_seed(0)
    y = torch.randn(5, 200, device=DEVICE).bfloat16()
    got, want = round_rows(y, CARD, E4M3, width, gate=gate), TritonOps(DEVICE).apply_gate(y, gate)
    other = round_rows(want, CARD, E4M3, width)
    # On a card one of two kernels may fuse products that the other does not.
    few, close = (0.02, 0.01) if DEVICE.type == "cuda" else (0.0, 0.0)
    assert float((got.rows[:5].float() != other.rows[:5].float()).float().mean()) <= few
    torch.testing.assert_close(got.steps[:, :5], other.steps[:, :5], rtol=close, atol=0.0)


@pytest.mark.parametrize("width", [0, 32], ids=["row", "runs"])
@pytest.mark.parametrize("rows", [3, 40], ids=["as they are", "rounded"])
@pytest.mark.parametrize("library", [False, True], ids=["kernel", "library"])
def test_a_gated_mlp_is_its_two_products(rows: int, library: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a norm that is rounded at once."""
    torch.manual_seed(rows)
    ops, (x, residual) = TritonOps(DEVICE), torch.randn(2, rows, 64, device=DEVICE).bfloat16()
    gate_up, down = float8_matrix(96, 64, width), float8_matrix(64, 48, width)
    if library:
        monkeypatch.setattr(rounded_gemm, "prefers_library", lambda rows, matrix, card: len(matrix.weight) == 96)
        monkeypatch.setattr(rounded_gemm, "library_linear", by_kernel)
    norm, total = Norm(torch.rand(64, device=DEVICE).bfloat16(), 1e-6), residual.clone()
    normed, total = ops.add_norm(x, total, norm, scale=0.5)
    want = ops.quantized_linear(ops.quantized_linear(normed, gate_up, None, "silu"), down)
    assert off(ops.quantized_mlp(normed, gate_up, down, "silu"), want.float()) <= (
        0.01 if DEVICE.type == "cuda" else 0.0
    )
    read, made = ops.add_norm_rounded(x, residual, norm, gate_up, 0.5)
    torch.testing.assert_close(made, total)
    assert isinstance(read, RoundedRows) is (rows == 40)
    assert off(ops.quantized_mlp(read, gate_up, down, "silu"), want.float()) < 0.01, "sums of squares in another order"
    if isinstance(read, RoundedRows):
        for gate in ("", "silu"):
            exact = REFERENCE.multiply_normed(read._replace(dtype=torch.float32), gate_up, None, gate)
            assert off(ops.multiply_normed(read, gate_up, None, gate), exact) < 0.012, "bfloat16 of halves and result"


def by_kernel(x: RoundedRows, weights: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """As `library_linear`."""
    how = rounded_config(x.tokens, len(weights.weight), x.rows.shape[1], gated=False)
    return rounded_linear(x, weights, bias, how, CARD, ARRIVED)


def multiplied(x: Tensor, weights: QuantizedMatrix, bias: Tensor | None, how: GemmConfig, gate: Gate = "") -> Tensor:
    """x, rounded, times the matrix by the kernel."""
    rows = round_rows(x, CARD, weights.weight.dtype, rounded_gemm.run_of(weights))
    return rounded_linear(rows, weights, bias, how, CARD, ARRIVED, gate)


def test_numbers_that_are_none_stay_none() -> None:
    x = torch.ones(2, 64, device=DEVICE)
    for broken in (float("nan"), float("inf")):
        x[0, 3] = broken
        got, steps, *_ = round_rows(x, CARD, E4M3)
        assert bool(steps[0, 0].isnan()), "which makes all of the row's products none"
        assert torch.equal(got[1].float() * steps[0, 1], x[1])


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 200), (20, 72, 256), (70, 40, 100)])
def test_products_are_those_of_the_reference(rows: int, outputs: int, inputs: int, gate: Gate) -> None:
    torch.manual_seed(rows)
    (weight, scale), x = matrix(outputs, inputs), torch.randn(rows, inputs, device=DEVICE)
    bias = torch.randn(outputs, device=DEVICE)
    want = REFERENCE.int8_linear(x.cpu(), weight.cpu(), scale.cpu(), bias.cpu(), gate).to(DEVICE)
    torch.testing.assert_close(TritonOps(DEVICE).int8_linear(x, weight, scale, bias, gate), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("splits", "bias", "gate"), [(1, False, "silu"), (1, True, ""), (2, True, "silu")], ids=str)
@pytest.mark.parametrize(
    ("width", "height"), [(0, 1), (32, 1), (64, 1), (32, 16)], ids=["row", "runs", "long-runs", "blocks"]
)
def test_products_of_float8_round_x_and_nothing_else(
    width: int, height: int, splits: int, bias: bool, gate: Gate
) -> None:
    torch.manual_seed(width)
    outputs = 32 if height > 1 else 40
    x, weights = torch.randn(20, 200, device=DEVICE), float8_matrix(outputs, 200, width, height=height)
    assert alike(weights, outputs, 16) is (height > 1)
    shift = torch.randn(outputs, device=DEVICE) if bias else None
    how = GemmConfig(16, 16, 64, 4, 3, splits=splits)
    want = REFERENCE.quantized_linear(held_by_float8(x, width), weights, shift, gate)
    for _ in range(splits):
        got = multiplied(x, weights, shift, how, gate)
        assert off(got, want) < EXACT
        assert not ARRIVED.any(), "counters are left as they were found"


def test_the_error_of_rounding_is_that_of_three_bits() -> None:
    """A number of e4m3 is off by up to a sixteenth, 2.6 % on average of squares; random errors add up as the products
    do, so that a sum is off by as much."""
    torch.manual_seed(0)
    x, exact = torch.randn(64, 512, device=DEVICE), torch.randn(96, 512, device=DEVICE)
    for width in (0, 128):
        weights = float8_matrix(96, 512, width, exact)
        held = REFERENCE.quantized_linear(x, weights)
        how = rounded_config(64, 96, 512, gated=False)
        got = multiplied(x, weights, None, how)
        assert 0.02 < off(got, held) < 0.032
        assert 0.02 < off(dequantize(weights), exact) < 0.032, "as much as the matrix itself"


def test_a_row_has_the_same_bits_in_any_batch_and_any_tiling() -> None:
    torch.manual_seed(0)
    (weight, scale), x = matrix(48, 128), torch.randn(70, 128, device=DEVICE)
    whole = BatchInvariantTritonOps(DEVICE).int8_linear(x, weight, scale)
    for rows in (slice(3, 4), slice(5, 25)):
        assert torch.equal(BatchInvariantTritonOps(DEVICE).int8_linear(x[rows], weight, scale), whole[rows])
    numbers = QuantizedMatrix(weight, scale, 128)
    for count in (1, 16, 17, 64, 65):
        how = rounded_config(count, 48, 128, gated=False)
        assert torch.equal(multiplied(x[:3], numbers, None, how), whole[:3])
    split = GemmConfig(16, 16, 32, 4, 3, splits=4)
    assert torch.equal(multiplied(x[:3], numbers, None, split), whole[:3])


@pytest.mark.parametrize("width", [0, 32], ids=["row", "runs"])
def test_activations_are_rounded_where_many_rows_meet_float8(width: int) -> None:
    torch.manual_seed(0)
    x, weights, ops = torch.randn(17, 64, device=DEVICE).half(), float8_matrix(48, 64, width), TritonOps(DEVICE)
    exact = REFERENCE.quantized_linear(x.float(), weights)
    rounded = REFERENCE.quantized_linear(held_by_float8(x, width), weights)
    half = 1e-3  # what float16 rounds of the result, and of sums
    assert off(ops.quantized_linear(x, weights), rounded) < half
    assert off(rounded, exact) > 10 * half, "which is another result"
    for unrounded in (ops.unrounded(), TritonOps(DEVICE, rounds_float8=False), BatchInvariantTritonOps(DEVICE)):
        assert off(unrounded.quantized_linear(x, weights), exact) < half
    assert off(ops.quantized_linear(x[:16], weights), exact[:16]) < half, "few rows"
    assert off(ops.quantized_linear(x.float(), weights), exact) < 1e-5, "float32"


def test_other_cards_and_matrices_keep_sixteen_bits() -> None:
    plain, runs = float8_matrix(48, 96, 0), float8_matrix(48, 96, 32)
    for capability, has in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        card = replace(CARD, capability=capability)
        assert multiplies_float8(plain, card) is multiplies_float8(runs, card) is has
    card = replace(CARD, capability=(9, 0))
    for odd in (runs._replace(offset=16), float8_matrix(48, 96, 48), float8_matrix(48, 96, 16)):
        assert not multiplies_float8(odd, card)
    assert not multiplies_float8(plain._replace(weight=plain.weight.view(torch.int8)), card)


def test_the_library_takes_many_rows_of_what_it_knows() -> None:
    many, runs = float8_matrix(48, 256, 0), float8_matrix(48, 256, 128)
    rows = LEAST_NARROW_ROWS
    hopper, ada = (replace(CARD, capability=each) for each in ((9, 0), (8, 9)))
    assert prefers_library(rows, many, hopper)
    assert prefers_library(rows, many, ada)
    assert prefers_library(MOST_RUN_ROWS + 1, runs, hopper)
    assert not prefers_library(MOST_RUN_ROWS, runs, hopper)
    assert not prefers_library(rows, float8_matrix(48, 192, 128), hopper), "half a run at the end"
    assert not prefers_library(rows, runs, ada)
    assert not prefers_library(rows - 1, many, hopper)
    wide = QuantizedMatrix(torch.empty(NARROW + 16, 16, dtype=E4M3, device=DEVICE), many.scale[:1], 16)
    assert prefers_library(LEAST_LIBRARY_ROWS, wide, hopper)
    assert not prefers_library(LEAST_LIBRARY_ROWS - 1, wide, hopper)
    assert not prefers_library(rows, float8_matrix(40, 256, 0), hopper)
    assert not prefers_library(rows, float8_matrix(48, 256, 64), hopper)
    assert not prefers_library(rows, many, replace(CARD, capability=(0, 0))), "the interpreter has none"


def test_the_library_multiplies_what_the_kernel_does() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(32, 128, device=DEVICE).bfloat16(), float8_matrix(48, 128, 0)
    got = rounded_gemm.library_linear(round_rows(x, CARD, E4M3), weights, None)
    want = REFERENCE.quantized_linear(held_by_float8(x, 0), weights)
    assert off(got, want) < 4e-3, "bfloat16 of the result"


@pytest.mark.parametrize(
    ("rows", "outputs", "blocks"),
    [
        (512, 4096, True),
        (256, 4096, False),
        (1024, 2048, True),
        (512, 2048, False),
        (4096, 512, True),
        (65, 12352, True),
    ],
)
def test_scales_of_blocks_are_for_many_results_and_wide_matrices(rows: int, outputs: int, blocks: bool) -> None:
    weight = torch.empty(outputs, 2048, dtype=E4M3, device="meta")
    matrix = QuantizedMatrix(weight, torch.empty(outputs, 16, device="meta"), 128)
    assert rounded_gemm.has_blocks(rows, matrix._replace(height=128)) == blocks
    assert not rounded_gemm.has_blocks(rows, matrix)


@pytest.mark.parametrize("height", [1, 128], ids=["runs", "blocks"])
def test_the_library_gets_scales_as_it_wants_them(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs of a row one after the other; of blocks of 128 x 128 those of a row of blocks."""
    torch.manual_seed(0)
    monkeypatch.setattr(rounded_gemm, "BLOCK_TILES", 0)
    x, weights = torch.randn(16, 512, device=DEVICE).bfloat16(), float8_matrix(272, 512, 128, height=height)
    wanted = ScalingType.BlockWise1x128 if height == 1 else ScalingType.BlockWise128x128

    def by_hand(
        rows: Tensor, matrix: Tensor, own: Tensor, kind: ScalingType, theirs: Tensor, recipe: ScalingType, **_: object
    ) -> Tensor:
        assert (kind, recipe) == (ScalingType.BlockWise1x128, wanted)
        assert theirs.stride() == (1, 4) if height > 1 else theirs.t().is_contiguous()
        scale = theirs.t() if height > 1 else theirs
        exact = matrix.t().float() * scale.repeat_interleave(height, 0)[:272].repeat_interleave(128, 1)
        return (rows.float() * own.repeat_interleave(128, 1) @ exact.t()).bfloat16()

    monkeypatch.setattr(rounded_gemm.F, "scaled_mm", by_hand)
    assert rounded_gemm.has_blocks(16, weights) is (height > 1)
    assert not rounded_gemm.has_blocks(16, float8_matrix(272, 384, 128, height=128)), "the library wants fours of runs"
    got = rounded_gemm.library_linear(round_rows(x, CARD, E4M3, 128), weights, None)
    assert off(got, REFERENCE.quantized_linear(held_by_float8(x, 128), weights)) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(100, 12352, 2048), (5000, 2048, 512), (2000, 4160, 4096)])
def test_the_library_multiplies_blocks_on_the_gpu(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    x, weights = torch.randn(rows, inputs, device=DEVICE).bfloat16(), float8_matrix(outputs, inputs, 128, height=128)
    assert rounded_gemm.has_blocks(rows, weights)
    rounded = round_rows(x, CARD, E4M3, 128)
    got = rounded_gemm.library_linear(rounded, weights, None)
    assert off(got, rounded_gemm.library_linear(rounded, weights._replace(height=1), None).float()) < 1e-3
    assert off(got, REFERENCE.quantized_linear(held_by_float8(x, 128), weights)) < 4e-3


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
    assert off(got, want) < 1e-2
    assert torch.equal(ops.int8_linear(x, weight, scale, bias, gate), got)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("width", [0, 128, 64], ids=["row", "runs", "short-runs"])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("rows", [17, 64, 256, 1500])
def test_float8_on_the_gpu(rows: int, gate: Gate, width: int) -> None:
    torch.manual_seed(rows)
    for (outputs, inputs), dtype in itertools.product(
        [(6144, 4096), (4096, 12288), (2048, 14336)], [torch.bfloat16, torch.float16]
    ):
        weights = float8_matrix(outputs, inputs, width)
        # What a gate multiplies may not leave float16, whose largest number is 65,504.
        x = (torch.randn(rows, inputs, device=DEVICE) / 32).to(dtype)
        bias = torch.randn(outputs, device=DEVICE).to(dtype)
        want = REFERENCE.quantized_linear(held_by_float8(x, width), weights, bias.float(), gate)
        got = TritonOps(DEVICE).quantized_linear(x, weights, bias, gate)
        plain = 5e-3  # bfloat16 of the result (1.7e-3), and sums of products of e4m3 by the matrix units
        # Of a gated product both factors are off by as much, and what they make is rounded once more.
        assert off(got, want) < (2**0.5 * plain + 2e-3 if gate else plain)
