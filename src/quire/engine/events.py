"""What an engine reports to its observers, and its totals. Observers cannot change a decision."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from quire.scheduler.plan import Plan
from quire.scheduler.sequence import Decision, InflightStep, Sequence
from quire.types import FinishReason, Request, RequestStepOutput


class Gauges(NamedTuple):
    """The state after a step."""

    running: int
    waiting: int
    used_blocks: int
    free_blocks: int
    evictions: int
    preemptions: int
    prefix_queried: int
    prefix_hit: int
    discarded_spans: int
    draft_totals: tuple[int, int, int] = (0, 0, 0)
    """Verify spans, drafts fed, drafts accepted."""
    accepted_by_position: tuple[int, ...] = ()
    """Drafts accepted, by position."""
    prefix_cache_resets: int = 0
    """Times that the prefix cache was emptied."""


class Completed(NamedTuple):
    """A request that ended. Times are seconds of the engine's clock."""

    id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish: FinishReason
    submitted: float
    opened: float | None
    first_token: float | None
    finished: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step. Times are seconds of the engine's clock: planned -> launched -> committed."""

    number: int
    planned: float
    launched: float
    committed: float
    plan: Plan
    seqs: list[Sequence]
    decisions: list[Decision]
    events: list[RequestStepOutput]
    ended: list[Completed]
    gauges: Gauges

    @property
    def ids(self) -> list[str]:
        """The request of each span."""
        return [s.request.id for s in self.seqs]


class Observer:
    """What happens in an engine, for metrics, the live page and recordings. What a subclass leaves out does nothing."""

    def on_submit(self, request: Request, now: float) -> None:
        """A request is queued."""

    def on_step(self, record: StepRecord) -> None:
        """A step is committed."""

    def on_end(self, ended: Completed) -> None:
        """A request ended outside a step: aborted, timed out, or failed."""

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """A step failed; these requests were on the device."""


@dataclass(slots=True)
class RequestTimes:
    """One request's times, in seconds of the engine's clock."""

    seq: Sequence
    submitted: float
    opened: float | None = None
    first_token: float | None = None

    def reported(self, event: RequestStepOutput) -> RequestStepOutput:
        """The output of its first token, with the times until then."""
        opened, first = self.opened, self.first_token
        if event.report is None or opened is None or first is None:
            return event
        return event._replace(report=event.report._replace(queued=opened - self.submitted, prefill=first - opened))


class EngineStats:
    """Totals since the start, and the times of requests that have not ended.

    keep: how many completed requests are remembered.
    """

    def __init__(self, keep: int) -> None:
        self.requests_by_id: dict[str, RequestTimes] = {}
        self.completed: deque[Completed] = deque(maxlen=keep)
        self.num_finished = self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0
        self.num_host_tokens = self.num_disk_tokens = self.num_remote_tokens = 0
        self.num_steps = self.num_spans = self.max_batch_size = 0

    def on_submit(self, seq: Sequence, now: float) -> None:
        """A request is queued."""
        self.requests_by_id[seq.request.id] = RequestTimes(seq, now)

    def on_commit(
        self, step: InflightStep, events: list[RequestStepOutput], planned: float, now: float
    ) -> list[Completed]:
        """Count one step, and put times into the reports of `events`. Returns the requests that it ended."""
        width = len(step.seqs)
        times_by_id = self.requests_by_id
        ended = []
        self.num_steps += 1
        self.num_spans += width
        self.max_batch_size = max(self.max_batch_size, width)
        for kind, id, _, _ in step.decisions:
            if kind == "opened" and (times := times_by_id.get(id)) is not None and times.opened is None:
                times.opened = planned
        for i, event in enumerate(events):
            self.num_generated_tokens += len(event[1])
            # A report comes with a request's first token.
            if event.report is not None and (times := times_by_id[event.id]).first_token is None:
                seq, times.first_token = times.seq, now
                self.num_prompt_tokens += seq.prompt_length
                self.num_cached_tokens += event.num_cached
                self.num_host_tokens += seq.num_from_host
                self.num_disk_tokens += seq.num_from_disk
                self.num_remote_tokens += seq.num_from_remote
                events[i] = times.reported(event)
            if (finish := event[2]) is not None:
                ended.append(self.on_finish(event.id, finish, now))
        return ended

    def on_finish(self, id: str, finish: FinishReason, now: float) -> Completed:
        """A request has ended, for whatever reason."""
        times = self.requests_by_id.pop(id)
        seq = times.seq
        self.num_finished += 1
        done = Completed(
            id,
            seq.prompt_length,
            tuple(seq.answer),
            finish,
            times.submitted,
            times.opened,
            times.first_token,
            now,
            seq.preemptions,
        )
        self.completed.append(done)
        return done
