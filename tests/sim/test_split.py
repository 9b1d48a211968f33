"""Prefill and decode engines, K/V tiers and pipelines in simulations: the engines' own schedulers on several clocks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.bench.simulated import staged
from quire.bench.simulated_engine import SimulatedEngine
from quire.cli.inspect import read_facts
from quire.config import Settings
from quire.engine.timing import VirtualClock
from quire.errors import InvalidConfig
from quire.scheduler.kv_offload import KVOffload
from quire.scheduler.kv_transfer import PrefillOffload
from quire.scheduler.step_time import StepCost
from quire.sim.calibration import Calibration, StepSampler, fit, fit_copies, read_calibration
from quire.sim.copies import GPU_COPIES
from quire.sim.fleet import Fleet, FleetConfig, PrefillPool, Totals, prepare, simulate_fleet
from quire.sim.replica import Replica
from quire.sim.results import Results, percentile
from quire.sim.sessions import Sessions
from quire.sim.trace import Trace
from tests.pairs import in_turn
from tests.sim.fleets import COST, engine_of, trace_of

NOTHING = (0.0, 0.0)
COPIES = {"save": (1e-4, 0.0), "load": (2e-4, 0.0), "send": (3e-4, 1e-6), "read": (1e-3, 0.0), "write": (1e-3, 0.0)}
STEP = StepCost(base=1e-2, per_token=1e-4)


def side(**options: Any) -> SimulatedEngine:
    """An engine of a split."""
    return replace(engine_of(**{"blocks": 200, "chunk": 128, **options}), block_bytes=100, copies=COPIES)


def split(
    engine: SimulatedEngine, engines: int = 1, replicas: int = 1, timeout: float = 10.0, slowdown: float = 1e9
) -> FleetConfig:
    """slowdown: with the default, a prefill engine is always asked."""
    return FleetConfig(engine, replicas, prefill=PrefillPool(engine, engines, 16, timeout, slowdown))


def long_prompts(count: int, rate: float, seed: int = 1) -> Trace:
    rng, at, rows = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        rows.append((at, rng.randrange(8, 300), rng.randrange(2, 40)))
    return trace_of(rows)


def test_the_first_token_takes_what_its_parts_take() -> None:
    """Asking, a step of the prompt, a copy to host memory, five blocks one by one, a copy to the device, a step."""
    engine = side(cost=STEP)
    results, totals = simulate_fleet(split(engine), trace_of([(1.0, 45, 3)]))
    prompt, last = STEP.seconds(41, 41), STEP.seconds(5, 45)
    sent = 3e-4 + prompt + 1e-4 + 5 * (3e-4 + 1e-6 * 100)
    assert results.first[0] - 1.0 == pytest.approx(sent + 2e-4 + last)
    assert totals.tiers == {"remote_tokens": 40, "prefills_done": 1}
    assert results.end[0] - results.first[0] == pytest.approx(2 * STEP.seconds(1))
    assert totals.prefill_busy == pytest.approx(prompt) and totals.busy > totals.prefill_busy


@pytest.mark.parametrize(
    ("lookahead", "engines", "replicas"),
    in_turn(((depth, *sizes) for depth in (0, 1, 2) for sizes in ((1, 1), (2, 3), (3, 1))), 4),
)
def test_every_request_is_answered_alike_every_time(engines: int, replicas: int, lookahead: int) -> None:
    load, engine = long_prompts(60, 40.0), side(lookahead=lookahead, noise=(0.8, 1.0, 1.2))
    config = split(engine, engines, replicas)
    (one, totals), (two, _) = simulate_fleet(config, load), simulate_fleet(config, load)
    assert one.digest() == two.digest() and bytes(one.status) == b"\1" * 60
    assert totals.tiers["prefills_done"] > 30 and totals.tiers.keys() <= {"remote_tokens", "prefills_done"}
    assert all(first > at for first, at in zip(one.first, load.arrivals, strict=True))


def test_all_engines_are_a_servers_own_and_end_without_holding_anything() -> None:
    fleet = Fleet(split(side(), 2, 2), long_prompts(40, 60.0), lambda done, share: None)
    fleet.run()
    assert fleet.split is not None
    kinds = [type(each.tiers) for each in fleet.split.all]
    assert kinds == [PrefillOffload, PrefillOffload, KVOffload, KVOffload]
    for each in fleet.split.all:
        scheduler = each.engine.scheduler
        assert not scheduler.has_work and each.next_time() == math.inf
        assert not any(scheduler.kv.block_pool.ref_counts) and not scheduler.kv.offload.held_blocks()


def test_decoding_is_not_held_up_by_prompts_that_another_engine_computes() -> None:
    load, engine = long_prompts(80, 25.0), side(cost=STEP, tokens=512, chunk=512, max_num_seqs=16)
    mixed, _ = simulate_fleet(FleetConfig(engine, 1), load)
    apart, _ = simulate_fleet(split(engine), load)
    assert apart.itl(99) < 0.7 * mixed.itl(99)


def test_what_comes_too_late_is_computed_by_the_replica() -> None:
    results, totals = simulate_fleet(split(side(cost=STEP), timeout=0.1), long_prompts(40, 500.0))
    assert totals.tiers["prefills_timeout"] > 3 and bytes(results.status) == b"\1" * 40


def asked(send: tuple[float, float], slowdown: float, rate: float, count: int = 150) -> tuple[Results, dict[str, int]]:
    """What comes of long prompts, by a network on which a block takes `send`."""
    engine = replace(side(cost=STEP, tokens=512, chunk=512, blocks=2000), copies={**COPIES, "send": send})
    results, totals = simulate_fleet(split(engine, slowdown=slowdown), long_prompts(count, rate))
    assert bytes(results.status) == b"\1" * count
    return results, dict(totals.tiers)


def first_tokens(results: Results, q: float) -> float:
    """A percentile of the seconds to the first token."""
    return percentile(sorted(results.ttft(results.answered())), q)


SLOW, FAST = (5e-2, 0.0), (1e-5, 0.0)
"""A prompt's 20 blocks take a second on the one, where computing it takes 25 ms; and next to nothing on the other."""


