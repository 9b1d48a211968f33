"""Products of one row with whole numbers, beside dequantized ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.integer import dequantize_integers
from quire.ops.operands import Gate, IntegerMatrix, Norm, UnnormedRow
from quire.ops.reference import ReferenceOps
from quire.ops.triton.integer_row import HALVES, RingConfig, integer_row, norms, takes
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from tests.ops.triton.device import DEVICE
from tests.ops.triton.integers import made, off, taking
from tests.ops.triton.test_integer_gemm import computed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
HOPPER = replace(CARD, sms=132, capability=(9, 0), shared=227 << 10)
NEEDS_CARD = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter does not run Gluon")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KINDS = pytest.mark.parametrize(
    ("kind", "group"),
    [
        *(("zeros", 32), ("zeros", 64), ("zeros", 128), ("nibbles", 32), ("q4_k", 32)),
        *(("bytes", 32), ("rows", 128)),
    ],
)


def test_only_what_fits_is_taken() -> None:
    taken = taking(takes, HOPPER, 1)
    assert taken() and taken(dtype=torch.float16) and taken(inputs=14336)
    assert taken(kind="q4_k", group=32) and taken(kind="bytes", group=32)
    assert not taken(rows=2)
    assert not taken(dtype=torch.float32)
    assert not taken(group=64) and not taken(group=512) and not taken(kind="nibbles", group=32)
    assert not taken(kind="rows") and not taken(kind="byte zeros") and not taken(kind="floats", group=32)
    assert not taken(kind="q5_k", group=32) and not taken(kind="q6_k", group=16)
    assert not taken(inputs=2560) and not taken(inputs=28672), "neither are whole tiles"
    assert not taken(outputs=28704)
    assert not taken(outputs=4096), "small matrices are `integer_gemv`'s"
    assert not taken(card=replace(HOPPER, capability=(8, 0))) and not taken(card=replace(HOPPER, capability=(12, 0)))
    assert not taken(card=replace(HOPPER, sms=0)), "kernels that must not depend on the batch have another order"


def test_a_plain_norm_of_the_columns_in_their_order_is_made_within_a_product() -> None:
    weight = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
    plain, layer = Norm(weight, 1e-5), Norm(weight, 1e-5, weight, centred=True)

    def taken(norm: Norm, rows: int = 1, order: Tensor | None = None) -> bool:
        within = lambda x, matrix, card: norms(x, norm, matrix._replace(order=order), card)  # noqa: E731
        return taking(within, HOPPER, rows)()

    assert taken(plain)
    assert not taken(plain, rows=2) and not taken(layer) and not taken(layer._replace(bias=None))
    assert not taken(plain, order=torch.arange(4096, device=DEVICE))


def test_four_bytes_become_eight_numbers() -> None:
    for byte in range(256):
        given = [(byte * k + 7 * k) % 256 for k in (1, 3, 5, 11)]
        held = computed(HALVES, int.from_bytes(bytes(given), "little"), outputs=2)
        assert list(held["$0"].to_bytes(4, "little")) == [b & 15 for b in given]
        assert list(held["$1"].to_bytes(4, "little")) == [b >> 4 for b in given]


def product(
    x: Tensor, matrix: IntegerMatrix, add: Tensor | None, gate: Gate, *how: RingConfig
) -> tuple[Tensor, Tensor]:
    """(the kernel's, seen to have the same bits twice, the dequantized matrix's)."""
    got = integer_row(x, matrix, add, CARD, gate, *how)
    assert torch.equal(integer_row(x, matrix, add, CARD, gate, *how), got)
    plain = matrix._replace(order=None)
    x = x if matrix.order is None else x[:, matrix.order]
    want = REFERENCE.linear(x.float(), dequantize_integers(plain), None if add is None else add.float(), gate)
    return got, want


@pytest.mark.gpu
@NEEDS_CARD
@DTYPES
@KINDS
@pytest.mark.parametrize("gate", ["", "silu"])
def test_products_are_those_of_the_dequantized_matrix(dtype: torch.dtype, kind: str, group: int, gate: Gate) -> None:
    torch.manual_seed(0)
    for outputs, inputs, biased in ((256, 1024, False), (256, 1024, True), (512, 14336, False)):
        matrix = made(kind, group, outputs, inputs, half=dtype is torch.float16)
        x = torch.randn(1, inputs, dtype=dtype, device=DEVICE) / 64
        bias = torch.randn(outputs, dtype=dtype, device=DEVICE) if biased else None
        assert off(*product(x, matrix, bias, gate)) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("gate", ["gelu", "relu2", ""])
def test_programs_have_several_tiles(gate: Gate) -> None:
    torch.manual_seed(0)
    matrix, x = made("zeros", 128, 28672, 3072), torch.randn(1, 3072, dtype=torch.bfloat16, device=DEVICE) / 64
    assert off(*product(x, matrix, None, gate)) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("how", [(32, 4, 2, 3, 8, 1), (16, 8, 2, 4, 8, 2), (64, 2, 2, 3, 8, 1)])
def test_other_tiles_have_the_same_products(how: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for kind, group in (("zeros", 128), ("q4_k", 32), ("bytes", 32)):
        matrix, x = made(kind, group, 8192, 4096), torch.randn(1, 4096, dtype=torch.bfloat16, device=DEVICE)
        assert off(*product(x, matrix, None, "silu", RingConfig(*how))) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("q4_k", 32), ("bytes", 32)])
def test_small_numbers_beside_large_ones_keep_their_bits(kind: str, group: int) -> None:
    """Where the matrix has nothing for the largest of a group, what is left is that of the others, to 2^-16 of it."""
    torch.manual_seed(0)
    matrix, x = made(kind, group, 256, 1024), torch.randn(1, 1024, dtype=torch.bfloat16, device=DEVICE)
    x[0, 5], x[0, 700], x[0, 256:384] = 300.0, -1000.0, 0.0
    exact = dequantize_integers(matrix)
    got, want = integer_row(x, matrix, None, CARD), REFERENCE.linear(x.float(), exact)
    assert off(got, want) < 4e-3
    lost = torch.zeros(1024, device=DEVICE)
    lost[:256], lost[512:768] = 300.0, 1000.0
    assert ((got - want).abs() <= (exact.abs() @ lost) * 2.0**-16 + want.abs() * 2.0**-8).all()


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("q4_k", 32), ("bytes", 32)])
def test_what_is_not_finite_becomes_nan(kind: str, group: int, gate: Gate, bad: float) -> None:
    matrix = made(kind, group, 256, 1024)
    for at in (0, 128, 1023):
        x = torch.randn(1, 1024, dtype=torch.bfloat16, device=DEVICE)
        x[0, at] = bad
        assert integer_row(x, matrix, None, CARD, gate).isnan().all()
    zeros = torch.zeros(1, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert not integer_row(zeros, matrix, None, CARD, gate).any()


@pytest.mark.gpu
@NEEDS_CARD
def test_columns_in_another_order_are_taken_in_the_order_of_the_matrix() -> None:
    torch.manual_seed(0)
    matrix = made("zeros", 128, 128, 1024)._replace(order=torch.randperm(1024, device=DEVICE))
    assert off(*product(torch.randn(1, 1024, dtype=torch.bfloat16, device=DEVICE), matrix, None, "")) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
@DTYPES
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("q4_k", 32), ("bytes", 32)])
def test_a_row_is_added_and_normed_within_the_product(dtype: torch.dtype, kind: str, group: int) -> None:
    torch.manual_seed(0)
    ops, matrix = TritonOps(DEVICE), made(kind, group, 28672, 4096, half=dtype is torch.float16)
    x, residual = torch.randn(2, 1, 4096, dtype=dtype, device=DEVICE)
    norm = Norm(torch.rand(4096, dtype=dtype, device=DEVICE) / 64, 1e-5)
    normed, total = ops.add_norm(x, residual.clone(), norm, scale=0.5)
    read, summed = ops.add_norm_rounded(x, residual, norm, matrix, 0.5)
    assert isinstance(read, UnnormedRow)
    gates: tuple[Gate, ...] = ("", "silu")
    for gate in gates:
        summed.fill_(float("nan"))
        got = ops.multiply_normed(read, matrix, None, gate)
        assert torch.equal(summed, total)
        assert torch.equal(ops.multiply_normed(read, matrix, None, gate), got)
        assert off(got, REFERENCE.linear(normed.float(), dequantize_integers(matrix), None, gate)) < 1e-2
    x[0, 5] = float("inf")
    assert ops.multiply_normed(read, matrix).isnan().all()
