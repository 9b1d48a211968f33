"""Products with matrices of integers against the matrix dequantized whole, then multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.integer import dequantize_integers, floats_of
from quire.ops.operands import Gate, IntegerMatrix, QuantizedMatrix
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import COUNTERS, GemmConfig
from quire.ops.triton.integer_gemm import (
    BYTES,
    E2M1,
    NIBBLES,
    WORD_NIBBLES,
    dequantize,
    e2m1_in_float16,
    fitted,
    in_float16,
    integer_gemm_config,
    integer_linear,
)
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE
from tests.ops.triton.integers import KINDS, made, off

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
ARRIVED = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
GATES = pytest.mark.parametrize("gate", ["", "silu"])


@KINDS
@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
def test_a_matrix_is_dequantized_to_the_bit(kind: str, group: int, half: bool) -> None:
    torch.manual_seed(0)
    matrix = made(kind, group, 20, 200, half)
    chosen = torch.tensor([7, 0, 19, 7], device=DEVICE)
    assert torch.equal(dequantize(matrix, torch.float32, CARD, chosen=chosen), dequantize_integers(matrix)[chosen])
    assert torch.equal(dequantize(matrix, torch.float32, CARD), dequantize_integers(matrix))
    assert torch.equal(dequantize(matrix, torch.float32, CARD, slice(3, 19)), dequantize_integers(matrix)[3:19])


@KINDS
@GATES
def test_a_product_is_that_of_the_dequantized_matrix(kind: str, group: int, gate: Gate) -> None:
    torch.manual_seed(0)
    matrix = made(kind, group, 40, 200)
    for rows, how in ((3, GemmConfig(8, 16, 256, 2, 3)), (20, GemmConfig(16, 32, 64, 2, 2))):
        x, bias = torch.randn(rows, matrix.inputs, device=DEVICE), torch.randn(40, device=DEVICE)
        got = integer_linear(x, matrix, bias, how, CARD, ARRIVED, gate)
        assert off(got, REFERENCE.linear(x, dequantize_integers(matrix), bias, gate)) < 1e-5


@GATES
def test_inputs_cut_into_runs_add_up_whichever_program_ends_last(gate: Gate) -> None:
    torch.manual_seed(0)
    matrix, x = made("zeros", 64, 48, 640), torch.randn(3, 640, device=DEVICE)
    want = REFERENCE.linear(x, dequantize_integers(matrix), None, gate)
    for _ in range(2):
        got = integer_linear(x, matrix, None, GemmConfig(8, 16, 128, 2, 3, splits=3), CARD, ARRIVED, gate)
        assert off(got, want) < 1e-5
        assert not ARRIVED.any(), "counters are left as they were found"


@pytest.mark.parametrize(
    ("kind", "group"),
    [("zeros", 128), ("zeros", 32), ("nibbles", 32), ("floats", 32), ("rows", 128), ("q4_k", 32), ("q6_k", 16)],
)
@GATES
@pytest.mark.parametrize(("rows", "how"), [(1, (8, 8)), (3, (8, 4)), (4, (16, 2))], ids=["8", "4 of two", "2 of eight"])
def test_inputs_in_chunks_side_by_side(kind: str, group: int, gate: Gate, rows: int, how: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix, x = made(kind, group, 32, 2048), torch.randn(rows, 2048, device=DEVICE)
    want = REFERENCE.linear(x, dequantize_integers(matrix), None, gate)
    for splits in (1, 2):
        some = GemmConfig(how[0], 16, 256 if kind.startswith("q") else 128, 4, 3, splits=splits, chunks=how[1])
        some = some._replace(splits=1) if kind.startswith("q") and how[1] == 8 else some
        assert fitted(some, matrix, CARD, 4, gate != "").chunks == how[1]
        assert off(integer_linear(x, matrix, None, some, CARD, ARRIVED, gate), want) < 1e-5


def test_inputs_with_a_remainder_are_not_taken_in_chunks() -> None:
    torch.manual_seed(0)
    for inputs, outputs in ((1920, 32), (2048, 40)):
        matrix, x = made("zeros", 64, outputs, inputs), torch.randn(2, inputs, device=DEVICE)
        how = GemmConfig(8, 16, 128, 4, 3, chunks=8)
        assert fitted(how, matrix, CARD, 4, False).chunks == 1
        assert off(integer_linear(x, matrix, None, how, CARD, ARRIVED), x @ dequantize_integers(matrix).T) < 1e-5


def computed(code: str, *given: int, outputs: int = 0) -> dict[str, int]:
    """Registers after a run of PTX instructions, 32 bits each. given: what comes after the outputs ($0, $1 ..), by
    default as many as there are `fma`."""
    outputs = outputs or code.count("fma")
    held = {f"${outputs + i}": word for i, word in enumerate(given)}
    dtype = torch.bfloat16 if "bf16" in code else torch.float16

    def pair(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(dtype)

    for line in code.splitlines()[2:-1]:
        name, rest = line.rstrip(";").split(" ", 1)
        to, *names = rest.split(", ")
        value = [held[each] if each in held else int(each, 0) for each in names]
        if name.startswith("prmt"):
            whole = (value[1] << 32 | value[0]).to_bytes(8, "little")
            held[to] = int.from_bytes(bytes(whole[value[2] >> 4 * i & 7] for i in range(4)), "little")
        elif name.startswith("fma"):
            first, second = (
                (pair(value[0]).float() * pair(value[1]).float() + pair(value[2]).float()).to(dtype).tolist()
            )
            held[to] = int(torch.tensor([first, second], dtype=dtype).view(torch.int32).item()) & 0xFFFFFFFF
        else:
            held[to] = {
                "mov": lambda a: a,
                "shr": lambda a, b: a >> b,
                "shl": lambda a, b: a << b & 0xFFFFFFFF,
                "and": lambda a, b: a & b,
                "lop3": lambda a, b, c, _: a & b | c,
            }[name.split(".")[0]](*value)
    return {f"${i}": held[f"${i}"] for i in range(outputs)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_of_a_card_take_every_byte_by_itself(dtype: torch.dtype) -> None:
    half = dtype is torch.float16
    for byte in range(256):
        others = [(byte * k + 7 * k) % 256 for k in (1, 3, 5, 11)]
        word = int.from_bytes(bytes(others), "little")
        zeros = [0xC300 + (byte + k) % 17 + (0xE400 - 0xC300 if half else 0) for k in range(8)]
        less = [(byte + k) % 17 for k in range(8)]
        made = computed(NIBBLES if not half else in_float16(NIBBLES), word, *(z | 0x5A5A0000 for z in zeros))
        got = torch.tensor([made[f"${i}"] for i in range(4)]).to(torch.uint32).view(torch.int32).view(dtype).tolist()
        low, high = [b & 15 for b in others], [b >> 4 for b in others]
        assert got == [q - z for q, z in zip(low + high, less, strict=True)]
        pair = zeros[0] | zeros[1] << 16
        made = computed(WORD_NIBBLES if not half else in_float16(WORD_NIBBLES), word, pair)
        got = torch.tensor([made[f"${i}"] for i in range(4)]).to(torch.uint32).view(torch.int32).view(dtype).tolist()
        turned = [q for every in (low, high) for first in (0, 1) for q in every[first::2]]
        assert got == [q - z for q, z in zip(turned, less[:2] * 4, strict=True)]
        made = computed(e2m1_in_float16(E2M1) if half else E2M1, word)
        got = torch.tensor([made[f"${i}"] for i in range(4)]).to(torch.uint32).view(torch.int32).view(dtype).tolist()
        assert got == floats_of(torch.tensor(low + high)).tolist()
        made = computed(BYTES if not half else in_float16(BYTES), word)
        got = torch.tensor([made[f"${i}"] for i in range(2)]).to(torch.uint32).view(torch.int32).view(dtype).tolist()
        assert got == [b - 256 if b > 127 else b for b in others]


def test_columns_are_taken_in_the_order_of_the_matrix() -> None:
    torch.manual_seed(0)
    groups = (torch.arange(128, device=DEVICE) // 64)[torch.randperm(128, device=DEVICE)]
    weight = torch.randint(0, 256, (24, 64), dtype=torch.uint8, device=DEVICE)
    scale, zero = (torch.rand(24, 2, device=DEVICE) + 0.1).half().float(), torch.randint(0, 16, (24, 2), device=DEVICE)
    plain = QuantizedMatrix(weight, scale, zero=zero.byte(), groups=groups)
    ops, x = TritonOps(DEVICE), torch.randn(3, 128, device=DEVICE)
    matrix = ops.arranged(plain)
    assert isinstance(matrix, IntegerMatrix)
    want = REFERENCE.quantized_linear(x, plain)
    assert off(ops.quantized_linear(x, matrix), want) < 1e-5, "dequantized first"
    got = integer_linear(x, matrix, None, GemmConfig(8, 16, 128, 2, 3), CARD, ARRIVED)
    assert off(got, want) < 1e-5


def test_a_matrix_that_the_layout_cannot_hold_is_multiplied_as_it_is() -> None:
    groups = torch.arange(96, device=DEVICE) // 48
    weight = torch.randint(0, 256, (24, 48), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(24, 2, device=DEVICE) + 0.1
    plain = QuantizedMatrix(weight, scale, zero=torch.full_like(scale, 8).byte(), groups=groups)
    ops, x = TritonOps(DEVICE), torch.randn(3, 96, device=DEVICE)
    assert ops.arranged(plain) is plain
    assert off(ops.quantized_linear(x, plain), REFERENCE.quantized_linear(x, plain)) < 1e-4


def test_a_matrix_of_many_outputs_is_dequantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("quire.ops.triton.ops.MOST_OUTPUTS", 16)
    matrix, x, bias = made("q4_k", 32, 40, 256), torch.randn(70, 256, device=DEVICE), torch.randn(40, device=DEVICE)
    got = TritonOps(DEVICE).quantized_linear(x, matrix, bias)
    assert off(got, REFERENCE.quantized_linear(x, matrix, bias)) < 1e-5


@KINDS
def test_a_row_has_the_same_bits_in_any_batch(kind: str, group: int) -> None:
    torch.manual_seed(0)
    ops, matrix = BatchInvariantTritonOps(DEVICE), made(kind, group, 32, 128)
    x = torch.randn(20, matrix.inputs, device=DEVICE)
    whole = ops.quantized_linear(x, matrix)
    for rows in (slice(3, 4), slice(5, 12)):
        assert torch.equal(ops.quantized_linear(x[rows], matrix), whole[rows])
    assert off(whole, REFERENCE.quantized_linear(x, matrix)) < 1e-5


def test_tiles_fit_the_columns_and_many_rows_are_multiplied_by_the_dequantized_matrix() -> None:
    torch.manual_seed(0)
    matrix, card = made("zeros", 128, 64, 384), replace(CARD, sms=132)
    for rows in (1, 8, 9, 16, 17, 32, 33, 64):
        for gated in (False, True):
            how = integer_gemm_config(rows, matrix, card, gated=gated)
            assert how is not None
            assert how.rows >= min(rows, 32)
    assert integer_gemm_config(65, matrix, card) is None


def test_tiles_of_superblocks_are_those_that_each_card_can_compile() -> None:
    matrix, card = made("q4_k", 32, 64, 512), replace(CARD, sms=132)
    tiles = [integer_gemm_config(64, matrix, replace(card, capability=each)) for each in ((9, 0), (10, 0), (12, 0))]
    assert [how.rows for how in tiles if how is not None] == [64, 32, 32]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@KINDS
@GATES
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [*((torch.bfloat16, rows) for rows in (1, 4, 16, 17, 64, 100, 300)), (torch.float16, 1), (torch.float16, 64)],
    ids=str,
)
def test_half_precision_on_the_gpu(kind: str, group: int, dtype: torch.dtype, rows: int, gate: Gate) -> None:
    torch.manual_seed(rows)
    matrix, ops = made(kind, group, 6144, 4096), TritonOps(DEVICE)
    # Small enough that what a gate multiplies is within float16.
    x = (torch.randn(rows, 4096, device=DEVICE) / 32).to(dtype)
    bias = torch.randn(6144, device=DEVICE).to(dtype)
    got = ops.quantized_linear(x, matrix, bias, gate)
    assert not ops.arrived.any()
    assert off(got, REFERENCE.linear(x.float(), dequantize_integers(matrix), bias.float(), gate)) < 1e-2
    assert torch.equal(ops.quantized_linear(x, matrix, bias, gate), got)
