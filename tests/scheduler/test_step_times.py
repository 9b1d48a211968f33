"""What the step-time model says after each of a series of steps, and the order of blocks and of the queue."""

from __future__ import annotations

import random

import pytest

from quire.scheduler.block_pool import Fifo, Lru
from quire.scheduler.constraint import FREE, PENDING
from quire.scheduler.plan import Plan, Span
from quire.scheduler.scheduler import WaitingQueue
from quire.scheduler.sequence import Sequence
from quire.scheduler.speculation import AdaptiveDrafts, FixedDrafts, draft_counts
from quire.scheduler.step_time import StepCost, StepTimeModel, width_class
from quire.types import Request


def step(*spans: tuple[int, int], drafts: tuple[int, ...] = ()) -> Plan:
    """A plan of spans (tokens, samples)."""
    return Plan((), (), tuple(Span(i, n, samples, samples) for i, (n, samples) in enumerate(spans)), (), drafts)


def test_a_line_is_fitted_through_steps_the_later_the_heavier() -> None:
    times = StepTimeModel()
    assert times.fit() == StepCost() and times.longest(9) == 0.0 and times.num_steps == 0
    times.record(step((10, 1)), 0.2)
    assert times.fit() == StepCost(0.2)
    times.record(step((10, 1)), 0.3)
    base, per_token, per_kv, *_ = times.fit()
    assert (base, per_token, per_kv) == (pytest.approx((0.2 * 0.98 + 0.3) / 1.98), 0.0, 0.0)
    for tokens in (1, 20, 40):
        times = StepTimeModel()
        times.record(step((tokens, 1)), 0.1 + 0.01 * tokens)
        times.record(step((5, 1), (3, 0)), 0.18)
        assert times.fit().per_token == 0.0, "two steps make no line yet"
        times.record(step((5, 1), (3, 0)), 0.18)
        assert times.fit()[:3] == pytest.approx((0.1, 0.01, 0.0))
    assert StepCost(1.0, 0.5, 0.25).seconds(2, 8) == 4.0 and StepCost(1.0, 0.5, 0.25).seconds(2) == 2.0


def test_a_falling_line_and_one_below_zero_are_cut_at_zero() -> None:
    times = StepTimeModel()
    for tokens, seconds in ((1, 0.5), (100, 0.1), (100, 0.1)):
        times.record(step((tokens, 1)), seconds)
    assert times.fit().per_token == 0.0 and times.fit().base > 0.1
    times = StepTimeModel()
    for tokens, seconds in ((10, 0.0), (100, 1.0), (100, 1.0)):
        times.record(step((tokens, 1)), seconds)
    assert times.fit().base == 0.0 and times.fit().per_token > 0.01


def test_the_least_time_is_that_of_similar_steps_that_were_waited_for() -> None:
    times = StepTimeModel()
    for tokens, seconds, waited in (
        (16, 0.5, True),
        (17, 0.4, True),
        (26, 0.3, True),
        (27, 0.1, True),
        (1, 0.05, False),
    ):
        times.record(step((tokens, 1)), seconds, waited=waited)
    assert [times.fastest(tokens) for tokens in (8, 15, 16, 17)] == [None, None, None, 0.1]
    times.record(step((26, 1)), 0.6, waited=True)
    assert times.fastest(16) == 0.3, "at most an eighth more, and eight"
    for _ in range(StepTimeModel.NUM_RECENT):
        times.record(step((1, 1)), 0.9, waited=True)
    assert times.fastest(16) == 0.9
    times.forget_fastest()
    assert times.fastest(16) is None


def test_the_longest_time_grows_with_tokens_by_what_large_steps_took() -> None:
    times = StepTimeModel()
    times.record(step((10, 1)), 0.1, latency=0.5)
    assert (times.longest(10), times.longest(100)) == (0.5, 5.0)
    times.record(step((21, 1)), 0.21)
    assert (times.longest(10), times.longest(100)) == (0.5, pytest.approx(1.0))
    times.record(step((10, 1)), 0.4)
    assert times.longest(100) == pytest.approx(1.0), "less than half as many tokens say nothing of many"
    times.record(step((11, 1)), 0.33)
    assert times.longest(100) == pytest.approx(3.0)


