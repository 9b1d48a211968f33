"""Chunks of prompts with long contexts, whose positions are divided among programs, beside sequences that decode."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.ops.triton import attention, attention_schedule
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.types import UNLIMITED
from tests.ops.test_attention import naive
from tests.ops.triton.device import DEVICE, moved, placed
from tests.ops.triton.test_attention import Spans, padded, situation
from tests.ops.triton.test_latent import check as latent_check

OPS = TritonOps(DEVICE)

LANDING: Spans = [(40, 1), (150, 37), (66, 1), (0, 5), (9, 70)]
PLAIN = Scores(0.25)
EXACT: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def short_contexts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG_CONTEXT", 32)


@pytest.fixture
def ops() -> TritonOps:
    """Of a card that is large enough for what is tested here."""
    made = copy(OPS)
    made.card = replace(made.card, sms=max(made.card.sms, 64))
    return made


def check(ops: TritonOps, spans: Spans, heads: int, groups: int, how: Scores, *, pads: int = 0, dim: int = 16) -> None:
    """As the naive loop attends, twice, since layers share lists."""
    q, kv, batch, held = situation(spans, heads, groups, dim, 16, torch.float32)
    starts = batch.query_start.tolist()
    if pads:
        batch, q = padded(batch, pads), torch.cat((q, q.new_full((pads, heads, dim), float("nan"))))
    planned = ops.prepare(moved(batch))
    sinks = None if how.sinks is None else how.sinks.cpu()
    for _ in range(2):
        got = ops.attention(q.to(DEVICE), moved(kv), planned, how).cpu()
        for i, (k, v) in enumerate(held):
            own = slice(starts[i], starts[i + 1])
            want = naive(q[own], k, v, how.scale, how.window, how.soft_cap, sinks, how.chunk)
            torch.testing.assert_close(got[own].double(), want, **EXACT)
    assert [*planned.parts] == [64 * groups // heads], "chunks were cut"
    assert not planned.lists, "no other list was made"


@pytest.mark.parametrize("share", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_any_share_of_heads(ops: TritonOps, share: int) -> None:
    check(ops, [*LANDING, (20, 64 // share + 1)], share, 1, PLAIN)


@pytest.mark.parametrize(
    "how",
    [
        Scores(0.25, window=100),
        Scores(0.25, window=33),
        Scores(0.25, soft_cap=0.7),
        Scores(0.25, chunk=40),
        Scores(0.25, window=90, soft_cap=0.7, sinks=placed(torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    ],
    ids=["window", "narrow", "cap", "chunk", "all"],
)
def test_what_hides_and_bends_scores(ops: TritonOps, how: Scores) -> None:
    check(ops, LANDING, 4, 2, how)


@pytest.mark.parametrize("pads", [0, 3, 20])
def test_padding_spans_and_tokens_change_nothing(ops: TritonOps, pads: int) -> None:
    check(ops, LANDING, 4, 2, PLAIN, pads=pads)


@pytest.mark.parametrize("queries", [33, 64, 65, 256, pytest.param(2048, marks=pytest.mark.nightly)])
def test_chunks_of_any_length(ops: TritonOps, queries: int) -> None:
    check(ops, [(90, 1), (70, queries)], 2, 1, PLAIN)


@pytest.mark.parametrize("count", range(1, 9))
def test_chunks_of_several_sequences_beside_others(ops: TritonOps, count: int) -> None:
    chosen = random.Random(count)
    spans = [(chosen.randrange(200), chosen.choice([17, 18, 31, 40])) for _ in range(count)]
    spans += [(chosen.randrange(100), 1) for _ in range(chosen.randrange(10))]
    chosen.shuffle(spans)
    check(ops, spans, 4, 1, PLAIN)


@pytest.mark.parametrize("dim", [24, 64, 128, 256])
def test_any_head_dim(ops: TritonOps, dim: int) -> None:
    check(ops, [(70, 1), (40, 40)], 4, 2, Scores(dim**-0.5), dim=dim)


def test_pages_of_eight_bits_are_read_times_their_scales(ops: TritonOps) -> None:
    q, kv, batch, _ = situation(LANDING, 4, 2, 16, 16, torch.float32)
    small = LayerKV(kv.k.to(torch.float8_e4m3fn), kv.v.to(torch.float8_e4m3fn), k_scale=0.5, v_scale=3.0)
    exact = LayerKV((small.k.float() * 0.5).nan_to_num(), (small.v.float() * 3.0).nan_to_num())
    planned = ops.prepare(moved(batch))
    got = ops.attention(q.to(DEVICE), moved(small), planned, PLAIN).cpu()
    torch.testing.assert_close(got, ReferenceOps().attention(q, exact, batch, PLAIN), atol=1e-5, rtol=1e-5)
    assert planned.parts


@pytest.mark.parametrize("heads", [1, 6, 16, 32, 40])
def test_chunks_of_latents_are_cut(ops: TritonOps, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 40 heads have one query each."""
    sizes, cut = list[int](), AttentionPlan.in_spans_of

    def noted(batch: AttentionPlan, most: int) -> AttentionPlan:
        sizes.append(most)
        return cut(batch, most)

    monkeypatch.setattr(AttentionPlan, "in_spans_of", noted)
    spans: Spans = [(40, 1), (150, 70 if heads < 16 else 9), (66, 1), (0, 5)]
    latent_check(ops, spans, heads, 32, 8)
    assert sizes == [64 // heads] * (heads <= 32)


def test_only_chunks_with_long_contexts_and_few_tiles_are_cut(ops: TritonOps) -> None:
    host_q, _, host, _ = situation(LANDING, 4, 2, 16, 16, torch.float32)
    q, batch = host_q.to(DEVICE), moved(host)

    def cut(
        q: Tensor = q,
        groups: int = 2,
        how: Scores = PLAIN,
        longest: int = UNLIMITED,
        sms: int = 64,
        **changed: Any,
    ) -> bool:
        """changed: fields of the batch."""
        plan = AttentionPlan.of(replace(batch, **changed))
        return attention.cut_chunks(plan, q, groups, how, replace(ops.card, sms=sms), longest) is not plan

    assert cut()
    assert cut(longest=70)
    assert not cut(longest=69), "a part does not say that its span is one for other kernels"
    assert cut(sms=7)
    assert not cut(sms=5), "whole tiles keep the card busy"
    assert not cut(max_query=32), "a tile holds such spans"
    assert not cut(max_kv=31), "contexts are short"
    assert not cut(last_visible=batch.positions), "tokens may see later ones"
    assert not any(cut(how=how) for how in (Scores(0.25, window=31), Scores(0.25, chunk=31), Scores(0.25, ahead=2)))
    assert not cut(q.new_empty(len(q), 80, 16), 1), "a query is more than a tile"


def test_tiles_of_parts_are_pipelined_as_those_of_prompts_and_have_longer_pieces() -> None:
    hopper = DeviceInfo(sms=132, capability=(9, 0), shared=227 << 10)
    for dim, stages in ((64, 3), (128, 3), (256, 2)):
        ((tile, least, most),) = attention.part_tiles(hopper, 4, dim, 2, 16, 300)
        assert (tile.rows, tile.stages, least, most) == (64, stages, 1, 16)
        assert tile.run * tile.columns == 64 * attention.PART_RUN


def test_deterministic_mode_cuts_no_chunks() -> None:
    q, kv, batch, _ = situation(LANDING, 4, 2, 16, 16, torch.float32)
    fixed = BatchInvariantTritonOps(DEVICE)
    planned = fixed.prepare(moved(batch))
    fixed.attention(q.to(DEVICE), moved(kv), planned, PLAIN)
    assert planned.lists
    assert not planned.parts


def batch_of(counts: list[int], past: list[int], tokens: int, columns: int = 3) -> AttentionPlan:
    """Spans of so many tokens, some none, of a step that is padded to `tokens`."""
    some = torch.zeros(tokens, dtype=torch.int64)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(counts, dtype=torch.int32) + torch.tensor(past, dtype=torch.int32)
    table = torch.arange(len(counts) * columns, dtype=torch.int32).view(-1, columns)
    batch = RaggedBatch(some, some, some, starts, lengths, table, 16, tokens, 4096)
    return AttentionPlan.of(moved(batch))


@pytest.mark.parametrize("seed", range(20))
def test_parts_follow_each_other_and_padding_is_behind_them(seed: int) -> None:
    chosen = random.Random(seed)
    counts = [chosen.choice([0, 1, 1, 2, chosen.randrange(60)]) for _ in range(chosen.randrange(1, 30))]
    past, most = [chosen.randrange(99) for _ in counts], chosen.choice([1, 3, 8, 16, 64])
    tokens = max(1, sum(counts) + chosen.choice([0, 7]))
    batch = batch_of(counts, past, tokens)
    cut = batch.in_spans_of(most)
    assert batch.in_spans_of(most) is cut
    want, start = [], 0
    for s, n in enumerate(counts):
        for at in range(0, n, most):
            want.append((start + at, min(most, n - at), past[s] + min(n, at + most), batch.page_table[s].tolist()))
        start += n
    starts, lengths, table = cut.query_start.tolist(), cut.kv_len.tolist(), cut.page_table.tolist()
    assert len(want) <= len(lengths) == len(counts) + tokens // most == len(table) == len(starts) - 1
    got = [(starts[i], starts[i + 1] - starts[i], lengths[i], table[i]) for i in range(len(lengths))]
    assert got[: len(want)] == want
    assert all(each[:3] == (sum(counts), 0, 0) for each in got[len(want) :])
    assert cut.max_query == most
    assert cut.positions is batch.positions


class NothingRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a number on the device is read, or a shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not {"_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave"} & {func._schema.name[6:]}
        return func(*args, **kwargs or {})


class Unlaunched:
    """A kernel's double, which runs nothing."""

    def __getitem__(self, grid: object) -> object:
        return lambda *_, **__: None


def test_nothing_is_read_back(ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((attention_schedule, "parts_kernel"), (attention_schedule, "shares_kernel"),
                         (attention, "attention_kernel")):  # fmt: skip
        monkeypatch.setattr(module, name, Unlaunched())
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    q, kv, batch, _ = situation(LANDING, 4, 2, 16, 16, torch.float32)
    placed_q, placed_kv, planned = q.to(DEVICE), moved(kv), ops.prepare(moved(batch))
    with NothingRead():  # type: ignore[no-untyped-call]
        ops.attention(placed_q, placed_kv, planned, PLAIN)
    assert planned.parts


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("share", [1, 4, 8])
def test_bfloat16_on_the_gpu(share: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG_CONTEXT", 2048)
    spans = [(9000, 100), *[(40 * i + 3, 1) for i in range(15)]]
    q, kv, batch, held = situation(spans, 8 * share, 8, dim, 64, torch.bfloat16)
    starts, planned, on_card = batch.query_start.tolist(), OPS.prepare(moved(batch)), (q.to(DEVICE), moved(kv))
    got = OPS.attention(*on_card, planned, Scores(dim**-0.5)).cpu()
    for i, (k, v) in enumerate(held):
        own = slice(starts[i], starts[i + 1])
        want = naive(q[own], k, v, dim**-0.5, UNLIMITED, 0.0)
        torch.testing.assert_close(got[own].double(), want, atol=2e-2, rtol=2e-2)
    assert planned.parts


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_step_serves_other_lengths() -> None:
    host_q, host_kv, host, _ = situation(LANDING, 4, 2, 64, 16, torch.float32)
    whole = LayerKV(host_kv.k.nan_to_num(), host_kv.v.nan_to_num())  # sequences grow into pages of none
    q, kv, batch = host_q.to(DEVICE), moved(whole), moved(host)

    def layers() -> list[Tensor]:
        planned = OPS.prepare(batch)
        return [OPS.attention(q, kv, planned, Scores(0.1)) for _ in range(3)]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    total = int(host.query_start[-1])
    for counts in ([1, 37, 1, 5, 70], [70, 1, 1, 1, 41], [0, 114, 0, 0, 0]):
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = host.kv_len.minimum(torch.tensor(counts, dtype=torch.int32) + 3)
        lengths = lengths.maximum(torch.tensor(counts, dtype=torch.int32))
        other = replace(host, query_start=starts, kv_len=lengths)
        batch.query_start.copy_(starts)
        batch.kv_len.copy_(lengths)
        graph.replay()
        want = ReferenceOps().attention(host_q, whole, other, Scores(0.1))
        assert int(starts[-1]) == total
        for got in out:
            torch.testing.assert_close(got.cpu(), want, atol=5e-5, rtol=5e-5)
