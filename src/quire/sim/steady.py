"""Many decode steps at once, where the scheduler would make the same plan again and again.

While all running sequences decode, none is about to end, and none that waits could be admitted, every plan is the last
one again: one token for each sequence. What changes from step to step is the clock, lengths, and now and then a block.
`SteadyDecode` makes exactly these changes. Its results are those of `Engine.step`, which `tests/sim/test_steady.py`
compares: decisions, times to the last bit, blocks and statistics.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from quire.engine.engine import Engine
from quire.engine.timing import LatencyController, PlanDelay
from quire.executors.synthetic import SyntheticHandle
from quire.scheduler.constraint import FREE
from quire.scheduler.kv_offload import NoOffload
from quire.scheduler.plan import Plan
from quire.scheduler.policy import PriorityPolicy, SchedulingPolicy
from quire.scheduler.sequence import InflightStep, Sequence
from quire.scheduler.speculation import FixedDrafts
from quire.scheduler.step_time import StepTimeModel
from quire.sim.executor import SimulatedExecutor

OnStep = Callable[[float], None]
"""Called with the time of each commit."""

_ALLOCATE, _CACHE = 0, 1


class SteadyDecode:
    """Repeats an engine's decode step. executor: the engine's own."""

    def __init__(self, engine: Engine, executor: SimulatedExecutor) -> None:
        self.engine, self.executor, self.clock = engine, executor, executor.clock
        scheduler = engine.scheduler
        self.possible = (
            type(scheduler.policy) in (SchedulingPolicy, PriorityPolicy)
            and type(scheduler.speculation) is FixedDrafts
            and scheduler.speculation.max_drafts == 0
            and scheduler.groups == 1
            and type(scheduler.kv.offload) is NoOffload
            and type(engine.step_budget) in (type(None), LatencyController)  # which never holds up a decode
            and not engine.observers
        )
        """Whether plans repeat at all: other policies may decide by anything, and copies of blocks end at any time."""

    def num_steps(self) -> int:
        """How many steps at least will be like the last one if no request comes; 0: the next one may differ."""
        scheduler = self.engine.scheduler
        running = scheduler.running
        if not self.possible or not running or not self._nothing_else(running):
            return 0
        left = math.inf
        for seq in running:
            if seq.span != (seq.row, 1, 1, 1) or seq.num_unscheduled != 1 or len(seq.tokens) == seq.prompt_length:
                return 0
            if seq.num_inflight != len(scheduler.inflight) or seq.constraint is not FREE:
                return 0
            left = min(left, seq.max_length - len(seq.tokens) - seq.num_inflight)
        return max(0, int(left) - 1)

    def _nothing_else(self, running: list[Sequence]) -> bool:
        """Whether nothing waits that could be admitted, and the steps in flight decode these sequences alone."""
        engine, scheduler = self.engine, self.engine.scheduler
        waiting = scheduler.waiting
        if len(waiting) and (
            len(waiting) != waiting.num_queued or scheduler.policy.admit(running, scheduler.max_num_seqs) > 0
        ):
            return False
        if engine.recovery.active or len(engine.inflight) != engine.lookahead:
            return False
        return all(
            step.seqs == running
            and step.plan.spans is scheduler._last_spans
            and not step.deferred_frees
            and not step.plan.new_sequences
            for step in scheduler.inflight
        )

    def run(self, most: int, until: float, next_arrival: float, on_step: OnStep) -> int:
        """Make up to `most` steps, as `num_steps` says, that are planned before `until` and before `next_arrival`.

        Returns how many were made.
        """
        events = self._events(most)
        if events is None:
            return 0
        done = self._advance(most, until, next_arrival, on_step)
        if done:
            self._take_effect(done, events)
        return done

    # ---------------------------------------------------------------- time

    def _advance(self, most: int, until: float, next_arrival: float, on_step: OnStep) -> int:
        """The steps' times, by the engine's own clock, step times and delay of plans."""
        engine, executor, clock = self.engine, self.executor, self.clock
        scheduler, delay = engine.scheduler, engine.plan_delay
        step_times, flight, lookahead = scheduler.step_times, engine.inflight, engine.lookahead
        width = len(scheduler.running)
        if scheduler._last_spans != (spans := tuple([seq.span for seq in scheduler.running])):
            scheduler._last_spans = spans
        plan = Plan((), (), spans)
        fixed, per_kv = executor.cost.fixed(width, width), executor.cost.per_kv
        rows = [seq.row for seq in scheduler.running if seq.row is not None]
        kv = sum(executor.lengths[row] for row in rows) - executor.shared.spared(rows)
        done, last_commit = 0, engine._last_commit
        window = _Fastest(step_times, width)
        while done < most:
            if lookahead and delay is not None and not self._wait(delay, window, until, next_arrival):
                break
            planned = clock.time
            if planned >= until or next_arrival <= planned:
                break
            kv += width
            flight.append(
                (planned, planned, SyntheticHandle(clock, executor.run([fixed + (per_kv * kv + 0.0)]), [], {}))
            )
            if delay is not None:
                delay.on_launch(planned)
            _, launched, handle = flight.popleft()
            assert isinstance(handle, SyntheticHandle)
            waited = clock.time < handle.done
            clock.sleep_until(handle.done)
            now = clock.time
            seconds = now - (launched if launched > last_commit else last_commit)
            step_times.record(plan, seconds, latency=now - launched, waited=waited)
            if waited:
                window.append(seconds)
            if delay is not None:
                delay.on_commit(waited, step_times)
            engine._last_commit = last_commit = now
            done += 1
            on_step(now)
        return done

    def _wait(self, delay: PlanDelay, window: _Fastest, until: float, next_arrival: float) -> bool:
        """Let the clock pass until the next plan is due, as `Engine.time_to_next_plan` says. False: something comes
        first."""
        engine = self.engine
        launched, last_commit = engine.inflight[0][1], engine._last_commit
        wait = delay.until_due(window.seconds(), launched if launched > last_commit else last_commit)
        if wait <= 0.0:
            return True
        due = self.clock.time + floor_ms(wait)
        if due >= until or next_arrival <= due:
            return False
        self.clock.sleep_until(due)
        return True

    # ---------------------------------------------------------------- effects

    def _events(self, most: int) -> list[tuple[int, int, int]] | None:
        """(step, _ALLOCATE or _CACHE, place in `running`), in order; None: there may be too few blocks."""
        scheduler = self.engine.scheduler
        size, events, num_allocated = scheduler.kv.block_size, [], 0
        for place, seq in enumerate(scheduler.running):
            length = len(seq.tokens)
            step, last = seq.capacity - (length + seq.num_inflight) + 2, seq.max_length - 1
            capacity = seq.capacity
            while step <= most and capacity < last:
                events.append((step, _ALLOCATE, place))
                num_allocated, step, capacity = num_allocated + 1, step + size, capacity + size
            step = seq.next_cache_at - length + 1
            while step <= most and seq.prefix_node is not None:
                events.append((step, _CACHE, place))
                step += size
        return None if num_allocated > scheduler.kv.block_pool.num_free else sorted(events)

    def _take_effect(self, done: int, events: list[tuple[int, int, int]]) -> None:
        """Tokens, blocks, statistics, and the plans in flight, after so many steps."""
        engine, executor, scheduler = self.engine, self.executor, self.engine.scheduler
        running, kv = scheduler.running, scheduler.kv
        before = [len(seq.tokens) for seq in running]
        for seq in running:
            assert seq.row is not None
            seq.tokens += executor.answers[seq.row] * done
            executor.lengths[seq.row] += done
        for step, kind, place in events:
            if step > done:
                break
            seq = running[place]
            if kind == _ALLOCATE:
                kv.allocate(seq, 1)
            else:
                seq.num_computed = before[place] + step - 1
                kv.cache_blocks(seq)
        for seq in running:
            seq.num_computed = len(seq.tokens) - 1
        stats, width = engine.stats, len(running)
        stats.num_steps += done
        stats.num_spans += done * width
        stats.max_batch_size = max(stats.max_batch_size, width)
        stats.num_generated_tokens += done * width
        kv.pins.advance(self.clock.time)
        if scheduler.inflight:
            self._replace_inflight(done)

    def _replace_inflight(self, done: int) -> None:
        """The plans in flight are those of the last steps. Handles were made by `_advance`, without tokens."""
        engine, executor, scheduler = self.engine, self.executor, self.engine.scheduler
        running = scheduler.running
        tokens = [executor.answers[seq.row] for seq in running if seq.row is not None]
        plan = Plan((), (), scheduler._last_spans)
        for _ in range(min(done, len(scheduler.inflight))):
            scheduler.inflight.popleft()
            scheduler.inflight.append(InflightStep(plan, list(running), [], [], []))
        for _, _, handle in engine.inflight:
            assert isinstance(handle, SyntheticHandle)
            handle.tokens = tokens


class _Fastest:
    """`StepTimeModel.fastest` for steps of one width, while only such steps are recorded: a minimum over a window.

    It is kept as a queue of ever larger values (Lemire, arXiv:cs/0610046), so that a step costs the same whatever the
    window.
    """

    def __init__(self, step_times: StepTimeModel, width: int) -> None:
        self.size, self.least = step_times.NUM_RECENT, step_times.MIN_KNOWN
        limit = step_times.SIMILAR * width + step_times.FEW
        recent = step_times.recent
        self._place = 0
        self._known: deque[int] = deque()
        """Places of similar steps in the window."""
        self._lowest: deque[tuple[int, float]] = deque()
        for tokens, seconds in recent:
            if tokens <= limit:
                self.append(seconds)
            else:
                self._place += 1

    def append(self, seconds: float) -> None:
        """A similar step was recorded."""
        lowest, known, place = self._lowest, self._known, self._place
        while lowest and lowest[-1][1] >= seconds:
            lowest.pop()
        lowest.append((place, seconds))
        known.append(place)
        self._place = place = place + 1
        if known[0] < place - self.size:
            known.popleft()
        if lowest[0][0] < place - self.size:
            lowest.popleft()

    def seconds(self) -> float | None:
        """The least of those in the window; None: too few are known."""
        return self._lowest[0][1] if len(self._known) >= self.least else None


def floor_ms(seconds: float) -> float:
    """As the engine's process waits: selectors count in milliseconds."""
    return math.floor(seconds * 1e3) * 1e-3
