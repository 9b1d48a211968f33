"""Deployments: routers see what has happened and nothing else, and no shortcut changes a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.errors import InvalidConfig
from quire.scheduler.routing import ROUTING_POLICIES
from quire.sim.fleet import Autoscaling, Fleet, FleetConfig, simulate_fleet
from quire.sim.results import Results, summarize
from quire.sim.sessions import Sessions
from quire.sim.trace import Trace, chats
from tests.pairs import in_turn
from tests.sim.fleets import engine_of, trace_of

SCALING = Autoscaling(200, 1, 4, startup=2.0, interval=0.5, up_delay=0.5, down_delay=3.0)


def shared() -> Trace:
    """Conversations that are short enough for small engines."""
    whole, small = chats(150), Trace("chats", block_size=8)
    for number in range(len(whole)):
        blocks = whole.blocks[number][10:40]
        small.add(whole.arrivals[number] / 3, 8 * len(blocks), whole.outputs[number] // 6, blocks)
    return small


def sessions(count: int = 100) -> Sessions:
    return Sessions(12, count=count, turns=3, think=0.5, asked=(5, 40), answered=(2, 30), system=32)


def config_of(**options: Any) -> FleetConfig:
    engine = {name: options.pop(name) for name in ("lookahead", "noise", "blocks") if name in options}
    return FleetConfig(engine_of(**engine), **{"replicas": 4, **options})


class EveryReplicaAtEveryEvent(Fleet):
    """The plain way: no replica is ever left behind."""

    def _pass(self, at: float) -> None:
        for replica in self.replicas.values():
            replica.advance(at)
            self._take(replica)
        super()._pass(at)


def plain(config: FleetConfig, load: Trace | Sessions) -> str:
    results, _ = EveryReplicaAtEveryEvent(replace(config, step_by_step=True), load, lambda done, share: None).run()
    return results.digest()


def answered(results: Results) -> bool:
    return results.status.count(1) == len(results)


@pytest.mark.parametrize(
    ("policy", "lookahead"),
    in_turn((policy, (at + step) % 2) for at, policy in enumerate(ROUTING_POLICIES) for step in (0, 1)),
)
def test_leaving_replicas_behind_and_many_steps_at_once_change_no_result(policy: str, lookahead: int) -> None:
    config, load = config_of(policy=policy, lookahead=lookahead), shared()
    results, _ = simulate_fleet(config, load)
    assert answered(results)
    assert results.digest() == plain(config, load)
    assert len(set(results.replica)) == 4


@pytest.mark.parametrize(
    ("policy", "scaling", "closed"),
    [
        pytest.param(
            policy,
            SCALING if scaled else None,
            closed,
            marks=() if (policy == "least_loaded") == (scaled == closed) else pytest.mark.nightly,
        )
        for policy in ("least_loaded", "longest_prefix")
        for scaled in (False, True)
        for closed in (False, True)
    ],
)
def test_nor_do_they_with_sessions_or_an_autoscaler(policy: str, scaling: Autoscaling | None, closed: bool) -> None:
    config = config_of(policy=policy, autoscaling=scaling, lookahead=1, noise=(0.7, 1.6))
    results, _ = simulate_fleet(config, sessions() if closed else shared())
    assert answered(results) and len(results) == (100 if closed else 150)
    assert results.digest() == plain(config, sessions() if closed else shared())


def test_in_turn_each_replica_alone_is_the_same_as_all_together() -> None:
    config, load = config_of(policy="round_robin"), shared()
    alone, totals = simulate_fleet(config, load)
    together, others = Fleet(config, load, lambda done, share: None).run()
    assert alone.digest() == together.digest()
    assert (totals.steps, totals.evictions) == (others.steps, others.evictions) and totals.busy == pytest.approx(
        others.busy
    )
    assert totals.replica_seconds == pytest.approx(others.replica_seconds)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"policy": "round_robin"}, {"policy": "longest_prefix", "routers": 2}])
def test_several_processes_find_what_one_does(options: dict[str, Any]) -> None:
    one, totals = simulate_fleet(config_of(**options), shared())
    two, others = simulate_fleet(config_of(**options, jobs=2), shared())
    assert one.digest() == two.digest() and totals.steps == others.steps


def test_routers_have_their_own_replicas_and_requests_in_turn() -> None:
    results, _ = simulate_fleet(config_of(routers=2), shared())
    assert {number % 2 for number in range(150) if results.replica[number] < 2} == {0}
    assert {number % 2 for number in range(150) if results.replica[number] >= 2} == {1}


def test_the_least_loaded_replica_gets_the_request() -> None:
    # the first one is busy with a long answer when the others have ended theirs
    load = trace_of([(0.0, 20, 500), (0.1, 20, 2), (0.2, 20, 2), (1.0, 20, 2), (1.1, 20, 2), (1.2, 20, 2)])
    results, _ = simulate_fleet(config_of(replicas=2), load)
    assert list(results.replica) == [0, 1, 1, 1, 1, 1]


def test_prompts_that_begin_alike_meet_on_one_replica_and_are_found_in_its_cache() -> None:
    hits = {}
    for policy in ROUTING_POLICIES:
        results, totals = simulate_fleet(config_of(policy=policy, max_imbalance=20), shared())
        hits[policy] = summarize(results, {}, totals.busy, totals.replica_seconds)["hit_rate"]
    assert min(hits["longest_prefix"], hits["prefix_hash"]) > 1.2 * max(hits["round_robin"], hits["least_loaded"])


def test_an_answer_is_found_in_the_cache_by_the_turn_that_follows_it() -> None:
    load = Sessions(1, count=2, turns=2, think=0.0, asked=(16, 16), answered=(41, 41), system=0)
    results, _ = simulate_fleet(config_of(replicas=1), load)
    # 16 + 41 tokens, of which the last is never fed: seven blocks of eight
    assert list(results.cached) == [0, 56] and results.prompt[1] == 16 + 41 + 16


def test_replicas_come_when_tokens_queue_and_go_when_they_do_not() -> None:
    rows = [(0.01 * i, 200, 30) for i in range(600)] + [(40.0 + i, 10, 2) for i in range(20)]
    results, totals = simulate_fleet(config_of(autoscaling=SCALING), trace_of(rows))
    sizes = [size for _, size in totals.sizes]
    assert answered(results) and max(sizes) == 4 and sizes[0] == sizes[-1] == 1
    assert totals.sizes[1][0] >= SCALING.up_delay + SCALING.startup
    end = max(results.end)
    assert end < totals.replica_seconds < 4 * end
    assert set(results.replica) >= {0, 1, 2, 3}


def test_a_full_queue_refuses_and_what_is_too_long_is_counted_apart() -> None:
    rows = [(0.0, 50, 20)] * 20 + [(5.0, 3000, 5), (6.0, 50, 5)]
    results, totals = simulate_fleet(config_of(replicas=1, max_queued=3), trace_of(rows))
    row = summarize(results, {"ttft": 10.0}, totals.busy, totals.replica_seconds)
    assert row["refused"] == 17 and row["too_long"] == 1 and row["answered"] == 4
    assert row["good"] == 4 and row["good_share"] == pytest.approx(4 / 22)


def test_progress_is_reported() -> None:
    seen = list[tuple[int, float]]()
    simulate_fleet(config_of(), trace_of([(0.01 * i, 5, 2) for i in range(1200)]), lambda *each: seen.append(each))
    assert [done for done, _ in seen] == [512, 1024] and seen[-1][1] == pytest.approx(1024 / 1200)


@pytest.mark.parametrize(
    ("options", "closed", "said"),
    [
        ({"routers": 3}, False, "4 replicas cannot be divided among 3 routers"),
        ({"routers": 2}, True, "sessions go through one router"),
        ({"routers": 2, "autoscaling": SCALING}, False, "autoscaling is for one router"),
        ({"policy": "random"}, False, "the routing policy must be one of"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], closed: bool, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        simulate_fleet(config_of(**options), sessions() if closed else shared())