def test_a_prefill_engine_that_is_slow_is_asked_only_now_and_then() -> None:
    always, counts = asked(SLOW, 1e9, 5.0)
    assert "prefills_slower" not in counts
    seldom, found = asked(SLOW, 4.0, 5.0)
    assert found["prefills_slower"] > 10 * found["prefills_done"] > 0
    assert first_tokens(seldom, 50) < 0.1 * first_tokens(always, 50)


def test_a_prefill_engine_that_has_become_fast_is_asked_again() -> None:
    """Each time that it is not asked, its prediction is a little less; and then it is measured anew."""
    _, found = asked((4e-3, 0.0), 2.0, 5.0, count=400)
    assert found["prefills_done"] > 8 and found["prefills_slower"] > found["prefills_done"]


def test_a_prefill_engine_that_is_fast_is_asked_for_nearly_all() -> None:
    _, found = asked(FAST, 4.0, 5.0)
    assert found["prefills_done"] > 10 * found.get("prefills_slower", 0)


def test_both_engines_compute_prompts_where_one_alone_would_not_keep_up() -> None:
    """Those that wait in the queue count as well: what the other engine computes, they need not wait for."""
    alone, _ = asked(SLOW, 0.1, 60.0)
    both, found = asked((5e-3, 0.0), 1.0, 60.0)
    assert min(found["prefills_done"], found["prefills_slower"]) > 20
    assert first_tokens(both, 90) < 0.9 * first_tokens(alone, 90)


def test_users_in_sessions_are_answered_by_a_split() -> None:
    load = Sessions(4, count=24, turns=3, think=0.5, asked=(20, 80), answered=(4, 20))
    results, totals = simulate_fleet(split(side(max_model_len=4000), 1, 2), load)
    assert results.answered() == list(range(len(results))) and totals.tiers["remote_tokens"] > 0
    assert sum(results.cached) >= totals.tiers["remote_tokens"]


