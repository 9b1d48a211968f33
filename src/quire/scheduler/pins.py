"""Pinned blocks: prefixes that are evicted last for a time, within a bound that owners share fairly.

Pins only order evictions. A pinned block without a reference is still free: it is given to a sequence when no other
block is left, so pins delay no admission and cause no preemption.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Literal

from quire.scheduler.block_pool import EvictionPolicy

PinEnd = Literal["expired", "displaced", "evicted"]
"""Why a pin ended: its time was over, another pin took its place, or its block was needed."""


class Pins:
    """An eviction policy around `others`, which evicts pinned blocks only when nothing else is left.

    max_blocks: pinned blocks at once, held ones included; 0: nothing is ever pinned. Time is a number that `advance`
    is given, in seconds; nothing here reads a clock.

    Each owner may pin as much as is free. When the bound is reached, a new pin takes the place of one of the owner with
    the most, if that is at least two more than its own owner has; otherwise of one of its own that ends sooner.
    """

    def __init__(self, others: EvictionPolicy, max_blocks: int = 0) -> None:
        self.others = others
        self.max_blocks = max_blocks
        self.now = 0.0
        self.pinned: dict[int, tuple[float, int, str]] = {}
        """By block: when its pin ends, minus its place in the prefix, and the owner."""
        self.counts: dict[str, int] = {}
        """Pinned blocks by owner."""
        self.ended: dict[PinEnd, int] = {"expired": 0, "displaced": 0, "evicted": 0}
        self.num_refused = 0
        """Blocks that were to be pinned, and were not for the bound."""
        self._free: OrderedDict[int, int] = OrderedDict()
        """Pinned blocks without a reference, least recently used first, and when each was allocated."""
        self._ends: dict[str, list[tuple[float, int, int]]] = {}
        """By owner, a heap of (end, minus the place in the prefix, block). Entries of older pins are skipped."""
        self._next_end = math.inf
        """No pin ends before."""

    # ---------------------------------------------------------------- pins

    def pin(self, blocks: Seq[int], seconds: float, owner: str) -> int:
        """Pin blocks of a prefix, its first one first, or extend their pins. They must have references.

        Returns how many of them, from the first on, are pinned now.
        """
        end = self.now + seconds
        for place, block in enumerate(blocks):
            if not self._pin(block, end, place, owner):
                self.num_refused += len(blocks) - place
                return place
        return len(blocks)

    def _pin(self, block: int, end: float, place: int, owner: str) -> bool:
        known = self.pinned.get(block)
        if known is None:
            if len(self.pinned) >= self.max_blocks and not self._make_room(end, owner):
                return False
            self.counts[owner] = self.counts.get(owner, 0) + 1
        elif known[0] >= end:
            return True
        else:
            owner = known[2]
        self.pinned[block] = end, -place, owner
        ends = self._ends.setdefault(owner, [])
        heapq.heappush(ends, (end, -place, block))
        self._next_end = min(self._next_end, end)
        if len(ends) > 64 + 4 * self.counts[owner]:
            ends[:] = [(each[0], each[1], one) for one, each in self.pinned.items() if each[2] == owner]
            heapq.heapify(ends)
        return True

    def _make_room(self, end: float, owner: str) -> bool:
        """End one pin for a new one that ends at `end`. False: none has to make room for it."""
        largest = max(self.counts, key=self.counts.__getitem__, default=owner)
        fair = self.counts.get(largest, 0) > self.counts.get(owner, 0) + 1
        soonest = self._soonest(largest if fair else owner)
        if soonest is None or not (fair or soonest[0] < end):
            return False
        self._unpin(soonest[2], "displaced")
        return True

    def _soonest(self, owner: str) -> tuple[float, int, int] | None:
        """The first of an owner's pins to end; of those that end together, the one deepest in its prefix."""
        ends = self._ends.get(owner, [])
        while ends and self.pinned.get(ends[0][2]) != (ends[0][0], ends[0][1], owner):
            heapq.heappop(ends)
        return ends[0] if ends else None

    def _unpin(self, block: int, why: PinEnd) -> None:
        owner = self.pinned.pop(block)[2]
        self.ended[why] += 1
        self.counts[owner] -= 1
        if not self.counts[owner]:
            del self.counts[owner], self._ends[owner]
        if (allocated_at := self._free.pop(block, None)) is not None:
            self.others.add(block, allocated_at)

    def advance(self, now: float) -> None:
        """It is `now`: end the pins whose time is over."""
        self.now = now
        if now < self._next_end:
            return
        self._next_end = math.inf
        for owner in list(self._ends):
            while (soonest := self._soonest(owner)) is not None and soonest[0] <= now:
                self._unpin(soonest[2], "expired")
            self._next_end = min(self._next_end, math.inf if soonest is None else soonest[0])

    def clear(self) -> None:
        """End all pins: the prefix cache is emptied."""
        for block, allocated_at in self._free.items():
            self.others.add(block, allocated_at)
        for held in (self.pinned, self.counts, self._free, self._ends):
            held.clear()
        self._next_end = math.inf

    # ---------------------------------------------------------------- eviction

    def add(self, block: int, allocated_at: int) -> None:
        """See EvictionPolicy."""
        if block in self.pinned:
            self._free[block] = allocated_at
        else:
            self.others.add(block, allocated_at)

    def evict(self) -> int:
        """One that is not pinned; else the least recently used one, whose pin ends."""
        if len(self.others):
            return self.others.evict()
        block, _ = self._free.popitem(last=False)
        self._unpin(block, "evicted")
        return block

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        if self._free.pop(block, None) is None:
            self.others.remove(block)

    @property
    def num_free(self) -> int:
        """Pinned blocks without a reference."""
        return len(self._free)

    def __len__(self) -> int:
        return len(self.others) + len(self._free)
