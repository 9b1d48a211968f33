"""Which request makes a step fail: halve the suspects until one fails alone."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence


class Recovery:
    """Runs suspects in ever smaller groups, with all others held back, until the culprit runs alone.

    A group of which each gets one committed step past the failure is cleared. A failure that needs many rows at once
    (for lack of memory, say) disappears by halving and fails no request.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.groups: list[list[Sequence]] = []
        self.parked: list[Sequence] = []
        self.unproven: set[int] = set()
        self.failure_point: tuple[int, int] = (-1, -1)

    @property
    def active(self) -> bool:
        """Whether suspects are being tried."""
        return bool(self.groups)

    def admit(self, seq: Sequence) -> None:
        """A request that is new to the queue waits while suspects are tried, unless it is one of those on trial."""
        on_trial = self.active and any(seq is each for each in self.groups[0])
        if self.active and not on_trial and seq in self.scheduler.waiting:
            self.scheduler.waiting.discard(seq)
            self.parked.append(seq)

    def on_step_failed(self) -> tuple[list[Sequence], Sequence | None]:
        """A step failed: all rows go back to the queue. Returns the suspects, and the culprit if it is found.

        The culprit is a request that fails twice, alone on the device, at the same position. Requests that ran beside
        the group on trial had passed; none is blamed for a failure with others, nor for a single one.
        """
        beside = {id(seq) for step in self.scheduler.inflight for seq in step.seqs}  # ended ones included
        lost = self.scheduler.recover()
        trial = {s.arrival for s in (self.groups.pop(0) if self.groups else lost)}
        suspects = [s for s in lost if s.arrival in trial]
        culprit = None
        if len(lost) == 1 and beside <= {id(lost[0])}:
            failure = (lost[0].arrival, lost[0].num_computed)
            culprit = lost[0] if failure == self.failure_point else None
            self.failure_point = failure
        if culprit is None:
            half = (len(suspects) + 1) // 2
            self.groups[:0] = [group for group in (suspects[:half], suspects[half:]) if group]
        self._next_group()
        return suspects, culprit

    def on_executor_lost(self) -> list[Sequence]:
        """The device is gone, and no trial goes on. Returns the sequences that were on it."""
        lost = self.scheduler.recover()
        self.groups.clear()
        self._next_group()
        return lost

    def on_step_passed(self, seqs: Iterable[Sequence]) -> None:
        """These got through a step. When the whole group has, the next one is tried."""
        for seq in seqs:
            if seq.num_computed >= len(seq.tokens) - 1:  # past its prompt again, where it stood when the step failed
                self.unproven.discard(seq.arrival)
        if not any(s.arrival in self.unproven and s.finish_reason is None for s in self.groups[0]):
            self.groups.pop(0)
            self._next_group()

    def _next_group(self) -> None:
        """Let only the next group run; with none left, all."""
        waiting = self.scheduler.waiting
        while self.groups and all(s.finish_reason is not None for s in self.groups[0]):
            self.groups.pop(0)
        everyone = [*waiting.drain(), *self.parked]
        chosen = {s.arrival for s in self.groups[0]} if self.groups else {s.arrival for s in everyone}
        self.unproven = set(chosen)
        self.parked = [s for s in everyone if s.arrival not in chosen and s.finish_reason is None]
        for seq in everyone:
            if seq.arrival in chosen and seq.finish_reason is None:
                waiting.push(seq)
