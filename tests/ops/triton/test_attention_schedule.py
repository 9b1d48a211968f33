"""The lists that attention walks: every block in exactly one piece, and programs that have about as much to do."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from quire.ops.ragged import RaggedBatch
from quire.ops.triton import attention_schedule
from quire.ops.triton.attention_schedule import (
    MIN_SHARE_BLOCKS,
    AttentionPlan,
    AttentionSchedule,
    Tiling,
    make_schedule,
)
from quire.types import UNLIMITED
from tests.ops.triton.device import DEVICE

COLUMNS, SPREAD = 64, 66


def decode(lengths: list[int], pads: int = 0) -> AttentionPlan:
    """One token of each sequence; `pads` padding spans after them."""
    count = len(lengths) + pads

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    tokens = ints([0] * count).long()
    starts = [*range(len(lengths) + 1), *[len(lengths)] * pads]
    table = torch.ones(count, 64, dtype=torch.int32, device=DEVICE)
    batch = RaggedBatch(tokens, tokens, tokens, ints(starts), ints([*lengths, *[0] * pads]), table, 64, 1, 4096)
    return AttentionPlan.of(batch)


def shared_out(
    lengths: list[int], window: int = UNLIMITED, pads: int = 0, chunk: int = UNLIMITED, most: int = 1
) -> tuple[AttentionSchedule, list[list[int]]]:
    """The list, checked, and the blocks that each program reads, piece by piece."""
    tiling = Tiling(4, 4 * max(4, most), COLUMNS, 1, most, SPREAD, 1, window, chunk=chunk)
    made = make_schedule(decode(lengths, pads), tiling, 8)
    total = int(made.total)
    assert total <= tiling.bound(decode(lengths, pads)) == len(made.arrived) == len(made.pieces) - 1
    pieces = made.pieces[:total].tolist()
    starts = list(range(total + 1)) if made.starts is None else made.starts.tolist()
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] == total
    for span, length in enumerate(lengths):
        mine = [i for i, piece in enumerate(pieces) if piece[6] == span]
        assert mine == list(range(mine[0], mine[-1] + 1)), "counters are found from a piece's place among its tile's"
        seen = max(length - window, (length - 1) // chunk * chunk)
        first, last = seen // COLUMNS, (length - 1) // COLUMNS + 1
        cuts = [pieces[i][4] for i in mine] + [pieces[mine[-1]][5]]
        assert cuts == sorted(set(cuts)) and cuts[0] == first and cuts[-1] == last
        for part, i in enumerate(mine):
            assert pieces[i][:4] == [span, 1, 0, length]
            assert pieces[i][4:6] == cuts[part : part + 2]
            assert pieces[i][7:] == [part + len(mine) * 65536, 0]
    return made, [[pieces[i][5] - pieces[i][4] for i in range(*pair)] for pair in pairwise(starts)]


@pytest.mark.parametrize("count", [1, 8, 16])
def test_few_spans_have_a_program_for_each_piece(count: int) -> None:
    made, programs = shared_out([600] * count)
    assert made.starts is None
    assert max(map(sum, programs)) <= -(-10 * count // SPREAD)


@pytest.mark.parametrize(("count", "mean"), [(24, 1500), (50, 1300), (200, 900), (256, 2000)])
def test_many_long_spans_are_divided_evenly(count: int, mean: int) -> None:
    rng = random.Random(count)
    lengths = [rng.randint(mean // 2, mean * 3 // 2) for _ in range(count)]
    _, programs = shared_out(lengths, pads=3)
    blocks = sum(-(-n // COLUMNS) for n in lengths)
    assert len(programs) == SPREAD
    share = -(-blocks // SPREAD)
    assert all(sum(mine) <= share or (len(mine) == 1 and 2 * mine[0] <= 3 * share) for mine in programs)


@pytest.mark.parametrize("seed", range(20))
def test_a_piece_of_several_queries_costs_some_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(seed)
    gap = seed % MIN_SHARE_BLOCKS
    monkeypatch.setattr(attention_schedule, "GAP", gap)
    lengths = [chosen.choice([1, 64, 65, 400, 3000]) for _ in range(chosen.randrange(80, 120))] + [40_000] * 4
    _, programs = shared_out(lengths, pads=seed % 3, most=16)
    share = -(-sum(-(-n // COLUMNS) + gap for n in lengths) // SPREAD)
    assert max(sum(mine) + gap * (len(mine) - 1) for mine in programs) <= share


def test_where_there_is_a_program_for_every_piece_each_has_one() -> None:
    _, programs = shared_out([640] * 64, pads=5)
    assert sorted(map(len, programs)) == [0] * 2 + [1] * 64


def test_pieces_are_lengthened_where_each_program_can_then_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [random.Random(i).randint(100, 400) for i in range(64)]
    _, programs = shared_out(lengths, pads=2)
    assert max(map(len, programs)) == 1
    monkeypatch.setattr(attention_schedule, "ALONE", 4)
    _, cut = shared_out(lengths, pads=2)
    assert max(map(len, cut)) == 2
    assert max(map(sum, programs)) <= 1.5 * max(map(sum, cut))


def test_short_spans_are_cut_one_by_one_and_distributed() -> None:
    lengths = [random.Random(i).randint(64, 300) for i in range(100)]
    _, programs = shared_out(lengths, pads=2)
    counts = [len(pieces) for pieces in programs]
    assert max(counts) - min(counts) <= 1


def test_only_a_window_is_divided() -> None:
    rng = random.Random(5)
    for count in (4, 64):
        _, programs = shared_out([rng.randint(300, 3000) for _ in range(count)], window=200)
        assert sum(map(sum, programs)) <= 5 * count


def test_only_the_last_chunk_is_divided() -> None:
    rng = random.Random(6)
    for count in (4, 64):
        lengths = [rng.randint(300, 3000) for _ in range(count)]
        _, programs = shared_out(lengths, chunk=256)
        assert sum(map(sum, programs)) == sum((length - 1) % 256 // COLUMNS + 1 for length in lengths)


def test_one_long_sequence_has_no_more_pieces_than_are_quickly_combined() -> None:
    made, _ = shared_out([100_000, *[40] * 40])
    assert int(made.total) - 40 <= attention_schedule.MOST_PIECES + 1


def test_one_sequence_of_many_blocks_has_pieces_of_two() -> None:
    for blocks, pieces, each in ((24, 24, 1), (25, 13, 2), (60, 30, 2)):
        tiling = Tiling(4, 16, COLUMNS, 1, 1, SPREAD, 1, UNLIMITED, short=24)
        made = make_schedule(decode([blocks * COLUMNS]), tiling, 8)
        assert int(made.total) == pieces
        assert max(end - begin for *_, begin, end, _, _, _ in made.pieces[:pieces].tolist()) == each


def test_shares_are_even_from_a_least_length_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [700] * 70  # 11 blocks each; each of 66 programs has 12
    monkeypatch.setattr(attention_schedule, "MIN_SHARE_BLOCKS", 12)
    _, even = shared_out(lengths)
    monkeypatch.setattr(attention_schedule, "MIN_SHARE_BLOCKS", 13)
    _, dealt = shared_out(lengths)
    assert max(map(sum, even)) == 12
    assert max(map(sum, dealt)) == 22, "two of them"
