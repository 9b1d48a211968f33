"""Products of a few rows, with what stands around them, against the same made of plain operations."""

from __future__ import annotations

import pytest
import torch

from quire.ops.reference import ReferenceOps
from quire.ops.triton.launch import Card
from quire.ops.triton.skinny import Norm, Recipe, product, recipe
from tests.ops.triton.device import DEVICE

CARD, REFERENCE = Card.of(DEVICE), ReferenceOps()
VECTOR, WIDE, MATRIX = Recipe(1, 4, 256, 2), Recipe(4, 2, 256, 2), Recipe(16, 16, 64, 4, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["", "silu", "gelu"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("how", "rows"), [(VECTOR, 1), (WIDE, 3), (MATRIX, 2), (MATRIX, 16)], ids=["vector", "few", "two", "sixteen"]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 192), (10, 100)], ids=["even", "odd"])
def test_a_product_and_what_stands_around_it(
    outputs: int, inputs: int, how: Recipe, rows: int, normed: bool, gate: str, bias: bool
) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, rows, inputs, device=DEVICE)
    gamma, weight = torch.randn(inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
    shift = torch.randn(outputs, device=DEVICE) if bias else None
    if normed and how.stages:
        return
    norm = Norm(residual, gamma, 0.1) if normed else None
    got, stream = product(x, weight, shift, how, CARD, norm, gate)
    total = x + residual if normed else x
    plain = REFERENCE.linear(REFERENCE.rms_norm(total, gamma, 0.1) if normed else x, weight, shift)
    want = {"": lambda y: y, "silu": REFERENCE.silu_mul, "gelu": REFERENCE.gelu_mul}[gate](plain)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(stream, total)


def test_many_rows_are_left_to_the_library() -> None:
    assert recipe(17, 4096, 4096) is None
    assert all(recipe(rows, 4096, 4096) is not None for rows in (1, 2, 16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_bfloat16_on_the_card(rows: int, normed: bool, gate: str) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(2, rows, 4096, device=DEVICE).bfloat16()
    gamma, weight = torch.randn(4096, device=DEVICE).bfloat16(), torch.randn(6144, 4096, device=DEVICE).bfloat16() / 64
    how = recipe(rows, 6144, 4096)
    assert how is not None
    got, stream = product(x, weight, None, how, CARD, Norm(residual, gamma, 1e-5) if normed else None, gate)
    total = x + residual if normed else x
    exact = total.float()
    if normed:
        exact = REFERENCE.rms_norm(exact, gamma.float(), 1e-5)
    want = REFERENCE.linear(exact, weight.float())
    want = REFERENCE.silu_mul(want) if gate else want
    assert float((got.float() - want).norm() / want.norm()) < 1e-2
    assert torch.equal(stream, total)
