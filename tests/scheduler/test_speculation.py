"""The depth that pays is found by measurement, and turning speculation on is not a mistake."""

from __future__ import annotations

import random

import pytest

from quire.scheduler.plan import NewSequence, Plan, Span
from quire.scheduler.sequence import Sequence
from quire.scheduler.speculation import AdaptiveDrafts, DraftStats
from quire.scheduler.step_time import StepTimeModel
from quire.types import Request


def seq(order: int = 0) -> Sequence:
    return Sequence(Request(id=str(order), prompt=(1,), max_new_tokens=9), order, [1], 10)


def simulate(
    policy: AdaptiveDrafts, *, width: int, rate: float, verify: float, draft: float, steps: int
) -> tuple[float, float]:
    """(tokens a second with the policy, and without): a step costs 1 + verify a token + draft a draft, with noise."""
    rng = random.Random(3)
    rows = [seq(i) for i in range(width)]
    time = tokens = 0.0
    held = [0] * width
    for _ in range(steps):
        policy.begin_plan(width)
        made = [policy.num_drafts(s) for s in rows]
        spans = tuple(Span(i, 1 + held[i], 1 + held[i], 1 + held[i]) for i in range(width))
        fed = sum(s.num_tokens for s in spans)
        seconds = (1 + verify * fed + draft * sum(made)) * rng.uniform(0.93, 1.07)
        policy.step_times.record(Plan((), (), spans, (), tuple(made)), seconds)
        time += seconds
        for i, s in enumerate(rows):
            got = 0
            while got < held[i] and rng.random() < rate:
                got += 1
            if held[i]:
                policy.record_acceptance(s, held[i], got)
            tokens += 1 + got
        held = made
    return tokens / time, width / (1 + verify * width)


@pytest.mark.parametrize(
    ("width", "rate", "verify", "draft", "gain"),
    [
        (1, 0.8, 0.02, 0.1, 1.6),  # cheap drafts, often right: deep
        (8, 0.7, 0.02, 0.01, 1.4),
        (64, 0.7, 0.1, 0.02, 0.98),  # verifying is dear: off
        (1, 0.05, 0.02, 0.1, 0.98),  # drafts are always wrong: off
        (256, 0.6, 0.05, 0.05, 0.98),
    ],
)
def test_drafting_gains_where_it_can_and_never_costs_throughput(
    width: int, rate: float, verify: float, draft: float, gain: float
) -> None:
    on, off = simulate(AdaptiveDrafts(4), width=width, rate=rate, verify=verify, draft=draft, steps=3000)
    assert on >= gain * off


def paced(**off: float) -> AdaptiveDrafts:
    """At one row drafting is nearly free, at 64 dear."""
    paces = {(1, 0): 1.0, (1, 1): 1.1, (1, 2): 1.2, (64, 0): 1.0, (64, 1): 3.0, (64, 2): 5.0}
    return AdaptiveDrafts(2, StepTimeModel(paces), **off)


def decode(policy: AdaptiveDrafts, width: int, depth: int, seconds: float, steps: int = 12) -> None:
    spans = tuple(Span(i, 1 + depth, 1 + depth, 1 + depth) for i in range(width))
    for _ in range(steps):
        policy.begin_plan(width)
        policy.step_times.record(Plan((), (), spans, (), (depth,) * width), seconds)


def test_no_drafts_are_measured_first_and_then_only_depths_that_should_gain() -> None:
    policy = paced()
    policy.begin_plan(1)
    assert policy.chosen == 0
    decode(policy, 1, 0, 2.0)
    assert policy.chosen == 2 and policy.step_times.expected_decode(1) == {0: 2.0, 1: 2.1, 2: 2.2}
    decode(policy, 64, 0, 2.0)
    assert policy.chosen == 0


def test_a_sequence_too_short_to_repay_the_draft_models_prefill_is_not_drafted_for() -> None:
    policy = paced(catch_up_seconds=0.02)
    decode(policy, 1, 0, 2.0)
    short = Sequence(Request(id="a", prompt=(1,) * 400, max_new_tokens=9), 0, [1] * 400, 409)
    long = Sequence(Request(id="b", prompt=(1,) * 400, max_new_tokens=900), 1, [1] * 400, 1300)
    assert (policy.num_drafts(short), policy.num_drafts(long)) == (0, 2)


