"""Pages that many sequences begin with are read once for several of them, and no answer changes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.ops.triton import attention, attention_schedule
from quire.ops.triton.attention_schedule import AttentionPlan
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.types import UNLIMITED
from tests.ops.batches import poisoned
from tests.ops.triton.device import DEVICE, moved, placed
from tests.ops.triton.test_attention import padded

OPS = TritonOps(DEVICE)
PAGE = 64

Sequences = list[tuple[str, int]]
"""Of each sequence the pages it has in common with others, a letter each, and the tokens of its own."""

ALL: Sequences = [("ab", 1 + 7 * i % 90) for i in range(34)]
TWO: Sequences = [("ab" if i % 3 else "xyz", 1 + i) for i in range(34)]
NESTED: Sequences = [("abcdefgh"[: 1 + i % 3] if i % 4 else "abxy", 20) for i in range(34)]
LESS: Sequences = [*ALL[:20], ("a", 70), *ALL[20:]]
NOTHING: Sequences = [("", 30 + i) for i in range(33)]
LATER: Sequences = [(chr(200 + i) + "bcd", 5) for i in range(33)]
WHOLE: Sequences = [("abc", 64) for _ in range(33)]
LAST: Sequences = [("ab", 1) for _ in range(33)]
EVERY = {
    "all": ALL, "two groups": TWO, "nested": NESTED, "one has less": LESS, "none": NOTHING, "later": LATER,
    "whole pages": WHOLE, "all but the last token": LAST,
}  # fmt: skip


@pytest.fixture(autouse=True)
def any_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_BYTES_SAVED", 0)


def situation(
    sequences: Sequences,
    heads: int = 2,
    groups: int = 1,
    dim: int = 16,
    page: int = PAGE,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, LayerKV, RaggedBatch]:
    """One query of each sequence, and a pool that is NaN wherever none of them has written."""
    torch.manual_seed(0)
    ids: dict[object, int] = {}
    lengths = [len(common) * page + own for common, own in sequences]
    tables = [
        [ids.setdefault((i, p) if p >= len(common) else common[p], len(ids) + 1) for p in range(-(-length // page))]
        for i, ((common, _), length) in enumerate(zip(sequences, lengths, strict=True))
    ]
    order = torch.randperm(len(ids)) + 1
    table = torch.zeros(len(sequences), max(map(len, tables)) + 2, dtype=torch.int32)
    kv = poisoned(len(ids) + 1, groups, page, dim, torch.float32)
    for i, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
        for p, name in enumerate(pages):
            at, held = int(order[name - 1]), min(page, length - p * page)
            table[i, p] = at
            if kv.k[at, :, :held].isnan().any():
                kv.k[at, :, :held], kv.v[at, :, :held] = torch.randn(2, groups, held, dim)
    past = torch.tensor(lengths) - 1
    batch = RaggedBatch(
        tokens=past,
        positions=past,
        slots=table[torch.arange(len(sequences)), past // page].long() * page + past % page,
        query_start=torch.arange(len(sequences) + 1, dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        page_size=page,
        max_query=1,
        max_kv=max(lengths),
    )
    return torch.randn(len(sequences), heads, dim, dtype=dtype), LayerKV(kv.k.to(dtype), kv.v.to(dtype)), batch


def check(
    sequences: Sequences, heads: int = 2, groups: int = 1, dim: int = 16, page: int = PAGE, window: int = UNLIMITED,
    soft_cap: float = 0.0, dtype: torch.dtype = torch.float32, tolerance: float = 2e-5, pads: int = 0,
    sunk: bool = False,
) -> AttentionPlan:  # fmt: skip
    q, kv, batch = situation(sequences, heads, groups, dim, page, dtype)
    exact, how = LayerKV(kv.k.float().nan_to_num(), kv.v.float().nan_to_num()), (dim**-0.5, window, soft_cap)
    sinks = 2 * torch.randn(heads) if sunk else None
    want = ReferenceOps().attention(q.float(), exact, batch, Scores(*how, sinks))
    if pads:
        batch, q = padded(batch, pads), torch.cat((q, q.new_full((pads, heads, dim), float("nan"))))
    planned = OPS.prepare(moved(batch))
    got = OPS.attention(q.to(DEVICE), moved(kv), planned, Scores(*how, placed(sinks))).cpu()[: len(sequences)]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    return planned


def looked(sequences: Sequences) -> AttentionPlan:
    """A batch for which it was looked what spans share."""
    q, kv, batch = situation(sequences)
    planned = OPS.prepare(moved(batch))
    attention.cascade_attention(q.to(DEVICE), moved(kv), planned, Scores(0.25), OPS.card)
    return planned


def depths(planned: AttentionPlan) -> list[int]:
    """Tokens of each span that are read with others."""
    ((found),) = planned.cascades.values()
    return found.begun[0].tolist()


def lone(planned: AttentionPlan) -> int:
    """Tokens, in whole blocks, that spans read by themselves."""
    ((tiling, _),), ((work),) = planned.lists, planned.lists.values()
    pieces = work.pieces[: int(work.total)].cpu()
    return int((pieces[:, 5] - pieces[:, 4]).sum()) * tiling.columns


def together(planned: AttentionPlan) -> int:
    """Tokens that are read for several spans at once."""
    ((sharing, found),) = planned.cascades.items()
    pieces = found.pieces[: int(found.counts[0])].cpu()
    return int((pieces[:, 4] - pieces[:, 3]).sum()) * sharing.unit


@pytest.mark.parametrize("kind", EVERY)
def test_what_is_shared_is_attended_to_as_what_is_not(kind: str) -> None:
    check(EVERY[kind])


def test_each_span_does_not_read_what_its_group_reads() -> None:
    assert depths(looked(ALL)) == [128] * len(ALL)
    assert depths(looked(TWO)) == [128 if i % 3 else 192 for i in range(len(TWO))]
    assert depths(looked(LESS)) == [128] * 20 + [0] + [128] * 14
    assert depths(looked(NOTHING)) == [0] * len(NOTHING)
    assert depths(looked(LATER)) == [0] * len(LATER), "what comes before it is not the same"
    assert depths(looked(WHOLE)) == [192] * len(WHOLE)
    assert depths(looked([("abc", 0)] * 33)) == [128] * 33, "the last page is still written to"
    assert depths(looked([*[("ab", 9)] * 3, *NOTHING])) == [0] * (3 + len(NOTHING)), "three are no group"


def test_of_nested_prefixes_each_span_takes_the_one_that_saves_most() -> None:
    sequences = [*[("abcd", 9)] * 12, *[("axyz", 9)] * 12, *[("a", 9)] * 12]
    assert depths(looked(sequences)) == [256] * 24 + [64] * 12
    pair = "abcdefghijklmnopqrst"
    assert depths(looked([(pair, 9), (pair, 9), *[("a", 9)] * 12, *NOTHING[:20]])) == [64] * 14 + [0] * 20


def test_shared_pages_are_read_once_for_as_many_spans_as_a_tile_holds() -> None:
    sequences = [("abcdefgh", 30)] * 64
    planned = check(sequences)
    assert lone(planned) == 64 * 64, "a block of its own each"
    ((sharing, _),) = planned.cascades.items()
    assert sharing.members >= 16
    assert together(planned) == -(-64 // sharing.members) * 8 * 64


def test_a_group_is_formed_from_the_least_saving_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spared, token = 128 * (len(ALL) - 1), 2 * 16 * 4
    monkeypatch.setattr(attention, "MIN_BYTES_SAVED", spared * token)
    assert depths(looked(ALL)) == [128] * len(ALL)
    monkeypatch.setattr(attention, "MIN_BYTES_SAVED", (spared + 1) * token)
    assert depths(looked(ALL)) == [0] * len(ALL)


def test_the_rest_of_a_long_sequence_is_split_and_continues_from_the_shared_blocks_once() -> None:
    common = "abcdefghijklmnopqrstuvwxyz"[:20]
    planned = check([*[(common, 3)] * 32, (common, 900)])
    ((work),) = planned.lists.values()
    pieces = work.pieces[: int(work.total)].cpu()
    last = pieces[pieces[:, 6] == 32]
    assert len(last) > 1
    ((found),) = planned.cascades.values()
    runs = int(found.begun[1, 32])
    assert runs > 1
    assert sorted(last[:, 8].tolist()) == [0] * (len(last) - 1) + [runs]


@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (7, 1), (4, 2), (16, 1)])
def test_any_number_of_query_heads_shares_what_many_sequences_share(heads: int, groups: int) -> None:
    check(TWO, heads, groups)


@pytest.mark.parametrize(("dim", "page"), [(24, 16), (64, 16), (128, 64), (256, 32), (16, 256)])
def test_any_head_dim_and_page(dim: int, page: int) -> None:
    planned = check([("abcd", 5 + i) for i in range(33)], 2, 1, dim, page, tolerance=5e-5)
    assert min(depths(planned)) == 4 * page


def test_pages_smaller_than_a_block_are_shared_in_whole_blocks() -> None:
    assert depths(check([("abcdefg", 3)] * 33, page=16)) == [64] * 33


def test_half_precision_is_summed_in_float32() -> None:
    check(ALL, 3, 1, 64, dtype=torch.float16, tolerance=3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", EVERY)
def test_bfloat16_on_the_gpu(kind: str, dim: int) -> None:
    check(EVERY[kind], 6, 2, dim, dtype=torch.bfloat16, tolerance=2e-2)
    check(EVERY[kind] * 8, 6, 2, dim, dtype=torch.bfloat16, soft_cap=5.0, tolerance=2e-2)
    check(EVERY[kind] * 8, 16, 2, dim, dtype=torch.bfloat16, tolerance=2e-2, sunk=True)


def test_a_soft_cap_bends_the_scores() -> None:
    check(ALL, soft_cap=0.7)


def test_a_sink_takes_its_share_once_beside_a_shared_prefix() -> None:
    check(ALL, heads=4, groups=2, sunk=True)


def test_pages_of_eight_bits_are_read_times_their_scales() -> None:
    q, kv, batch = situation(ALL)
    small = LayerKV(kv.k.to(torch.float8_e4m3fn), kv.v.to(torch.float8_e4m3fn), k_scale=0.5, v_scale=3.0)
    exact = LayerKV(small.k.float().nan_to_num() * 0.5, small.v.float().nan_to_num() * 3.0)
    got = OPS.attention(q.to(DEVICE), moved(small), OPS.prepare(moved(batch)), Scores(0.25)).cpu()
    torch.testing.assert_close(got, ReferenceOps().attention(q, exact, batch, Scores(0.25)), atol=1e-5, rtol=1e-5)


def test_layers_with_a_window_or_chunks_and_those_without_take_turns() -> None:
    q, kv, batch = situation(ALL)
    planned, whole = OPS.prepare(moved(batch)), LayerKV(kv.k.nan_to_num(), kv.v.nan_to_num())
    for window, chunk in ((100, UNLIMITED), (UNLIMITED, UNLIMITED), (UNLIMITED, 100), (100, UNLIMITED)):
        got = OPS.attention(q.to(DEVICE), moved(kv), planned, Scores(0.25, window, chunk=chunk)).cpu()
        want = ReferenceOps().attention(q, whole, batch, Scores(0.25, window, chunk=chunk))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert len(planned.lists) == 3
    assert depths(planned) == [128] * len(ALL)


def test_padding_spans_share_nothing() -> None:
    planned = check(ALL[:20], pads=20)
    assert depths(planned) == [128] * 20 + [0] * 20


def test_table_entries_after_a_sequences_end_are_not_read() -> None:
    q, kv, batch = situation(NOTHING)
    batch.page_table[:] = torch.where(batch.page_table > 0, batch.page_table, 9)
    planned = OPS.prepare(moved(batch))
    OPS.attention(q.to(DEVICE), moved(kv), planned, Scores(0.25))
    assert depths(planned) == [0] * len(NOTHING)


@pytest.mark.parametrize("sequences", [64, pytest.param(256, marks=pytest.mark.nightly)])
def test_many_sequences_share_long_prefixes_cut_into_runs(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_schedule, "MAX_RUN_TOKENS", 256)
    planned = check([("abcdefghijkl"[: 8 if i % 2 else 12], 3) for i in range(sequences)])
    assert depths(planned) == [512] * sequences
    ((found),) = planned.cascades.values()
    assert min(found.begun[1].tolist()) > 1


def test_few_sequences_mixed_steps_and_deterministic_ones_do_not_look() -> None:
    q, kv, batch = situation(ALL)
    fixed = BatchInvariantTritonOps(DEVICE)
    for ops, given in ((OPS, replace(batch, max_query=2)), (fixed, batch)):
        planned = ops.prepare(moved(given))
        ops.attention(q.to(DEVICE), moved(kv), planned, Scores(0.25))
        assert not planned.cascades
    q, kv, batch = situation(ALL[: attention.MIN_CASCADE_SPANS - 1])
    planned = OPS.prepare(moved(batch))
    OPS.attention(q.to(DEVICE), moved(kv), planned, Scores(0.25))
    assert not planned.cascades


def test_no_list_is_longer_than_its_bound() -> None:
    sequences = [(chr(97 + i // attention_schedule.MIN_GROUP), 3) for i in range(64)]
    planned = looked(sequences)
    ((sharing, found),) = planned.cascades.items()
    assert int(found.counts[0]) == 64 // attention_schedule.MIN_GROUP <= sharing.bound(64) == len(found.pieces)
    assert sorted(found.members.tolist()) == list(range(64))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_step_finds_shared_prefixes_again() -> None:
    host_q, host_kv, host = situation(LATER * 4, 6, 2, 128)
    q, kv, batch = host_q.to(DEVICE), moved(host_kv), moved(host)
    whole = LayerKV(host_kv.k.nan_to_num(), host_kv.v.nan_to_num())

    def layers() -> list[Tensor]:
        planned = OPS.prepare(batch)
        return [OPS.attention(q, kv, planned, Scores(0.1)) for _ in range(3)]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    first = host.page_table[:, 0].clone()
    for alike in (first, first[:1].expand(len(first)), first[torch.arange(len(first)) % 2], first):
        host.page_table[:, 0] = alike
        batch.page_table.copy_(host.page_table)
        graph.replay()
        want = ReferenceOps().attention(host_q, whole, host, Scores(0.1))
        for got in out:
            torch.testing.assert_close(got.cpu(), want, atol=5e-5, rtol=5e-5)


class Launched:
    """A kernel's double, which runs nothing."""

    def __getitem__(self, grid: object) -> object:
        return lambda *_, **__: None


