"""Attention kernels against attention written down naively, over pools that are NaN wherever no sequence wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.triton.ops import TritonOps
from quire.types import UNLIMITED
from tests.ops.batches import Pages, poisoned
from tests.ops.test_attention import feed, naive
from tests.ops.triton.device import DEVICE, moved, placed

OPS = TritonOps(DEVICE)

Spans = list[tuple[int, int]]
"""(tokens computed before, tokens fed now) of each."""

DECODE: Spans = [(0, 1), (5, 1), (63, 1), (200, 1)]
VERIFY: Spans = [(9, 4), (64, 2), (130, 1)]
MIXED: Spans = [(40, 1), (0, 150), (130, 33), (7, 2)]


def situation(
    spans: Spans, heads: int, groups: int, dim: int, page: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, LayerKV, RaggedBatch, list[tuple[Tensor, Tensor]]]:
    """Queries, a pool that holds every span's K/V, their batch, and each span's k and v [L, G, D]."""
    torch.manual_seed(seed)
    count = 2 + sum(-(-(past + n) // page) for past, n in spans)
    pages, kv = Pages(count, page, seed), poisoned(count, groups, page, dim, dtype)
    held = {
        i: (torch.randn(past + n, groups, dim, dtype=dtype), torch.randn(past + n, groups, dim, dtype=dtype))
        for i, (past, n) in enumerate(spans)
    }
    earlier = [(i, 0, past) for i, (past, _) in enumerate(spans) if past]
    if earlier:
        feed(held, pages, kv, earlier)
    batch = feed(held, pages, kv, [(i, past, n) for i, (past, n) in enumerate(spans)])
    q = torch.randn(len(batch.slots), heads, dim, dtype=dtype)
    return q, kv, batch, [held[i] for i in range(len(spans))]


def check(
    spans: Spans, heads: int, groups: int, dim: int, page: int = 16, window: int = UNLIMITED, soft_cap: float = 0.0,
    dtype: torch.dtype = torch.float32, tolerance: float = 2e-5, pads: int = 0, sunk: bool = False,
    chunk: int = UNLIMITED,
) -> None:  # fmt: skip
    """pads: spans without tokens behind the real ones, and as many padding tokens, as a captured step has them."""
    q, kv, batch, held = situation(spans, heads, groups, dim, page, dtype)
    sinks = 2 * torch.randn(heads) if sunk else None
    starts = batch.query_start.tolist()
    if pads:
        batch, q = padded(batch, pads), torch.cat((q, q.new_full((pads, heads, dim), float("nan"))))
    how = dim**-0.5, window, soft_cap
    got = OPS.attention(q.to(DEVICE), moved(kv), moved(batch), Scores(*how, placed(sinks), chunk)).cpu()
    for i, (k, v) in enumerate(held):
        own = slice(starts[i], starts[i + 1])
        want = naive(q[own], k, v, *how, sinks, chunk)
        torch.testing.assert_close(got[own].double(), want, atol=tolerance, rtol=tolerance)


def padded(batch: RaggedBatch, pads: int) -> RaggedBatch:
    def grown(x: Tensor, fill: int) -> Tensor:
        return torch.cat((x, x.new_full((pads, *x.shape[1:]), fill)))

    return replace(
        batch,
        tokens=grown(batch.tokens, 0),
        positions=grown(batch.positions, 0),
        slots=grown(batch.slots, 0),
        query_start=grown(batch.query_start, int(batch.query_start[-1])),
        kv_len=grown(batch.kv_len, 0),
        page_table=grown(batch.page_table, 0),
    )


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("spans", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
def test_any_mixture_of_spans_attends_as_the_naive_loop(spans: Spans, page: int) -> None:
    check(spans, 4, 2, 16, page)


@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (7, 1), (5, 1), (16, 1), (40, 1), (80, 1)])
def test_any_number_of_query_heads_shares_a_kv_head(heads: int, groups: int) -> None:
    check([(70, 1), (3, 2)], heads, groups, 16)


@pytest.mark.parametrize("dim", [24, 64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim(dim: int) -> None:
    check([(70, 1), (3, 20)], 4, 2, dim, tolerance=5e-5)


@pytest.mark.parametrize("window", [1, 7, 64, 100])
@pytest.mark.parametrize("spans", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_window_hides_what_is_further_back(spans: Spans, window: int) -> None:
    check(spans, 4, 2, 16, window=window)


@pytest.mark.parametrize("chunk", [7, 64, 140])
@pytest.mark.parametrize("spans", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
def test_a_query_sees_nothing_before_its_own_chunk(spans: Spans, chunk: int) -> None:
    check(spans, 4, 2, 16, chunk=chunk)


def test_a_long_span_crosses_chunks_and_a_long_context_ends_in_one() -> None:
    check([(1200, 1), (30, 1)], 4, 1, 16, chunk=900, sunk=True)
    check([(20, 300)], 4, 2, 64, chunk=100, dtype=torch.float16, tolerance=3e-3)
    check([(90, 40), (31, 1)], 4, 2, 16, chunk=32, window=20)


@pytest.mark.parametrize("spans", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_soft_cap_bends_the_scores(spans: Spans) -> None:
    check(spans, 4, 2, 16, window=90, soft_cap=0.7)


@pytest.mark.parametrize("window", [7, 100, UNLIMITED])
@pytest.mark.parametrize(
    "spans", [DECODE, VERIFY, MIXED, [(1200, 1), (30, 1)]], ids=["decode", "verify", "mixed", "split"]
)
def test_a_sink_takes_its_share_of_the_softmax_once(spans: Spans, window: int) -> None:
    check(spans, 6, 2, 16, window=window, sunk=True)


def test_padding_spans_and_tokens_change_nothing() -> None:
    check(DECODE, 4, 2, 16, pads=3)
    check(MIXED, 4, 2, 16, pads=3, sunk=True)


def test_a_long_context_is_split_and_combined() -> None:
    q, kv, batch, held = situation([(1200, 1), (30, 1)], 4, 1, 16, 16, torch.float32)
    planned = OPS.prepare(moved(batch))
    for _ in range(2):  # combining the pieces leaves the counters at 0
        got = OPS.attention(q.to(DEVICE), moved(kv), planned, Scores(0.25)).cpu()
        for i, (k, v) in enumerate(held):
            want = naive(q[i : i + 1], k, v, 0.25, UNLIMITED, 0.0)
            torch.testing.assert_close(got[i : i + 1].double(), want, atol=2e-5, rtol=2e-5)
    ((work,),) = (planned.lists.values(),)
    pieces = work.pieces[: int(work.total)].cpu()
    assert int(work.total) > 2
    assert not work.arrived.any()
    for span, blocks in ((0, 19), (1, 1)):
        own = pieces[pieces[:, 6] == span]
        assert int((own[:, 5] - own[:, 4]).sum()) == blocks, "every block belongs to exactly one piece"


def test_half_precision_is_summed_in_float32() -> None:
    check([(300, 1), (17, 1), (0, 40)], 6, 2, 32, dtype=torch.float16, tolerance=3e-3)


def test_pages_of_eight_bits_are_read_times_their_scales() -> None:
    q, kv, batch, _ = situation(MIXED, 4, 2, 16, 16, torch.float32)
    small = LayerKV(kv.k.to(torch.float8_e4m3fn), kv.v.to(torch.float8_e4m3fn), k_scale=0.5, v_scale=3.0)
    exact = LayerKV(small.k.float() * 0.5, small.v.float() * 3.0)
    for sinks in (None, placed(torch.randn(4))):
        got, want = (
            OPS.attention(q.to(DEVICE), moved(pool), moved(batch), Scores(0.25, sinks=sinks)) for pool in (small, exact)
        )
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(
    "spans",
    [DECODE, MIXED, [(5000, 1), (3000, 300)], [(700, 1)], [(4000, 1), (80, 1)]],
    ids=["decode", "mixed", "long", "one", "two"],
)
def test_bfloat16_on_the_gpu(spans: Spans, dim: int) -> None:
    check(spans, 8, 2, dim, 64, dtype=torch.bfloat16, tolerance=2e-2)
    check(spans, 8, 2, dim, 64, window=100, soft_cap=5.0, dtype=torch.bfloat16, tolerance=2e-2)
    check(spans, 64, 8, dim, 64, window=128, sunk=True, dtype=torch.bfloat16, tolerance=2e-2)
    check(spans, 64, 8, dim, 64, sunk=True, dtype=torch.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("spans", [[(700, 1)], [(1700, 1)], [(1600, 1), (40, 1)]], ids=["one", "long", "two"])
def test_pieces_of_one_or_two_sequences_are_combined(spans: Spans) -> None:
    check(spans, 16, 2, 16, 64)
    check(spans, 16, 2, 16, 64, sunk=True)


def test_many_long_contexts_are_divided_among_programs_that_begin_anywhere() -> None:
    spans = [(300 + 61 * i % 700, 1) for i in range(20)]
    q, kv, batch, held = situation(spans, 4, 2, 16, 16, torch.float32)
    planned = OPS.prepare(moved(batch))
    for _ in range(2):
        got = OPS.attention(q.to(DEVICE), moved(kv), planned, Scores(0.25)).cpu()
        for i, (k, v) in enumerate(held):
            want = naive(q[i : i + 1], k, v, 0.25, UNLIMITED, 0.0)
            torch.testing.assert_close(got[i : i + 1].double(), want, atol=2e-5, rtol=2e-5)
    ((work,),) = (planned.lists.values(),)
    assert work.starts is not None
    assert not work.arrived.any()
