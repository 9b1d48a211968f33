"""Windows on both sides (`ahead`) and the last position that each token sees (`last_visible`), against a plain mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops import paged_attention, reference
from quire.ops.base import Ops
from quire.ops.batch_invariant import BatchInvariantOps, SteadyOps
from quire.ops.native.library import best_level
from quire.ops.native.ops import NativeOps
from quire.ops.operands import Angles, Scores
from quire.ops.reference import ReferenceOps
from quire.types import UNLIMITED
from tests.ops.batches import Pages, poisoned

EVERY: dict[str, Ops] = {"reference": ReferenceOps(), "fixed": BatchInvariantOps(), "steady": SteadyOps(256)}
if (BEST := best_level()) is not None:
    EVERY["native"] = NativeOps(BEST)

HEADS, GROUPS, DIM, SIZE = 4, 2, 8, 4


def plain(q: Tensor, k: Tensor, v: Tensor, past: int, last: Tensor, s: dict) -> Tensor:
    """Attention of one span by one mask: q [n, H, D], k and v [L, G, D] of the whole span, last [n]."""
    n, length = len(q), len(k)
    query, key = torch.arange(past, past + n)[:, None], torch.arange(length)
    until = torch.maximum(query + s["ahead"], last[:, None])
    seen = (key <= until) & (key > query - s["window"]) & (key >= query // s["chunk"] * s["chunk"])
    k, v = (x.double().repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def check(ops: Ops, s: dict, move: Callable[[Any], Any] = lambda x: x) -> None:
    """s: spans [(past, n, length of the images in it)], window, ahead, chunk, whether images see themselves whole.
    move: to where `ops` computes."""
    torch.manual_seed(s["seed"])
    pages, kv = Pages(2000, SIZE, s["seed"]), poisoned(2000, GROUPS, SIZE, DIM)
    # Where queries see later ones, a span is a whole prompt.
    spans = [(0 if s["ahead"] else past, n) for past, n in s["spans"]]
    held = [tuple(torch.randn(past + n, GROUPS, DIM) for _ in "kv") for past, n in spans]
    for i, (past, _) in enumerate(spans):
        if past:
            ReferenceOps().write_kv(kv, *(x[:past] for x in held[i]), pages.batch([(i, 0, [0] * past)]))
    batch = pages.batch([(i, past, [0] * n) for i, (past, n) in enumerate(spans)], spare=2)
    last = batch.positions.clone()
    starts = batch.query_start.tolist()
    for i, (past, n) in enumerate(spans):
        if s["image"] and n > 1:
            # An image from the second token on, of as many tokens as there are, is computed at once.
            first, length = min(1, n - 1), min(s["image"], n - 1)
            last[starts[i] + first : starts[i] + first + length] = past + first + length - 1
    batch = replace(batch, last_visible=last) if s["image"] else batch
    k, v = (torch.cat([x[part][past:] for x, (past, _) in zip(held, spans, strict=True)]) for part in (0, 1))
    ReferenceOps().write_kv(kv, k, v, batch)
    q, how = torch.randn(len(last), HEADS, DIM), Scores(DIM**-0.5, s["window"], chunk=s["chunk"], ahead=s["ahead"])
    got = ops.attention(move(q), move(kv), move(batch), how).cpu()
    for i, (past, n) in enumerate(spans):
        rows = slice(starts[i], starts[i] + n)
        wanted = plain(q[rows], *held[i], past, last[rows], s)
        torch.testing.assert_close(got[rows].double(), wanted, atol=2e-5, rtol=2e-5)


SITUATIONS = st.fixed_dictionaries(
    {
        "spans": st.lists(
            st.tuples(st.integers(0, 90), st.sampled_from([1, 2, 5, 9, 33, 70, 150])), min_size=1, max_size=4
        ),
        "window": st.sampled_from([UNLIMITED, 3, 20, 70]),
        "ahead": st.sampled_from([0, 0, 2, 19, UNLIMITED]),
        "chunk": st.sampled_from([UNLIMITED, UNLIMITED, 6, 65]),
        "image": st.sampled_from([0, 4, 40, 100]),
        "seed": st.integers(0, 1000),
    }
)


@pytest.mark.parametrize("kind", EVERY)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(s=SITUATIONS, few=st.sampled_from([1, 4, 32]), tile=st.sampled_from([7, 256]))
def test_both_together_are_one_mask(kind: str, s: dict, few: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "FEW", few)
        patch.setattr(reference, "FEW", few)
        patch.setattr(reference, "TILE", tile)
        check(EVERY[kind], s)


@pytest.mark.skipif(BEST is None, reason="a processor without these kernels")
@pytest.mark.parametrize("length", [9, 70])
def test_images_are_seen_whole_where_a_prompt_is_attended_in_one_call(length: int) -> None:
    """`NativeOps.self_attention` takes a shorter way for whole prompts, as `ReferenceOps` does not."""
    torch.manual_seed(0)
    made = []
    for kind in ("reference", "native"):
        pages, kv = Pages(200, SIZE), poisoned(200, GROUPS, SIZE, DIM)
        batch = pages.batch([(0, 0, [0] * length), (1, 0, [0] * length)])
        last = batch.positions.clone()
        last[2:8] = 7
        qkv = torch.randn(2 * length, (HEADS + 2 * GROUPS) * DIM, generator=torch.Generator().manual_seed(1))
        angles = torch.randn(2 * length, DIM // 2).mul(0).cos(), torch.zeros(2 * length, DIM // 2)
        how = Scores(DIM**-0.5, window=30, ahead=1)
        made.append(EVERY[kind].self_attention(qkv, HEADS, kv, replace(batch, last_visible=last), Angles(*angles), how))
    torch.testing.assert_close(*made, atol=2e-5, rtol=2e-5)
