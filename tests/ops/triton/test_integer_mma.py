"""Products of 4- and 8-bit numbers that go straight into the registers of the matrix units, beside dequantized ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from quire.ops.integer import dequantize_integers
from quire.ops.operands import Gate
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import COUNTERS
from quire.ops.triton.integer_gemm import in_float16
from quire.ops.triton.integer_mma import NIBBLES, MmaConfig, config, integer_mma, takes
from quire.ops.triton.launch import DeviceInfo
from tests.ops.triton.device import DEVICE
from tests.ops.triton.integers import made, off
from tests.ops.triton.test_integer_gemm import computed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
HOPPER = replace(CARD, sms=132, capability=(9, 0))
NEEDS_CARD = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter does not run Gluon")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
def test_four_bytes_become_eight_numbers(dtype: torch.dtype) -> None:
    half = dtype is torch.float16
    for byte in range(256):
        given = [(byte * k + 7 * k) % 256 for k in (1, 3, 5, 11)]
        less = byte % 17, byte * 3 % 17
        twice = [(0x10001 * ((0xE400 if half else 0xC300) + each)) for each in less]
        held = computed(in_float16(NIBBLES) if half else NIBBLES, int.from_bytes(bytes(given), "little"), *twice)
        words = torch.tensor([held[f"${i}"] for i in range(4)]).to(torch.uint32).view(torch.int32)
        assert words.view(dtype).tolist() == [(b & 15) - less[0] for b in given] + [(b >> 4) - less[1] for b in given]


def test_only_what_fits_is_taken() -> None:
    def taken(kind: str = "zeros", group: int = 128, outputs: int = 128, inputs: int = 1024, gate: Gate = "",
              rows: int = 8, dtype: torch.dtype = torch.bfloat16, card: DeviceInfo = HOPPER) -> bool:  # fmt: skip
        x = torch.zeros(rows, inputs, dtype=dtype, device=DEVICE)
        return takes(x, made(kind, group, outputs, inputs), gate, card)

    assert taken() and taken(group=64) and taken(gate="silu") and taken(rows=32) and taken(dtype=torch.float16)
    assert not taken(rows=33)
    assert not taken(dtype=torch.float32)
    assert taken(group=32) and taken(kind="nibbles", group=32) and taken(kind="q4_k", group=32)
    assert taken(kind="bytes", group=32) and taken(kind="rows")
    assert taken(kind="q5_k", group=32) and taken(kind="q6_k", group=16)
    assert not taken(kind="byte zeros") and not taken(kind="floats", group=32)
    assert not taken(inputs=1280), "pieces of x have no remainder"
    assert not taken(outputs=96) and not taken(outputs=64, gate="silu"), "neither have tiles"
    assert not taken(card=replace(HOPPER, capability=(7, 5)))
    assert not taken(card=replace(HOPPER, sms=0)), "kernels that must not depend on the batch have another order"
    matrix, x = made("zeros", 128, 128, 1024), torch.zeros(8 * 1024 + 1, dtype=torch.bfloat16, device=DEVICE)
    assert not takes(x[1:].view(8, 1024), matrix, "", HOPPER), "copies of 16 bytes are aligned"


def test_tiles_hold_all_rows_and_divide_what_is_taken() -> None:
    for inputs, outputs in ((512, 64), (4096, 4096), (14336, 4096)):
        for kind, group in (("zeros", 128), ("q4_k", 32), ("bytes", 32), ("rows", 128), ("q6_k", 16)):
            matrix = made(kind, group, outputs, 512)._replace(inputs=inputs)
            for rows, gated in product(range(1, 33), (False, True)):
                how = config(rows, matrix, gated)
                assert how.rows >= rows and 512 % (how.chunks * how.chunk) == 0
                assert 64 * (1 + gated) % how.outputs == 0 and how.outputs % (16 * how.warps // how.chunks) == 0


@pytest.mark.gpu
@NEEDS_CARD
@DTYPES
@pytest.mark.parametrize(
    ("kind", "group"),
    [
        *(("zeros", 32), ("zeros", 64), ("zeros", 128), ("zeros", 512), ("nibbles", 32), ("q4_k", 32)),
        *(("bytes", 32), ("rows", 128), ("q5_k", 32), ("q6_k", 16)),
    ],
)
@pytest.mark.parametrize("gate", ["", "silu", "gelu", "relu2"])
def test_products_are_those_of_the_dequantized_matrix(dtype: torch.dtype, kind: str, group: int, gate: Gate) -> None:
    torch.manual_seed(0)
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    for inputs in (512, 4608):
        matrix = made(kind, group, 256, inputs, half=dtype is torch.float16)
        exact, bias = dequantize_integers(matrix), torch.randn(256, dtype=dtype, device=DEVICE)
        for rows in (1, 5, 8, 9, 16, 17, 31, 32):
            x = torch.randn(rows, inputs, dtype=dtype, device=DEVICE) / 64
            assert takes(x, matrix, gate, CARD)
            for add in (None, bias):
                got = integer_mma(x, matrix, add, CARD, arrived, gate)
                want = REFERENCE.linear(x.float(), exact, None if add is None else add.float(), gate)
                assert off(got, want) < 1e-2
                assert torch.equal(integer_mma(x, matrix, add, CARD, arrived, gate), got), "the order of sums is fixed"
    assert not arrived.any(), "counters are left as they were found"


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("how", [(16, 64, 2, 256, 8, 2, 2), (16, 64, 4, 128, 4, 3, 6), (8, 128, 1, 512, 8, 4, 1)])
def test_other_tiles_have_the_same_products(how: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    matrix, x = made("zeros", 128, 256, 5120), torch.randn(7, 5120, dtype=torch.bfloat16, device=DEVICE)
    want = REFERENCE.linear(x.float(), dequantize_integers(matrix), None, "silu")
    assert off(integer_mma(x, matrix, None, CARD, arrived, "silu", MmaConfig(*how)), want) < 1e-2


@pytest.mark.gpu
@NEEDS_CARD
def test_columns_in_another_order_are_taken_in_the_order_of_the_matrix() -> None:
    torch.manual_seed(0)
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(1024, device=DEVICE)
    matrix = made("zeros", 128, 128, 1024)._replace(order=order)
    x = torch.randn(12, 1024, dtype=torch.bfloat16, device=DEVICE)
    got = integer_mma(x, matrix, None, CARD, arrived)
    assert off(got, x[:, order].float() @ dequantize_integers(matrix._replace(order=None)).T) < 1e-2
