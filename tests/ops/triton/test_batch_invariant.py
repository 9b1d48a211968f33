"""Kernels whose launches depend on no batch: right, and to the bit the same whatever company a row is in.

In the interpreter a tile is multiplied by NumPy's library, which sums a column by its place in the tile; a card's
matrix units do not. So there it is done as they do: every number of a tile alike, one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from quire.ops.base import Ops
from quire.ops.operands import Angles, Gate, Norm, Norms, QuantizedMatrix, RouterWeights, Scores, TopK
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from quire.ops.triton.ops import BatchInvariantTritonOps
from quire.ops.triton.rows import FEW_HEADS
from quire.types import UNLIMITED
from tests.ops.batches import Pages, poisoned
from tests.ops.triton.device import DEVICE, moved

OPS, REFERENCE = BatchInvariantTritonOps(DEVICE), ReferenceOps()
BOTH = OPS, REFERENCE
OUT, IN = 70, 144


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = floats(a), floats(b)
        total = d.data.copy()
        for i in range(left.shape[1]):
            np.add(total, left[:, i, None] * right[i], out=total, casting="unsafe")
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def floats(tile: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits."""
    bits = tile.data.dtype == np.uint16
    return (tile.data.astype(np.uint32) << 16).view(np.float32) if bits else tile.data.astype(np.float32)


