"""How the page pool stands: what is held for nothing, what no contiguous allocator could use, what is shared."""

from __future__ import annotations

from typing import NamedTuple

from quire.scheduler.scheduler import Scheduler


class PoolState(NamedTuple):
    """internal: share of the slots in held pages that hold no token (0 when none is held). external: share of the free
    pages outside the longest run of them; paging makes it harmless, which is why it is shown. shared: pages that more
    than one sequence holds."""

    internal: float
    external: float
    shared: int


def pool_state(scheduler: Scheduler) -> PoolState:
    """Looks at every page, unless none is held: not for every step."""
    pool = scheduler.kv.block_pool
    if not pool.num_used:
        return PoolState(0.0, 0.0, 0)
    slots = sum(len(seq.blocks) for seq in scheduler.running) * scheduler.kv.block_size
    internal = 1 - sum(seq.num_computed for seq in scheduler.running) / slots if slots else 0.0
    refs = pool.ref_counts[1:]
    held = bytes(map(bool, refs))
    longest, free = max(map(len, held.split(b"\1"))), held.count(0)
    return PoolState(internal, 1 - longest / free if free else 0.0, len(refs) - free - refs.count(1))
