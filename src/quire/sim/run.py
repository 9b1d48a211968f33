"""Runs a workload through the real engine with a synthetic executor, on the wall clock or a virtual one."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.deprecated import aliases
from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.timing import Clock, WallClock
from quire.executors.synthetic import FREE, SyntheticExecutor
from quire.observability.engine_metrics import pool_state
from quire.scheduler.block_pool import EVICTION_POLICIES
from quire.scheduler.kv_cache import KVCacheManager, make_prefix_cache
from quire.scheduler.policy import Batching, Pressure, make_policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_time import StepCost
from quire.sim.workload import Load

_SAMPLE = 16
"""Steps between two samples of fragmentation."""

__getattr__ = aliases(__name__, __name__, {"House": "SimConfig", "drive": "simulate"})


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The settings of a simulated engine; names and defaults as the server's."""

    pages: int = 4096
    page_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    chunk: int = 512
    depth: int = 0
    prefix_caching: bool = True
    batching: Batching = "continuous"
    scheduling_policy: str = "fcfs"
    eviction_policy: str = "lru"
    pressure_policy: Pressure = "foresee"
    cost: StepCost = FREE

    def build(
        self,
        clock: Clock | None = None,
        observers: Iterable[Observer] = (),
        make: Callable[..., Engine] = Engine,
    ) -> Engine:
        """The engine of these settings. make: `Engine`, or what makes recorded ones."""
        clock = WallClock() if clock is None else clock
        rows = self.max_num_seqs * (1 + self.depth)
        index = make_prefix_cache(self.page_size, self.prefix_caching)
        scheduler = Scheduler(
            KVCacheManager(self.pages, self.page_size, index, EVICTION_POLICIES[self.eviction_policy]()),
            rows=rows,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.chunk,
            policy=make_policy(self.scheduling_policy, batching=self.batching, pressure=self.pressure_policy),
        )
        executor = SyntheticExecutor(
            pages=self.pages, page_size=self.page_size, rows=rows, depth=self.depth, cost=self.cost, clock=clock
        )
        return make(scheduler, executor, lookahead=self.depth, clock=clock, observers=observers)


@dataclass
class Outcome:
    """What a run measured. Durations in seconds; fragmentation from 0 to 1, sampled; memory in bytes."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    queue_wait: list[float] = field(default_factory=list)
    internal: list[float] = field(default_factory=list)
    external: list[float] = field(default_factory=list)
    snapshot: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    failed: int = 0
    peak_use: float = 0.0
    """Most of the K/V blocks that sequences held after a step, 0 to 1."""


def simulate(engine: Engine, loads: Sequence[Load], tick: Callable[[int], None] = lambda done: None) -> Outcome:
    """Submit each load at its arrival time and step until all have finished. `tick` gets the number finished."""
    out, clock, pool = Outcome(requests=len(loads)), engine.clock, engine.scheduler.kv.block_pool
    peak = 0
    started, wall, todo = clock.now(), time.perf_counter, 0
    begun = wall()
    while todo < len(loads) or engine.has_pending_work:
        elapsed = clock.now() - started
        while todo < len(loads) and loads[todo].arrival <= elapsed:
            engine.submit(loads[todo].prompt, loads[todo].new)
            todo += 1
        if not engine.has_pending_work:
            clock.sleep_until(started + loads[todo].arrival)
            continue
        before = wall()
        engine.step()
        out.steps.append(wall() - before)
        peak = max(peak, pool.num_used)
        if engine.stats.num_steps % _SAMPLE == 0:
            _fragmentation(engine, out)
            tick(engine.stats.num_finished)
    out.seconds = clock.now() - started or wall() - begun
    out.tokens = engine.stats.num_generated_tokens
    out.peak_use = peak / pool.num_blocks
    out.failed = sum(each.finish == "error" for each in engine.completed_requests)
    out.snapshot = engine.metrics_snapshot()
    out.latency = [c.finished - c.submitted for c in engine.completed_requests]
    out.queue_wait = [c.opened - c.submitted for c in engine.completed_requests if c.opened is not None]
    return out


def _fragmentation(engine: Engine, out: Outcome) -> None:
    state = pool_state(engine.scheduler)
    if engine.scheduler.running:
        out.internal.append(state.internal)
    out.external.append(state.external)


def peak_memory(work: Callable[[], Outcome]) -> int:
    """Peak bytes of Python memory during `work`, by tracemalloc: apart from timing, which it would distort."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
