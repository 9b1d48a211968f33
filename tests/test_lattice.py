"""Tokens equal the naive loop's in every combination; and planted bugs do not survive it."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.types import UNLIMITED
from tests import lattice
from tests.mutants import AHEAD, BUGS, HARMLESS, PREFILLS, STATES, TIERS, Bug, plant

SHARES = 8
"""Half of them in CI."""
PER_SHARE = 90


def _sample(seed: str, count: int, **fixed: object) -> list[dict[str, object]]:
    """`count` combinations drawn over all axes; an axis may be fixed."""
    rng = random.Random(seed)
    return [{axis: fixed.get(axis, rng.choice(values)) for axis, values in lattice.AXES.items()} for _ in range(count)]


@pytest.mark.parametrize(
    "share", [*range(SHARES // 4), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(SHARES // 4, SHARES))]
)
def test_every_combination_gives_the_naive_loops_tokens(share: int) -> None:
    for combo in _sample(f"share {share}", PER_SHARE):
        lattice.run(combo)


def test_pressure_preempts_and_reuse_hits_somewhere_in_the_sample() -> None:
    runs = [lattice.run(c) for c in _sample("pressure", 60, tight=1, reuse=True, size=4, pressure="preempt")]
    assert sum(r.sch.num_preemptions for r in runs) > 50
    assert sum(r.followed for r in runs) > 50
    assert sum(r.sch.kv.num_hit_tokens for r in runs) > 1000
    assert sum(r.dev.stray_writes for r in runs) > 0
    assert sum(sum(r.sch.discarded_spans.values()) for r in runs) > 50


def test_pins_expire_somewhere_in_the_sample() -> None:
    runs = [lattice.run(c) for c in _sample("pins", 30, pins=UNLIMITED, reuse=True, size=4)]
    assert sum(r.expired for r in runs) > 20


def grouped(seed: str, count: int, **fixed: object) -> list[dict[str, object]]:
    """As `_sample`, for pipelines of several stages."""
    turns = itertools.cycle(lattice.GROUPS)
    return [
        combo | {"groups": groups, "depth": depth}
        for combo, (groups, depth) in zip(_sample(seed, count, **fixed), turns, strict=False)
    ]


@pytest.mark.parametrize("count", [60, pytest.param(900, marks=pytest.mark.nightly)])
def test_rows_in_groups_give_the_naive_loops_tokens(count: int) -> None:
    runs = [lattice.run(combo) for combo in grouped("groups", count)]
    assert sum(run.dev.deepest > 1 for run in runs) > count / 2


FED_TOO_SOON = Bug(
    "a row in flight is fed", "scheduler.scheduler", "*(seq for seq in self.running if seq.num_inflight)", ""
)


def test_planted_bug_of_groups_is_caught() -> None:
    classes = plant(FED_TOO_SOON)
    with pytest.raises(AssertionError, match="tokens of"):
        lattice.run(grouped("caught", 1, fails=False, cap=UNLIMITED)[0], classes)


RARE = {
    "a background request is not preempted": 55,
    "a pin that is extended keeps its first end on the heap of ends": 32,
    "abort forgets the waiting queue": 1,
    "abort forgets a preempted row with a step in flight": 6,
    "an evicted block stays pinned": 19,
    "followers forgotten when their leader ends": 3,
    "followers forgotten when their leader is preempted": 3,
    "short row preempts although blocks are about to be freed": 90,
}
"""Bugs that few combinations show, and the number of a sample that does: a short way to the first of them."""

SLOW = (
    "abort forgets a preempted row with a step in flight",
    "abort forgets the waiting queue",
    "an evicted block stays pinned",
    "short row preempts although blocks are about to be freed",
)
"""Bugs that take more than a second to catch: those of `make nightly`."""


@pytest.mark.parametrize(
    "bug", [pytest.param(b, marks=pytest.mark.nightly if b.name in SLOW else ()) for b in BUGS], ids=lambda b: b.name
)
def test_planted_bug_is_caught(bug: Bug) -> None:
    classes, full, failing = plant(bug), {"tight": 1, "size": 1, "pressure": "preempt"}, {"fails": True, "tight": 2}
    rare = [(f"{bug.name} {RARE[bug.name]}", 1)] if bug.name in RARE else []
    first = [tuple(_sample(*each, **fixed)[0] for fixed in ({}, full, failing)) for each in rare]
    drawn = zip(
        _sample("catch " + bug.name, 300),
        _sample(bug.name, 300, **full),
        _sample(bug.name, 300, **failing),
        strict=True,
    )
    for several in itertools.chain(first, drawn):
        for combo in several:
            try:
                lattice.run(combo, classes)
            except Exception:
                return
    pytest.fail("the lattice did not notice")


PRESSED = {"reuse": True, "tight": 1, "pressure": "preempt", "size": 4}
DRAFTED = PRESSED | {"drafts": 3, "snapshots": (40, 8)}


@pytest.mark.parametrize("bug", STATES, ids=lambda b: b.name)
def test_planted_bug_of_states_is_caught_and_by_combinations_with_states_alone(bug: Bug) -> None:
    classes = plant(bug)
    for combo in _sample(bug.name, 3, reuse=True, snapshots=None):
        lattice.run(combo, classes)
    few = _sample(bug.name, 40, reuse=True, snapshots=(3, UNLIMITED))
    one = _sample(bug.name, 40, snapshots=(1, 4), **PRESSED)
    for combo in itertools.chain(*zip(few, one, strict=True), _sample(f"{bug.name} 2", 20, **DRAFTED)):
        try:
            lattice.run(combo, classes)
        except Exception:
            return
    pytest.fail("the lattice did not notice")


TIERED = {"reuse": True, "tight": 1, "size": 1, "snapshots": None}
LARGE = ((500, 0), (200, 9))
"""Slots that are more than the device's blocks, and files."""
RARE_TIERS = {
    "a failed copy is kept": 47,
    "saves are forgotten after a reset": 73,
    "a suspect that waited for blocks is held back from its own trial": 217,
}
"""As `RARE`: combinations that are passed over."""


