"""Pages nobody holds, in the order in which they are given up."""

from __future__ import annotations

import pytest

from quire.errors import InvalidRequest
from quire.scheduler.block_pool import Fifo
from quire.scheduler.kv_cache import KVCacheManager
from quire.types import Request


def taken(shelf: Fifo) -> list[int]:
    return [shelf.evict() for _ in range(len(shelf))]


def test_a_page_that_was_taken_back_and_filled_anew_is_given_up_by_its_new_age() -> None:
    shelf = Fifo()
    shelf.add(1, allocated_at=10)
    shelf.add(2, allocated_at=20)
    shelf.remove(1)
    shelf.add(3, allocated_at=30)
    shelf.add(1, allocated_at=40)  # its first entry, of age 10, is still in the heap
    assert len(shelf) == 3 and taken(shelf) == [2, 3, 1]


def test_entries_that_count_no_more_are_cleared_away_and_the_order_stays() -> None:
    shelf = Fifo()
    for born in range(500):
        page = born % 5
        if born >= 5:
            shelf.remove(page)
        shelf.add(page, allocated_at=born)
    assert len(shelf._heap) <= 64 + 4 * 5 + 1
    assert taken(shelf) == [0, 1, 2, 3, 4]


def test_a_request_may_need_every_block_there_is_and_no_more() -> None:
    kv = KVCacheManager(4, 4)
    kv.check_fits(Request(id="a", prompt=(1,) * 9, max_new_tokens=8))
    with pytest.raises(InvalidRequest, match="need 5 KV blocks, and there are 4"):
        kv.check_fits(Request(id="a", prompt=(1,) * 9, max_new_tokens=9))
