"""The row store as a fold over plans, and the batch it makes, against a row kept as plain lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quire.errors import StepFailed
from quire.model_runner.row_state import RowState
from quire.model_runner.step_io import build_batch
from quire.scheduler.plan import NULL_BLOCK, NewSequence, Plan, Span

CPU = torch.device("cpu")
CONTEXT, SIZE = 48, 4


@dataclass
class Plain:
    """A row as the architecture describes it: feed (history + drafts)[length : length + n]."""

    history: list[int]
    length: int
    table: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


def advance(row: Plain, span: Span, sampled: list[int], drafts: list[int]) -> list[int]:
    if not span.num_samples:
        row.length += span.num_tokens
        return []
    kept = []
    for i, token in enumerate(sampled):
        kept.append(token)
        if i == len(sampled) - 1 or row.drafts[i] != token:
            break
    row.history += kept
    row.length, row.drafts = len(row.history) - 1, drafts
    return kept


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_feed_what_plain_lists_would(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    rows, plain = RowState(5, CONTEXT, SIZE, depth), {}
    pages = iter(range(1, 10_000))
    for _ in range(60):
        opened, grown = [], []
        for r in range(5):
            if r not in plain or len(plain[r].history) > CONTEXT - 6 or rng.random() < 0.05:
                text = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 20)))
                opened.append(NewSequence(r, text, rng.randrange(len(text)), 1))
                plain[r] = Plain(list(text), opened[-1].num_computed)
        spans = []
        for r in rng.sample(sorted(plain), rng.randrange(1, 6)):
            row = plain[r]
            n = rng.randint(1, len(row.history) + len(row.drafts) - row.length)
            count = max(0, n - (len(row.history) - row.length) + 1)
            spans.append(Span(r, n, count, count))
            missing = -(-(row.length + n) // SIZE) - len(row.table)
            if missing > 0 and rng.random() < 0.9:  # without its pages, a row past its limit
                grown.append((r, tuple(next(pages) for _ in range(missing))))
                row.table += grown[-1][1]
        shape = rows.apply_plan(Plan(tuple(opened), tuple(grown), tuple(spans)))
        batch = build_batch(rows, shape, CPU)
        check(batch, [(plain[s.row], s) for s in spans])
        sampled = np.array([rng.randrange(3) for s in spans for _ in range(s.num_samples)], dtype=np.intp)
        keep, failed = rows.advance(shape, sampled, np.zeros(len(sampled), bool))
        drafts = np.array([[rng.randrange(3) for _ in range(depth)] for _ in keep], np.int32).reshape(len(keep), depth)
        rows.set_drafts(shape.sampling_row, drafts, np.full(len(drafts), drafts.shape[1]))
        left, kept, made = sampled.tolist(), iter(keep.tolist()), iter(drafts.tolist())
        for s in spans:
            mine = [left.pop(0) for _ in range(s.num_samples)]
            got = advance(plain[s.row], s, mine, next(made) if s.num_samples else [])
            assert not s.num_samples or len(got) == next(kept)
            if s.num_samples:
                assert rows.drafts_of(s.row) == plain[s.row].drafts
        assert (failed == -1).all()


def check(batch, spans):  # type: ignore[no-untyped-def]
    start = 0
    for s, (row, span) in enumerate(spans):
        places = range(row.length, row.length + span.num_tokens)
        own = slice(start, start + span.num_tokens)
        page = lambda p: row.table[p] if p < len(row.table) else NULL_BLOCK  # noqa: E731, B023
        assert batch.tokens[own].tolist() == (row.history + row.drafts)[row.length : row.length + span.num_tokens]
        assert batch.positions[own].tolist() == list(places)
        assert batch.slots[own].tolist() == [page(p // SIZE) * SIZE + p % SIZE for p in places]
        assert batch.kv_len[s] == places[-1] + 1
        assert batch.page_table[s].tolist() == [page(p) for p in range(batch.page_table.shape[1])]
        start += span.num_tokens
        assert batch.query_start[s + 1] == start
    assert (batch.query_start[0], len(batch.tokens)) == (0, start)
    assert batch.max_kv == max(batch.kv_len.tolist()) <= SIZE * batch.page_table.shape[1]
    assert batch.max_query == max(s.num_tokens for _, s in spans)
    assert batch.tokens.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
    assert batch.query_start.dtype == batch.kv_len.dtype == batch.page_table.dtype == torch.int32


def decoding(depth: int = 0, context: int = CONTEXT) -> tuple[RowState, tuple[Span, ...]]:
    rows = RowState(2, context, SIZE, depth)
    rows.apply_plan(Plan((NewSequence(0, (5, 6), 1, 2), NewSequence(1, (7,), 0, 1)), (), ()))
    return rows, (Span(0, 1, 1, 1), Span(1, 1, 1, 1))


def test_steady_decode_keeps_its_shape_and_its_epoch() -> None:
    rows, spans = decoding()
    shape = rows.apply_plan(Plan((), (), spans))
    epoch = rows.epoch
    rows.advance(shape, np.array([1, 2]), np.zeros(2, bool))
    assert rows.apply_plan(Plan((), (), spans)) is shape
    assert rows.apply_plan(Plan((), (), tuple(Span(*s) for s in spans))) is shape  # equal, as from a wire
    assert rows.epoch == epoch
    rows.apply_plan(Plan((NewSequence(0, (5, 6), 1, 2),), (), spans))
    assert rows.epoch > epoch


def test_a_failed_row_keeps_its_place_and_the_next_span_still_fits() -> None:
    rows, spans = decoding()
    shape = rows.apply_plan(Plan((), (), spans))
    keep, failed = rows.advance(shape, np.array([1, 2]), np.array([True, False]))
    assert (keep.tolist(), failed.tolist()) == ([0, 1], [0, -1])
    assert build_batch(rows, rows.apply_plan(Plan((), (), spans)), CPU).tokens.tolist() == [6, 2]


def test_a_bad_sample_after_a_rejected_draft_fails_no_row() -> None:
    rows, _ = decoding(depth=2)
    rows.set_drafts(np.array([0, 1]), np.array([[3, 4], [3, 4]], np.int32), np.array([2, 2]))
    shape = rows.apply_plan(Plan((), (), (Span(0, 3, 3, 3), Span(1, 3, 3, 3))))
    bad = np.array([False, False, True] * 2)
    keep, failed = rows.advance(shape, np.array([3, 9, 0, 3, 4, 0]), bad)
    assert (keep.tolist(), failed.tolist()) == ([2, 2], [-1, 5])  # what is right before it is kept


def test_a_row_past_the_context_writes_to_the_null_block_and_stays_in_bounds() -> None:
    rows, spans = decoding(depth=2, context=6)
    rows.apply_plan(Plan((), ((0, (9, 8)),), ()))
    for token in range(12):
        rows.set_drafts(np.array([0]), np.array([[token, token]], np.int32), np.array([2]))
        shape = rows.apply_plan(Plan((), (), (Span(0, 3, 3, 3),)))
        batch = build_batch(rows, shape, CPU)
        assert batch.positions.max() < 6
        past = rows.num_computed[0] + np.arange(3) >= 8
        assert (batch.slots[torch.from_numpy(past)] < SIZE).all()
        rows.advance(shape, np.array([token] * 3), np.zeros(3, bool))
    assert spans[0].row == 0


def test_capacity_that_is_not_used_costs_no_memory() -> None:
    before = resident()
    rows = RowState(1024, 131_072, 16)
    assert rows.tokens.nbytes > 1 << 29
    assert resident() - before < 1 << 24


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ((Span(0, 2, 1, 1),), "disagree"),
        ((Span(0, 1, 0, 0),), "disagree"),
        ((Span(0, 0, 0, 0),), "disagree"),
        ((Span(0, 3, 3, 3),), "disagree"),
    ],
)
def test_spans_that_do_not_fit_their_rows_are_refused(spans: tuple[Span, ...], says: str) -> None:
    rows, _ = decoding()
    with pytest.raises(StepFailed, match=says):
        rows.apply_plan(Plan((), (), spans))


def test_a_row_that_is_opened_again_has_no_drafts_of_the_sequence_before() -> None:
    rows = RowState(1, CONTEXT, SIZE, 2)
    opened = (NewSequence(0, (1, 2, 3), 0, 3),)
    rows.apply_plan(Plan(opened, ((0, (1,)),), (Span(0, 3, 1, 1),)))
    rows.advance(rows.shape, np.array([4], np.intp), np.zeros(1, bool))
    rows.set_drafts(np.array([0]), np.array([[5, 6]], np.int32), np.array([2]))
    assert rows.drafts_of(0) == [5, 6]
    rows.apply_plan(Plan(opened, ((0, (2,)),), (Span(0, 3, 1, 1),)))
    assert rows.drafts_of(0) == []
    with pytest.raises(StepFailed, match="plan and rows disagree"):
        rows.apply_plan(Plan(opened, (), (Span(0, 4, 2, 2),)))
