"""What an engine tells its observers. Observers watch; nothing they do changes a decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.scheduler.plan import Plan
from quire.scheduler.sequence import Decision, Sequence
from quire.types import FinishReason, Request, RequestStepOutput


class Gauges(NamedTuple):
    """How things stood after a step. Pages are KV blocks; `used_tokens` are positions written in used pages."""

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
    """A request that ended, as the library surface keeps it. Times are the engine clock's, in seconds."""

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
    """One committed step. Times are the engine clock's seconds: planned -> launched -> committed."""

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
        """Whose spans the plan's are."""
        return [s.request.id for s in self.seqs]


class Observer(Protocol):
    """Metrics, traces, the live page, the flight recorder."""

    def on_submit(self, request: Request, now: float) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_end(self, ended: Completed) -> None:
        """A request ended outside a step: aborted, timed out, or failed."""

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """A step failed; these requests were on the device."""
