"""Attention in cells: the same bits however cells are divided among programs, and in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.triton import attention as kernels
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.cells import num_cells
from quire.ops.triton.ops import BatchInvariantTritonOps
from quire.types import UNLIMITED
from tests.ops.test_attention import naive
from tests.ops.triton.device import DEVICE, moved, placed
from tests.ops.triton.test_attention import Spans, padded, situation

OPS = BatchInvariantTritonOps(DEVICE)

DECODE: Spans = [(0, 1), (700, 1), (255, 1), (256, 1), (63, 1)]
VERIFY: Spans = [(450, 4), (64, 2), (130, 1)]

WAYS = {"whole": (1 << 20, 132), "cut": (0, 1 << 10), "dealt out": (0, 1)}
"""Of dividing cells: `LEAST_CUT`, and multiprocessors."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of 64 positions, and from 256 on of 256; blocks have 64."""
    monkeypatch.setattr(kernels, "FINE", 64)
    monkeypatch.setattr(kernels, "COARSE", 256)


def attended(way: str, q: Tensor, kv: object, batch: AttentionPlan, how: Scores) -> Tensor:
    """By one way of dividing cells."""
    ops = BatchInvariantTritonOps(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        least, units = WAYS[way]
        patch.setattr(kernels, "LEAST_CUT", least)
        ops.card = replace(ops.card, units=units)
        return ops.attention(q, kv, batch, how)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spans", [DECODE, VERIFY], ids=["decode", "verify"])
@pytest.mark.parametrize(
    ("window", "chunk", "soft_cap", "sunk"),
    [(UNLIMITED, UNLIMITED, 0.0, False), (300, UNLIMITED, 0.0, True), (UNLIMITED, 280, 5.0, True)],
    ids=["plain", "window", "chunk"],
)
def test_cells_have_the_same_bits_however_they_are_divided(
    spans: Spans, window: int, chunk: int, soft_cap: float, sunk: bool, way: str
) -> None:
    q, kv, batch, held = situation(spans, 4, 2, 16, 16, torch.float32)
    starts = batch.query_start.tolist()
    if way == "cut":
        batch, q = padded(batch, 2), torch.cat((q, q.new_full((2, 4, 16), float("nan"))))
    sinks = 2 * torch.randn(4, generator=torch.Generator().manual_seed(2)) if sunk else None
    how = Scores(0.25, window, soft_cap, placed(sinks), chunk)
    planned = AttentionPlan.of(moved(batch))
    got, again = (attended(way, q.to(DEVICE), moved(kv), planned, how) for _ in range(2))
    assert torch.equal(got[: starts[-1]], again[: starts[-1]])  # adding cells up leaves the counters at 0
    ((work,),) = (planned.lists.values(),)
    assert not work.arrived.any() and work.several == (way == "dealt out")
    whole = attended("whole", q.to(DEVICE), moved(kv), AttentionPlan.of(moved(batch)), how)
    for i, (k, v) in enumerate(held):
        own = slice(starts[i], starts[i + 1])
        want = naive(q[own], k, v, 0.25, window, soft_cap, sinks, chunk)
        torch.testing.assert_close(got[own].double().cpu(), want, atol=2e-5, rtol=2e-5)
        assert torch.equal(got[own], whole[own])


def test_pieces_are_the_cells_and_have_room() -> None:
    _, _, batch, _ = situation(DECODE, 4, 2, 16, 16, torch.float32)
    planned = AttentionPlan.of(moved(batch))
    q, _, _, _ = situation(DECODE, 4, 2, 16, 16, torch.float32)
    _, kv, _, _ = situation(DECODE, 4, 2, 16, 16, torch.float32)
    attended("cut", q.to(DEVICE), moved(kv), planned, Scores(0.25))
    ((work,),) = (planned.lists.values(),)
    pieces = work.pieces[: int(work.total)].tolist()
    cuts = [piece[4:6] for piece in pieces if piece[6] == 1]
    assert cuts == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 8], [8, 11]]
    assert [piece[7] for piece in pieces if piece[6] == 1] == [part + 6 * 65536 for part in range(6)]
    assert [sum(piece[6] == span for piece in pieces) for span in range(5)] == [1, 6, 4, 5, 1]


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 8, 9, 40])
def test_cells_are_counted_as_they_are_cut(blocks: int) -> None:
    begins = [b for b in range(blocks) if b % (2 if b < 4 else 4) == 0]
    assert num_cells(blocks, 2, 4) == len(begins)
