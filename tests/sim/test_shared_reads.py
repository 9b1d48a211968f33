"""A prefix that sequences share is read once, as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.bench.simulated import SHARING_ON_GPUS
from quire.sim.replica import Replica
from quire.sim.results import Results
from quire.sim.shared_reads import SharedReads, Sharing
from tests.sim.fleets import engine_of, trace_of
from tests.sim.test_steady import send_all


def reads(sharing: Sharing) -> SharedReads:
    made = SharedReads(sharing)
    for row, (block, cached) in enumerate([(7, 0), (7, 100), (7, 60), (9, 80), (9, 80), (9, 40), (3, 0)]):
        made.open(row, block, cached)
    return made


def test_the_rest_of_a_group_is_spared_what_it_found() -> None:
    made = reads(Sharing(group=3, step=1))
    assert made.spared([0, 1, 2]) == 160  # the first computed it, and reads it for all
    assert made.spared([3, 4, 5]) == 120  # the one that computed it has ended: one reads the longest
    assert made.spared([0, 1, 2, 3, 4, 5, 6]) == 280
    assert made.spared([1, 2, 3, 4, 6]) == 0
    made.clear()
    assert made.spared([0, 1, 2]) == 0


def test_few_sequences_read_their_own_and_so_do_all_where_nothing_is_shared() -> None:
    assert reads(Sharing(group=3, step=8)).spared([0, 1, 2, 3, 4, 5, 6]) == 0
    assert reads(Sharing()).spared([0, 1, 2, 3, 4, 5, 6]) == 0


def test_as_attention_does() -> None:
    attention = pytest.importorskip("quire.ops.triton.attention")
    schedule = pytest.importorskip("quire.ops.triton.attention_schedule")
    assert Sharing(schedule.MIN_GROUP, attention.MIN_CASCADE_SPANS) == SHARING_ON_GPUS


def test_answers_of_one_prefix_are_sooner_done() -> None:
    prefix = tuple(range(20))
    load = trace_of([(0.0, 160 + 8, 40)] * 6, [(*prefix, 100 + n) for n in range(6)])
    done = []
    for sharing in (Sharing(), Sharing(group=2, step=2)):
        results = Results(len(load))
        replica = Replica(0, replace(engine_of(), sharing=sharing), results)
        send_all(replica, load)
        replica.advance(float("inf"))
        done.append(replica.clock.time)
    assert done[1] < done[0]
