"""Mixtures of experts of integers by kernels, against those of dequantized matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.integer import dequantize_integers, stack_integers
from quire.ops.operands import NO_BIASES, Gate, IntegerMatrix, RouterWeights, Routing, TopK
from quire.ops.reference import ReferenceOps
from quire.ops.triton.gemv import GemmConfig
from quire.ops.triton.integer_experts import (
    FEW_TOKENS,
    FIXED,
    IntegerExpertConfig,
    integer_expert_config,
    integer_experts,
)
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE
from tests.ops.triton.integers import KINDS, made, off
from tests.ops.triton.test_experts import padded, random_biases, routed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
ONE = IntegerExpertConfig(GemmConfig(8, 16, 64, 2, 2), GemmConfig(8, 32, 128, 2, 3), False)
EIGHT = IntegerExpertConfig(GemmConfig(8, 16, 64, 2, 2), GemmConfig(8, 32, 128, 2, 3))
WIDE = IntegerExpertConfig(GemmConfig(8, 128, 128, 4, 2), GemmConfig(8, 128, 128, 4, 2))
MANY = IntegerExpertConfig(GemmConfig(32, 32, 128, 4, 3), GemmConfig(32, 16, 64, 4, 2))


def mixture(kind: str, group: int, count: int, hidden: int, width: int) -> tuple[IntegerMatrix, IntegerMatrix]:
    """Gate and up, and down, of experts whose inner numbers have a standard deviation near 1. Superblocks have at least
    so many inputs."""
    torch.manual_seed(count)
    wide = 256 if kind.startswith("q") else width
    pairs = [(made(kind, group, 2 * wide, hidden), made(kind, group, hidden, wide)) for _ in range(count)]
    gate_up, down = (stack_integers(each) for each in zip(*pairs, strict=True))
    assert gate_up is not None
    assert down is not None
    return gate_up, down


def inputs(tokens: int, matrix: IntegerMatrix) -> Tensor:
    """x, so small that experts' inner numbers stay near 1."""
    return torch.randn(tokens, matrix.inputs, device=DEVICE) / dequantize_integers(matrix.expert(0)).norm(dim=1).mean()


@KINDS
def test_a_mixture_is_that_of_dequantized_matrices(kind: str, group: int) -> None:
    gate_up, down = mixture(kind, group, 3, 256 if kind.startswith("q") else 200, 72)
    x, routing = inputs(4, gate_up), routed(4, 3, 1, [0, 2])
    got = integer_experts(x, routing, gate_up, down, "silu", WIDE, CARD)
    assert off(got, REFERENCE.quantized_experts(x, routing, gate_up, down, "silu")) < 1e-5


@pytest.mark.parametrize(
    ("hidden", "width", "gate"),
    [(128, 64, "silu"), (100, 40, "gelu"), (70, 33, "silu")],
    ids=["even", "multiple", "odd"],
)
@pytest.mark.parametrize(
    ("how", "tokens", "used", "only"),
    [
        (ONE, 1, 4, list(range(9))),
        (ONE, 3, 1, [8]),
        (EIGHT, 11, 2, [2, 5]),
        (MANY, 40, 1, [6]),
        (MANY, 12, 3, list(range(9))),
    ],
)
def test_any_number_of_tokens_and_experts_of_odd_shapes(
    how: IntegerExpertConfig, tokens: int, used: int, only: list[int], hidden: int, width: int, gate: Gate
) -> None:
    gate_up, down = mixture("zeros", 64, 9, hidden, width)
    x, routing = inputs(tokens, gate_up), routed(tokens, 9, used, only)
    got = integer_experts(x, routing, gate_up, down, gate, how, CARD)
    assert off(got, REFERENCE.quantized_experts(x, routing, gate_up, down, gate)) < 1e-5