@pytest.mark.parametrize("spread", [0, 5])
def test_lists_are_where_the_batch_is(spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and devices of a batch on another device than the default one."""
    for name in ("depth_kernel", "gather_kernel", "tiles_kernel", "shares_kernel"):
        monkeypatch.setattr(attention_schedule, name, Launched())
    away, sharing = torch.device("meta"), attention_schedule.PrefixSharing(16, 8, 4, 32)
    spans = torch.zeros(34, dtype=torch.int32, device=away)
    batch = SimpleNamespace(kv_len=spans, positions=spans, query_start=spans, page_table=spans[:, None], page_size=16)
    found = attention_schedule.find_shared_prefixes(batch, sharing)  # type: ignore[arg-type]
    assert [list(each.shape) for each in found] == [[2, 34], [34], [sharing.bound(34), 6], [2]]
    tiling = attention_schedule.Tiling(2, 16, 32, 1, 1, spread, 2, UNLIMITED)
    made = attention_schedule.make_schedule(batch, tiling, 3)  # type: ignore[arg-type]
    shapes = [[35 + spread, 9], [1], [34 + spread, 3], *([[spread + 1]] if spread else [])]
    lists = [each for each in made[:4] if each is not None]
    assert [list(each.shape) for each in lists] == shapes
    assert {(each.device, each.dtype) for each in (*found, *lists)} == {(away, torch.int32)}
