"""Products of few rows with matrices of integers, against the matrix dequantized whole, then multiplied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.integer import dequantize_integers, stack_integers
from quire.ops.operands import NO_BIASES, ExpertBiases, Gate, IntegerMatrix, RouterWeights, Routing, TopK, num_parts
from quire.ops.reference import ReferenceOps
from quire.ops.triton import integer_gemv as few
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE
from tests.ops.triton.integers import KINDS, made, off
from tests.ops.triton.test_experts import padded, random_biases, routed
from tests.ops.triton.test_integer_experts import inputs, mixture, moved

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
GATES = pytest.mark.parametrize("gate", ["", "silu"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def exact(x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, gate: Gate) -> Tensor:
    """The product as the kernel makes it, not rounded at the end."""
    out = torch.empty(len(x), matrix.outputs // num_parts(gate), device=DEVICE)
    few.launch(x, matrix, bias, out, None, few.DENSE, 1, gate, CARD)
    return out


@KINDS
@pytest.mark.parametrize(("gate", "rows"), [("silu", 1), ("", 3)])
def test_a_product_is_that_of_the_dequantized_matrix(kind: str, group: int, gate: Gate, rows: int) -> None:
    torch.manual_seed(0)
    matrix = made(kind, group, 20, 200)
    x, bias = torch.randn(rows, matrix.inputs, device=DEVICE).bfloat16(), torch.randn(20, device=DEVICE)
    want = REFERENCE.linear(x.float(), dequantize_integers(matrix), bias, gate)
    assert off(exact(x, matrix, bias, gate), want) < 1e-5


@DTYPES
@pytest.mark.parametrize("half", [True, False], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "group", "outputs", "inputs"),
    [("zeros", 128, 18, 640), ("zeros", 64, 6, 2240), ("zeros", 32, 16, 4), ("rows", 128, 2, 36)],
)
def test_any_number_of_batches_and_halves(
    kind: str, group: int, outputs: int, inputs: int, half: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    matrix = made(kind, group, outputs, inputs, half)
    rows = 4 if half else 1
    x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    got = exact(x, matrix, None, "")
    assert off(got, REFERENCE.linear(x.float(), dequantize_integers(matrix))) < 2e-5
    assert off(few.integer_gemv(x, matrix, None, CARD), got) < 8e-3


@GATES
def test_large_numbers_of_x_and_zeros_far_from_the_middle_lose_nothing(gate: Gate) -> None:
    torch.manual_seed(2)
    matrix, x = made("zeros", 64, 16, 256), torch.rand(1, 256, device=DEVICE).mul(1000).bfloat16()
    want = REFERENCE.linear(x.double().float(), dequantize_integers(matrix), None, gate)
    assert off(exact(x, matrix, None, gate), want) < 2e-5


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(3)
    matrix, x = made("zeros", 128, 16, 256), torch.randn(4, 256, device=DEVICE).bfloat16()
    want = few.integer_gemv(x, matrix, None, CARD)
    x[2] = float("nan")
    got = few.integer_gemv(x, matrix, None, CARD)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


HERE = replace(CARD, sms=2, capability=(8, 0))
"""A card that has the matrix units."""


def test_only_rows_that_it_can_read_are_taken() -> None:
    matrix, x = made("zeros", 64, 32, 128), torch.zeros(1, 129, dtype=torch.bfloat16, device=DEVICE)
    assert few.takes(x[:, :128].contiguous(), HERE, matrix)
    assert not few.takes(x[:, 1:], HERE, matrix), "not at a multiple of 8 bytes"
    assert not few.takes(x[:, :128].float(), HERE, matrix)
    assert not few.takes(x[:, :128].expand(few.MAX_ROWS + 1, -1), HERE, matrix)
    assert not few.takes(x[:, :128].contiguous(), HERE, matrix, made("zeros", 64, 32, 126))
    assert not few.takes(x[:, :128].contiguous(), replace(HERE, capability=(7, 5)), matrix)
    assert not few.takes(x[:, :128].contiguous(), replace(HERE, sms=0), matrix), "not the same in every batch"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("gate", "dtype"), [("", torch.bfloat16), ("silu", torch.float16)], ids=str)
def test_operations_take_it_for_few_rows(gate: Gate, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    called, plain = list[int](), few.integer_gemv

    def counted(x: Tensor, *others: object) -> Tensor:
        called.append(len(x))
        return plain(x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(few, "integer_gemv", counted)
    matrix = made("zeros", 64, 32, 128)._replace(order=torch.randperm(128, device=DEVICE))
    for rows in (1, few.MAX_ROWS + 1):
        x = torch.randn(rows, 128, device=DEVICE).to(dtype)
        got = TritonOps(DEVICE).quantized_linear(x, matrix, None, gate)
        assert off(got, REFERENCE.quantized_linear(x.float(), matrix, None, gate)) < 1e-2
        fixed = BatchInvariantTritonOps(DEVICE).quantized_linear(x, matrix, None, gate)
        assert off(fixed, got) < 1e-2
    assert called == [1]


# ---------------------------------------------------------------- mixtures


def both(
    x: Tensor,
    routing: Routing,
    gate_up: IntegerMatrix,
    down: IntegerMatrix,
    gate: Gate,
    biases: ExpertBiases = NO_BIASES,
) -> Tensor:
    inner = few.multiply_slots(x, routing, gate_up, gate, CARD, biases.gate_up)
    early = few.multiply_slots(x, routing._replace(early=True), gate_up, gate, CARD, biases.gate_up)
    used = routing.experts.flatten() >= 0
    assert torch.equal(early[used], inner[used])
    return few.add_slots(inner, routing, down, CARD, biases.down)


@pytest.mark.parametrize(("hidden", "width"), [pytest.param(128, 64, marks=pytest.mark.nightly), (100, 40)])
def test_floats_of_four_bits_with_biases_and_a_clamped_gate(hidden: int, width: int) -> None:
    gate_up, down = mixture("floats", 32, 5, hidden, width)
    x, biases = 9 * inputs(3, gate_up).bfloat16(), random_biases(5, hidden, width)
    routing = routed(3, 5, 2, [0, 2, 4])
    want = REFERENCE.quantized_experts(x.float(), routing, gate_up, down, "clamped", biases)
    assert off(both(x, routing, gate_up, down, "clamped", biases), want) < 1e-2


def test_slots_of_other_ranks_experts_are_left_out() -> None:
    """Where a rank has some experts as a whole, a token's others have number -1 and weight 0, the first one, too."""
    gate_up, down = mixture("floats", 32, 5, 100, 40)
    chosen = torch.tensor([[-1, 2, 0], [3, -1, 4], [-1, -1, -1]], dtype=torch.int32, device=DEVICE)
    routing = Routing(chosen, torch.rand(3, 3, device=DEVICE) * (chosen >= 0))
    x = inputs(3, gate_up).bfloat16()
    for biases in (NO_BIASES, random_biases(5, 100, 40)):
        want = REFERENCE.quantized_experts(x.float(), routing, gate_up, down, "silu", biases)
        assert off(both(x, routing, gate_up, down, "silu", biases), want) < 2e-2


