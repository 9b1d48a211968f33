"""Paged attention against attention written down naively: one query, one head at a time, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops import paged_attention, reference
from quire.ops.base import Ops
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.types import UNLIMITED
from tests.ops.batches import Pages, poisoned

OPS = ReferenceOps()
EVERY: dict[str, Ops] = {"reference": OPS, "fixed": BatchInvariantOps()}


def naive(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, soft_cap: float, sinks: Tensor | None = None,
    chunk: int = UNLIMITED,
) -> Tensor:  # fmt: skip
    """The last len(q) positions of one sequence attend: q [n, H, D], k [L, G, D], v [L, G, E] -> [n, H, E] float64."""
    n, heads, _ = q.shape
    share = heads // k.shape[1]
    out = torch.zeros(n, heads, v.shape[-1], dtype=torch.float64)
    for i in range(n):
        position = len(k) - n + i
        seen = slice(max(position // chunk * chunk, position - window + 1), position + 1)
        for h in range(heads):
            scores = k[seen, h // share].double() @ q[i, h].double() * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[h : h + 1].double()))
            out[i, h] = scores.softmax(0)[: position + 1 - seen.start] @ v[seen, h // share].double()
    return out


def feed(
    history: dict[int, tuple[Tensor, Tensor]], pages: Pages, kv: LayerKV, spans: list[tuple[int, int, int]]
) -> RaggedBatch:
    """Write the spans' (sequence, past, n) K/V into the pool and return their batch."""
    batch = pages.batch([(sequence, past, [0] * n) for sequence, past, n in spans], spare=2)
    k, v = (torch.cat([history[s][i][past : past + n] for s, past, n in spans]) for i in range(2))
    OPS.write_kv(kv, k, v, batch)
    return batch


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    share = draw(st.integers(1, 4))
    groups = draw(st.integers(1, 3))
    spans = draw(
        st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 3, 5, 9])), min_size=1, max_size=6)
    )
    return {
        "spans": spans,
        "heads": share * groups,
        "groups": groups,
        "dim": draw(st.sampled_from([2, 5, 8, 16])),
        "size": draw(st.sampled_from([1, 2, 4, 16])),
        "window": draw(st.sampled_from([UNLIMITED, UNLIMITED, 1, 3, 7])),
        "chunk": draw(st.sampled_from([UNLIMITED, UNLIMITED, 1, 4, 6])),
        "soft_cap": draw(st.sampled_from([0.0, 0.7, 5.0])),
        "sinks": draw(st.booleans()),
        "few": draw(st.sampled_from([1, 4, 32])),
        "worth": draw(st.sampled_from([0, 10, 512])),
        "tile": draw(st.sampled_from([2, 3, 256])),
        "seed": draw(st.integers(0, 1000)),
    }


def check(s: dict, dtype: torch.dtype, tolerance: float, ops: Ops = OPS) -> None:
    torch.manual_seed(s["seed"])
    pages, kv = Pages(200, s["size"], s["seed"]), poisoned(200, s["groups"], s["size"], s["dim"], dtype)
    history = {
        i: tuple(torch.randn(past + n, s["groups"], s["dim"], dtype=dtype) for _ in "kv")
        for i, (past, n) in enumerate(s["spans"])
    }
    earlier = [(i, 0, past) for i, (past, _) in enumerate(s["spans"]) if past]
    if earlier:
        feed(history, pages, kv, earlier)
    batch = feed(history, pages, kv, [(i, past, n) for i, (past, n) in enumerate(s["spans"])])
    q = torch.randn(len(batch.slots), s["heads"], s["dim"], dtype=dtype)
    scale = s["dim"] ** -0.5
    sinks = 2 * torch.randn(s["heads"]) if s.get("sinks") else None
    how = scale, s["window"], s["soft_cap"], sinks, s.get("chunk", UNLIMITED)
    got = ops.attention(q, kv, batch, Scores(*how))
    starts = batch.query_start.tolist()
    for i in history:
        want = naive(q[starts[i] : starts[i + 1]], *history[i], *how)
        torch.testing.assert_close(got[starts[i] : starts[i + 1]].double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", EVERY)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(s=situations())
def test_any_mixture_of_spans_windows_chunks_caps_and_sinks_attends_as_the_naive_loop(kind: str, s: dict) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "WORTH", s["worth"])
        patch.setattr(paged_attention, "FEW", s["few"])
        patch.setattr(reference, "FEW", s["few"])
        patch.setattr(reference, "TILE", s["tile"])
        check(s, torch.float32, 2e-5, EVERY[kind])


