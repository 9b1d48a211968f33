"""Products with quantised matrices against the matrix restored whole, then multiplied."""

from __future__ import annotations

import pytest
import torch

from quire.ops.base import Gate
from quire.ops.reference import ReferenceOps
from quire.ops.triton.launch import Card
from quire.ops.triton.scaled import Quantised, product, recipe
from quire.ops.triton.skinny import Recipe
from tests.ops.triton.device import DEVICE

CARD, REFERENCE, E4M3 = Card.of(DEVICE), ReferenceOps(), torch.float8_e4m3fn
HOW = pytest.mark.parametrize(
    ("how", "rows"), [(Recipe(2, 4, 128, 2), 2), (Recipe(16, 16, 32, 4, 3), 20)], ids=["few", "many"]
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
def test_a_byte_a_number(width: int, offset: int, dtype: torch.dtype, gate: Gate, how: Recipe, rows: int) -> None:
    x, bias, exact = numbers(rows, 20, 100)
    groups = 1 if width == 100 else -(-(100 + offset) // width)
    weight = (exact * 20).round().to(dtype) if dtype is torch.int8 else exact.to(dtype)
    scale = torch.rand(20, groups, device=DEVICE) + 0.1
    want = REFERENCE.scaled_linear(x, weight, scale, width, offset, bias, gate)
    got = product(x, Quantised(weight, scale, width, offset), bias, how, CARD, gate)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)


@HOW
@GATES
def test_half_a_byte_a_number(gate: Gate, how: Recipe, rows: int) -> None:
    x, bias, _ = numbers(rows, 20, 96)
    weight = torch.randint(0, 256, (20, 48), dtype=torch.uint8, device=DEVICE)
    scale, zero = torch.rand(20, 3, device=DEVICE) + 0.1, torch.randint(0, 16, (20, 3), device=DEVICE)
    groups = torch.randint(0, 3, (96,), device=DEVICE)
    want = REFERENCE.halved_linear(x, weight, scale, zero, groups, bias, gate)
    got = product(x, Quantised(weight, scale, zero=zero, groups=groups), bias, how, CARD, gate)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)


def test_many_rows_are_multiplied_by_the_matrix_restored() -> None:
    assert recipe(257, 4096, 4096) is None
    assert all(recipe(rows, 4096, 4096) is not None for rows in (1, 2, 3, 64, 256))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 16, 100])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_bfloat16_on_the_card(rows: int, gate: Gate) -> None:
    x, _, exact = numbers(rows, 6144, 4096)
    scale = exact.abs().amax(1, keepdim=True) / 448
    how = recipe(rows, 6144 // (2 if gate else 1), 4096)
    assert how is not None
    matrix = Quantised((exact / scale).to(E4M3), scale / 64, 4096)
    got = product(x.bfloat16(), matrix, None, how, CARD, gate).float()
    want = REFERENCE.scaled_linear(x.bfloat16().float(), matrix.weight, matrix.scale, 4096, 0, None, gate)
    assert float((got - want).norm() / want.norm()) < 1e-2