@KINDS
def test_a_mixture_is_that_of_dequantized_matrices(kind: str, group: int) -> None:
    """Its halves one by one, so that matrices of superblocks have few outputs as well."""
    torch.manual_seed(3)
    gate_up = stack_integers([made(kind, group, 2 * 24, 136) for _ in range(3)])
    down = stack_integers([made(kind, group, 24, 136) for _ in range(3)])
    assert gate_up is not None
    assert down is not None
    routing = routed(2, 3, 2, [0, 2])
    slots = [(token, expert) for token, chosen in enumerate(routing.experts.tolist()) for expert in chosen]
    gates, downs = ([dequantize_integers(each.expert(e)) for e in range(3)] for each in (gate_up, down))
    x = (torch.randn(2, gate_up.inputs, device=DEVICE) / gates[0].norm(dim=1).mean()).half()
    want = torch.cat([REFERENCE.linear(x[token, None].float(), gates[e], None, "silu") for token, e in slots])
    assert off(few.multiply_slots(x, routing, gate_up, "silu", CARD), want) < 2e-3
    inner = (torch.randn(len(slots), down.inputs, device=DEVICE) / downs[0].norm(dim=1).mean()).half()
    products = torch.stack([downs[e] @ inner[slot].float() for slot, (_, e) in enumerate(slots)])
    want = (products.view(2, 2, -1) * routing.weights[..., None]).sum(1)
    assert off(few.add_slots(inner, routing, down, CARD), want) < 2e-3


