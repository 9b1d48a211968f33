"""Who is here since when, and the totals: kept once, read by `/stats`, metrics and the library surface."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.core.sequence import Sequence
from quire.core.step import Step
from quire.engine.events import Completed
from quire.values import FinishReason, Tokens


@dataclass(slots=True)
class Life:
    """One request's times, in seconds of the engine's clock."""

    seq: Sequence
    submitted: float
    opened: float | None = None
    first_token: float | None = None


class Ledger:
    """Totals since the start. `keep`: how many completed requests are remembered."""

    def __init__(self, keep: int) -> None:
        self.lives: dict[str, Life] = {}
        self.completed: deque[Completed] = deque(maxlen=keep)
        self.requests = self.prompted = self.cached = self.generated = 0
        self.steps = self.spans = self.widest = self.fed = 0

    def submitted(self, seq: Sequence, now: float) -> None:
        self.lives[seq.request.id] = Life(seq, now)

    def committed(self, step: Step, events: list[Tokens], planned: float, now: float) -> list[Completed]:
        """Enter one step; those that it ended."""
        width, lives, ended = len(step.seqs), self.lives, []
        self.steps += 1
        self.spans += width
        self.widest = max(self.widest, width)
        for what, id, _, _ in step.decisions:
            if what == "opened" and (life := lives.get(id)) is not None and life.opened is None:
                life.opened = planned
        for id, tokens, finish, _, _, _, cached, *_ in events:
            life = lives[id]
            if tokens:
                self.generated += len(tokens)
                if life.first_token is None:
                    life.first_token = now
                    self.prompted += life.seq.prompt_length
                    self.cached += cached
            if finish is not None:
                ended.append(self.ended(id, finish, now))
        return ended

    def ended(self, id: str, finish: FinishReason, now: float) -> Completed:
        """A request is over, for whatever reason."""
        life = self.lives.pop(id)
        seq = life.seq
        self.requests += 1
        made = tuple(seq.tokens[seq.prompt_length :])
        done = Completed(
            id, seq.prompt_length, made, finish, life.submitted, life.opened, life.first_token, now, seq.preemptions
        )
        self.completed.append(done)
        return done
