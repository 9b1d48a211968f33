"""Mixtures of experts with many rows an expert, as Hopper's copy engine and matrix units compute them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.capture import PRECOMPILING
from quire.ops.operands import NO_BIASES, ExpertBiases, Gate, Routing
from quire.ops.reference import ReferenceOps
from quire.ops.triton.experts import MANY, combine, multiply_tiles, sort_slots
from quire.ops.triton.gemv import COUNTERS
from quire.ops.triton.grouped_gemm import ROWS, grouped_experts, grouped_product, takes
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE, NEEDS_HOPPER
from tests.ops.triton.integers import off
from tests.ops.triton.test_experts import routed

CARD, REFERENCE = DeviceInfo.of(DEVICE), ReferenceOps()
ARRIVED = torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)
HOPPER = replace(CARD, sms=132, capability=(9, 0))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def matrices(count: int, hidden: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """gate and up, down."""
    torch.manual_seed(count + hidden + width)
    gate_up = torch.randn(count, 2 * width, hidden, device=DEVICE) * hidden**-0.5
    return gate_up.to(dtype), (torch.randn(count, hidden, width, device=DEVICE) * width**-0.5).to(dtype)


def test_only_what_fits_is_taken() -> None:
    def taken(hidden: int = 512, width: int = 128, gate: Gate = "silu", rows: int = ROWS, card: DeviceInfo = HOPPER,
              dtype: torch.dtype = torch.bfloat16, other: torch.dtype | None = None) -> bool:  # fmt: skip
        x = torch.zeros(8, hidden, dtype=other or dtype, device=DEVICE)
        return takes(x, *matrices(2, hidden, width, dtype), gate, rows, card)

    assert taken() and taken(dtype=torch.float16) and taken(hidden=256, width=384) and taken(gate="gelu")
    assert not taken(dtype=torch.float32) and not taken(other=torch.float16)
    assert not taken(hidden=384) and not taken(width=192), "tiles have no remainder"
    assert not taken(rows=64) and not taken(gate="relu2")
    assert not taken(card=replace(HOPPER, capability=(8, 0))) and not taken(card=replace(HOPPER, capability=(12, 0)))
    assert not taken(card=replace(HOPPER, sms=0)), "kernels that must not depend on the batch have tiles of their own"
    x = torch.zeros(8 * 512 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(8, 512)
    assert not takes(x, *matrices(2, 512, 128), "silu", ROWS, HOPPER), "the copy engine reads 16 bytes at a time"


def launched(tokens: int, biases: ExpertBiases = NO_BIASES, kind: type[TritonOps] = TritonOps) -> set[str]:
    """Names of the kernels of a mixture of four experts."""
    names, ops = set[str](), kind(DEVICE)
    ops.card = replace(HOPPER, sms=ops.card.sms and HOPPER.sms)
    token = PRECOMPILING.set(lambda made, *_, **__: names.add(made.fn.__name__))
    try:
        x = torch.zeros(tokens, 256, dtype=torch.bfloat16, device=DEVICE)
        ops.experts(x, routed(tokens, 4, 2, [0, 1, 2, 3]), *matrices(4, 256, 128), "silu", biases)
    finally:
        PRECOMPILING.reset(token)
    return names


def test_experts_with_many_rows_and_without_biases_are_multiplied_so() -> None:
    assert "grouped_kernel" in launched(200)
    assert "grouped_kernel" not in launched(90)
    assert "grouped_kernel" not in launched(200, ExpertBiases(torch.zeros(4, 256, device=DEVICE)))
    assert "grouped_kernel" not in launched(200, kind=BatchInvariantTritonOps)


def spread(tokens: int, count: int, used: int) -> Routing:
    """Experts of which one has most tokens and one has none; tokens that only fill up a step have none."""
    routing = routed(tokens, count, used, list(range(1, count)))
    routing.experts[: tokens // 2, 0] = 1
    routing.experts[-tokens // 9 :] = -1
    routing.weights[-tokens // 9 :] = 0.0
    return routing


@pytest.mark.gpu
@NEEDS_HOPPER
@DTYPES
@pytest.mark.parametrize("gate", ["silu", "gelu", "clamped"])
@pytest.mark.parametrize(
    ("tokens", "count", "used", "hidden", "width"),
    [(33, 3, 1, 256, 128), (700, 9, 2, 512, 384), (1000, 16, 8, 1024, 256), (4100, 128, 8, 2048, 768)],
    ids=str,
)
def test_mixtures_are_those_of_plain_operations(
    dtype: torch.dtype, gate: Gate, tokens: int, count: int, used: int, hidden: int, width: int
) -> None:
    gate_up, down = matrices(count, hidden, width, dtype)
    routing, x = spread(tokens, count, used), torch.randn(tokens, hidden, dtype=dtype, device=DEVICE)
    assert takes(x, gate_up, down, gate, ROWS, CARD)
    got = grouped_experts(x, routing, gate_up, down, gate, CARD, ARRIVED)
    kept = (routing.experts >= 0).all(1)
    own = Routing(routing.experts[kept], routing.weights[kept])
    want = REFERENCE.experts(x[kept].float(), own, gate_up.float(), down.float(), gate)
    assert off(got[kept], want) < 1e-2
    assert not got[~kept].any(), "rows that only fill up a step get zeros"
    assert torch.equal(grouped_experts(x, routing, gate_up, down, gate, CARD, ARRIVED), got), (
        "the order of sums is fixed"
    )
    assert not ARRIVED.any(), "counters are left as they were found"


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("programs", [1, 7, 132])
def test_any_number_of_programs_makes_the_same(programs: int) -> None:
    gate_up, down = matrices(8, 512, 256)
    routing, x = spread(1500, 8, 2), torch.randn(1500, 512, dtype=torch.bfloat16, device=DEVICE)
    card = replace(CARD, sms=programs)
    slots = sort_slots(routing.experts, 8, ROWS, CARD)
    held = int((routing.experts >= 0).sum())
    inner = grouped_product(x, gate_up, slots, 2, card, ARRIVED, "silu")
    assert off(inner[:held], multiply_tiles(x, gate_up, slots, 2, MANY.gate_up, CARD, "silu")[:held].float()) < 4e-3
    made = combine(grouped_product(inner, down, slots, 2, card, ARRIVED), routing.weights, CARD)
    plain = combine(multiply_tiles(inner, down, slots, 2, MANY.down, CARD), routing.weights, CARD)
    assert off(made, plain.float()) < 4e-3
