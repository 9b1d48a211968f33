"""An indexer's kernels, and attention to what they chose, against the formulas; and alike to the bit in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops.base import Ops
from quire.ops.operands import Angles
from quire.ops.quantized import FLOAT8, Float8
from quire.ops.reference import ReferenceOps
from quire.ops.triton import indexer
from quire.ops.triton.attention_schedule import AttentionPlan, TokenSpans
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.batches import Pages, poisoned
from tests.ops.indexing import DIM, INDEX_HEADS, INDEX_NORM, LENGTHS, ROTATED, Fed, draw, like, naive, on
from tests.ops.triton.device import DEVICE

KERNELS: dict[str, Ops] = {"kernels": TritonOps(DEVICE), "invariant-kernels": BatchInvariantTritonOps(DEVICE)}


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several tiles and chunks."""
    monkeypatch.setattr(indexer, "SCORED_AT_ONCE", 16)
    monkeypatch.setattr(indexer, "KEYS", 64)
    monkeypatch.setattr(indexer, "LEAST_CHUNK", 16)
    monkeypatch.setattr(indexer, "MOST_CHUNK", 64)
    monkeypatch.setattr(indexer, "HELD", 16)


small = pytest.mark.usefixtures("few_at_once")


def check(name: str, count: int, lengths: tuple[int, ...]) -> None:
    fed = Fed(KERNELS[name], count, device=DEVICE, lengths=lengths)
    got, start = fed.chunks(count), 0
    for s, n in enumerate(lengths):
        seen, want = naive(s, count)
        assert fed.positions(s) == seen[:n]
        assert (got[start : start + n] - want[:n]).abs().max() < 2e-5
        start += n
    assert fed.kv.index is not None
    assert fed.kv.index[0].isnan().all(), "the null block stays as it is"


@small
@pytest.mark.parametrize("name", KERNELS)
def test_choices_and_results_are_those_of_the_formulas(name: str) -> None:
    check(name, 8, (40, 7))


@small
@pytest.mark.nightly
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_choices_and_results_of_long_sequences_are_those_of_the_formulas(name: str, count: int) -> None:
    check(name, count, LENGTHS)


@small
@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, 16])
def test_results_do_not_depend_on_batches_and_chunks(size: int) -> None:
    ops = KERNELS["invariant-kernels"]
    wanted = Fed(ops, 8, device=DEVICE).chunks(0)
    assert torch.equal(Fed(ops, 8, size=size, device=DEVICE).chunks(size), wanted)


@pytest.mark.parametrize("form", FLOAT8.values(), ids=FLOAT8)
def test_keys_are_normed_rotated_and_stored_as_the_reference_stores_them(form: Float8) -> None:
    x, batch = draw(9), Pages(30, 4).batch([(0, 0, [0] * 9)], spare=1)
    stored = []
    for ops, device in ((KERNELS["kernels"], DEVICE), (ReferenceOps(), torch.device("cpu"))):
        for dtype in (torch.float32, form.dtype):
            kv = on(poisoned(30, 1, 4, ROTATED, index_dim=DIM), device)
            kv = replace(kv, index=torch.zeros(30, 1, 4, DIM, dtype=dtype, device=device))
            key, turn = x.key.to(device), Angles(x.cos.to(device), x.sin.to(device))
            ops.store_index_key(key, kv, on(batch, device), turn, like(INDEX_NORM, key))
            assert kv.index is not None
            stored.append(kv.index.float().cpu())
    exact, rough, want, held = stored
    torch.testing.assert_close(exact, want, atol=1e-5, rtol=1e-5)
    # The interpreter rounds some numbers badly.
    assert torch.isclose(rough, held, atol=0.02, rtol=form.error * 2.2).float().mean() > 0.99
    assert held.any() and not held[0].any()


