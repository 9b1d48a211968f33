"""Operations of fixed shapes: right as the reference is, and to the bit the same whatever company a row is in."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops import batch_invariant
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.matmul import can_pack, in_tiles, pack, packed_linear
from quire.ops.operands import XIELU, Angles, Norm, QuantizedMatrix, Scores
from quire.ops.reference import ReferenceOps
from quire.types import UNLIMITED
from tests.ops.batches import Pages, poisoned

OPS, REFERENCE = BatchInvariantOps(), ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (60, 90, 576, 3072)
"""No vector's width divides the first two; the last is summed in several runs."""


def companies(x: Tensor) -> list[tuple[Tensor, slice]]:
    """Some rows of x [40, n], and which."""
    return [(x[i : i + n], slice(i, i + n)) for i, n in ((0, 1), (17, 1), (3, 2), (5, 7), (0, 8), (9, 17), (1, 39))]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("columns", SIZES)
def test_every_operation_on_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    x, weight, norm = (torch.randn(n, columns).to(dtype) for n in (40, 50, 1))
    eighth, scale = weight.to(torch.float8_e4m3fn), torch.rand(50, 1)
    ways = {
        "linear": lambda x: OPS.linear(x, weight),
        "gated": lambda x: OPS.linear(x, weight, gate="silu"),
        "narrow": lambda x: OPS.linear(x, weight[:6], weight[:6, 0]),
        "narrow gated": lambda x: OPS.linear(x, weight[:10], gate="gelu"),
        "scaled": lambda x: OPS.quantized_linear(x, QuantizedMatrix(eighth, scale, UNLIMITED)),
        "int8": lambda x: OPS.int8_linear(x, weight.clamp(-1, 1).mul(99).to(torch.int8), scale),
        "silu": OPS.silu_mul,
        "gelu gate": OPS.gelu_mul,
        "gelu": OPS.gelu,
        "relu gate": OPS.relu_mul,
        "relu2": OPS.relu2,
        "xielu": lambda x: OPS.xielu(x, XIELU(*torch.tensor([[0.3], [-0.6], [0.5]]))),
        "norm": lambda x: OPS.norm(x, Norm(norm[0], 1e-6)),
        "layer norm": lambda x: OPS.norm(x, Norm(norm[0], 1e-6, norm[0], centred=True)),
        "scaled sum": lambda x: OPS.add_norm(x, x.flip(1), None, scale=0.22)[1],
        "sigmoid": OPS.sigmoid,
        "clamped gate": OPS.clamped_mul,
        "tanh": torch.tanh,
        "shares": lambda x: x.float().softmax(-1),
        "mix": lambda x: OPS.combine_experts(x.view(len(x), 6, -1), OPS.normalize(x[:, :6].float().abs())),
        "angles": lambda x: torch.stack(OPS.angles(x[:, 0] * 50, norm[0].float()), 1),
    }
    for name, way in ways.items():
        whole = way(x)
        for rows, which in companies(x):
            assert torch.equal(way(rows), whole[which]), (name, which)


