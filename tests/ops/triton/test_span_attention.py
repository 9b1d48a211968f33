"""Attention of long prompts, as Hopper's copy engine and matrix units compute it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, LongSpan, LongSpans, RaggedBatch
from quire.ops.triton import ops as triton_ops
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.span_attention import attend_span, takes
from quire.types import UNLIMITED
from tests.ops.test_attention import naive
from tests.ops.triton.device import DEVICE, NEEDS_HOPPER, moved, placed
from tests.ops.triton.test_attention import Spans, situation

CARD = DeviceInfo.of(DEVICE)
HOPPER = replace(CARD, sms=132, capability=(9, 0), shared=227 << 10)
PLAIN = Scores(0.1)
SPANS: Spans = [(0, 130), (100, 200), (1000, 300), (37, 128), (0, 1), (517, 900), (5, 65)]


def test_only_what_was_measured_is_taken() -> None:
    q, kv, batch, _ = situation([(20, 60)], 4, 2, 128, 64, torch.bfloat16)

    def taken(how: Scores = PLAIN, card: DeviceInfo = HOPPER, q: Tensor = q, kv: LayerKV = kv,
              batch: RaggedBatch = batch) -> bool:  # fmt: skip
        return takes(q, kv, batch, how, card)

    assert taken() and taken(Scores(0.1, window=batch.max_kv))
    for how in (Scores(0.1, 9), Scores(0.1, soft_cap=2.0), Scores(0.1, chunk=16), Scores(0.1, ahead=1)):
        assert not taken(how)
    assert not taken(Scores(0.1, sinks=torch.zeros(4)))
    assert not taken(q=q.float()) and not taken(q=q.half())
    assert not taken(kv=LayerKV(kv.k.to(torch.float8_e4m3fn), kv.v.to(torch.float8_e4m3fn)))
    for changed in ({"capability": (8, 0)}, {"capability": (10, 0)}, {"sms": 0}, {"shared": 99 << 10}):
        assert not taken(card=replace(HOPPER, **changed))
    for dim, page in ((64, 64), (128, 16), (256, 64)):
        pool = torch.zeros(2, 2, page, dim, dtype=torch.bfloat16)
        assert not taken(kv=LayerKV(pool, pool))


def attended(
    spans: Spans, dim: int = 128, page: int = 64, dtype: torch.dtype = torch.bfloat16, *,
    stored: torch.dtype | None = None, window: int = UNLIMITED, sunk: bool = False, heads: int = 8, **how: Any,
) -> None:  # fmt: skip
    """As the naive loop attends, with no row of another span written."""
    q, kv, batch, held = situation(spans, heads, 2, dim, page, dtype)
    if stored is not None:
        kv = LayerKV((kv.k / 0.5).to(stored), (kv.v / 2.0).to(stored), k_scale=0.5, v_scale=2.0)
    sinks = 2 * torch.randn(heads) if sunk else None
    scores = Scores(dim**-0.5, window, sinks=placed(sinks))
    on_card, pool, whole = q.to(DEVICE), moved(kv), moved(batch)
    starts = batch.query_start.tolist()
    for i, (past, n) in enumerate(spans):
        own = slice(starts[i], starts[i + 1])
        out = torch.full_like(on_card, 7.0)
        attend_span(out, on_card, pool, whole, LongSpan(i, starts[i], n, past), scores, CARD, **how)
        want = naive(q[own], *held[i], dim**-0.5, window, 0.0, sinks)
        near = 2e-2 if stored is None else 0.15
        torch.testing.assert_close(out[own].cpu().double(), want, atol=near, rtol=near)
        assert (out[: starts[i]] == 7).all() and (out[starts[i + 1] :] == 7).all()


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("page", [8, 64, 256])
def test_spans_attend_as_the_naive_loop(dim: int, page: int) -> None:
    attended(SPANS, dim, page)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [1, 64, 200, 513, UNLIMITED])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows_and_sinks(dim: int, window: int, sunk: bool) -> None:
    attended(SPANS, dim, 16, window=window, sunk=sunk)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("window", [200, UNLIMITED])
def test_eight_bit_kv_is_attended_to_in_its_own_unit(stored: torch.dtype, window: int) -> None:
    attended(SPANS, stored=stored, window=window)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("heads", [2, 4, 6, 16])
def test_any_share_of_heads_in_half_precision(heads: int) -> None:
    attended(SPANS, heads=heads, dtype=torch.float16)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("how", [{"turns": False}, {"ring": 3}, {"keys": 64, "ring": 4}], ids=str)
def test_other_sizes_and_orders_of_work(how: dict[str, Any]) -> None:
    attended(SPANS, **how)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_a_prompt_has_the_same_bits_in_one_span_and_in_two() -> None:
    q, kv, batch, _ = situation([(300, 700)], 4, 2, 128, 64, torch.bfloat16)
    on_card, pool, whole = q.to(DEVICE), moved(kv), moved(batch)
    out, again = torch.empty_like(on_card), torch.empty_like(on_card)
    attend_span(out, on_card, pool, whole, LongSpan(0, 0, 700, 300), Scores(0.1), CARD)
    for first, n in ((0, 333), (333, 367)):
        attend_span(again, on_card, pool, whole, LongSpan(0, first, n, 300 + first), Scores(0.1), CARD)
    assert torch.equal(out, again)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_long_spans_are_attended_to_so_beside_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "LONG", 32)
    ops = TritonOps(DEVICE)
    ops.dense = None
    spans = [(0, 1), (0, 70), (40, 33), (129, 150), (7, 2), (200, 1)]
    q, kv, batch, held = situation(spans, 4, 2, 128, 64, torch.bfloat16)
    starts = batch.query_start.tolist()
    long = LongSpans([LongSpan(i, starts[i], n, past) for i, (past, n) in enumerate(spans) if n > 32])
    got = ops.attention(q.to(DEVICE), moved(kv), replace(moved(batch), long_spans=long), Scores(0.125)).cpu()
    for i, (k, v) in enumerate(held):
        own = slice(starts[i], starts[i + 1])
        want = naive(q[own], k, v, 0.125, UNLIMITED, 0.0)
        torch.testing.assert_close(got[own].double(), want, atol=2e-2, rtol=2e-2)
