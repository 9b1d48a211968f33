"""K/V of eight bits with scales, in every mode of attention: the same as with the numbers that they stand for."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch

from quire.ops.operands import Scores
from quire.ops.quantized import FLOAT8, Float8
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from quire.ops.triton import attention
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE, moved, placed
from tests.ops.triton.test_attention import Spans, situation

KINDS = {"kernels": TritonOps(DEVICE), "invariant-kernels": BatchInvariantTritonOps(DEVICE)}
BOTH = pytest.mark.parametrize("kind", KINDS)
FORMS = pytest.mark.parametrize("form", FLOAT8.values(), ids=FLOAT8)
DECODES: Spans = [(300, 1), (17, 1), (0, 1)]
MIXED: Spans = [(40, 1), (150, 37), (66, 1), (0, 5), (9, 70)]
SINKS = placed(torch.tensor([0.5, -1.0, 2.0, 0.0]))
HOW = {
    "plain": Scores(0.25),
    "window": Scores(0.25, window=33),
    "chunk": Scores(0.25, chunk=40),
    "all": Scores(0.25, window=90, soft_cap=0.7, sinks=SINKS),
}


def check(ops: TritonOps, spans: Spans, how: Scores, form: Float8) -> None:
    """As the reference attends to the same numbers in float32, whatever is in blocks that no sequence wrote."""
    q, kv, batch, _ = situation(spans, 4, 2, 16, 16, torch.float32)
    small = LayerKV(kv.k.to(form.dtype), kv.v.to(form.dtype), k_scale=0.5, v_scale=3.0)
    exact = LayerKV((small.k.float() * 0.5).nan_to_num(), (small.v.float() * 3.0).nan_to_num())
    own = how if how.sinks is None else how._replace(sinks=how.sinks.cpu())
    got = ops.attention(q.to(DEVICE), moved(small), ops.prepare(moved(batch)), how).cpu()
    torch.testing.assert_close(got, ReferenceOps().attention(q, exact, batch, own), atol=1e-5, rtol=1e-5)


@BOTH
@FORMS
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("spans", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_windows_chunks_caps_and_sinks(kind: str, form: Float8, how: Scores, spans: Spans) -> None:
    check(KINDS[kind], spans, how, form)


@FORMS
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_chunks_that_are_cut(form: Float8, how: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG_CONTEXT", 32)
    ops = copy(KINDS["kernels"])
    ops.card = replace(ops.card, sms=max(ops.card.sms, 64))
    check(ops, MIXED, how, form)


@BOTH
@FORMS
def test_contexts_of_many_cells(kind: str, form: Float8) -> None:
    check(KINDS[kind], [(1500, 1), (700, 3)], Scores(0.25), form)


@FORMS
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_chunks(form: Float8, how: Scores) -> None:
    ops = KINDS["invariant-kernels"]
    q, kv, batch, _ = situation(MIXED, 4, 2, 16, 16, torch.float32)
    small = LayerKV(kv.k.to(form.dtype), kv.v.to(form.dtype), k_scale=0.5, v_scale=3.0)
    on_card, pool, whole = q.to(DEVICE), moved(small), moved(batch)
    together = ops.attention(on_card, pool, ops.prepare(whole), how)
    starts = batch.query_start.tolist()
    for i, (past, n) in enumerate(MIXED):
        for first, count in ((0, n), (0, n // 2), (n // 2, n - n // 2)):
            rows = slice(starts[i] + first, starts[i] + first + count)
            alone = replace(
                whole,
                **{name: getattr(whole, name)[rows] for name in ("tokens", "positions", "slots")},
                query_start=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
                kv_len=torch.tensor([past + first + count], dtype=torch.int32, device=DEVICE),
                page_table=whole.page_table[i : i + 1],
            )
            if count:
                assert torch.equal(ops.attention(on_card[rows], pool, ops.prepare(alone), how), together[rows])
