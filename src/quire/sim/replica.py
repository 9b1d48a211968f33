"""One replica of a simulated deployment: an engine on a clock of its own, with the arrivals that it was sent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from quire.engine.engine import Engine
from quire.engine.timing import VirtualClock
from quire.errors import InvalidRequest
from quire.executors.synthetic import SyntheticHandle
from quire.scheduler.kv_offload import KVOffload
from quire.sim.copies import Role, SimulatedStore, Split
from quire.sim.executor import SimulatedExecutor
from quire.sim.results import QUEUE_FULL, TOO_LONG, Results
from quire.sim.steady import SteadyDecode, floor_ms
from quire.types import Request

BuildEngine = Callable[[VirtualClock, int], tuple[Engine, SimulatedExecutor]]
"""Makes the engine of a replica on this clock. The number is the seed of its noise."""


class BuildSide(Protocol):
    """A `BuildEngine` that also makes either side of a split."""

    def __call__(
        self, clock: VirtualClock, seed: int, split: Split | None = None, role: Role = "decode"
    ) -> tuple[Engine, SimulatedExecutor]:
        """See `BuildEngine`. split: what connects it with the others; None: nothing does."""


class Ended(NamedTuple):
    """A request ended. at: seconds. tokens: of its answer; empty: it was refused."""

    at: float
    number: int
    tokens: tuple[int, ...]


class Replica:
    """An engine that runs up to given times. number: its place in the deployment.

    results: where times of requests are kept; they are numbers there, and the engine's ids are these numbers as text.
    step_by_step: never several steps at once. max_queued: requests that may wait; more are refused.
    """

    def __init__(
        self,
        number: int,
        build: BuildEngine,
        results: Results,
        *,
        started: float = 0.0,
        step_by_step: bool = False,
        max_queued: float = math.inf,
    ) -> None:
        self.number, self.name = number, f"replica-{number}"
        self.clock = VirtualClock(started)
        self.engine, self.executor = build(self.clock, number)
        self.results, self.started, self.max_queued = results, started, max_queued
        self.inbox: deque[tuple[float, int, Request]] = deque()
        self.ended: list[Ended] = []
        """Requests that ended since the list was emptied last."""
        self.first_tokens: list[tuple[float, int]] = []
        """(seconds, request) of first tokens since the list was emptied last."""
        offload = self.engine.scheduler.kv.offload
        self.tiers = offload if isinstance(offload, KVOffload) else None
        self._steady = SteadyDecode(self.engine, self.executor)
        self._steady.possible &= not step_by_step
        self._last_token: dict[str, float] = {}
        self._previous = 0.0
        self._width = 0

    def send(self, at: float, number: int, request: Request) -> None:
        """A request arrives at `at`; arrivals must come in order."""
        self.inbox.append((at, number, request))

    def _next_copy(self) -> float:
        """When copies of K/V end next, or a prompt comes from another engine, or has waited too long for its blocks."""
        if self.tiers is None:
            return math.inf
        store, timeout = self.tiers.store, self.tiers.timeout()
        assert isinstance(store, SimulatedStore)
        return min(store.next_event(), math.inf if timeout is None else self.tiers.now + timeout)

    def next_time(self) -> float:
        """When it does something next, as far as it knows; infinity: it has nothing to do."""
        engine, now = self.engine, self.clock.time
        first = self.inbox[0][0] if self.inbox else math.inf
        if not engine.can_step:
            return max(now, min(first, self._next_copy()))
        return max(now, min(now + floor_ms(engine.time_to_next_plan()), first))

    def horizon(self) -> float:
        """Seconds before which no request can end here or get its first token."""
        engine, now = self.engine, self.clock.time
        first = self.inbox[0][0] if self.inbox else math.inf
        if not engine.can_step:
            return max(now, min(first, self._next_copy()))
        bound = now
        if engine.inflight:  # it is committed when it is done, and once the next plan has been due
            bound = max(self._done(), min(now + floor_ms(engine.time_to_next_plan()), first))
        if self.inbox or (steps := self._steady.num_steps() - engine.lookahead) <= 0:
            return max(now, bound)
        width = len(engine.scheduler.running)
        least = self.executor.cost.fixed(width, width) * min(self.executor.noise, default=1.0)
        # a little less, for sums of so many numbers are not exact
        return max(bound, now + steps * least * (1 - 1e-9))

    def _done(self) -> float:
        """When the oldest step in flight is done."""
        handle = self.engine.inflight[0][2]
        assert isinstance(handle, SyntheticHandle)
        return handle.done

    def advance(self, until: float) -> None:
        """Do everything that begins before `until`: admit arrivals, plan steps, and commit what was planned."""
        engine, clock, inbox = self.engine, self.clock, self.inbox
        while True:
            while inbox and inbox[0][0] <= clock.time and inbox[0][0] < until:
                self._admit(*inbox.popleft())
            if not engine.can_step:
                if (due := self.next_time()) >= until:
                    return
                clock.sleep_until(due)
                if self._next_copy() <= clock.time:
                    self._step()
                continue
            if clock.time >= until:
                return
            if (wait := engine.time_to_next_plan()) > 0.0 and (due := clock.time + floor_ms(wait)) > clock.time:
                first = inbox[0][0] if inbox else math.inf
                if min(due, first) >= until:
                    return
                clock.sleep_until(min(due, first))
                if first <= due:
                    continue
            if not self._repeat(until):
                self._step()

    def _admit(self, at: float, number: int, request: Request) -> None:
        if len(self.engine.scheduler.waiting) >= self.max_queued:
            self._refuse(at, number, QUEUE_FULL)
            return
        try:
            self.engine.add(request)
        except InvalidRequest:
            self._refuse(at, number, TOO_LONG)

    def _refuse(self, at: float, number: int, status: int) -> None:
        self.results.refused(number, max(at, self.clock.time), status)
        self.ended.append(Ended(max(at, self.clock.time), number, ()))

    # ---------------------------------------------------------------- steps

    def _step(self) -> None:
        """One step of the engine."""
        results, last = self.results, self._last_token
        outputs = self.engine.step()
        now = self.clock.time
        for output in outputs:
            id, tokens, finish = output[0], output[1], output[2]
            if tokens:
                before = last.get(id)
                if before is None:
                    results.first_token(int(id), now, output.num_cached)
                    self.first_tokens.append((now, int(id)))
                else:
                    results.gap(now - before, 1)
                last[id] = now
            if finish is not None:
                number, done = int(id), self.engine.stats.completed.popleft()
                del last[id]
                results.ended(number, now, done.preemptions)
                self.ended.append(Ended(now, number, done.tokens))

    def _repeat(self, until: float) -> int:
        """As many equal decode steps as there are at once. Returns how many."""
        steps = self._steady.num_steps()
        if steps < 2:
            return 0
        running, last = self.engine.scheduler.running, self._last_token
        self._width = len(running)
        starts = [last[seq.request.id] for seq in running]
        self._previous = starts[0] if min(starts) == max(starts) else math.nan
        first = self.inbox[0][0] if self.inbox else math.inf
        done = self._steady.run(steps, until, first, self._on_step)
        if done:
            for seq in running:
                last[seq.request.id] = self.clock.time
        return done

    def _on_step(self, now: float) -> None:
        """One of several decode steps is committed."""
        previous = self._previous
        if previous == previous:
            self.results.gap(now - previous, self._width)
        else:  # rows that got their last token at different times
            for seq in self.engine.scheduler.running:
                self.results.gap(now - self._last_token[seq.request.id], 1)
        self._previous = now
