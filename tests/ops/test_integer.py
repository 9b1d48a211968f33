"""Matrices of integers in the layout of the kernels: they stand for the same numbers, or are left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.integer import dequantize_integers, integers_of, pack_integers, pack_superblocks, stack_integers
from quire.ops.operands import IntegerKind, QuantizedMatrix
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
    [torch.arange(96) // 16, torch.arange(96) // 48, torch.tensor([0] * 32 + [1] * 64), torch.arange(96) ** 2 % 7 % 3],
    ids=["16", "48", "uneven", "mixed"],
)
def test_groups_of_other_sizes_stay_as_they_are(groups: Tensor) -> None:
    assert integers_of(halved(groups)) is None


def test_scales_that_sixteen_bits_do_not_hold_stay_as_they_are() -> None:
    matrix = halved(torch.arange(64) // 32)
    assert integers_of(matrix._replace(scale=matrix.scale * 1e-9)) is None
    near = integers_of(matrix._replace(scale=matrix.scale * 1.0003))
    assert near is not None
    torch.testing.assert_close(dequantize(near), dequantize(matrix) * 1.0003, rtol=1e-3, atol=0.0)


def test_bytes_with_a_scale_for_each_row_keep_it_in_float32() -> None:
    matrix = QuantizedMatrix(torch.randint(-128, 128, (4, 200)).to(torch.int8), torch.rand(4, 1) * 1e-9, 200)
    packed = integers_of(matrix)
    assert packed is not None
    assert (packed.kind, packed.bits) == (IntegerKind.ROWS, 8)
    assert torch.equal(dequantize(packed), dequantize(matrix))


@pytest.mark.parametrize(("width", "offset"), [(32, 0), (64, 64), (128, 0), (256, 0)])
def test_bytes_with_scales_for_groups_stand_for_the_same_numbers(width: int, offset: int) -> None:
    weight = torch.randint(-128, 128, (4, 320)).to(torch.int8)
    scale = (torch.rand(4, -(-(320 + offset) // width)) + 0.1).half().float()
    matrix = QuantizedMatrix(weight, scale, width, offset)
    packed = integers_of(matrix)
    assert packed is not None
    assert packed.kind is (IntegerKind.PAIRS if width == 32 else IntegerKind.ZEROS)
    assert torch.equal(dequantize(packed), dequantize(matrix))


def test_bytes_with_zero_points_stand_for_the_same_numbers() -> None:
    groups = torch.arange(300) // 128
    weight, zero = torch.randint(0, 256, (4, 300), dtype=torch.uint8), torch.randint(0, 257, (4, 3))
    matrix = QuantizedMatrix(weight, (torch.rand(4, 3) + 0.1).half().float(), zero=zero, groups=groups)
    packed = integers_of(matrix)
    assert packed is not None
    assert (packed.kind, packed.bits) == (IntegerKind.ZEROS, 8)
    assert torch.equal(dequantize(packed), dequantize(matrix))


def test_matrices_of_float8_stay_as_they_are() -> None:
    assert integers_of(QuantizedMatrix(torch.ones(4, 64).to(torch.float8_e4m3fn), torch.ones(4, 1), 64)) is None


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, 16)])
def test_superblocks_have_scales_of_scales(bits: int, group: int) -> None:
    shape = (3, 512)
    numbers = (
        torch.randint(0, 16, shape, dtype=torch.uint8) if bits == 4 else torch.randint(-32, 32, shape).to(torch.int8)
    )
    supers = (torch.rand(3, 2, 2) + 0.1).half()
    scales = torch.randint(0, 64, (3, 32), dtype=torch.uint8)
    packed = pack_superblocks(numbers, group, scales, supers)
    assert packed.nbytes == 3 * 512 * (bits + 0.5 + 0.125) / 8
    scale, minimum = (scales, None) if group == 16 else (scales[:, ::2], scales[:, 1::2])
    wanted = numbers.float() * scale.repeat_interleave(group, 1) * supers[..., 0].float().repeat_interleave(256, 1)
    if minimum is not None:
        wanted -= minimum.repeat_interleave(32, 1) * supers[..., 1].float().repeat_interleave(256, 1)
    assert torch.equal(dequantize_integers(packed), wanted)
    assert torch.equal(dequantize_integers(packed.rows(slice(1, 3))), wanted[1:])


@pytest.mark.parametrize("inputs", [64, 96, 320])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_is_in_the_middle_without_zero_points(bits: int, inputs: int) -> None:
    numbers = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, inputs), dtype=torch.int8)
    scale = (torch.rand(3, inputs // 32) + 0.1).half().float()
    packed = pack_integers(numbers if bits == 8 else (numbers + 8).to(torch.uint8), 32, scale)
    assert (packed.bits, packed.kind) == (bits, IntegerKind.PAIRS)
    assert packed.weight.nbytes + packed.words.nbytes == 3 * packed.padded * (bits + 0.5) / 8
    assert torch.equal(dequantize_integers(packed), numbers.float() * scale.repeat_interleave(32, 1))


def test_matrices_of_experts_lie_one_after_the_other() -> None:
    torch.manual_seed(0)
    groups = torch.arange(192) // 64
    plain = [halved(groups) for _ in range(3)]
    packed = [matrix for each in plain if (matrix := integers_of(each))]
    whole = stack_integers(packed)
    assert whole is not None
    assert (whole.outputs, whole.padded, len(whole.weight)) == (5, 256, 3)
    for e, each in enumerate(plain):
        assert torch.equal(dequantize(whole.expert(e)), dequantize(each))


def test_experts_whose_scales_float16_holds_join_others_of_a_checkpoint_in_bfloat16() -> None:
    torch.manual_seed(0)
    groups = torch.arange(192) // 64
    plain = [halved(groups, half=False), halved(groups)]
    plain[1] = plain[1]._replace(scale=plain[1].scale.bfloat16().float())
    packed = [matrix for each in plain if (matrix := integers_of(each))]
    assert [each.half for each in packed] == [False, True]
    whole = stack_integers(packed)
    assert whole is not None
    for e, each in enumerate(plain):
        assert torch.equal(dequantize(whole.expert(e)), dequantize(each))


def test_experts_whose_columns_are_moved_each_in_its_own_way_are_joined() -> None:
    torch.manual_seed(0)
    groups = torch.arange(192) // 64
    plain = [halved(groups[torch.randperm(192)]) for _ in range(3)]
    whole = stack_integers([matrix for each in plain if (matrix := integers_of(each))])
    assert whole is not None
    assert whole.order is not None
    assert whole.order.shape == (3, 192)
    for e, each in enumerate(plain):
        assert torch.equal(dequantize(whole.expert(e)), dequantize(each))


def test_experts_of_several_layouts_or_some_with_columns_moved_stay_apart() -> None:
    torch.manual_seed(0)
    groups = torch.arange(256) // 64
    plain, moved = integers_of(halved(groups)), integers_of(halved(groups[torch.randperm(256)]))
    other, small = integers_of(halved(torch.arange(256) // 128)), integers_of(halved(groups, half=False))
    fine = halved(groups)
    fine = integers_of(fine._replace(scale=fine.scale * 1.0003))
    assert plain and moved and other and small and fine
    assert moved.order is not None
    for pair in ([plain, moved], [plain, other], [fine, small]):
        assert stack_integers(pair) is None
