"""The engine: one loop around a scheduler and an executor. Token ids only; runs in any process."""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, ParamSpec, TypeVar

from quire.core.constraint import FREE, Constraint
from quire.core.plan import Plan
from quire.core.scheduler import Scheduler
from quire.engine.clock import Clock, WallClock
from quire.engine.events import Completed, Gauges, Observer, StepRecord
from quire.engine.executor import Executor, Handle
from quire.engine.ledger import Ledger
from quire.engine.pacer import NoPace, Pacer
from quire.engine.recovery import Recovery
from quire.engine.slack import NoSlack, Slack
from quire.errors import ExecutorLost, InvalidRequest, QuireError, StepFailed, Unavailable
from quire.text.harmless import block
from quire.values import GREEDY, MANY, FinishReason, Request, SamplingParams, Tokens, failed

_Flying = tuple[float, float, Handle]

P = ParamSpec("P")
R = TypeVar("R")


class Engine:
    """Continuous batching over any executor.

    depth: steps launched ahead of results; a number, not a mode. keep: completed requests remembered for
    `completed_requests` (a server keeps none).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 0,
        clock: Clock | None = None,
        observers: Iterable[Observer] = (),
        pacer: Pacer | None = None,
        slack: Slack | None = None,
        keep: int = MANY,
    ) -> None:
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self.clock: Clock = WallClock() if clock is None else clock
        self.observers = tuple(observers)
        self.pacer: Pacer = NoPace() if pacer is None else pacer
        self.slack: Slack = NoSlack() if slack is None else slack
        self.about = executor.describe()
        self.flight: deque[_Flying] = deque()
        self.recovery = Recovery(scheduler)
        self.ledger = Ledger(keep)
        self.failures = 0
        self._out: list[Tokens] = []
        self._committed = -math.inf
        self._deadlines: list[tuple[float, str]] = []
        self._ids = itertools.count()

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[Tokens]:
        """Plan, launch, and commit what is due. What each request got; empty when idle. Never blocks when idle."""
        self._expire()
        try:
            self._step()
        except ExecutorLost as lost:
            self._give_up(lost)
        except StepFailed as failure:
            self._recover(failure)
        out, self._out = self._out, []
        return out

    def _step(self) -> None:
        scheduler, flight = self.scheduler, self.flight
        planned = self.clock.now()
        plan = scheduler.plan(self.pacer.budget(len(scheduler.running)))
        if plan:
            flight.append((planned, self.clock.now(), _tried(self.executor.launch, plan)))  # its forward starts now
            self.slack.launched(planned)
        elif flight:
            self._commit()  # nothing to add: let one come home
        if plan and plan.masked:  # masks need every token before them
            while len(flight) > 1:
                self._commit()
            _tried(flight[0][2].sample, _tried(scheduler.masks))
        while len(flight) > self.depth:
            self._commit()

    def _commit(self) -> None:
        planned, launched, handle = self.flight.popleft()
        waited = not _tried(handle.over)
        result = _tried(handle.result)
        step = self.scheduler.flight[0]
        events = self.scheduler.commit(result)
        now = self.clock.now()
        took = now - max(launched, self._committed)
        fed = _fed(step.plan)
        self.pacer.learn(fed, took)
        self.slack.learn(fed, took, waited=waited)
        if step.plan.drafts:
            self.scheduler.speculation.timed(step.plan, took)
        self._committed = now
        ended = self.ledger.committed(step, events, planned, now)
        if self.recovery.active:
            self.recovery.passed(step.seqs)
        self._out += events
        record = StepRecord(
            self.ledger.steps,
            planned,
            launched,
            now,
            step.plan,
            step.seqs,
            step.decisions,
            events,
            ended,
            self.gauges(),
        )
        for observer in self.observers:
            _shown(observer.on_step, record)

    # ---------------------------------------------------------------- requests

    def submit(
        self,
        tokens: Seq[int],
        max_new_tokens: int = 16,
        *,
        id: str | None = None,
        sampling: SamplingParams = GREEDY,
        stop: Iterable[int] = (),
        priority: int = 0,
        timeout: float = math.inf,
    ) -> str:
        """Queue a prompt of token ids; returns its id. Raises InvalidRequest if it can never run."""
        id = f"req-{next(self._ids)}" if id is None else id
        deadline = self.clock.now() + timeout
        self.add(
            Request(
                id=id,
                prompt=tuple(tokens),
                max_new=max_new_tokens,
                sampling=sampling,
                stop=frozenset(stop),
                seed=sampling.seed or 0,
                priority=priority,
                deadline=deadline,
            )
        )
        return id

    def add(self, request: Request, constraint: Constraint = FREE) -> None:
        """Queue a request as the rim makes them; a PENDING constraint is provided later.

        Raises InvalidRequest naming the field that cannot work.
        """
        about = self.about
        length = len(request.prompt) + request.max_new
        if length > about.max_model_len:
            raise InvalidRequest(
                f"prompt ({len(request.prompt)} tokens) plus max_tokens ({request.max_new}) is {length}, "
                f"and this model's context holds {about.max_model_len}",
                param="prompt",
            )
        request.check_ids(about.vocab_size)
        asked = request.sampling.structured_outputs
        if asked is not None and (constraint is FREE or not about.masks):
            raise InvalidRequest(f"{asked.param}: this engine cannot make structured output", param=asked.param)
        seq = self.scheduler.add(request, constraint)
        self.recovery.admit(seq)
        now = self.clock.now()
        self.ledger.submitted(seq, now)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        for observer in self.observers:
            _shown(observer.on_submit, request, now)

    def provide(self, id: str, constraint: Constraint) -> None:
        """The constraint that a request waited for is made. Requests that have ended are fine."""
        seq = self.scheduler.seqs.get(id)
        if seq is not None:
            self.scheduler.waiting.ready(seq, constraint)
            self.recovery.admit(seq)

    def abort(self, id: str, why: FinishReason = "abort") -> None:
        """End a request now; its pages are free within a step. Unknown and ended ids are fine."""
        self._end(Tokens(id, (), why), why)

    def fail(self, id: str, error: QuireError) -> None:
        """The same, for a request that cannot be answered; its status says whose mistake that is."""
        self._end(failed(id, error), "error")

    def _end(self, told: Tokens, why: FinishReason) -> None:
        id = told.id
        if self.scheduler.abort(id, why) is not None:
            ended = self.ledger.ended(id, why, self.clock.now())
            if self.recovery.active:
                self.recovery.passed(())
            self._out.append(told)
            for observer in self.observers:
                _shown(observer.on_end, ended)

    def _expire(self) -> None:
        while self._deadlines and (self._deadlines[0][1] not in self.ledger.lives or self._overdue()):
            self.abort(heapq.heappop(self._deadlines)[1], "timeout")

    def _overdue(self) -> bool:
        return self._deadlines[0][0] <= self.clock.now()

    def reset_prefix_cache(self) -> None:
        """Whoever is opened from now on finds nothing of what was computed until now; who runs goes on."""
        self.scheduler.kv.forget(self.scheduler.seqs.values())

    # ---------------------------------------------------------------- failure

    def _recover(self, failure: StepFailed) -> None:
        """Start again from committed tokens; the culprit is found by halving and failed alone."""
        self.flight.clear()
        self.executor.reset()
        self.failures += 1
        suspects, guilty = self.recovery.failed()
        now = self.clock.now()
        for observer in self.observers:
            _shown(observer.on_failure, str(failure), [s.request.id for s in suspects], now)
        if guilty is not None:  # what went wrong is for the log: it may name files and addresses
            self.fail(guilty.request.id, StepFailed(f"the engine could not run this request ({_kind(failure)})"))

    def _give_up(self, lost: ExecutorLost) -> None:
        """Every row is lost and nobody to blame: who had one fails, who waits may find the executor back."""
        self.flight.clear()
        self.executor.reset()
        self.failures += 1
        lives, now = self.recovery.lost(), self.clock.now()
        for observer in self.observers:
            observer.on_failure(str(lost), [s.request.id for s in lives], now)
        for seq in lives:  # which executor, and why, is for the log
            self.fail(seq.request.id, Unavailable("the executor was lost while this request ran: it may be sent again"))

    def abandon(self) -> None:
        """End every request and forget every step in flight: for who closes, and after a `step` that raised.

        Raises what keeps the executor from starting again.
        """
        for id in list(self.scheduler.seqs):
            self.abort(id)
        self.flight.clear()
        self.recovery.lost()
        self._out.clear()
        self.executor.reset()

    # ---------------------------------------------------------------- what can be read

    @property
    def completed_requests(self) -> deque[Completed]:
        """Requests that ended, oldest first; as many as `keep`."""
        return self.ledger.completed

    @property
    def has_pending_work(self) -> bool:
        return self.scheduler.busy or bool(self._out)

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do: not so while all that is left waits for a constraint."""
        scheduler = self.scheduler
        return bool(scheduler.waiting.queued or scheduler.running or scheduler.flight or self._out)

    def spare(self) -> float:
        """Seconds for which the next `step` can wait, so that who comes meanwhile is in it; 0: it is due."""
        if not self.flight:
            return 0.0
        _, launched, _ = self.flight[0]
        return self.slack.left(_fed(self.scheduler.flight[0].plan), max(launched, self._committed))

    def gauges(self) -> Gauges:
        scheduler = self.scheduler
        kv, drafted = scheduler.kv, scheduler.drafted
        pool = kv.pool
        free = pool.free
        return Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_pages=pool.pages - free,
            free_pages=free,
            evictions=pool.evictions,
            preemptions=scheduler.preempted,
            prefix_queried=kv.queried,
            prefix_hit=kv.hit,
            discarded_spans=sum(scheduler.wasted.values()),
            drafted=(drafted.spans, drafted.fed, drafted.accepted),
            accepted_at=tuple(drafted.by_position),
            resets=kv.resets,
        )

    def metrics_snapshot(self) -> dict[str, Any]:
        """The counters of `/stats`, plain JSON."""
        gauges, ledger = self.gauges(), self.ledger
        pages = self.scheduler.kv.pool.pages
        return {
            "waiting_requests": gauges.waiting,
            "active_requests": gauges.running,
            "completed_requests": ledger.requests,
            "generated_tokens": ledger.generated,
            "decode_steps": ledger.steps,
            "average_batch_size": ledger.spans / ledger.steps if ledger.steps else 0.0,
            "max_batch_observed": ledger.widest,
            "cache": {
                "page_size": self.scheduler.kv.page_size,
                "max_pages": pages,
                "used_pages": gauges.used_pages,
                "free_pages": gauges.free_pages,
                "active_sequences": gauges.running,
                "pressure_events": gauges.preemptions,
                "evictions": gauges.evictions,
                "utilization": gauges.used_pages / pages if pages else 0.0,
                "policy": type(self.scheduler.kv.pool.shelf).__name__.lower(),
            },
        }

    def close(self) -> None:
        self.executor.close()


def _fed(plan: Plan) -> int:
    return sum([span[1] for span in plan.spans])


def _tried(run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`run(...)`. Raises StepFailed for whatever goes wrong, in a kernel or a grammar: one request is to pay."""
    try:
        return run(*args, **kwargs)
    except StepFailed:
        raise
    except Exception as failure:
        raise StepFailed(f"{type(failure).__name__}: {failure}") from failure


def _shown(observe: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Tell an observer; what it cannot take is said, and is nobody else's affair."""
    try:
        observe(*args, **kwargs)
    except Exception:
        print(block(traceback.format_exc()), file=sys.stderr, flush=True)


def _kind(failure: BaseException) -> str:
    """What kind of error is at the bottom of it."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return type(failure).__name__