@pytest.mark.parametrize("bug", [*TIERS, *AHEAD, *PREFILLS], ids=lambda b: b.name)
def test_planted_bug_of_tiers_is_caught_and_by_combinations_with_tiers_alone(bug: Bug) -> None:
    classes = plant(bug)
    for combo in _sample(bug.name, 3, tiers=None):
        lattice.run(combo, classes)
    sizes = ((40, 2, 1), (6, 3, 1)) if bug in PREFILLS else ((40, 2), (4, 6), (30, 500)) if bug in TIERS else LARGE
    draws = [_sample(bug.name, 40, tiers=tiers, fails=fails, **TIERED) for tiers in sizes for fails in (False, True)]
    for combo in itertools.islice(itertools.chain(*zip(*draws, strict=True)), RARE_TIERS.get(bug.name, 0), None):
        try:
            lattice.run(combo, classes)
        except Exception:
            return
    pytest.fail("the lattice did not notice")


def test_blocks_come_back_from_both_tiers_somewhere_in_the_sample() -> None:
    runs = [lattice.run(c) for c in _sample("tiers", 30, tiers=(30, 500), **TIERED)]
    stats = [run.tiers.stats for run in runs if run.tiers]
    assert sum(each.num_hit["host"] for each in stats) > 20
    assert sum(each.copied["read"] for each in stats) > 0
    assert sum(each.copied["load"] for each in stats) > 20


def test_states_are_reused_and_taken_from_others_somewhere_in_the_sample() -> None:
    runs = [lattice.run(c) for c in _sample("states", 40, **DRAFTED | {"snapshots": (3, 4)})]
    assert sum(r.sch.num_preemptions for r in runs) > 50
    assert sum(r.followed for r in runs) > 20
    assert sum(r.sch.kv.num_hit_tokens for r in runs) > 1000
    assert sum(r.dev.restored for r in runs) > 100
    assert sum(r.sch.kv.prefix_cache.num_evicted for r in runs) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("share", range(10))
def test_ten_thousand_requests_with_states_hits_drafts_and_preemption(share: int) -> None:
    requests = hits = preemptions = n = 0
    while requests < 1000:
        snapshots = ((1, 4), (3, UNLIMITED), (8, 8), (40, 8))[n % 4]
        (combo,) = _sample(f"ten thousand {share} {n}", 1, **PRESSED | {"drafts": -3, "snapshots": snapshots})
        run = lattice.run(combo)
        requests, n = requests + len(lattice.REQUESTS), n + 1
        hits, preemptions = hits + run.dev.restored, preemptions + run.sch.num_preemptions
    # What is drawn decides how many there are: 77 preemptions are the fewest of the ten.
    assert hits > 200 and preemptions > 50


@pytest.mark.parametrize("change", HARMLESS, ids=lambda b: b.name)
def test_a_harmless_change_is_not_called_a_bug(change: Bug) -> None:
    classes = plant(change)
    for combo in _sample("harmless", 60):
        lattice.run(combo, classes)


@pytest.mark.nightly
@pytest.mark.parametrize("depth", lattice.AXES["depth"])
@pytest.mark.parametrize("size", lattice.AXES["size"])
@pytest.mark.parametrize("feed", lattice.AXES["feed"])
def test_a_thousand_combinations_of_every_part_of_the_lattice(depth: int, size: int, feed: tuple[int, int]) -> None:
    """All of them, 62 million, would take a fortnight."""
    part = lattice.AXES | {"depth": (depth,), "size": (size,), "feed": (feed,)}
    for combo in lattice.sampled(random.Random(f"{depth} {size} {feed}"), 1000, part):
        lattice.run(combo)


def test_no_request_is_blamed_for_a_failed_step_of_one_that_was_aborted_since() -> None:
    """A poisoned request is aborted while its step is under way; then, at the same place, a step fails of nothing."""
    sizes = {"depth": 2, "size": 66, "tight": 2, "cap": 4, "feed": (1 << 30, 1 << 30), "drafts": -3}
    ways = {"admit": "continuous", "order": "fcfs", "eviction": "fifo", "pressure": "preempt", "pins": 3}
    lattice.run({**sizes, **ways, "reuse": False, "eager": False, "late": True, "fails": True})
