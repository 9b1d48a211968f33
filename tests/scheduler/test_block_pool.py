"""Blocks without a reference, in the order in which they are evicted."""

from __future__ import annotations

import pytest

from quire.errors import InvalidRequest
from quire.scheduler import block_pool
from quire.scheduler.block_pool import BlockKey, Fifo, RadixPrefixCache
from quire.scheduler.kv_cache import KVCacheManager
from quire.types import Request


def evicted(policy: Fifo) -> list[int]:
    return [policy.evict() for _ in range(len(policy))]


def test_a_block_that_was_reused_is_evicted_by_its_new_age() -> None:
    policy = Fifo()
    policy.add(1, allocated_at=10)
    policy.add(2, allocated_at=20)
    policy.remove(1)
    policy.add(3, allocated_at=30)
    policy.add(1, allocated_at=40)  # its first entry, of age 10, is still in the heap
    assert len(policy) == 3 and evicted(policy) == [2, 3, 1]


def test_outdated_heap_entries_are_removed_and_the_order_stays() -> None:
    policy = Fifo()
    for born in range(500):
        page = born % 5
        if born >= 5:
            policy.remove(page)
        policy.add(page, allocated_at=born)
    assert len(policy._heap) <= 64 + 4 * 5 + 1
    assert evicted(policy) == [0, 1, 2, 3, 4]


def test_a_request_may_need_every_block_there_is_and_no_more() -> None:
    kv = KVCacheManager(4, 4)
    kv.check_fits(Request(id="a", prompt=(1,) * 9, max_new_tokens=8))
    with pytest.raises(InvalidRequest, match="need 5 KV blocks, and there are 4"):
        kv.check_fits(Request(id="a", prompt=(1,) * 9, max_new_tokens=9))


@pytest.mark.parametrize("salt", ["", "a"])
def test_only_prompts_that_begin_alike_are_compared_token_by_token(salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, common = list[BlockKey](), block_pool._common

    def counted(a: BlockKey, b: BlockKey) -> int:
        compared.append(a)
        return common(a, b)

    monkeypatch.setattr(block_pool, "_common", counted)
    cache = RadixPrefixCache(4)
    for i in range(200):
        cache.insert(cache.root, [i, 1, 2, 3], 0, salt, i)
    cache.insert(cache.root, [7, 1, 5, 6], 0, salt, 200)
    assert cache.common_length(cache.root, [999, 1, 2, 3], 0, salt) == 0 and not compared
    assert cache.common_length(cache.root, [7, 1, 5, 9, 8], 0, salt) == 3 and len(compared) == 2
    assert cache.common_length(cache.root, [7, 1], 0, salt) == 2
    assert cache.common_length(cache.root, [], 0, salt) == 0
    assert cache.common_length(cache.root, [7, 1, 5, 9], 0, "b") is None
    assert cache.common_length({}, [7, 1, 5, 9], 0, salt) is None