@pytest.mark.parametrize(("how", "tokens"), [(ONE, 3), (EIGHT, 11), (MANY, 40)])
@pytest.mark.parametrize("kind", ["zeros", "floats"])
def test_experts_without_a_gate(how: IntegerExpertConfig, tokens: int, kind: str) -> None:
    _, down = mixture(kind, 32, 5, 128, 64)
    rise, _ = mixture(kind, 32, 5, 128, 32)
    x, routing = inputs(tokens, rise), routed(tokens, 5, 2, [0, 2, 4])
    got = integer_experts(x, routing, rise, down, "relu2", how, CARD)
    assert off(got, REFERENCE.quantized_experts(x, routing, rise, down, "relu2")) < 1e-5


@pytest.mark.parametrize(("how", "tokens"), [(ONE, 3), (EIGHT, 11), (MANY, 40)])
@pytest.mark.parametrize(("hidden", "width"), [(128, 64), (96, 160)])
def test_floats_of_four_bits_with_biases_and_a_clamped_gate(
    how: IntegerExpertConfig, tokens: int, hidden: int, width: int
) -> None:
    gate_up, down = mixture("floats", 32, 5, hidden, width)
    x, routing, biases = 9 * inputs(tokens, gate_up), routed(tokens, 5, 2, [0, 2, 4]), random_biases(5, hidden, width)
    got = integer_experts(x, routing, gate_up, down, "clamped", how, CARD, biases)
    assert off(got, REFERENCE.quantized_experts(x, routing, gate_up, down, "clamped", biases)) < 1e-5


def moved(matrix: IntegerMatrix) -> IntegerMatrix:
    """The same experts with their columns moved, each in its own way."""
    orders = [torch.randperm(matrix.inputs, device=DEVICE) for _ in range(len(matrix.weight))]
    return matrix._replace(order=torch.stack(orders))


@pytest.mark.parametrize(("how", "tokens"), [(ONE, 3), (EIGHT, 11), (MANY, 40)])
@pytest.mark.parametrize("hidden", [128, 70])
def test_experts_whose_columns_are_moved(how: IntegerExpertConfig, tokens: int, hidden: int) -> None:
    gate_up, down = mixture("zeros", 64, 5, hidden, 33)
    gate_up, routing = moved(gate_up), routed(tokens, 5, 2, [0, 2, 4])
    x, biases = inputs(tokens, gate_up), random_biases(5, hidden, 33)
    routing.experts[1, 0], routing.weights[1, 0] = -1, 0.0
    x[2], routing.experts[2], routing.weights[2] = float("nan"), -1, 0.0
    got = integer_experts(x, routing, gate_up, down, "silu", how, CARD, biases)
    own = torch.arange(tokens) != 2
    some = Routing(*(each[own] for each in routing[:2]))
    assert off(got[own], REFERENCE.quantized_experts(x[own], some, gate_up, down, "silu", biases)) < 1e-5
    assert (got[2] == 0).all()


