"""An executor that knows how long steps take and how many drafts are right, and nothing else: for whole deployments on
a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.engine.executor import Description
from quire.engine.timing import VirtualClock
from quire.executors.synthetic import SyntheticHandle
from quire.scheduler.plan import Plan, Span
from quire.scheduler.step_time import StepCost
from quire.sim.shared_reads import NO_SHARING, SharedReads, Sharing

FIRST_TOKEN = 1 << 30
"""Answers consist of one token each, from here on, chosen by the request's seed. Prompts have smaller ones."""


class SimulatedExecutor:
    """Steps run one after another, as on a device, and take what `cost` says: or in each stage of a pipeline, whose
    stages a step passes one after another, `hop` seconds apart, what the stage's of `stages` says.

    An answer repeats one token, so that a prompt which continues it can be foretold. acceptance: the probability that a
    draft is right if those before it were. noise: factors of a step's time, each as likely; empty: none. seed: of both.
    sharing: of reads of prefixes.
    """

    def __init__(
        self,
        description: Description,
        cost: StepCost,
        clock: VirtualClock,
        *,
        acceptance: float = 0.0,
        noise: Sequence[float] = (),
        seed: int = 0,
        stages: Sequence[StepCost] = (),
        hop: float = 0.0,
        sharing: Sharing = NO_SHARING,
    ) -> None:
        self.description, self.cost, self.clock = description, cost, clock
        self.costs = tuple(stages) or (cost,)
        self.acceptance, self.noise, self.seed = acceptance, noise, seed
        self.lengths: dict[int, int] = {}
        """By row, positions with K/V."""
        self.shared = SharedReads(sharing)
        self.answers: dict[int, list[int]] = {}
        """By row, what a step without drafts samples."""
        self.hop, self.busy_until = hop, [0.0] * len(self.costs)
        """When each stage has done what was launched."""
        self.busy = 0.0
        """Seconds that steps have taken in all, of a stage on average."""
        self._random = random.Random(seed)

    def describe(self) -> Description:
        """Its sizes."""
        return self.description

    def launch(self, plan: Plan) -> SyntheticHandle:
        """Count what the step feeds and reads, and when it is done."""
        lengths, answers = self.lengths, self.answers
        blocks = dict(plan.new_blocks) if plan.new_sequences else {}
        for opened in plan.new_sequences:
            lengths[opened.row] = opened.num_computed
            answers[opened.row] = [answer_token(opened.seed)]
            self.shared.open(opened.row, blocks[opened.row][0], opened.num_computed)
        tokens: list[list[int]] = []
        num_fed = kv = rows = 0
        pairs = 0.0
        for span in plan.spans:
            row, fed, num_samples, _ = span
            length = lengths[row] + fed
            num_fed += fed
            kv += length
            rows += num_samples
            if fed > 1:
                pairs += fed * (length - (fed - 1) / 2)
            if num_samples > 1:
                length, sampled = self._verify(span, length)
                tokens.append(sampled)
            else:
                tokens.append(answers[row] if num_samples else [])
            lengths[row] = length
        if num_fed == len(plan.spans):  # attention to prompts reads each sequence's own
            kv -= self.shared.spared(span.row for span in plan.spans)
        most_drafts = max(plan.num_drafts, default=0)
        seconds = [cost.seconds(num_fed, kv, rows, pairs) + cost.per_draft * most_drafts for cost in self.costs]
        return SyntheticHandle(self.clock, self.run(seconds), tokens, {})

    def _verify(self, span: Span, length: int) -> tuple[int, list[int]]:
        """The length after some of a span's drafts were right, and its tokens."""
        num_drafts, accepted = span.num_samples - 1, 0
        while accepted < num_drafts and self._random.random() < self.acceptance:
            accepted += 1
        return length - (num_drafts - accepted), self.answers[span.row] * (accepted + 1)

    def run(self, seconds: Sequence[float]) -> float:
        """When a step of so many seconds in each stage is done that is launched now."""
        factor = self.noise[int(self._random.random() * len(self.noise))] if self.noise else 1.0
        self.busy += sum(seconds) * factor / len(seconds)
        done, busy = self.clock.time - self.hop, self.busy_until
        for stage, until in enumerate(busy):
            done += self.hop
            busy[stage] = done = (until if until > done else done) + seconds[stage] * factor
        return done

    def reset(self) -> None:
        """Forget all rows."""
        self.lengths, self.answers, self.busy_until = {}, {}, [0.0] * len(self.busy_until)
        self.shared.clear()

    def close(self) -> None:
        """Forget all rows."""
        self.reset()


def answer_token(seed: int) -> int:
    """The token that the answer to a request of this seed repeats."""
    return FIRST_TOKEN + seed