def test_a_split_has_one_router_and_a_fixed_number_of_replicas() -> None:
    with pytest.raises(InvalidConfig, match="leave --routers and --autoscale out"):
        simulate_fleet(replace(split(side(), replicas=2), routers=2), long_prompts(4, 1.0))
    with pytest.raises(InvalidConfig, match="without recurrent layers"):
        simulate_fleet(split(replace(side(), recurrent=True)), long_prompts(4, 1.0))


# ---------------------------------------------------------------- tiers of one engine


def returning(engine: SimulatedEngine) -> tuple[Results, Totals]:
    """Twelve conversations of 160 tokens, each of which comes back once the others have taken its blocks."""
    names = [tuple(range(40 * (i % 12), 40 * (i % 12) + 20)) for i in range(24)]
    rows = [(0.5 * i, 161, 2) for i in range(24)]
    return simulate_fleet(FleetConfig(engine), trace_of(rows, names))


def test_blocks_come_back_from_host_memory_and_from_files(tmp_path: Path) -> None:
    plain = side(blocks=50)
    results, _ = returning(plain)
    assert sum(results.cached) == 0
    size = 300 * 100 / (1 << 30)
    results, totals = returning(side(blocks=50, kv_offloading_size=size))
    assert totals.tiers == {"host_tokens": sum(results.cached)} and sum(results.cached) > 1000
    folder = {"kv_offloading_dir": str(tmp_path), "kv_offloading_dir_size": size}
    results, totals = returning(side(blocks=50, kv_offloading_size=size / 4, **folder))
    assert totals.tiers["disk_tokens"] > 500 and not list(tmp_path.iterdir())


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    slow = replace(side(blocks=50, kv_offloading_size=300 * 100 / (1 << 30)), copies={**COPIES, "load": (5.0, 0.0)})
    _, totals = returning(slow)
    assert totals.tiers.get("host_tokens", 0) <= 320, "at most until the first copies were measured"


# ---------------------------------------------------------------- pipelines


def piped(stages: int, cost: StepCost = STEP, hop: float = 0.0, shares: tuple[float, ...] = ()) -> SimulatedEngine:
    engine = engine_of(stages - 1, cost=cost, max_num_seqs=16, pipeline_parallel_size=stages)
    return replace(engine, hop=hop, stages=Calibration(cost, stages=stages, shares=shares).costs())


def test_a_request_alone_passes_all_stages_and_several_share_them() -> None:
    results, _ = simulate_fleet(FleetConfig(piped(3, hop=2e-3)), trace_of([(0.0, 10, 11)]))
    each = 3 * STEP.seconds(1) + 2 * 2e-3
    assert results.end[0] - results.first[0] == pytest.approx(10 * each)
    assert results.first[0] == pytest.approx(3 * STEP.seconds(10, 10) + 2 * 2e-3)
    seconds = []
    for stages in (1, 2, 3):
        results, _ = simulate_fleet(FleetConfig(piped(stages)), trace_of([(0.0, 10, 101)] * 12))
        seconds.append(max(results.end))
    assert seconds[0] == pytest.approx(100 * STEP.seconds(12), rel=0.1), "a step holds all rows"
    assert seconds[1] == pytest.approx(200 * STEP.seconds(6), rel=0.1), "or each of two half of them"
    assert seconds[2] == pytest.approx(300 * STEP.seconds(4), rel=0.1)


UNLIKE = (0.8, 1.2)
"""Shares of the layers of two stages."""


def test_the_stage_that_takes_longest_sets_the_pace_and_all_of_them_the_way() -> None:
    cost = replace_cost(STEP, per_row=1e-3)
    first, last = Calibration(cost, stages=2, shares=UNLIKE).costs()
    assert first.seconds(7, 0, 6) == pytest.approx(0.8 * STEP.seconds(7)), "logits are the last one's"
    assert last.seconds(7, 0, 6) == pytest.approx(1.2 * STEP.seconds(7) + 2 * 6e-3)
    results, _ = simulate_fleet(FleetConfig(piped(2, cost, shares=UNLIKE)), trace_of([(0.0, 10, 11)]))
    assert results.end[0] - results.first[0] == pytest.approx(10 * (first.seconds(1, 0, 1) + last.seconds(1, 0, 1)))
    results, _ = simulate_fleet(FleetConfig(piped(2, cost, shares=UNLIKE)), trace_of([(0.0, 10, 101)] * 12))
    assert max(results.end) == pytest.approx(200 * last.seconds(6, 0, 6), rel=0.05)


