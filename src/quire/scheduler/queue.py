"""The waiting queue: by (priority, arrival), so that a preempted sequence returns to its own place."""

from __future__ import annotations

import heapq

from quire.scheduler.constraint import PENDING, Constraint
from quire.scheduler.sequence import Decision, Sequence


class WaitingQueue:
    """A heap with lazy removal: push, pop and discard stay O(log n) with a hundred thousand waiting.

    `held` counts sequences that wait elsewhere: behind one that computes what they begin with. Those whose constraint
    is still being made wait beside the queue, and take their place in it when it is `ready`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._members: set[int] = set()
        self._awaiting_grammar: dict[int, Sequence] = {}
        self.num_parked = 0

    def push(self, seq: Sequence) -> None:
        """Queue it; nothing happens if it is queued already."""
        if seq.constraint is PENDING:
            self._awaiting_grammar[seq.arrival] = seq
        elif seq.arrival not in self._members:
            self._members.add(seq.arrival)
            heapq.heappush(self._heap, (seq.priority, seq.arrival, seq))

    def constraint_ready(self, seq: Sequence, constraint: Constraint) -> None:
        """Its constraint is made: it may run when its turn comes."""
        seq.constraint = constraint
        if self._awaiting_grammar.pop(seq.arrival, None) is not None:
            self.push(seq)

    def awaiting_grammar(self) -> list[Decision]:
        """Why those wait who are not in the queue yet."""
        return [Decision("waits", seq.request.id, "grammar") for seq in self._awaiting_grammar.values()]

    def peek(self) -> Sequence | None:
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
        self._members.discard(seq.arrival)
        self._awaiting_grammar.pop(seq.arrival, None)

    def park(self, leader: Sequence, length: int) -> None:
        """The first one waits beside the queue until `leader` has computed its first `upto` tokens."""
        leader.waiters.append((length, self._heap[0][2]))
        self.pop()
        self.num_parked += 1

    def unpark(self, leader: Sequence) -> None:
        """Those who waited for what it computes take their places in the queue again."""
        for _, seq in leader.waiters:
            self.num_parked -= 1
            if seq.finish_reason is None:
                self.push(seq)
        leader.waiters = []

    def __contains__(self, seq: Sequence) -> bool:
        return seq.arrival in self._members

    def drain(self) -> list[Sequence]:
        """Take everyone out, in order."""
        out = [seq for _, order, seq in sorted(self._heap, key=lambda e: e[:2]) if order in self._members]
        self._heap, self._members = [], set()
        return out

    @property
    def num_queued(self) -> int:
        """How many could run if there were room."""
        return len(self._members)

    def __len__(self) -> int:
        return len(self._members) + len(self._awaiting_grammar) + self.num_parked