def test_a_slow_measurement_without_drafts_is_corrected_later() -> None:
    policy = paced()
    decode(policy, 1, 0, 9.0)  # off was slow: drafts seem to pay
    assert policy.chosen == 2
    for _ in range(policy.CHECK + 20):
        decode(policy, 1, policy.chosen, 5.0 if policy.chosen else 1.0, steps=1)
    assert policy.chosen == 0


def test_each_trial_drafts_for_other_sequences() -> None:
    """Those of the trial before may have ended."""
    policy = paced()
    decode(policy, 64, 0, 2.0)
    for trial in range(2):
        while not policy._left:
            decode(policy, 64, 0, 2.0, steps=1)
        probed = [policy.num_drafts(seq(100 * trial + i)) for i in range(policy.PROBES + 2)]
        assert probed == [1] * policy.PROBES + [0] * 2
        while policy._left:
            decode(policy, 64, policy.chosen, 5.0, steps=1)


def test_the_slow_first_step_of_a_depth_does_not_decide() -> None:
    policy, seen = AdaptiveDrafts(4), set[int]()
    for i in range(60):
        policy.begin_plan(1)
        depth = policy.chosen
        first = depth not in seen or i % 7 == 3
        seen.add(depth)
        spans = (Span(0, 1 + depth, 1 + depth, 1 + depth),)
        policy.step_times.record(Plan((), (), spans, (), (depth,)), (1 + 0.1 * depth) * (9 if first else 1))
    assert policy.chosen == 4 and policy.step_times.expected_decode(1) == pytest.approx(
        {d: 1 + 0.1 * d for d in range(5)}
    )


def test_a_depth_with_a_slow_measurement_is_measured_again() -> None:
    policy = AdaptiveDrafts(2)
    for depth, seconds in enumerate((1.0, 1.1, 9.0)):
        for _ in range(policy.TRIES):
            policy.begin_plan(1)
            assert policy.chosen == depth
            policy.step_times.record(Plan((), (), (Span(0, 1 + depth, 1 + depth, 1 + depth),), (), (depth,)), seconds)
    for _ in range(4 * policy.CHECK):
        policy.begin_plan(1)
        spans = (Span(0, 1 + policy.chosen, 1 + policy.chosen, 1 + policy.chosen),)
        policy.step_times.record(Plan((), (), spans, (), (policy.chosen,)), 1 + 0.1 * policy.chosen)
    assert policy.chosen == 2


def test_drafts_accepted_in_runs_count_more_than_their_first_position() -> None:
    policy = AdaptiveDrafts(4)
    for i in range(400):
        policy.record_acceptance(seq(), 4, 4 if i % 2 else 0)  # all or none
    assert policy.expected_tokens(1) == pytest.approx(1.5, abs=0.05) and policy.expected_tokens(4) == pytest.approx(
        3.0, abs=0.15
    )


def test_positions_never_verified_do_not_prevent_a_deeper_draft() -> None:
    pace = {0: 1.87, 1: 2.9, 2: 3.66, 4: 5.18, 6: 6.68, 8: 8.21}  # 3B behind 1B on an H200, one row
    policy, rng, one = AdaptiveDrafts(8, StepTimeModel({(1, d): pace[d] for d in pace})), random.Random(1), seq()
    for _ in range(60):
        policy.begin_plan(1)
        depth = policy.num_drafts(one)
        spans = (Span(0, 1 + depth, 1 + depth, 1 + depth),)
        policy.step_times.record(Plan((), (), spans, (), (depth,)), pace[depth])
        got = next((i for i in range(depth) if rng.random() > 0.92), depth)
        policy.record_acceptance(one, depth, got)
    assert policy.chosen in (4, 6, 8)