@pytest.mark.parametrize(("stages", "shares"), [(1, ()), (2, ()), (3, ()), (2, UNLIKE), (3, (1.2, 0.9, 0.9))])
def test_steps_of_a_pipeline_are_fitted(stages: int, shares: tuple[float, ...]) -> None:
    cost, hop = replace_cost(STEP, per_kv=1e-6, per_row=1e-4), 4e-3 if stages > 1 else 0.0
    sampler, results = StepSampler(), Results(120)
    replica = Replica(0, piped(stages, cost, hop, shares), results)
    replica.engine.observers = (sampler,)
    replica._steady.possible = False
    rng = random.Random(stages)
    for number in range(120):
        at = 0.4 * number if number < 60 else 24 + 0.02 * number
        request = trace_of([(at, rng.randrange(4, 100), rng.randrange(2, 30))])
        run_one(replica, at, number, request)
    replica.advance(math.inf)
    found = fit(sampler.samples, noise=False, stages=stages, shares=shares)
    assert found.stages == stages and found.error < 0.08
    for tokens, kv, rows in ((1, 50, 1), (6, 400, 6), (100, 100, 1)):
        assert found.cost.seconds(tokens, kv, rows) == pytest.approx(cost.seconds(tokens, kv, rows), rel=0.1)
    assert found.hop == pytest.approx(hop, rel=0.25)


def replace_cost(cost: StepCost, **changed: float) -> StepCost:
    return cost._replace(**changed)  # type: ignore[arg-type]


def run_one(replica: Replica, at: float, number: int, trace: Trace) -> None:
    replica.send(at, number, replace(prepare(trace, 0)[1], id=str(number)))


def test_a_model_measured_whole_is_cut_as_it_is_loaded_and_other_cuts_are_refused() -> None:
    """The embedded model's eight layers are alike; its embedding and its head make the outer stages smaller."""
    asked = Settings.of(pipeline_parallel_size=4)
    facts = read_facts(asked)
    cut = staged(Calibration(COST, hop=1.0), asked, facts)
    assert cut.shares == (0.5, 1.5, 1.5, 0.5) and cut.stages == 4 and cut.hop == 0.0
    first, *_, last = costs = cut.costs()
    assert sum(each.seconds(100, 1000, 8, 50.0) for each in costs) == pytest.approx(COST.seconds(100, 1000, 8, 50.0))
    assert first.per_row == 0.0 and last.per_row == pytest.approx(COST.per_row)
    two = Calibration(COST, stages=2, hop=0.1)
    assert staged(two, asked.changed(pipeline_parallel_size=2), facts) == two
    with pytest.raises(InvalidConfig, match="of 2 stages, and --pipeline-parallel-size is 4"):
        staged(two, asked, facts)


# ---------------------------------------------------------------- what copies take


def test_copies_are_fitted_by_a_line_and_kept_in_the_file(tmp_path: Path) -> None:
    sizes = [1 << i for i in range(10, 20)]
    copies = {"load": [(size, 1e-4 + 2e-9 * size) for size in sizes], "send": [(4096, 1e-3), (4096, 3e-3)]}
    found = fit_copies(copies)
    assert found["load"] == pytest.approx((1e-4, 2e-9), rel=0.01)
    assert found["send"][0] == 0.0 and 1e-3 < 4096 * found["send"][1] < 3e-3
    made = Calibration(COST, copies=found, stages=3, hop=0.25, shares=(1.2, 0.9, 0.9))
    made.write(tmp_path / "here.json")
    assert read_calibration(tmp_path / "here.json") == made
    engine = SimulatedEngine(side().settings, side().limits, 10, COST, copies={**GPU_COPIES, **found})
    assert engine(VirtualClock(), 0)[0].scheduler.kv.offload.block_bytes() == 0, "no tiers"
