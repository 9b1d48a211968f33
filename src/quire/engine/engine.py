"""The engine: one loop around a scheduler and an executor. Token ids only; runs in any process."""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from typing import Any, ParamSpec, TypeVar, cast

from quire.engine.events import Completed, EngineStats, Gauges, Observer, StepRecord
from quire.engine.executor import Executor, ImageExecutor, StepHandle
from quire.engine.recovery import Recovery
from quire.engine.timing import Clock, LatencyController, PlanDelay, WallClock
from quire.errors import ExecutorLost, InvalidRequest, QuireError, StepFailed, Unavailable, print_traceback
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.plan import Plan
from quire.scheduler.scheduler import Scheduler
from quire.token_masks import token_array
from quire.types import GREEDY, UNLIMITED, FinishReason, Request, RequestStepOutput, SamplingParams, error_output

_Inflight = tuple[float, float, StepHandle]

_LAST_PREFILLS = 1.5
"""Seconds for which prompts of other engines are computed at the end; a server waits 5 for its engine."""

P = ParamSpec("P")
R = TypeVar("R")


def nothing_left() -> bool:
    """See `Engine.prepare`."""
    return False


class Engine:
    """Continuous batching over any executor.

    lookahead: steps launched before the results of earlier ones. step_budget: bounds the tokens of steps; None: the
    scheduler's limit alone. plan_delay: when plans are due; None: at once. keep: completed requests remembered for
    `completed_requests` (a server keeps none). prepare: see `prepare`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        lookahead: int = 0,
        clock: Clock | None = None,
        observers: Iterable[Observer] = (),
        step_budget: LatencyController | None = None,
        plan_delay: PlanDelay | None = None,
        keep: int = UNLIMITED,
        prepare: Callable[[], bool] = nothing_left,
    ) -> None:
        self.scheduler, self.executor, self.lookahead = scheduler, executor, lookahead
        self._prepare = prepare
        self._prepare_last = list[Callable[[], None]]()
        self.clock: Clock = WallClock() if clock is None else clock
        self.observers = tuple(observers)
        self.step_budget = step_budget
        self.plan_delay = plan_delay
        self.description = executor.describe()
        self.inflight: deque[_Inflight] = deque()
        self.recovery = Recovery(scheduler)
        self.stats = EngineStats(keep)
        self.failures = 0
        self.lost: ExecutorLost | None = None
        self._outputs: list[RequestStepOutput] = []
        self._masks_due = False
        """Whether the newest step in flight waits for its masks."""
        self._last_commit = -math.inf
        self._deadlines: list[tuple[float, str]] = []
        self._ids = itertools.count()

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[RequestStepOutput]:
        """Plan, launch, and commit what is due. Returns what each request got; empty when idle, without blocking."""
        self._expire()
        try:
            self._step()
        except ExecutorLost as lost:
            self._executor_lost(lost)
        except StepFailed as failure:
            self._recover(failure)
        outputs, self._outputs = self._outputs, []
        return self.scheduler.kv.offload.outgoing(outputs)

    def _take_incoming(self) -> None:
        """Add what other engines ask for; end what they no longer want."""
        offload = self.scheduler.kv.offload
        for each in offload.incoming():
            if isinstance(each, str):
                self.abort(each)
                continue
            try:
                self.add(each)
            except InvalidRequest:
                offload.refuse(each.id)

    def _step(self) -> None:
        scheduler, flight = self.scheduler, self.inflight
        if self._masks_due:
            self._hand_in_masks()
        planned = self.clock.now()
        scheduler.kv.pins.advance(planned)
        self._take_incoming()
        for seq in scheduler.poll_offload(planned):
            self.recovery.admit(seq)
        budget = self.step_budget
        decoding = len(scheduler.running) if scheduler.is_decoding else 0
        most = UNLIMITED
        if budget is not None:
            most = budget.max_tokens(decoding, scheduler.step_times, scheduler.prompt_context)
        plan = scheduler.plan(most)
        _as_step_failure(scheduler.kv.offload.flush)
        # Where nothing runs, the blocks that the first one in the queue needs are those that copies hold.
        scheduler.waiting.blocked = not (plan or flight) and bool(scheduler.kv.offload.held_blocks())
        if plan:
            launched = self.clock.now()
            self._load_images(plan)
            flight.append((planned, launched, _as_step_failure(self.executor.launch, plan)))
            if self.plan_delay is not None:
                self.plan_delay.on_launch(planned)
        elif flight:
            self._commit()  # nothing to add: wait for a step in flight
        self._masks_due = bool(plan and plan.masked_spans)
        if self._masks_due and scheduler.masks_ready:
            self._hand_in_masks()
        # Masks need every token before them. While they are waited for, outputs are passed on: the device, which
        # samples for a fraction of a step's time, gets its next forward first.
        while len(flight) > self.lookahead + self._masks_due:
            self._commit()
        if not flight:  # there may be no further step for long
            _as_step_failure(scheduler.kv.offload.flush)

    def _hand_in_masks(self) -> None:
        """Commit the steps before the newest one, and have it sampled."""
        while not self.scheduler.masks_ready:
            self._commit()
        _as_step_failure(self.inflight[-1][2].sample, _as_step_failure(self.scheduler.masks))
        self._masks_due = False

    def _load_images(self, plan: Plan) -> None:
        """Hand over the pixels of images whose encoding begins: a plan has none."""
        for span in plan.encode:
            if not span.first_layer:
                image = self.scheduler.encoder_cache.pixels(span.number)
                cast(ImageExecutor, self.executor).load_image(span.number, image)

    def _commit(self) -> None:
        planned, launched, handle = self.inflight.popleft()
        waited = not _as_step_failure(handle.is_done)
        result = _as_step_failure(handle.result)
        step = self.scheduler.inflight[0]
        events = self.scheduler.commit(result)
        now = self.clock.now()
        seconds = now - max(launched, self._last_commit)
        step_times = self.scheduler.step_times
        context = step.seqs[-1].num_computed if step.seqs else None
        fed = step_times.record(step.plan, seconds, latency=now - launched, waited=waited, context=context)
        if fed and self.step_budget is not None:
            self.step_budget.on_commit(step.plan, seconds)
        if self.plan_delay is not None:
            self.plan_delay.on_commit(waited, step_times)
        self._last_commit = now
        ended = self.stats.on_commit(step, events, planned, now)
        if self.recovery.active:
            self.recovery.on_step_passed(step.seqs)
        self._outputs += events
        if not self.observers:
            return
        record = StepRecord(
            self.stats.num_steps,
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
            _notify(observer.on_step, record)

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
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop=frozenset(stop),
                seed=sampling.seed or 0,
                priority=priority,
                deadline=deadline,
            )
        )
        return id

    def add(self, request: Request, constraint: Constraint = FREE) -> None:
        """Queue a request; a PENDING constraint is set later by `set_constraint`.

        Raises InvalidRequest naming the field that cannot work.
        """
        description = self.description
        length = len(request.prompt) + request.max_new_tokens
        if length > description.max_model_len:
            raise InvalidRequest(
                f"prompt ({len(request.prompt)} tokens) plus max_tokens ({request.max_new_tokens}) is {length}, "
                f"and this model's context holds {description.max_model_len}",
                param="prompt",
            )
        _check_ids(request, description.vocab_size)
        self._check_images(request)
        structure = request.sampling.structured_outputs
        if structure is not None and (constraint is FREE or not description.supports_masks):
            raise InvalidRequest(
                f"{structure.param}: this engine does not support structured output", param=structure.param
            )
        idle = not self.can_step
        seq = self.scheduler.add(request, constraint)
        self.recovery.admit(seq)
        if self.plan_delay is not None:
            self.plan_delay.on_arrival(len(request.prompt), idle)
        now = self.clock.now()
        self.stats.on_submit(seq, now)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        for observer in self.observers:
            _notify(observer.on_submit, request, now)

    def _check_images(self, request: Request) -> None:
        """Raises InvalidRequest for images that this engine cannot encode."""
        if request.images and not self.description.encoder_layers:
            raise InvalidRequest("images: this executor has no encoder of images", param="messages", code="no_images")
        capacity = self.scheduler.encoder_cache.capacity
        for image in request.images:
            if image.length > capacity:
                raise InvalidRequest(
                    f"an image of {image.width} x {image.height} pixels becomes {image.length} tokens, and there is "
                    f"room for {capacity} (--encoder-cache-size): send a smaller one",
                    param="messages",
                    code="image_too_large",
                )

    def set_constraint(self, id: str, constraint: Constraint) -> None:
        """The constraint of a waiting request is compiled. Requests that have ended are ignored."""
        seq = self.scheduler.sequences.get(id)
        if seq is not None:
            self.scheduler.waiting.constraint_ready(seq, constraint)
            self.recovery.admit(seq)

    def abort(self, id: str, reason: FinishReason = "abort") -> None:
        """End a request now; its blocks are free within a step. Unknown and ended ids are ignored."""
        self._finish(RequestStepOutput(id, (), reason), reason)

    def fail(self, id: str, error: QuireError) -> None:
        """End a request with an error, whose status says whose mistake it is."""
        self._finish(error_output(id, error), "error")

    def _finish(self, output: RequestStepOutput, reason: FinishReason) -> None:
        id = output.id
        if self.scheduler.abort(id, reason) is not None:
            ended = self.stats.on_finish(id, reason, self.clock.now())
            if self.recovery.active:
                self.recovery.on_step_passed(())
            self._outputs.append(output)
            for observer in self.observers:
                _notify(observer.on_end, ended)

    def _expire(self) -> None:
        while self._deadlines and (self._deadlines[0][1] not in self.stats.requests_by_id or self._overdue()):
            self.abort(heapq.heappop(self._deadlines)[1], "timeout")

    def _overdue(self) -> bool:
        return self._deadlines[0][0] <= self.clock.now()

    def reset_prefix_cache(self) -> None:
        """Sequences admitted from now on find nothing computed before; running ones go on."""
        self.scheduler.kv.invalidate(self.scheduler.sequences.values())

    # ---------------------------------------------------------------- failure

    def _recover(self, failure: StepFailed) -> None:
        """Start again from committed tokens; the culprit is found by halving and failed alone."""
        self._drop_inflight()
        self.failures += 1
        suspects, culprit = self.recovery.on_step_failed()
        now = self.clock.now()
        for observer in self.observers:
            _notify(observer.on_failure, str(failure), [s.request.id for s in suspects], now)
        if culprit is not None:  # what went wrong is for the log: it may name files and addresses
            self.fail(culprit.request.id, StepFailed(f"the engine could not run this request ({_root_cause(failure)})"))

    def _executor_lost(self, lost: ExecutorLost) -> None:
        """Every row is lost, and no request is to blame: those with a row fail, those that wait may run later."""
        self.lost = lost
        self._drop_inflight()
        self.failures += 1
        sequences, now = self.recovery.on_executor_lost(), self.clock.now()
        for observer in self.observers:
            observer.on_failure(str(lost), [s.request.id for s in sequences], now)
        for seq in sequences:
            self.fail(seq.request.id, Unavailable(lost.for_clients()))

    def abandon(self) -> None:
        """End every request and forget every step in flight: on close, and after a `step` that raised.

        Raises what keeps the executor from starting again.
        """
        for id in list(self.scheduler.sequences):
            self.abort(id)
        self.recovery.on_executor_lost()
        self._outputs.clear()
        self._drop_inflight()

    def _drop_inflight(self) -> None:
        """Forget every step in flight and every row. Raises what keeps the executor from starting again."""
        self.inflight.clear()
        self._masks_due = False
        self.executor.reset()

    # ---------------------------------------------------------------- what can be read

    @property
    def completed_requests(self) -> deque[Completed]:
        """Requests that ended, oldest first; as many as `keep`."""
        return self.stats.completed

    @property
    def has_pending_work(self) -> bool:
        """Whether a request has not ended, or outputs have not been returned."""
        return self.scheduler.has_work or bool(self._outputs)

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do; not while all that is left waits for grammars, or for copies of K/V."""
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        queued = waiting.num_queued and not waiting.blocked
        return bool(queued or scheduler.running or scheduler.inflight or self._outputs)

    def time_to_next_plan(self) -> float:
        """Seconds by which the next `step` can be delayed, so that requests arriving meanwhile are in it; 0: it is
        due."""
        if self.plan_delay is None:
            return 0.0
        scheduler = self.scheduler
        if not self.inflight:
            full = bool(scheduler.running) or scheduler.waiting.num_queued >= scheduler.max_num_seqs
            if self.lookahead or full or self._outputs:
                return 0.0
            return self.plan_delay.until_gathered(scheduler.max_num_batched_tokens, scheduler.step_times)
        _, launched, _ = self.inflight[0]
        num_tokens = sum([span[1] for span in scheduler.inflight[0].plan.spans])
        return self.plan_delay.remaining(num_tokens, max(launched, self._last_commit), scheduler.step_times)

    def gauges(self) -> Gauges:
        """The state after the last step."""
        scheduler = self.scheduler
        kv, drafted = scheduler.kv, scheduler.draft_stats
        pool = kv.block_pool
        free = pool.num_free
        return Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=pool.num_blocks - free,
            free_blocks=free,
            evictions=pool.evictions,
            preemptions=scheduler.num_preemptions,
            prefix_queried=kv.num_queried_tokens,
            prefix_hit=kv.num_hit_tokens,
            discarded_spans=sum(scheduler.discarded_spans.values()),
            draft_totals=(drafted.num_verified, drafted.num_drafted, drafted.num_accepted),
            accepted_by_position=tuple(drafted.accepted_by_position),
            prefix_cache_resets=kv.num_resets,
        )

    def metrics_snapshot(self) -> dict[str, Any]:
        """The counters of `/stats`, plain JSON."""
        gauges = self.gauges()
        stats = self.stats
        num_blocks = self.scheduler.kv.block_pool.num_blocks
        return {
            "waiting_requests": gauges.waiting,
            "active_requests": gauges.running,
            "completed_requests": stats.num_finished,
            "generated_tokens": stats.num_generated_tokens,
            "decode_steps": stats.num_steps,
            "average_batch_size": stats.num_spans / stats.num_steps if stats.num_steps else 0.0,
            "max_batch_observed": stats.max_batch_size,
            "cache": {
                "page_size": self.scheduler.kv.block_size,
                "max_pages": num_blocks,
                "used_pages": gauges.used_blocks,
                "free_pages": gauges.free_blocks,
                "active_sequences": gauges.running,
                "pressure_events": gauges.preemptions,
                "evictions": gauges.evictions,
                "utilization": gauges.used_blocks / num_blocks if num_blocks else 0.0,
                "policy": type(self.scheduler.kv.pins.others).__name__.lower(),
            },
        }

    def prepare(self) -> bool:
        """While there is nothing to step, some hundredths of a second of what makes later steps faster. False: all of
        it is done."""
        if self.can_step:
            return False
        if self._prepare():
            return True
        if self._prepare_last:
            self._prepare_last.pop()()
        return False

    def prepare_last(self, work: Callable[[], None]) -> None:
        """Have `prepare` do this, too, once all else is done."""
        self._prepare_last.append(work)

    def wait(self, seconds: float) -> None:
        """While there is nothing to step, and requests wait for blocks from another tier: return when some have
        arrived, or after so many seconds."""
        if not self.can_step:
            self.scheduler.kv.offload.wait(seconds)

    def close(self) -> None:
        """Finish what other engines asked for, if it does not take long; end what copies blocks; close the executor."""
        until = self.clock.now() + _LAST_PREFILLS
        while self.scheduler.kv.offload.drain() and self.clock.now() < until:
            self.wait(0.02)
            self.step()
        self.scheduler.kv.offload.close()
        self.executor.close()


def _check_ids(request: Request, vocab_size: int) -> None:
    """Raises InvalidRequest for token ids outside the vocabulary."""
    for name in ("prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"):
        ids = request.prompt if name == "prompt" else getattr(request.sampling, name)
        if ids and not in_vocabulary(ids, vocab_size):
            raise InvalidRequest(f"{name}: token ids must be from 0 to {vocab_size - 1}", param=name)


def in_vocabulary(ids: Collection[int], vocab_size: int) -> bool:
    """Whether all are token ids of a vocabulary of this size."""
    try:
        found = token_array(ids)
    except struct.error:
        return False
    return bool(found.view("uint64").max() < vocab_size)  # what is negative is very large then


def _as_step_failure(run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`run(...)`. Raises StepFailed for any exception, of a kernel or a grammar, so that one request is blamed."""
    try:
        return run(*args, **kwargs)
    except StepFailed:
        raise
    except Exception as failure:
        raise StepFailed(f"{type(failure).__name__}: {failure}") from failure


def _notify(observe: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call an observer; print what it raises, since observers must not end the engine."""
    try:
        observe(*args, **kwargs)
    except Exception:
        print_traceback()


def _root_cause(failure: BaseException) -> str:
    """The class of the innermost exception."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return type(failure).__name__