@pytest.mark.parametrize(("rate", "gain"), [(0.92, 1.15), (0.3, 0.985)])
def test_drafts_better_than_assumed_are_soon_used(rate: float, gain: float) -> None:
    """At what is assumed, 0.7, drafting would gain 4 % here, too little to begin with."""
    pace = {0: 1.72, 1: 2.81, 2: 3.62, 4: 5.18, 6: 6.68, 8: 8.21}
    policy, rng, one = AdaptiveDrafts(8, StepTimeModel({(1, d): pace[d] for d in pace})), random.Random(1), seq()
    one.max_length, took, tokens, held = 1 << 20, 0.0, 0, 0
    for _ in range(600):
        policy.begin_plan(1)
        depth = policy.num_drafts(one)
        spans = (Span(0, 1 + held, 1 + held, 1 + held),)
        policy.step_times.record(Plan((), (), spans, (), (depth,)), pace[depth])
        took += pace[depth]
        got = next((i for i in range(held) if rng.random() > rate), held)
        if held:
            policy.record_acceptance(one, held, got)
        tokens, held = tokens + 1 + got, depth
    assert tokens / took > gain / pace[0]
    assert bool(policy.chosen) == (gain > 1)


def test_a_sequence_without_accepted_drafts_is_drafted_less_until_it_ends() -> None:
    policy, good, bad = AdaptiveDrafts(4), seq(1), seq(2)
    good.max_length = bad.max_length = 99
    for _ in range(60):
        policy.record_acceptance(good, 4, 4)
        policy.record_acceptance(bad, 4, 0)
    policy.chosen = 4
    assert (policy.num_drafts(good), policy.num_drafts(bad)) == (4, 1)
    policy.remove(bad)
    assert policy.num_drafts(bad) == 4


def test_totals_are_counted_by_position() -> None:
    drafted = DraftStats()
    for fed, accepted in ((3, 3), (3, 1), (1, 0)):
        drafted.record(fed, accepted)
    assert (drafted.num_verified, drafted.num_drafted, drafted.num_accepted, drafted.accepted_by_position) == (
        3,
        7,
        4,
        [2, 1, 1],
    )


def test_a_step_that_opens_rows_is_no_measurement_of_decoding() -> None:
    policy = AdaptiveDrafts(2)
    spans = (Span(0, 1, 1, 1), Span(1, 1, 1, 1))
    policy.step_times.record(Plan((NewSequence(1, (5,), 0, 1),), (), spans, (), (0, 0)), 9.0)
    assert policy.step_times.expected_decode(2) == {}
    policy.step_times.record(Plan((), (), spans, (), (0, 0)), 1.0)
    policy.step_times.record(Plan((NewSequence(1, (5,), 0, 1),), (), spans, (), (0, 0)), 9.0)
    assert policy.step_times.expected_decode(2) == {0: 1.0}


def test_a_step_of_different_spans_is_no_measurement_of_decoding() -> None:
    policy = AdaptiveDrafts(2)
    for spans, drafts in (
        ((Span(0, 1, 1, 1), Span(1, 7, 1, 1)), (0, 0)),  # a chunk beside a decode
        ((Span(0, 1, 1, 1), Span(1, 2, 2, 2)), (0, 0)),  # one verifies, one does not
        ((Span(0, 1, 1, 1), Span(1, 1, 1, 1)), (0, 1)),  # one drafts, one does not
    ):
        policy.step_times.record(Plan((), (), spans, (), drafts), 9.0)
    assert policy.step_times.expected_decode(2) == {}


def test_the_time_of_a_longer_context_is_predicted_for_each_depth() -> None:
    paces = {(1, 0): 1.0, (1, 1): 1.5, (1, 2): 2.0}
    policy = AdaptiveDrafts(2, StepTimeModel(paces, kv_share=0.25))
    assert policy.step_times.expected_decode(1) == {0: 1.0, 1: 1.5, 2: 2.0}, "nothing is measured, and nothing is added"
    for _ in range(4):
        policy.step_times.record(Plan((), (), (Span(0, 1, 1, 1),), (), (0,)), 3.0)  # 2 s more than at the start
    assert policy.step_times.expected_decode(1) == pytest.approx({0: 3.0, 1: 1.5 + 2.0 * 1.25, 2: 2.0 + 2.0 * 1.5})
    for _ in range(4):
        policy.step_times.record(Plan((), (), (Span(0, 2, 2, 2),), (), (1,)), 9.0)
    assert policy.step_times.expected_decode(1)[1] == 9.0, "what is measured counts, not what is predicted"