@pytest.mark.parametrize(
    ("tokens", "used", "only", "hidden", "width", "gate"),
    [
        (1, 4, [*range(9)], 128, 64, "silu"),
        (3, 1, [8], 100, 40, "gelu"),
        (2, 5, [*range(9)], 100, 40, "gelu"),
        pytest.param(1, 4, [*range(9)], 100, 40, "gelu", marks=pytest.mark.nightly),
        pytest.param(3, 1, [8], 128, 64, "silu", marks=pytest.mark.nightly),
        pytest.param(2, 5, [*range(9)], 128, 64, "silu", marks=pytest.mark.nightly),
    ],
)
def test_any_number_of_tokens_and_experts(
    tokens: int, used: int, only: list[int], hidden: int, width: int, gate: Gate
) -> None:
    gate_up, down = mixture("zeros", 64, 9, hidden, width)
    x = torch.randn(tokens, hidden, device=DEVICE) / dequantize_integers(gate_up.expert(0)).norm(dim=1).mean()
    x, routing = x.half(), routed(tokens, 9, used, only)
    for matrix in (gate_up, moved(gate_up)):
        want = REFERENCE.quantized_experts(x.float(), routing, matrix, down, gate)
        assert off(both(x, routing, matrix, down, gate), want) < 3e-3


@pytest.mark.parametrize("hidden", [512, 320])
def test_a_warp_of_slots_has_half_a_batch_of_a_gate(hidden: int) -> None:
    """Two warps with four units each, or with three and two."""
    units = -(-hidden // 64)
    assert few.num_warps(units, 1, 4, "silu", slots=True) == 2
    assert few.num_warps(units, 1, 4, "silu", slots=False) == few.num_warps(units, 1, 4, "", slots=True) == 1
    assert few.num_warps(96, 1, 4, "", slots=True) == 8
    gate_up, down = mixture("zeros", 64, 3, hidden, 40)
    x, routing = inputs(1, gate_up).half(), routed(1, 3, 2, [0, 2])
    want = REFERENCE.quantized_experts(x.float(), routing, gate_up, down, "silu")
    assert off(both(x, routing, gate_up, down, "silu"), want) < 3e-3


def test_products_and_experts_without_a_gate() -> None:
    rise, _ = mixture("zeros", 64, 4, 128, 32)
    _, down = mixture("zeros", 64, 4, 128, 64)
    x, routing = inputs(3, rise).half(), routed(3, 4, 2, [0, 3])
    want = REFERENCE.quantized_experts(x.float(), routing, rise, down, "relu2")
    assert off(both(x, routing, rise, down, "relu2"), want) < 3e-3
    one = rise.expert(0)
    want = REFERENCE.linear(x.float(), dequantize_integers(one), None, "relu2")
    assert off(exact(x, one, None, "relu2"), want) < 3e-5


def test_tokens_that_fill_up_a_step_and_idle_experts_are_not_read() -> None:
    gate_up, down = mixture("zeros", 32, 9, 64, 32)
    x, router = torch.randn(4, 64, device=DEVICE).div(20), torch.randn(9, 64, device=DEVICE)
    routing = TritonOps(DEVICE).route(x, RouterWeights(router, TopK(2, True)), padded(4, 2))
    assert (routing.experts[2:] == -1).all()
    real = Routing(*(each[:2] for each in routing[:2]))
    want = REFERENCE.quantized_experts(x[:2].half().float(), real, gate_up, down, "silu")
    idle = [e for e in range(9) if e not in real.experts.flatten().tolist()]
    for matrix in (gate_up, down):
        matrix.words[idle] = -1  # scales and zero points that are no numbers
    x[2:] = float("nan")
    got = both(x.half(), routing, gate_up, down, "silu")
    assert off(got[:2], want) < 1e-2
    assert (got[2:] == 0).all()
