"""Products of a few rows that stay in registers, beside dequantized ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.integer import dequantize_integers
from quire.ops.operands import Gate, IntegerMatrix
from quire.ops.reference import ReferenceOps
from quire.ops.triton.integer_gemm import in_float16
from quire.ops.triton.integer_stationary import NIBBLES, integer_stationary, takes, takes_matrix
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from tests.ops.triton.device import DEVICE
from tests.ops.triton.integers import made, off, taking
from tests.ops.triton.test_integer_gemm import computed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
HOPPER = replace(CARD, sms=132, capability=(9, 0))
NEEDS_CARD = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter does not run Gluon")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KINDS = pytest.mark.parametrize(
    ("kind", "group"), [("zeros", 32), ("zeros", 64), ("zeros", 128), ("nibbles", 32), ("q4_k", 32)]
)


def test_only_what_fits_is_taken() -> None:
    taken = taking(takes, HOPPER, 8)
    assert taken() and taken(inputs=3072) and taken(dtype=torch.float16) and taken(rows=16) and taken(rows=2)
    assert taken(group=64) and taken(group=32) and taken(kind="q4_k", group=32) and taken(kind="nibbles", group=32)
    assert not taken(group=512) and not taken(kind="floats", group=32)
    assert not taken(kind="bytes", group=32) and not taken(kind="rows") and not taken(kind="q6_k", group=16)
    assert not taken(rows=1) and not taken(rows=17)
    assert not taken(dtype=torch.float32)
    assert not taken(inputs=2560), "warps have whole turns"
    assert not taken(inputs=1024, outputs=131072), "and more than one"
    assert not taken(inputs=14336), "registers do not hold so much of x"
    assert not taken(outputs=28704), "tiles have no remainder"
    assert not taken(outputs=6144), "few tiles for each multiprocessor are slower"
    assert not taken(card=replace(HOPPER, capability=(8, 0))) and not taken(card=replace(HOPPER, capability=(12, 0)))
    assert not taken(card=replace(HOPPER, sms=0)), "kernels that must not depend on the batch have another order"
    matrix, x = made("zeros", 128, 64, 2048), torch.zeros(8 * 2048 + 1, dtype=torch.bfloat16, device=DEVICE)
    large = matrix._replace(weight=matrix.weight.repeat(1, 512, 1))
    assert takes(x[:-1].view(8, 2048), large, HOPPER)
    assert not takes(x[1:].view(8, 2048), large, HOPPER), "columns are loaded 16 bytes at a time"


@DTYPES
def test_four_bytes_become_numbers_of_which_the_middle_ones_are_swapped(dtype: torch.dtype) -> None:
    half = dtype is torch.float16
    for byte in range(256):
        given = [(byte * k + 7 * k) % 256 for k in (1, 3, 5, 11)]
        code = in_float16(NIBBLES) if half else NIBBLES
        held = computed(code, int.from_bytes(bytes(given), "little"), outputs=4)
        words = torch.tensor([held[f"${i}"] for i in range(4)]).to(torch.uint32).view(torch.int32)
        order = [given[i] for i in (0, 2, 1, 3)]
        less = 1024 if half else 128
        assert (words.view(dtype) - less).tolist() == [b & 15 for b in order] + [b >> 4 for b in order]


def multiplied(x: Tensor, matrix: IntegerMatrix, add: Tensor | None, gate: Gate) -> tuple[Tensor, Tensor]:
    """(the kernel's, seen to have the same bits twice, the dequantized matrix's)."""
    got = integer_stationary(x, matrix, add, CARD, gate)
    assert torch.equal(integer_stationary(x, matrix, add, CARD, gate), got), "sums have a fixed order"
    plain = matrix._replace(order=None)
    x = x if matrix.order is None else x[:, matrix.order]
    return got, REFERENCE.linear(x.float(), dequantize_integers(plain), None if add is None else add.float(), gate)


@pytest.mark.gpu
@NEEDS_CARD
@DTYPES
@KINDS
@pytest.mark.parametrize("gate", ["", "silu", "relu2"])
def test_products_are_those_of_the_dequantized_matrix(dtype: torch.dtype, kind: str, group: int, gate: Gate) -> None:
    torch.manual_seed(0)
    for inputs, outputs, every in ((2048, 64, (2, 9)), (3072, 320, (7,)), (4096, 8640, (5, 16))):
        matrix = made(kind, group, outputs, inputs, half=dtype is torch.float16)
        assert takes_matrix(matrix, CARD)
        for rows in every:
            x = torch.randn(rows, inputs, dtype=dtype, device=DEVICE) / 64
            bias = torch.randn(outputs, dtype=dtype, device=DEVICE) if inputs == 3072 else None
            got, want = multiplied(x, matrix, bias, gate)
            assert got.shape == (rows, outputs // (2 if gate == "silu" else 1)) and off(got, want) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
@DTYPES
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("q4_k", 32)])
def test_zero_points_cost_no_precision(kind: str, group: int, dtype: torch.dtype) -> None:
    """x of one sign, so that sums with numbers that are too large are many times what is left of them."""
    torch.manual_seed(0)
    x = torch.rand(16, 4096, dtype=dtype, device=DEVICE) / 64 + 1 / 64
    assert off(*multiplied(x, made(kind, group, 256, 4096), None, "")) < 4e-3


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("q4_k", 32)])
def test_what_is_not_finite_stays_so_in_its_row(kind: str, group: int, bad: float) -> None:
    matrix, x = made(kind, group, 256, 4096), torch.randn(9, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[3, 128] = bad
    got = integer_stationary(x, matrix, None, CARD)
    assert not got[3].isfinite().any()
    assert got[:3].isfinite().all() and got[4:].isfinite().all()


@pytest.mark.gpu
@NEEDS_CARD
def test_columns_in_another_order_are_taken_in_the_order_of_the_matrix() -> None:
    torch.manual_seed(0)
    matrix = made("zeros", 128, 128, 2048)._replace(order=torch.randperm(2048, device=DEVICE))
    assert off(*multiplied(torch.randn(12, 2048, dtype=torch.bfloat16, device=DEVICE), matrix, None, "")) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
def test_large_matrices_are_multiplied_so() -> None:
    torch.manual_seed(0)
    matrix, x = made("zeros", 128, 36864, 2048), torch.randn(8, 2048, dtype=torch.bfloat16, device=DEVICE) / 64
    assert takes(x, matrix, CARD)
    got = TritonOps(DEVICE).quantized_linear(x, matrix)
    assert torch.equal(got, integer_stationary(x, matrix, None, CARD))
    assert off(got, x.float() @ dequantize_integers(matrix).T) < 1e-2