@pytest.mark.parametrize("kind", EVERY)
def test_bfloat16_is_rounded_once_and_not_summed_in_bfloat16(kind: str) -> None:
    s = {"spans": [(300, 1), (17, 1), (0, 40), (120, 3)], "heads": 6, "groups": 2, "dim": 32, "size": 16}
    check(s | {"window": UNLIMITED, "soft_cap": 0.0, "seed": 1}, torch.bfloat16, 2e-2, EVERY[kind])


@pytest.mark.parametrize("kind", EVERY)
def test_a_long_prompt_is_tiled_without_changing_the_answer(kind: str) -> None:
    n = 2 * reference.TILE + 37
    s = {"spans": [(50, n)], "heads": 2, "groups": 1, "dim": 4, "size": 16, "window": 300, "soft_cap": 0.0, "seed": 2}
    check(s, torch.float32, 2e-5, EVERY[kind])


@pytest.mark.parametrize("kind", EVERY)
def test_a_long_prompt_begins_and_ends_within_chunks(kind: str) -> None:
    n = 2 * reference.TILE + 37
    s = {"spans": [(50, n)], "heads": 2, "groups": 1, "dim": 4, "size": 16, "window": UNLIMITED, "chunk": 130}
    check(s | {"soft_cap": 0.0, "seed": 2}, torch.float32, 2e-5, EVERY[kind])


def test_a_partly_filled_block_is_cleared_of_what_its_last_owner_left() -> None:
    pages, kv = Pages(4, 4), poisoned(4, 1, 4, 2)
    feed({0: (torch.ones(2, 1, 2), torch.ones(2, 1, 2))}, pages, kv, [(0, 0, 2)])
    page = pages.held[0][0]
    assert kv.k[page].tolist() == [[[1, 1], [1, 1], [0, 0], [0, 0]]]
    feed({0: (torch.full((3, 1, 2), 2.0),) * 2}, pages, kv, [(0, 2, 1)])
    assert kv.v[page].tolist() == [[[1, 1], [1, 1], [2, 2], [0, 0]]]
    assert math.isnan(kv.v[0].sum()), "the null block is not cleared"


def test_a_prepared_batch_is_prepared_once_and_shared_by_layers_of_other_head_counts() -> None:
    batch = Pages(8, 4).batch([(0, 0, [1, 2, 3]), (1, 0, [4])])
    prepared = OPS.prepare(batch)
    assert OPS.prepare(prepared) is prepared
    for groups in (1, 2):
        k, q, kv = torch.randn(4, groups, 6), torch.randn(4, 2, 6), poisoned(8, groups, 4, 6)
        OPS.write_kv(kv, k, k, prepared)
        shared = OPS.attention(q, kv, prepared, Scores(1.0))
        torch.testing.assert_close(shared, OPS.attention(q, kv, batch, Scores(1.0)))
        torch.testing.assert_close(
            shared[3:].double(), naive(q[3:], k[3:], k[3:], 1.0, UNLIMITED, 0.0), atol=1e-5, rtol=1e-5
        )


def test_a_prepared_batch_is_shared_by_layers_with_different_windows_and_chunks() -> None:
    torch.manual_seed(3)
    prepared = OPS.prepare(Pages(8, 4).batch([(0, 0, [1] * 9), (1, 0, [4, 5])]))
    q, k, kv = torch.randn(11, 2, 6), torch.randn(11, 1, 6), poisoned(8, 1, 4, 6)
    OPS.write_kv(kv, k, k, prepared)
    for window, chunk in ((UNLIMITED, UNLIMITED), (3, UNLIMITED), (5, 4), (UNLIMITED, 4), (UNLIMITED, 3)):
        got = OPS.attention(q, kv, prepared, Scores(1.0, window, chunk=chunk))
        spans = slice(0, 9), slice(9, 11)
        want = torch.cat([naive(q[at], k[at], k[at], 1.0, window, 0.0, chunk=chunk) for at in spans])
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