def ways() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """By name, ours and the reference's, of x [T, IN]."""
    torch.manual_seed(1)
    weight, bias = torch.randn(OUT, IN, device=DEVICE), torch.randn(OUT, device=DEVICE)
    eighth, scale = weight.to(torch.float8_e4m3fn), torch.rand(OUT, 1, device=DEVICE) + 0.1
    halved = torch.randint(0, 256, (OUT, IN // 2), dtype=torch.uint8, device=DEVICE)
    groups = torch.arange(IN, device=DEVICE) // 48
    scales, zeros = torch.rand(OUT, 3, device=DEVICE), torch.randint(0, 16, (OUT, 3), device=DEVICE).to(torch.uint8)
    whole = (weight * 20).clamp(-127, 127).to(torch.int8)
    heads = torch.randn(3, IN // 3, 50, device=DEVICE)

    def of(name: str, *given: object, **named: object) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return tuple(lambda x, ops=ops: getattr(ops, name)(x, *given, **named) for ops in BOTH)  # type: ignore[return-value]

    return {
        "plain": of("linear", weight, bias),
        "gated": of("linear", weight, bias, "silu"),
        "scaled": of("quantized_linear", QuantizedMatrix(eighth, scale, UNLIMITED)),
        "blocks": of("quantized_linear", QuantizedMatrix(eighth, torch.rand(OUT, 3, device=DEVICE), 48), gate="gelu"),
        "halved": of("quantized_linear", QuantizedMatrix(halved, scales, zero=zeros, groups=groups)),
        "int8": of("int8_linear", whole, scale),
        "norm": of("norm", Norm(weight[0], 1e-6)),
        "silu": of("silu_mul"),
        "heads": tuple(lambda x, ops=ops: ops.heads_linear(x.view(len(x), 3, -1), heads).flatten(1) for ops in BOTH),
    }


@pytest.mark.parametrize("name", ways())
def test_a_row_has_the_same_bits_in_any_batch_and_is_right(name: str) -> None:
    ours, theirs = ways()[name]
    torch.manual_seed(0)
    x = torch.randn(90, IN, device=DEVICE)
    whole = ours(x)
    for start, count in ((0, 1), (70, 1), (3, 2), (5, 7), (9, 17), (1, 64), (2, 65)):
        assert torch.equal(ours(x[start : start + count]), whole[start : start + count]), (start, count)
    off = (whole - theirs(x)).norm() / theirs(x).norm()
    assert float(off) < (5e-3 if name == "int8" else 1e-4)


def test_experts_rows_have_the_same_bits_wherever_they_stand() -> None:
    torch.manual_seed(0)
    made, weights = torch.randn(20, 2, 24, device=DEVICE), torch.rand(20, 2, device=DEVICE)
    mixed = OPS.combine_experts(made, OPS.normalize(weights))
    assert torch.equal(OPS.combine_experts(made[3:4], OPS.normalize(weights[3:4])), mixed[3:4])
    torch.testing.assert_close(mixed, REFERENCE.combine_experts(made, REFERENCE.normalize(weights)))


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_tokens_have_the_same_experts_and_bits_in_any_batch(gate: Gate) -> None:
    torch.manual_seed(0)
    x, router = torch.randn(40, 48, device=DEVICE), torch.randn(9, 48, device=DEVICE)
    gate_up, down = torch.randn(9, 40, 48, device=DEVICE), torch.randn(9, 48, 20, device=DEVICE)

    def mixed(ops: Ops, rows: Tensor) -> Tensor:
        return ops.experts(rows, ops.route(rows, RouterWeights(router, TopK(3, True))), gate_up, down, gate)

    whole = mixed(OPS, x)
    torch.testing.assert_close(whole, mixed(REFERENCE, x), atol=1e-3, rtol=1e-4)
    for start, count in ((0, 1), (39, 1), (3, 5), (1, 33)):
        assert torch.equal(mixed(OPS, x[start : start + count]), whole[start : start + count]), (start, count)


def test_a_token_is_rotated_to_the_same_bits_among_few_and_many() -> None:
    """Of heads that are not normed: programs of many tokens have several heads."""
    torch.manual_seed(0)
    heads, groups, dim, count = 8, 4, 10, FEW_HEADS // 16 + 2
    batch = moved(Pages(count // 16 + 3, 16).batch([(0, 0, [0] * count)]))
    qkv = torch.randn(count, (heads + 2 * groups) * dim, device=DEVICE)
    turns = Angles(*OPS.angles(batch.positions, torch.rand(dim // 2, device=DEVICE)))

    def made(rows: slice) -> list[Tensor]:
        kv = LayerKV(*torch.zeros(2, count // 16 + 3, groups, 16, dim, device=DEVICE))
        own = replace(batch, slots=batch.slots[rows])
        near = turns._replace(cos=turns.cos[rows], sin=turns.sin[rows])
        q = OPS.qk_norm_rope_store_kv(qkv[rows], heads, kv, own, near, None)
        return [q, *(pool.transpose(1, 2).flatten(0, 1)[own.slots] for pool in (kv.k, kv.v))]

    whole = made(slice(count))
    for start, end in ((0, 1), (count - 3, count), (5, 70)):
        for few, many in zip(made(slice(start, end)), whole, strict=True):
            assert torch.equal(few, many[start:end])


class Layer:
    """One sequence's projections, fed in chunks among others through `turn_and_write` and `attention`."""

    def __init__(self, length: int, groups: int, share: int, dim: int) -> None:
        self.groups, self.heads, self.dim = groups, groups * share, dim
        self.qkv = torch.randn(length, (self.heads + 2 * groups) * dim, generator=torch.Generator().manual_seed(7))
        self.norm = torch.rand(dim, generator=torch.Generator().manual_seed(8)).to(DEVICE)
        self.sinks = torch.randn(self.heads, generator=torch.Generator().manual_seed(9)).to(DEVICE)

    def fed(
        self,
        chunks: list[int],
        *,
        page: int,
        window: int,
        chunk: int,
        soft_cap: float,
        sunk: bool,
        others: int,
        seed: int,
    ) -> Tensor:
        rng, pages = random.Random(seed), Pages(400, page, seed)
        pool = poisoned(400, self.groups, page, self.dim)
        kv = LayerKV(pool.k.to(DEVICE), pool.v.to(DEVICE))
        out, past, theirs = list[Tensor](), 0, [0] * others
        for n in chunks:
            spans = []
            for i in range(others):
                count = rng.choice([1, 1, 3, 20])
                spans.append((i + 1, theirs[i], [0] * count))
                theirs[i] += count
            at = rng.randrange(len(spans) + 1)
            spans.insert(at, (0, past, [0] * n))
            batch = moved(pages.batch(spans))
            first = sum(len(fed) for _, _, fed in spans[:at])
            qkv = torch.randn(len(batch.slots), self.qkv.shape[1])
            qkv[first : first + n] = self.qkv[past : past + n]
            frequencies = torch.rand(self.dim // 2, generator=torch.Generator().manual_seed(9)).to(DEVICE)
            turns = Angles(*OPS.angles(batch.positions, frequencies))
            norms = Norms(Norm(self.norm, 1e-6), Norm(self.norm, 1e-6))
            q = OPS.qk_norm_rope_store_kv(qkv.to(DEVICE), self.heads, kv, batch, turns, norms)
            sinks = self.sinks if sunk else None
            out.append(OPS.attention(q, kv, batch, Scores(0.3, window, soft_cap, sinks, chunk))[first : first + n])
            past += n
        return torch.cat(out)


@pytest.mark.parametrize(
    ("shape", "window", "chunk", "soft_cap", "sunk"),
    [
        ((2, 4, 16), UNLIMITED, UNLIMITED, 0.0, False),
        ((1, 3, 32), 13, UNLIMITED, 0.0, True),
        ((3, 1, 16), UNLIMITED, 25, 5.0, False),
    ],
)
def test_attention_has_the_same_bits_with_any_chunk_block_size_and_batch(
    shape: tuple[int, int, int], window: int, chunk: int, soft_cap: float, sunk: bool
) -> None:
    layer, kinds = Layer(60, *shape), {"window": window, "chunk": chunk, "soft_cap": soft_cap, "sunk": sunk}
    alone = layer.fed([60], page=16, others=0, seed=0, **kinds)
    assert torch.equal(layer.fed([1, 2, 20, 1, 30, 6], page=64, others=1, seed=3, **kinds), alone)
