"""Several decode steps at once do what the engine does step by step: to the last block, token and bit of time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from quire.sim.fleet import prepare
from quire.sim.replica import Replica
from quire.sim.results import Results
from quire.sim.shared_reads import Sharing
from quire.sim.trace import Trace, chats
from tests.pairs import pairwise
from tests.sim.fleets import engine_of, state_of, trace_of

AXES: dict[str, tuple[Any, ...]] = {
    "lookahead": (0, 1, 2),
    "load": ("sparse", "crowded", "shared", "bursts"),
    "blocks": (400, 96),
    "batching": ("continuous", "static"),
    "policy": ("fcfs", "priority"),
    "pressure": ("foresee", "preempt", "reserve"),
    "chunk": (16, 128, 1 << 30),
    "target": (0.0, 20.0),
    "caching": (True, False),
    "eviction": ("lru", "fifo"),
    "noise": ((), (0.8, 1.0, 1.7)),
    "sharing": (Sharing(), Sharing(group=2, step=2)),
    "drafts": ("", '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}', '{"method": "ngram"}'),
}


def load_of(kind: str) -> Trace:
    rng = random.Random(kind)
    if kind == "shared":
        whole = chats(40)
        small = Trace("chats", block_size=8)
        for number in range(len(whole)):
            blocks = whole.blocks[number][8:24]
            small.add(whole.arrivals[number] / 4, 8 * len(blocks) + number % 3, whole.outputs[number] // 4, blocks)
        return small
    rows = []
    at = 0.0
    for number in range(40):
        at += {"sparse": rng.expovariate(2), "crowded": rng.expovariate(50), "bursts": 2.0 * (number % 8 == 0)}[kind]
        rows.append((at, rng.choice((1, 8, 9, 100, 300)), rng.choice((1, 2, 40, 130))))
    names = [tuple(range(100 * n, 100 * n + -(-prompt // 8))) for n, (_, prompt, _) in enumerate(rows)]
    return trace_of(rows, names)


def run(case: dict[str, Any], *, step_by_step: bool, cuts: int = 0) -> tuple[str, Any, int]:
    """The digest, the engine's last state, and how many steps were made by `Engine.step`. cuts: halts on the way."""
    load = load_of(case["load"])
    chunk = case["chunk"]
    options: dict[str, Any] = {"speculative_config": case["drafts"]} if case["drafts"] else {}
    built = engine_of(
        case["lookahead"],
        blocks=case["blocks"],
        noise=case["noise"],
        chunk=chunk,
        tokens=2000 if chunk == 1 << 30 else 128,
        batching=case["batching"],
        scheduling_policy=case["policy"],
        pressure_policy=case["pressure"],
        latency_target_ms=case["target"],
        enable_prefix_caching=case["caching"],
        eviction_policy=case["eviction"],
        **options,
    )
    built = replace(built, sharing=case["sharing"])
    results = Results(len(load))
    replica = Replica(0, built, results, step_by_step=step_by_step)
    stepped = 0
    inner = replica.engine.step

    def step() -> Any:
        nonlocal stepped
        stepped += 1
        return inner()

    replica.engine.step = step  # type: ignore[method-assign]
    send_all(replica, load)
    for cut in range(cuts):
        replica.advance(load.seconds * cut / cuts)
    replica.advance(float("inf"))
    assert results.status.count(1) + results.status.count(3) == len(load)
    assert results.status.count(1) > 30
    return results.digest(), state_of(replica), stepped


def send_all(replica: Replica, load: Trace) -> None:
    for number, at in enumerate(load.arrivals):
        replica.results.arrival[number] = at
        replica.send(at, number, prepare(load, number)[1])


CASES = pairwise(AXES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(each)[:12] for each in case.values()))
def test_several_steps_at_once_are_those_that_the_engine_would_make(case: dict[str, Any]) -> None:
    plain, state, steps = run(case, step_by_step=True)
    fast, other, fewer = run(case, step_by_step=False)
    assert other == state
    assert fast == plain
    assert fewer <= steps and (case["drafts"] or fewer < steps or case["load"] == "shared")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_where_the_clock_is_halted_on_the_way_changes_nothing(lookahead: int) -> None:
    case = {name: values[0] for name, values in AXES.items()} | {"lookahead": lookahead, "load": "crowded"}
    assert run(case, step_by_step=False, cuts=37)[:2] == run(case, step_by_step=True)[:2]
