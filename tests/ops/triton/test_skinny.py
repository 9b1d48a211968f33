"""Products of a few rows, with what stands around them, against the same made of plain operations."""

from __future__ import annotations

import pytest
import torch

from quire.ops.base import Gate
from quire.ops.reference import ReferenceOps
from quire.ops.triton.launch import Card
from quire.ops.triton.skinny import Recipe, product, recipe
from tests.ops.triton.device import DEVICE

CARD, REFERENCE = Card.of(DEVICE), ReferenceOps()
VECTOR, WIDE, MATRIX = Recipe(1, 4, 256, 2), Recipe(4, 2, 256, 2), Recipe(16, 16, 64, 4, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["", "silu", "gelu"])
@pytest.mark.parametrize(
    ("how", "rows"), [(VECTOR, 1), (WIDE, 3), (MATRIX, 2), (MATRIX, 16)], ids=["vector", "few", "two", "sixteen"]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 192), (10, 100)], ids=["even", "odd"])
def test_a_product_and_what_stands_around_it(
    outputs: int, inputs: int, how: Recipe, rows: int, gate: Gate, bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
    shift = torch.randn(outputs, device=DEVICE) if bias else None
    got = product(x, weight, shift, how, CARD, gate)
    torch.testing.assert_close(got, REFERENCE.linear(x, weight, shift, gate), atol=2e-4, rtol=2e-4)


def test_many_rows_are_left_to_the_library() -> None:
    assert recipe(17, 4096, 4096) is None
    assert all(recipe(rows, 4096, 4096) is not None for rows in (1, 2, 16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (1024, 2048), (2048, 8192), (1024, 3072)])
def test_bfloat16_on_the_card(rows: int, gate: Gate, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5
    how = recipe(rows, outputs // (2 if gate else 1), inputs, gate != "")
    assert how is not None
    got = product(x.bfloat16(), weight.bfloat16(), None, how, CARD, gate).float()
    want = REFERENCE.linear(x.bfloat16().float(), weight.bfloat16().float(), None, gate)
    assert float((got - want).norm() / want.norm()) < 1e-2