def test_decode_steps_are_the_lower_quartile_of_the_last_by_width_and_drafts() -> None:
    times = StepTimeModel({(4, 0): 1.0, (3, 2): 2.0, (5, 0): 7.0}, kv_share=0.5)
    assert times.has_initial and not StepTimeModel().has_initial
    assert times.decode(4) == {} and times.expected_decode(4) == {0: 1.0, 2: 2.0}
    for i, seconds in enumerate((5.0, 3.0, 4.0, 1.5, 1.25), 1):
        times.record(step((1, 1), (1, 1), (1, 1), drafts=(0, 0, 0)), seconds)
        assert times.num_decode(3, 0) == i
    assert times.decode(4) == {0: 1.5} and times.expected_decode(3) == {0: 1.5, 2: 2.0 + 0.5 * (1 + 2 * 0.5)}
    for plan in (
        step((2, 1), drafts=(0,)),
        step((3, 3), (1, 1), drafts=(2, 2)),
        step((3, 3), (3, 3), drafts=(2, 0)),
        step((1, 1)),
    ):
        times.record(plan, 0.01)
    assert times.decode(2) == {} and times.decode(1) == {}
    times.forget_decode(4, 0)
    assert times.num_decode(4, 0) == 0 and times.decode(4) == {0: 1.5}
    for _ in range(20):
        times.record(step((1, 1), (1, 1), (1, 1), drafts=(0, 0, 0)), 9.0)
    assert times.num_decode(4, 0) == StepTimeModel.NUM_DECODE and times.decode(3) == {0: 9.0}
    assert times.expected_decode(5) == {0: 7.0}


def test_widths_are_alike_up_to_a_power_of_two() -> None:
    assert [width_class(width) for width in (0, 1, 2, 3, 4, 5, 8, 9, 64, 65)] == [0, 0, 1, 2, 2, 3, 3, 4, 6, 7]


def test_numbers_of_drafts_that_are_tried() -> None:
    assert [draft_counts(most) for most in range(9)] == [
        *((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 5), (0, 1, 2, 3, 4, 6)),
        *((0, 1, 2, 3, 5, 7), (0, 1, 2, 4, 6, 8)),
    ]
    assert FixedDrafts(3).num_drafts(queued(0)) == 3


def test_blocks_are_evicted_by_age_in_whatever_order_they_became_free() -> None:
    rng = random.Random(1)
    ages = [(block, rng.randrange(1000)) for block in range(300)]
    fifo, lru = Fifo(), Lru()
    for block, age in ages:
        for policy in (fifo, lru):
            policy.add(block, age)
    for block, age in ages[::2]:
        for _ in range(9):
            fifo.remove(block)
            fifo.add(block, age)
        lru.remove(block)
        lru.add(block, age)
    assert len(fifo) == len(lru) == 300
    assert [fifo.evict() for _ in range(300)] == [block for block, _ in sorted(ages, key=lambda each: each[::-1])]
    assert [lru.evict() for _ in range(300)] == [block for block, _ in ages[1::2] + ages[::2]]


def queued(arrival: int, priority: float = 0, constraint: object = FREE) -> Sequence:
    request = Request(id=str(arrival), prompt=(1,), max_new_tokens=9)
    return Sequence(request, arrival, [1], 10, constraint, priority)  # type: ignore[arg-type]


def test_the_queue_goes_by_priority_then_arrival_wherever_requests_waited() -> None:
    queue = WaitingQueue()
    seqs = [queued(0, 1), queued(1), queued(2, 2), queued(3, 0, PENDING), queued(4), queued(5, -1)]
    for seq in (*seqs, *seqs):
        queue.push(seq)
    assert (queue.num_queued, len(queue), queue.num_parked) == (5, 6, 0)
    assert [each.request_id for each in queue.set_aside()] == ["3"] and seqs[3] not in queue
    assert queue.peek() is seqs[5] and queue.peek() is seqs[5]
    queue.discard(seqs[5])
    queue.discard(seqs[5])
    leader = seqs[4]
    assert queue.peek() is seqs[1]
    queue.park(leader, 7)
    assert leader.waiters == [(7, seqs[1])] and (len(queue), queue.num_queued, queue.num_parked) == (5, 3, 1)
    assert seqs[1] not in queue and queue.peek() is leader
    queue.park(seqs[2], 3)
    seqs[1].finish_reason = "abort"
    queue.unpark(leader)
    queue.unpark(leader)
    assert (len(queue), queue.num_parked, leader.waiters) == (4, 1, [])
    queue.constraint_ready(seqs[3], FREE)
    queue.constraint_ready(seqs[3], FREE)
    assert queue.peek() is seqs[3] and not queue.set_aside()
    queue.pop()
    queue.unpark(seqs[2])
    assert queue.drain() == [seqs[4], seqs[0], seqs[2]]
    assert (len(queue), queue.peek()) == (0, None)


def test_a_sequence_is_drafted_for_until_it_ends_and_forgotten_then() -> None:
    policy = AdaptiveDrafts(4)
    seq = queued(7)
    for _ in range(20):
        policy.record_acceptance(seq, 2, 0)
    policy.chosen = 4
    assert policy.num_drafts(seq) == 1
    policy.remove(seq)
    policy.remove(seq)
    assert not policy._acceptance_by_sequence and not policy._followed
    policy.acceptance_rates = [0.9] * 4
    assert policy.num_drafts(seq) == 4, "what it was is forgotten"
    for inflight, most in ((0, 4), (3, 4), (4, 3), (5, 2), (6, 1), (7, 0), (9, 0)):
        seq.num_inflight = inflight
        assert policy.num_drafts(seq) == most
