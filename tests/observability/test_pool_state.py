"""The state of the block pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.observability.engine_metrics import PoolState, pool_state
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache import make_prefix_cache


def scheduler(pool: BlockPool, *running: Any) -> Any:
    return SimpleNamespace(running=running, kv=SimpleNamespace(block_pool=pool, block_size=4))


def test_holes_shares_and_empty_slots_are_counted() -> None:
    pool = BlockPool(8, make_prefix_cache(4, enabled=True))
    held = [pool.allocate() for _ in range(8)]  # 1 to 8
    assert held == list(range(1, 9))
    for page in (2, 5, 6, 7):
        pool.decref(page)
    pool.incref(3)
    one = SimpleNamespace(blocks=[1, 3, 4, 8], num_computed=14)
    assert pool_state(scheduler(pool, one)) == PoolState(internal=2 / 16, external=1 - 3 / 4, shared=1)


def test_where_every_page_is_held_there_is_no_hole() -> None:
    pool = BlockPool(2, make_prefix_cache(4, enabled=True))
    one = SimpleNamespace(blocks=[pool.allocate(), pool.allocate()], num_computed=8)
    assert pool_state(scheduler(pool, one)) == PoolState(0.0, 0.0, 0)


def test_where_none_is_held_no_page_is_looked_at() -> None:
    pool = BlockPool(2, make_prefix_cache(4, enabled=True))
    pool.decref(pool.allocate())
    pool.ref_counts = None  # type: ignore[assignment]
    assert pool_state(scheduler(pool)) == PoolState(0.0, 0.0, 0)