@pytest.mark.parametrize("how", [ONE, EIGHT], ids=["slots", "sorted"])
def test_tokens_that_fill_up_a_step_and_idle_experts_are_not_read(how: IntegerExpertConfig) -> None:
    gate_up, down = mixture("zeros", 32, 9, 64, 32)
    x, router = inputs(6, gate_up), torch.randn(9, 64, device=DEVICE)
    routing = TritonOps(DEVICE).route(x, RouterWeights(router, TopK(2, True)), padded(6, 4))
    assert (routing.experts[4:] == -1).all()
    real = Routing(*(each[:4] for each in routing[:2]))
    want = REFERENCE.quantized_experts(x[:4], real, gate_up, down, "silu")
    idle = [e for e in range(9) if e not in real.experts.flatten().tolist()]
    for matrix in (gate_up, down):
        matrix.words[idle] = -1  # scales and zero points that are no numbers
    x[4:] = float("nan")
    got = integer_experts(x, routing, gate_up, down, "silu", how, CARD)
    assert off(got[:4], want) < 1e-5
    assert (got[4:] == 0).all()


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS + 1, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_operations_take_the_kernels(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = mixture("zeros", 64, 4, 128, 64)
    x, routing = inputs(tokens, gate_up).to(dtype), routed(tokens, 4, 2, [0, 1, 3])
    monkeypatch.setattr(TritonOps, "integer_linear", None)
    for matrix in (gate_up, moved(gate_up)):
        got = TritonOps(DEVICE).quantized_experts(x, routing, matrix, down, "silu")
        want = REFERENCE.quantized_experts(x.float(), routing, matrix, down, "silu")
        assert off(got, want) < (1e-5 if dtype is torch.float32 else 1e-2)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    gate_up, down = mixture("zeros", 128, 5, 128, 128)
    ops, x, routing = BatchInvariantTritonOps(DEVICE), inputs(12, gate_up), routed(12, 5, 2, [0, 1, 2, 4])
    whole = ops.quantized_experts(x, routing, gate_up, down, "silu")
    for some in (slice(3, 4), slice(5, 12)):
        few = Routing(*(each[some].contiguous() for each in routing[:2]))
        assert torch.equal(ops.quantized_experts(x[some], few, gate_up, down, "silu"), whole[some])
    assert off(whole, REFERENCE.quantized_experts(x, routing, gate_up, down, "silu")) < 1e-5


@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("zeros", 32), ("q4_k", 32), ("rows", 128)])
def test_tiles_grow_with_the_tokens_of_an_expert_and_are_few_above_two_thousand(kind: str, group: int) -> None:
    one, other = made(kind, group, 512, 256), made(kind, group, 256, 256)
    for used, count in ((8, 128), (2, 8), (8, 256), (10, 512)):
        gate_up, down = (each._replace(weight=each.weight.expand(count, -1, -1, -1)) for each in (one, other))
        found = [integer_expert_config(tokens, used, gate_up, down) for tokens in range(1, 16384, 7)]
        rows = [how.gate_up.rows for how in found]
        assert rows == sorted(rows)
        assert all(how.gate_up.rows == how.down.rows for how in found)
        assert [how.sorted for how in found[:2]] == [False, True]
        assert len(set(found[293:])) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@KINDS
@pytest.mark.parametrize("gate", ["silu", "clamped"])
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [*((torch.bfloat16, tokens) for tokens in (1, 4, 5, 16, 64, 256, 1000)), (torch.float16, 1), (torch.float16, 64)],
    ids=str,
)
def test_half_precision_on_the_gpu(kind: str, group: int, dtype: torch.dtype, tokens: int, gate: Gate) -> None:
    check_on_the_gpu(kind, group, dtype, tokens, gate)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_deterministic_mixtures_on_the_gpu(tokens: int) -> None:
    check_on_the_gpu("zeros", 128, torch.bfloat16, tokens, "silu", FIXED)


def check_on_the_gpu(
    kind: str, group: int, dtype: torch.dtype, tokens: int, gate: Gate, how: IntegerExpertConfig | None = None
) -> None:
    """A mixture of the shape of Qwen3-30B-A3B, with fewer experts."""
    count, used, hidden, width = 16, 4, 2048, 768
    gate_up, down = mixture(kind, group, count, hidden, width)
    x = inputs(tokens, gate_up).to(dtype)
    routing = routed(tokens, count, used, list(range(0, count, 2)))
    routing = routing._replace(weights=routing.weights / used)
    how = how or integer_expert_config(tokens, used, gate_up, down)
    biases = random_biases(count, hidden, gate_up.outputs // 2) if gate == "clamped" else NO_BIASES
    got = integer_experts(x, routing, gate_up, down, gate, how, CARD, biases)
    assert torch.equal(integer_experts(x, routing, gate_up, down, gate, how, CARD, biases), got)
    plain = [torch.stack([dequantize_integers(each.expert(e)) for e in range(count)]) for each in (gate_up, down)]
    few = torch.arange(tokens, device=DEVICE)[:: max(1, tokens // 64)]
    want = REFERENCE.experts(x[few].float(), Routing(*(each[few] for each in routing[:2])), *plain, gate, biases)
    assert off(got[few], want) < 1e-2
