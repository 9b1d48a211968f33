"""Products with GGUF's blocks that Hopper's copy engine feeds, against the dequantized matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops.capture import PRECOMPILING
from quire.ops.integer import dequantize_integers
from quire.ops.operands import Gate
from quire.ops.reference import ReferenceOps
from quire.ops.triton.block_tma import BYTES, MAX_ROWS, MIN_ROWS, TURN, block_tma, takes
from quire.ops.triton.gemv import COUNTERS
from quire.ops.triton.integer_gemm import in_float16
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE, NEEDS_HOPPER
from tests.ops.triton.integers import made, off
from tests.ops.triton.test_integer_gemm import computed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
HOPPER = replace(CARD, sms=132, capability=(9, 0))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
def test_two_bytes_become_two_numbers(dtype: torch.dtype) -> None:
    code = in_float16(BYTES) if dtype is torch.float16 else BYTES
    for byte in range(256):
        given = [byte, (5 * byte + 7) % 256]
        # A signed load leaves ones above the two bytes.
        held = computed(code, int.from_bytes(bytes([*given, 0xFF, 0xFF]), "little"))
        words = torch.tensor([held["$0"]]).to(torch.uint32).view(torch.int32)
        assert words.view(dtype).tolist() == [b - 256 * (b > 127) for b in given]


def test_only_what_fits_is_taken() -> None:
    def taken(kind: str = "bytes", group: int = 32, outputs: int = 512, inputs: int = 1024, rows: int = 64,
              dtype: torch.dtype = torch.bfloat16, card: DeviceInfo = HOPPER, bias: torch.Tensor | None = None,
              gate: Gate = "") -> bool:  # fmt: skip
        x = torch.zeros(rows, inputs, dtype=dtype, device=DEVICE)
        return takes(x, made(kind, group, outputs, inputs), bias, gate, card)

    assert taken() and taken("q4_k") and taken(inputs=1152) and taken(gate="silu")
    assert taken(rows=MIN_ROWS) and taken(rows=MAX_ROWS)
    assert not taken(rows=MIN_ROWS - 1) and not taken(rows=MAX_ROWS + 1)
    assert not taken(dtype=torch.float32) and not taken(dtype=torch.float16)
    assert not taken(bias=torch.zeros(512, device=DEVICE)) and not taken(gate="gelu") and not taken(gate="relu2")
    assert not taken("nibbles") and not taken("zeros", 128) and not taken("rows") and not taken("q6_k")
    assert not taken(outputs=384), "tiles have no remainder"
    assert not taken(card=replace(HOPPER, capability=(8, 0))) and not taken(card=replace(HOPPER, sms=0))


def launched(kind: type[TritonOps], rows: int, name: str) -> set[str]:
    """Names of the kernels of a product with such blocks."""
    names, ops = set[str](), kind(DEVICE)
    ops.card = replace(HOPPER, sms=ops.card.sms and HOPPER.sms)
    token = PRECOMPILING.set(lambda made, *_, **__: names.add(made.fn.__name__))
    try:
        x = torch.zeros(rows, 256, dtype=torch.bfloat16, device=DEVICE)
        ops.quantized_linear(x, made(name, 32, 256, 256))
    finally:
        PRECOMPILING.reset(token)
    return names


@pytest.mark.parametrize("name", ["bytes", "q4_k"])
def test_some_rows_are_multiplied_so(name: str) -> None:
    for rows in (33, 64):
        assert launched(TritonOps, rows, name) == {"block_kernel"}
        assert "block_kernel" not in launched(BatchInvariantTritonOps, rows, name)
    assert "block_kernel" not in launched(TritonOps, 32, name) | launched(TritonOps, 65, name)


@pytest.mark.gpu
@NEEDS_HOPPER
@DTYPES
@pytest.mark.parametrize("name", ["bytes", "q4_k"])
@pytest.mark.parametrize("gate", ["", "silu", "relu2"])
def test_products_are_those_of_the_dequantized_matrix(dtype: torch.dtype, name: str, gate: Gate) -> None:
    torch.manual_seed(0)
    turns = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
    for inputs in (512, 4608):
        matrix = made(name, 32, 512, inputs)
        exact, bias = dequantize_integers(matrix), torch.randn(512, dtype=dtype, device=DEVICE)
        for rows in (33, 40, 64):
            x = torch.randn(rows, inputs, dtype=dtype, device=DEVICE) / 64
            for add in (None, bias):
                got = block_tma(x, matrix, add, CARD, turns, gate)
                want = REFERENCE.linear(x.float(), exact, None if add is None else add.float(), gate)
                assert off(got, want) < 1e-2
                assert torch.equal(block_tma(x, matrix, add, CARD, turns, gate), got), "the order of sums is fixed"
    assert not (turns % TURN.value).any(), "counters are left where each turn begins"


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("name", ["bytes", "q4_k"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (28672, 4096), (256, 256), (37888, 3584)])
def test_tiles_of_any_number_of_programs_are_whole(name: str, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    turns = torch.full((COUNTERS,), 2**31 - 2 * TURN.value, dtype=torch.int32, device=DEVICE)
    matrix, x = made(name, 32, outputs, inputs), torch.randn(60, inputs, dtype=torch.bfloat16, device=DEVICE) / 64
    want = x.float() @ dequantize_integers(matrix).T
    for _ in range(4):
        assert off(block_tma(x, matrix, None, CARD, turns), want) < 4e-3
    assert not (turns % TURN.value).any(), "counters may pass the largest number"
