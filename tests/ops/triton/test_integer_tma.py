"""Products with 4-bit matrices that Hopper's copy engine and matrix units make, against the dequantized matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops.integer import dequantize_integers
from quire.ops.operands import Gate
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import COUNTERS
from quire.ops.triton.integer_gemm import in_float16
from quire.ops.triton.integer_tma import MAX_ROWS, MIN_ROWS, NIBBLES, TmaConfig, divided, integer_tma, takes
from quire.ops.triton.launch import DeviceInfo
from tests.ops.triton.device import DEVICE, NEEDS_HOPPER
from tests.ops.triton.integers import made, off
from tests.ops.triton.test_integer_gemm import computed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
HOPPER = replace(CARD, sms=132, capability=(9, 0))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
def test_two_bytes_become_four_numbers(dtype: torch.dtype) -> None:
    half = dtype is torch.float16
    for byte in range(256):
        given, less = [(byte * k + 7 * k) % 256 for k in (1, 5)], byte % 17
        # A signed load leaves ones above the two bytes.
        word = int.from_bytes(bytes([*given, 0xFF, 0xFF]), "little")
        held = computed(in_float16(NIBBLES) if half else NIBBLES, word, 0x10001 * ((0xE400 if half else 0xC300) + less))
        words = torch.tensor([held["$0"], held["$1"]]).to(torch.uint32).view(torch.int32)
        assert words.view(dtype).tolist() == [(b & 15) - less for b in given] + [(b >> 4) - less for b in given]


def test_only_what_fits_is_taken() -> None:
    def taken(kind: str = "zeros", group: int = 128, outputs: int = 512, inputs: int = 1024, rows: int = 64,
              dtype: torch.dtype = torch.bfloat16, card: DeviceInfo = HOPPER) -> bool:  # fmt: skip
        x = torch.zeros(rows, inputs, dtype=dtype, device=DEVICE)
        return takes(x, made(kind, group, outputs, inputs), card)

    assert taken() and taken(group=64) and taken(inputs=1152) and taken(dtype=torch.float16)
    assert taken(rows=MIN_ROWS) and taken(rows=MAX_ROWS)
    assert not taken(rows=MIN_ROWS - 1) and not taken(rows=MAX_ROWS + 1)
    assert not taken(dtype=torch.float32)
    assert not taken(group=32) and not taken(kind="nibbles", group=32) and not taken(kind="q4_k", group=32)
    assert not taken(kind="byte zeros") and not taken(kind="rows") and not taken(kind="floats", group=32)
    assert not taken(outputs=384), "tiles have no remainder"
    assert not taken(card=replace(HOPPER, capability=(8, 0))) and not taken(card=replace(HOPPER, capability=(12, 0)))
    assert not taken(card=replace(HOPPER, sms=0)), "kernels that must not depend on the batch have another order"
    matrix, x = made("zeros", 128, 512, 1024), torch.zeros(64 * 1024 + 1, dtype=torch.bfloat16, device=DEVICE)
    assert not takes(x[1:].view(64, 1024), matrix, HOPPER), "the copy engine reads 16 bytes at a time"


@pytest.mark.parametrize(("count", "length"), [(24, 32), (16, 32), (112, 32), (16, 112), (1, 4), (7, 9), (300, 8)])
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize("each", [0, 7])
def test_each_piece_is_one_program_s_and_no_more_run_than_fit(
    count: int, length: int, programs: int, each: int
) -> None:
    how = divided(count, length, programs, each)
    assert how.programs <= programs and (how.programs - 1) * how.each < count * how.pitch <= how.programs * how.each
    assert how.pitch == length or (how.pitch > length > how.pitch - how.each and how.pitch % how.each == 0)
    owners = [[piece // how.each for piece in range(t * how.pitch, t * how.pitch + length)] for t in range(count)]
    assert max(len({*own}) for own in owners) <= how.most
    assert (how.most == 1) == all(len({*own}) == 1 for own in owners)
    assert {each for own in owners for each in own} == {*range(how.programs)}, "none has nothing to do"


def test_tiles_stay_whole_without_counters_for_all() -> None:
    how = divided(COUNTERS + 1, 8, 132)
    assert how.most == 1 and how.each % 8 == 0


@pytest.mark.gpu
@NEEDS_HOPPER
@DTYPES
@pytest.mark.parametrize("group", [64, 128, 512])
@pytest.mark.parametrize("gate", ["", "silu", "relu2"])
def test_products_are_those_of_the_dequantized_matrix(dtype: torch.dtype, group: int, gate: Gate) -> None:
    torch.manual_seed(0)
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    for inputs in (512, 4608):
        matrix = made("zeros", group, 512, inputs, half=dtype is torch.float16)
        exact, bias = dequantize_integers(matrix), torch.randn(512, dtype=dtype, device=DEVICE)
        for rows in (17, 32, 47, 64, 65, 129):
            x = torch.randn(rows, inputs, dtype=dtype, device=DEVICE) / 64
            assert takes(x, matrix, CARD)
            for add in (None, bias):
                got = integer_tma(x, matrix, add, CARD, arrived, gate)
                want = REFERENCE.linear(x.float(), exact, None if add is None else add.float(), gate)
                assert off(got, want) < 1e-2
                assert torch.equal(integer_tma(x, matrix, add, CARD, arrived, gate), got), "the order of sums is fixed"
    assert not arrived.any(), "counters are left as they were found"


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("each", [1, 3, 5, 9, 36, 50, 144])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_tiles_cut_anywhere_have_the_same_products(each: int, gate: Gate) -> None:
    torch.manual_seed(0)
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    matrix, x = made("zeros", 128, 1024, 4608), torch.randn(60, 4608, dtype=torch.bfloat16, device=DEVICE) / 64
    want = REFERENCE.linear(x.float(), dequantize_integers(matrix), None, gate)
    for rows in (16, 32, 64):
        got = integer_tma(x, matrix, None, CARD, arrived, gate, TmaConfig(rows, each=each))
        assert off(got, want) < 1e-2
    assert not arrived.any()


@pytest.mark.gpu
@NEEDS_HOPPER
def test_columns_in_another_order_are_taken_in_the_order_of_the_matrix() -> None:
    torch.manual_seed(0)
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(1024, device=DEVICE)
    matrix = made("zeros", 128, 256, 1024)._replace(order=order)
    x = torch.randn(48, 1024, dtype=torch.bfloat16, device=DEVICE) / 64
    got = integer_tma(x, matrix, None, CARD, arrived)
    assert off(got, x[:, order].float() @ dequantize_integers(matrix._replace(order=None)).T) < 1e-2
