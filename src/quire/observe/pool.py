"""How the page pool stands: what is held for nothing, what no contiguous allocator could use, what is shared."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.scheduler import Scheduler


class PoolState(NamedTuple):
    """internal: share of the slots in held pages that hold no token (0 when none is held). external: share of the free
    pages outside the longest run of them; paging makes it harmless, which is why it is shown. shared: pages that more
    than one sequence holds."""

    internal: float
    external: float
    shared: int


def look(scheduler: Scheduler) -> PoolState:
    """Looks at every page: not for every step."""
    held = sum(len(seq.blocks) for seq in scheduler.running) * scheduler.kv.page_size
    internal = 1 - sum(seq.computed for seq in scheduler.running) / held if held else 0.0
    run = best = free = shared = 0
    for holders in scheduler.kv.pool.refs[1:]:
        if holders:
            run = 0
            shared += holders > 1
        else:
            run += 1
            free += 1
            best = max(best, run)
    return PoolState(internal, 1 - best / free if free else 0.0, shared)