@small
def test_of_equal_scores_the_first_are_chosen_and_what_is_no_number_comes_last() -> None:
    pages, x = Pages(30, 4), draw(20)
    kv = on(poisoned(30, 1, 4, ROTATED, index_dim=DIM), DEVICE)
    assert kv.index is not None
    # A query of ones, and keys of one number each: a score is that number, as often as there are heads.
    values = torch.tensor([0.0, 3, -1, 5, 3, 3, -0.0, torch.nan, 3, 3, 7, 3, 0, 3, 3, 3, 3, 3, 3, 0])
    before = pages.batch([(0, 0, [0] * 20)])
    kv.index.view(-1, DIM)[before.slots.to(DEVICE)] = torch.nn.functional.pad(values[:, None], (DIM - 1, 0)).to(DEVICE)
    fed = on(pages.batch([(0, 19, [0])]), DEVICE)
    turn = Angles(*(each[:1].to(DEVICE) for each in (torch.ones(1, ROTATED // 2), torch.zeros(1, ROTATED // 2))))
    q, weights = torch.ones(1, INDEX_HEADS, DIM), torch.ones(1, INDEX_HEADS)
    table = fed.page_table[0].tolist()
    for count, wanted in ((4, [1, 3, 4, 10]), (1, [10]), (17, [i for i in range(20) if i not in (7, 12, 19)])):
        slots = KERNELS["kernels"].choose_positions(q.to(DEVICE), weights.to(DEVICE), kv, fed, turn, count)
        assert slots.tolist() == [[table[i // 4] * 4 + i % 4 for i in wanted]]
    assert len(x.key) == 20


@pytest.mark.parametrize(
    ("held", "count", "length"), [(64, 30, 1000), (65536, 3, 40000), (16, 100, 260), (512, 7, 500)]
)
def test_the_highest_scores_are_found_however_many_a_program_holds(
    monkeypatch: pytest.MonkeyPatch, held: int, count: int, length: int
) -> None:
    monkeypatch.setattr(indexer, "HELD", held)
    torch.manual_seed(length)
    scores = torch.randn(1, length).mul(8).round() if count > 50 else torch.randn(1, length)
    batch = AttentionPlan.of(on(Pages(length // 16 + 3, 16).batch([(0, length - 1, [0])]), DEVICE))
    tokens = TokenSpans(
        torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([length], dtype=torch.int32, device=DEVICE), []
    )
    chosen = torch.zeros(1, count, dtype=torch.int32, device=DEVICE)
    indexer.choose_scored(scores.to(DEVICE), batch, tokens, chosen, 0, TritonOps(DEVICE).card)
    order = scores[0].argsort(descending=True, stable=True)[:count].sort().values
    table = batch.page_table[0].cpu().long()
    assert chosen[0].tolist() == (table[order // 16] * 16 + order % 16).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("most", [None, 65536])
def test_choices_of_real_size_on_the_gpu(name: str, dtype: torch.dtype, most: int | None) -> None:
    """Of DeepSeek V3.2's sizes, some of more scores than a program holds, bounded by what there is, and by more."""
    torch.manual_seed(0)
    count, heads, dim, size = 2048, 64, 128, 64
    pages = Pages(800, size)
    past = [6000, 2046, 2047, 9000, 100, 30000]
    batch = on(pages.batch([(s, n, [0] * (s + 1)) for s, n in enumerate(past)]), DEVICE)
    batch = replace(batch, max_kv=most or batch.max_kv)
    tokens = len(batch.positions)
    kv = on(poisoned(800, 1, size, 64, dtype, index_dim=dim), DEVICE)
    kv = replace(kv, index=torch.randn(800, 1, size, dim, device=DEVICE).to(dtype))
    q, weights = torch.randn(tokens, heads, dim, device=DEVICE).to(dtype), torch.randn(tokens, heads, device=DEVICE)
    turns = 6 * torch.rand(tokens, 32, device=DEVICE)
    turn, weights = Angles(turns.cos(), turns.sin()), weights.to(dtype)
    chosen = KERNELS[name].choose_positions(q.clone(), weights, kv, batch, turn, count)
    again = KERNELS[name].choose_positions(q.clone(), weights, kv, batch, turn, count)
    turned = ReferenceOps().rope(q, q[:, :0], turn)[0].double()
    rows = [s for s in range(len(past)) for _ in range(s + 1)]
    for row, (s, position) in enumerate(zip(rows, batch.positions.tolist(), strict=True)):
        if position < count:
            continue
        assert torch.equal(chosen[row], again[row])
        slots = batch.page_table[s].long()[:, None] * size + torch.arange(size, device=DEVICE)
        keys = kv.index.view(-1, dim)[slots.view(-1)[: position + 1]].double()  # type: ignore[union-attr]
        scores = ((turned[row] @ keys.t()).clamp(min=0) * weights[row].double()[:, None]).sum(0)
        at = torch.zeros_like(scores, dtype=torch.bool)
        place = {slot: i for i, slot in enumerate(slots.view(-1)[: position + 1].tolist())}
        found = [place[slot] for slot in chosen[row].tolist()]
        assert found == sorted(set(found))
        at[found] = True
        margin = 1e-3 * scores.abs().max()
        last = scores.topk(count).values[-1]
        assert at[scores > last + margin].all()
        assert not at[scores < last - margin].any()
