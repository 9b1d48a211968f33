"""The waiting queue: by (priority, arrival), so that a preempted sequence returns to its own place."""

from __future__ import annotations

import heapq

from quire.core.sequence import Sequence


class Waiting:
    """A heap with lazy removal: push, pop and discard stay O(log n) with a hundred thousand waiting.

    `held` counts sequences that wait elsewhere: choices of `n` behind their leader.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._members: set[int] = set()
        self.held = 0

    def push(self, seq: Sequence) -> None:
        """Queue it; nothing happens if it is queued already."""
        if seq.order not in self._members:
            self._members.add(seq.order)
            heapq.heappush(self._heap, (seq.priority, seq.order, seq))

    def first(self) -> Sequence | None:
        """Who is next, left in place."""
        heap = self._heap
        while heap and heap[0][1] not in self._members:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> None:
        """Take out what `first` returned."""
        self._members.discard(heapq.heappop(self._heap)[1])

    def discard(self, seq: Sequence) -> None:
        """Take it out if it is there; its place in the heap is cleaned up when it comes to the top."""
        self._members.discard(seq.order)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.order in self._members

    def drain(self) -> list[Sequence]:
        """Take everyone out, in order."""
        out = [seq for _, order, seq in sorted(self._heap, key=lambda e: e[:2]) if order in self._members]
        self._heap, self._members = [], set()
        return out

    def __len__(self) -> int:
        return len(self._members) + self.held
