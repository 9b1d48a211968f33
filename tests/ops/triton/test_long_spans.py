"""Long spans attended to by a library's kernels, beside spans that `attention` serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, LongSpan, LongSpans
from quire.ops.triton import long_spans, span_attention
from quire.ops.triton import ops as triton_ops
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.long_spans import cudnn_attention, dense_attention, gather_kv, pieces
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.types import UNLIMITED
from tests.ops.test_attention import naive
from tests.ops.triton.device import DEVICE, moved, placed
from tests.ops.triton.test_attention import situation


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`DenseAttention` in float32, written down."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(share, 1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal:
        assert q.shape[2] == k.shape[2]
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def library(monkeypatch: pytest.MonkeyPatch) -> TritonOps:
    """Ops that give spans of more than 32 queries to cuDNN on a GPU, to `plain` elsewhere, in small pieces."""
    monkeypatch.setattr(span_attention, "takes", lambda *_: False)
    monkeypatch.setattr(triton_ops, "LONG", 32)
    monkeypatch.setattr(long_spans, "STEP", 32)
    monkeypatch.setattr(long_spans, "MOST_QUERIES", 96)
    monkeypatch.setattr(long_spans, "PIECES", (64, 16))
    ops = TritonOps(DEVICE)
    if ops.dense is None:
        ops.dense = plain
    return ops


OPS = TritonOps(DEVICE)

SPANS = [(0, 1), (0, 70), (40, 33), (129, 150), (7, 2), (96, 96), (0, 192), (200, 1)]


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 64), (6, 1, 128), (3, 3, 64)])
@pytest.mark.parametrize("page", [16, 64])
def test_long_spans_attend_as_the_naive_loop_beside_short_ones(
    heads: int, groups: int, dim: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = library(monkeypatch)
    q, kv, batch, held = situation(SPANS, heads, groups, dim, page, torch.float16)
    starts = batch.query_start.tolist()
    long = [LongSpan(i, starts[i], n, past) for i, (past, n) in enumerate(SPANS) if n > 32]
    assert len(long) == 5
    got = ops.attention(
        q.to(DEVICE), moved(kv), replace(moved(batch), long_spans=LongSpans(long)), Scores(dim**-0.5)
    ).cpu()
    for i, (k, v) in enumerate(held):
        own = slice(starts[i], starts[i + 1])
        want = naive(q[own], k, v, dim**-0.5, UNLIMITED, 0.0)
        torch.testing.assert_close(got[own].double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("what", ["window", "chunk", "soft_cap", "sinks", "float32"])
def test_what_the_library_lacks_is_computed_by_our_kernels(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = library(monkeypatch)
    calls: list[int] = []

    def counted(*args: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        raise AssertionError("the library was asked")

    ops.dense = counted
    dtype = torch.float32 if what == "float32" else torch.float16
    q, kv, batch, held = situation([(20, 60)], 4, 2, 64, 16, dtype)
    sinks = torch.randn(4) if what == "sinks" else None
    window, chunk = 30 if what == "window" else UNLIMITED, 30 if what == "chunk" else UNLIMITED
    how = 0.125, window, 0.7 if what == "soft_cap" else 0.0
    batch = replace(moved(batch), long_spans=LongSpans([LongSpan(0, 0, 60, 20)]))
    got = ops.attention(q.to(DEVICE), moved(kv), batch, Scores(*how, placed(sinks), chunk))
    want = naive(q, *held[0], *how, sinks, chunk)
    torch.testing.assert_close(got.cpu().double(), want, atol=2e-2, rtol=2e-2)
    assert not calls


def test_a_window_that_hides_nothing_is_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = library(monkeypatch)
    q, kv, batch, held = situation([(0, 60)], 4, 2, 64, 16, torch.float16)
    given = replace(moved(batch), long_spans=LongSpans([LongSpan(0, 0, 60, 0)], True))
    asked: list[bool] = []
    inner = ops.dense
    assert inner is not None
    ops.dense = lambda *how: (asked.append(True), inner(*how))[1]
    got = ops.attention(q.to(DEVICE), moved(kv), given, Scores(0.125, window=batch.max_kv)).cpu()
    torch.testing.assert_close(got.double(), naive(q, *held[0], 0.125, UNLIMITED, 0.0), atol=2e-2, rtol=2e-2)
    assert asked == [True]


@pytest.mark.parametrize("kind", [torch.float16, torch.float8_e4m3fn])
def test_blocks_are_gathered_in_order_with_zeros_behind_them(kind: torch.dtype) -> None:
    data = torch.randn(5, 2, 4, 8)
    kv = LayerKV((data / 0.5).to(kind), (data / 0.25).to(kind), k_scale=0.5, v_scale=0.25)
    pages = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    keys, values = gather_kv(moved(kv), pages, 6, 10, torch.float16, OPS.card)
    want = torch.cat((data[3], data[1]), 1)[:, :6].transpose(0, 1)
    for got in (keys.cpu(), values.cpu()):
        assert got.shape == (12, 2, 8)
        torch.testing.assert_close(got[:6].float(), want, atol=0.05, rtol=0.07)
        assert not got[6:].any()


@pytest.mark.parametrize("past", [0, 100, 2047, 2048, 8192, 24576, 100000, 131072, 300000])
def test_pieces_are_few_and_leave_less_than_the_shortest(past: int) -> None:
    made = list(pieces(past))
    assert [begin for begin, _ in made] == [0, *(end for _, end in made)][: len(made)]
    assert {end - begin for begin, end in made} <= set(long_spans.PIECES)
    assert 0 <= past - (made[-1][1] if made else 0) < long_spans.PIECES[-1]
    assert len(made) <= 5 + past // long_spans.PIECES[0]


def test_eight_bit_kv_is_attended_to_in_its_own_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = library(monkeypatch)
    q, kv, batch, held = situation([(20, 60)], 4, 2, 64, 16, torch.float16)
    stored_kv = LayerKV(
        (kv.k / 0.25).to(torch.float8_e4m3fn), (kv.v / 0.5).to(torch.float8_e4m3fn), k_scale=0.25, v_scale=0.5
    )
    long = replace(moved(batch), long_spans=LongSpans([LongSpan(0, 0, 60, 20)]))
    got = ops.attention(q.to(DEVICE), moved(stored_kv), long, Scores(0.125)).cpu()
    torch.testing.assert_close(got.double(), naive(q, *held[0], 0.125, UNLIMITED, 0.0), atol=8e-2, rtol=8e-2)


def test_only_a_hopper_gpu_has_the_library_and_deterministic_kernels_never_do() -> None:
    assert dense_attention(DeviceInfo(sms=2)) is None
    assert dense_attention(DeviceInfo(sms=108, capability=(8, 0))) is None
    if torch.backends.cudnn.is_available():
        assert dense_attention(DeviceInfo(sms=132, capability=(9, 0))) is cudnn_attention
    assert BatchInvariantTritonOps(DEVICE).dense is None
