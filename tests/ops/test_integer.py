"""Matrices of integers in the layout of the kernels: they stand for the same numbers, or are left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.base import IntegerKind, QuantizedMatrix
from quire.ops.integer import dequantize_integers, integers_of, pack_integers
from quire.ops.quantized import dequantize
from quire.ops.reference import ReferenceOps


def halved(groups: Tensor, outputs: int = 5, half: bool = True) -> QuantizedMatrix:
    """A random INT4 matrix whose columns have these groups. half: float16 holds its scales, else only bfloat16 does."""
    count = int(groups.max()) + 1
    weight = torch.randint(0, 256, (outputs, len(groups) // 2), dtype=torch.uint8)
    scale = torch.rand(outputs, count) + 0.1
    zero = torch.randint(0, 17, (outputs, count), dtype=torch.uint8)
    return QuantizedMatrix(
        weight, scale.half().float() if half else scale.bfloat16().float() * 2.0**-18, zero=zero, groups=groups
    )


@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("inputs", "group", "first"),
    [(96, 32, 0), (160, 64, 0), (300, 128, 0), (512, 256, 0), (200, 200, 0), (256, 1 << 30, 0), (128, 64, 2)],
    ids=["32", "64, cut short", "128, cut short", "256", "one", "all", "a shard's"],
)
def test_integers_stand_for_the_same_numbers(inputs: int, group: int, first: int, half: bool) -> None:
    torch.manual_seed(inputs)
    matrix = halved(first + torch.arange(inputs) // group, half=half)
    packed = integers_of(matrix)
    assert packed is not None
    assert packed.half == half
    assert packed.order is None
    assert packed.padded % 128 == 0
    assert torch.equal(dequantize(packed), dequantize(matrix))
    assert torch.equal(dequantize(packed.rows(slice(0, None, 2))), dequantize(matrix)[::2])


def test_columns_that_share_scales_in_any_order_are_moved_together() -> None:
    torch.manual_seed(0)
    matrix = halved((torch.arange(256) // 64)[torch.randperm(256)])
    packed = integers_of(matrix)
    assert packed is not None
    assert packed.order is not None
    assert torch.equal(dequantize(packed), dequantize(matrix))
    x, ops = torch.randn(3, 256), ReferenceOps()
    assert torch.equal(ops.quantized_linear(x, packed), ops.quantized_linear(x, matrix))


@pytest.mark.parametrize(
    "groups",
    [torch.arange(96) // 16, torch.arange(96) // 48, torch.tensor([0] * 32 + [1] * 64), torch.randint(0, 3, (96,))],
    ids=["16", "48", "uneven", "random"],
)
def test_groups_of_other_sizes_stay_as_they_are(groups: Tensor) -> None:
    assert integers_of(halved(groups)) is None


def test_scales_that_sixteen_bits_do_not_hold_stay_as_they_are() -> None:
    matrix = halved(torch.arange(64) // 32)
    assert integers_of(matrix._replace(scale=matrix.scale * 1e-9)) is None
    near = integers_of(matrix._replace(scale=matrix.scale * 1.0003))
    assert near is not None
    torch.testing.assert_close(dequantize(near), dequantize(matrix) * 1.0003, rtol=1e-3, atol=0.0)


def test_a_matrix_without_zero_points_stays_as_it_is() -> None:
    assert integers_of(QuantizedMatrix(torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 1), 64)) is None


@pytest.mark.parametrize("inputs", [64, 96, 320])
def test_minima_are_subtracted_after_scaling(inputs: int) -> None:
    numbers = torch.randint(0, 16, (3, inputs), dtype=torch.uint8)
    scale, minimum = ((torch.rand(3, inputs // 32) + 0.1).half().float() for _ in "sm")
    packed = pack_integers(numbers, 32, scale, minimum=minimum)
    assert packed.kind is IntegerKind.MINIMA
    wanted = numbers.float() * scale.repeat_interleave(32, 1) - minimum.repeat_interleave(32, 1)
    assert torch.equal(dequantize_integers(packed), wanted)


@pytest.mark.parametrize("inputs", [64, 96, 320])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_is_in_the_middle_without_zero_points(bits: int, inputs: int) -> None:
    numbers = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, inputs), dtype=torch.int8)
    scale = (torch.rand(3, inputs // 32) + 0.1).half().float()
    packed = pack_integers(numbers if bits == 8 else (numbers + 8).to(torch.uint8), 32, scale)
    assert (packed.bits, packed.kind) == (bits, IntegerKind.PAIRS)
    assert packed.weight.nbytes + packed.words.nbytes == 3 * packed.padded * (bits + 0.5) / 8
    assert torch.equal(dequantize_integers(packed), numbers.float() * scale.repeat_interleave(32, 1))