def test_tiles_lie_in_memory_alike_wherever_their_rows_come_from() -> None:
    """Libraries may sum rows that are further apart, or begin elsewhere, in another way."""
    seen = set()

    def product(tile: Tensor) -> Tensor:
        seen.add((tile.shape, tile.stride(), tile.data_ptr() % 64))
        return tile

    heads = torch.arange(40.0 * 5 * 12).view(40, 5, 12)
    for head in range(5):
        for rows, _ in companies(heads[:, head]):
            assert torch.equal(in_tiles(product, rows), rows)
    for first in range(8):
        rows = heads[:, 0].contiguous()[first : first + 8]
        assert torch.equal(in_tiles(product, rows), rows)
    assert seen == {((8, 12), (12, 1), 0)}


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if can_pack(dtype, torch.device("cpu"))])
@pytest.mark.parametrize("shape", [(70, 50), (128, 576), (96, 3072)])
def test_a_packed_product_in_tiles_has_the_same_bits_in_any_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, x = pack(torch.randn(shape).to(dtype)), torch.randn(40, shape[1]).to(dtype)
    product = lambda x: packed_linear(x, weight, None)  # noqa: E731
    whole = in_tiles(product, x)
    assert all(torch.equal(in_tiles(product, rows), whole[which]) for rows, which in companies(x))
    torch.testing.assert_close(whole, product(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_rotations_are_those_of_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(33, 90)).to(dtype)
    for name in ("silu_mul", "gelu_mul", "gelu"):
        torch.testing.assert_close(getattr(OPS, name)(x), getattr(REFERENCE, name)(x))
    heads = torch.randn(33, 3, 22).to(dtype), torch.randn(33, 1, 22).to(dtype)
    for interleaved in (False, True):
        turns = Angles(*OPS.angles(torch.arange(33), torch.rand(8)), interleaved)
        for ours, theirs in zip(OPS.rope(*heads, turns), REFERENCE.rope(*heads, turns), strict=True):
            torch.testing.assert_close(ours, theirs)
    made, shares = torch.randn(33, 3, 20).to(dtype), torch.rand(33, 3)
    torch.testing.assert_close(OPS.normalize(shares), REFERENCE.normalize(shares))
    torch.testing.assert_close(OPS.combine_experts(made, shares), REFERENCE.combine_experts(made, shares))


class Attended:
    """One sequence of `length` tokens, and what attention makes of each, fed in chunks among others."""

    def __init__(self, length: int, groups: int, share: int, dim: int, dtype: torch.dtype) -> None:
        seeded = torch.Generator().manual_seed(7)
        self.groups, self.dtype = groups, dtype
        self.sinks = 2 * torch.randn(groups * share, generator=torch.Generator().manual_seed(8))
        self.k, self.v, self.q = (
            torch.randn(length, heads, dim, generator=seeded).to(dtype) for heads in (groups, groups, groups * share)
        )

    def fed(
        self,
        chunks: list[int],
        *,
        size: int,
        window: int,
        chunk: int,
        soft_cap: float,
        sunk: bool,
        others: int,
        seed: int,
    ) -> Tensor:
        """seed: of what the others are, and of where this one stands among them."""
        rng = random.Random(seed)
        pages = Pages(3000, size, seed)
        kv = poisoned(3000, self.groups, size, self.k.shape[-1], self.dtype)
        out, past, theirs = list[Tensor](), 0, [0] * others
        for n in chunks:
            spans = []
            for i in range(others):
                count = rng.choice([1, 1, 2, 5, n, 40])
                spans.append((i + 1, theirs[i], [0] * count))
                theirs[i] += count
            at = rng.randrange(len(spans) + 1)
            spans.insert(at, (0, past, [0] * n))
            batch = pages.batch(spans, spare=rng.randrange(3))
            first = sum(len(fed) for _, _, fed in spans[:at])
            own = slice(first, first + n)
            k, v, q = (torch.randn(len(batch.slots), *x.shape[1:]).to(self.dtype) for x in (self.k, self.v, self.q))
            for fresh, mine in ((k, self.k), (v, self.v), (q, self.q)):
                fresh[own] = mine[past : past + n]
            OPS.write_kv(kv, k, v, batch)
            sinks = self.sinks if sunk else None
            out.append(OPS.attention(q, kv, batch, Scores(0.3, window, soft_cap, sinks, chunk))[own])
            past += n
        return torch.cat(out)


@st.composite
def feedings(draw: st.DrawFn) -> dict[str, object]:
    length = draw(st.sampled_from([20, 150, 300]))
    chunks = list[int]()
    while sum(chunks) < length:
        chunks.append(min(draw(st.sampled_from([1, 2, 3, 5, 33, 64, 150])), length - sum(chunks)))
    return {
        "shape": draw(st.sampled_from([(1, 1, 8), (3, 3, 22), (2, 4, 64), (1, 9, 16), (5, 1, 12)])),
        "chunks": chunks,
        "size": draw(st.sampled_from([2, 3, 16, 128, 512])),
        "window": draw(st.sampled_from([UNLIMITED, 13, 200])),
        "chunk": draw(st.sampled_from([UNLIMITED, UNLIMITED, 27, 130])),
        "soft_cap": draw(st.sampled_from([0.0, 3.0])),
        "sunk": draw(st.booleans()),
        "others": draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from(DTYPES)),
    }


@settings(deadline=None, max_examples=20, derandomize=True)
@given(feedings(), st.integers(0, 99))
def test_attention_has_the_same_bits_with_any_chunk_block_size_and_batch(f: dict, seed: int) -> None:
    chunks = f["chunks"]
    subject = Attended(sum(chunks), *f["shape"], f["dtype"])
    kinds = {name: f[name] for name in ("window", "chunk", "soft_cap", "sunk")}
    alone = subject.fed([sum(chunks)], size=16, others=0, seed=0, **kinds)
    assert torch.equal(subject.fed(chunks, size=f["size"], others=f["others"], seed=seed, **kinds), alone)


@pytest.mark.parametrize("shape", [(2, 3, 16), (7, 1, 5), (7, 1, 10), (3, 2, 11)])
def test_one_token_at_a_time_is_the_same_as_all_at_once(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Attended(140, *shape, torch.float32)
    kinds = {
        "size": 16,
        "window": UNLIMITED,
        "chunk": UNLIMITED,
        "soft_cap": 0.0,
        "sunk": False,
        "others": 0,
        "seed": 0,
    }
    whole = subject.fed([140], **kinds)
    assert torch.equal(subject.fed([1] * 140, **kinds), whole)
    monkeypatch.setattr(batch_invariant, "AT_ONCE", 24)
    assert torch.equal(subject.fed([140], **kinds), whole), "a long chunk is cut without changing the answer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_a_shared_expert_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    routed, shared, logits = (torch.randn(67, width).to(dtype) for width in (24, 24, 1))
    ops = BatchInvariantOps()
    whole = ops.add_shared(routed, shared, 6 * logits)
    for first in range(67):
        row = slice(first, first + 1)
        assert torch.equal(ops.add_shared(routed[row], shared[row], 6 * logits[row]), whole[row])
    plain = ReferenceOps().add_shared(routed, shared, 6 * logits)
    torch.testing.assert_close(whole, plain)
    assert torch.equal(ops.add_shared(routed, shared, None), routed + shared)
