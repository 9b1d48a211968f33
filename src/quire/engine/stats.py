"""Who is here since when, and the totals: kept once, read by `/stats`, metrics and the library surface."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.engine.events import Completed
from quire.scheduler.sequence import InflightStep, Sequence
from quire.types import FinishReason, RequestStepOutput


@dataclass(slots=True)
class RequestTimes:
    """One request's times, in seconds of the engine's clock."""

    seq: Sequence
    submitted: float
    opened: float | None = None
    first_token: float | None = None


class EngineStats:
    """Totals since the start. `keep`: how many completed requests are remembered."""

    def __init__(self, keep: int) -> None:
        self.requests_by_id: dict[str, RequestTimes] = {}
        self.completed: deque[Completed] = deque(maxlen=keep)
        self.num_finished = self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0
        self.num_steps = self.num_spans = self.max_batch_size = self.num_fed_tokens = 0

    def on_submit(self, seq: Sequence, now: float) -> None:
        self.requests_by_id[seq.request.id] = RequestTimes(seq, now)

    def on_commit(
        self, step: InflightStep, events: list[RequestStepOutput], planned: float, now: float
    ) -> list[Completed]:
        """Enter one step; those that it ended."""
        width, lives, ended = len(step.seqs), self.requests_by_id, []
        self.num_steps += 1
        self.num_spans += width
        self.max_batch_size = max(self.max_batch_size, width)
        for what, id, _, _ in step.decisions:
            if what == "opened" and (life := lives.get(id)) is not None and life.opened is None:
                life.opened = planned
        for id, tokens, finish, _, _, _, cached, *_ in events:
            life = lives[id]
            if tokens:
                self.num_generated_tokens += len(tokens)
                if life.first_token is None:
                    life.first_token = now
                    self.num_prompt_tokens += life.seq.prompt_length
                    self.num_cached_tokens += cached
            if finish is not None:
                ended.append(self.on_finish(id, finish, now))
        return ended

    def on_finish(self, id: str, finish: FinishReason, now: float) -> Completed:
        """A request is over, for whatever reason."""
        life = self.requests_by_id.pop(id)
        seq = life.seq
        self.num_finished += 1
        made = tuple(seq.tokens[seq.prompt_length :])
        done = Completed(
            id, seq.prompt_length, made, finish, life.submitted, life.opened, life.first_token, now, seq.preemptions
        )
        self.completed.append(done)
        return done
