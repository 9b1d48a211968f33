"""Small deployments for tests: their engines' sizes, costs and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.assembly.limits import Limits
from quire.bench.simulated_engine import SimulatedEngine
from quire.config import Settings
from quire.scheduler.step_time import StepCost
from quire.sim.trace import Trace

COST = StepCost(
    base=2e-3, per_token=2e-5, per_kv=3e-7, per_row=1e-5, per_pair=1e-9, weights=1e-3, overlap=2.0, per_draft=1e-4
)


def engine_of(
    lookahead: int = 0,
    *,
    blocks: int = 400,
    block_size: int = 8,
    max_num_seqs: int = 6,
    tokens: int = 128,
    chunk: int = 128,
    cost: StepCost = COST,
    noise: tuple[float, ...] = (),
    prefixes: bool = True,
    max_model_len: int = 2000,
    **options: Any,
) -> SimulatedEngine:
    limits = Limits(
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        num_rows=max_num_seqs * (1 + lookahead),
        lookahead=lookahead,
        max_num_batched_tokens=tokens,
        max_chunk_tokens=chunk,
    )
    return SimulatedEngine(Settings.of(**options), limits, blocks, cost, noise, prefixes)


def trace_of(rows: list[tuple[float, int, int]], blocks: list[tuple[int, ...]] | None = None, size: int = 8) -> Trace:
    """(arrival, prompt tokens, answer tokens) of each request, and the names of its prompt's blocks."""
    trace = Trace("test", block_size=size)
    for number, (at, prompt, output) in enumerate(rows):
        trace.add(at, prompt, output, None if blocks is None else blocks[number])
    return trace


def state_of(replica: Any) -> Mapping[str, Any]:
    """All that a replica's engine has in the end, but for names and handles."""
    engine, scheduler = replica.engine, replica.engine.scheduler
    pool, stats = scheduler.kv.block_pool, engine.stats
    return {
        "clock": replica.clock.time,
        "busy": replica.executor.busy,
        "steps": (stats.num_steps, stats.num_spans, stats.max_batch_size, stats.num_generated_tokens),
        "prompts": (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_finished),
        "pool": (pool.free_list, pool.ref_counts, pool.allocated_at, pool.num_allocated, pool.evictions),
        "evicted_next": list(getattr(scheduler.kv.pins.others, "_blocks", ())),
        "hits": (scheduler.kv.num_queried_tokens, scheduler.kv.num_hit_tokens),
        "preemptions": scheduler.num_preemptions,
        "rows": scheduler.free_rows,
        "step_times": (vars(scheduler.step_times)["_recent"], scheduler.step_times.fit()),
        "margin": engine.plan_delay.margin,
    }
