"""How many tokens to draft for a sequence's next step: measured acceptance against measured time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from quire.scheduler.sequence import Sequence
from quire.scheduler.step_time import StepTimeModel


class SpeculationPolicy(Protocol):
    """Decides how many tokens to draft, from how drafts fared and what steps took."""

    max_drafts: int
    """Most drafts of a sequence; 0: no speculation."""
    step_times: StepTimeModel
    """What steps take. The engine records them."""

    def begin_plan(self, width: int) -> None:
        """A plan is begun, with `width` sequences that run or could."""

    def num_drafts(self, seq: Sequence) -> int:
        """Drafts to make for `seq` once the step being planned has sampled."""

    def record_acceptance(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of `num_drafted` drafts in a row `num_accepted` were right."""

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended."""


class DraftStats:
    """Totals, as vLLM's spec_decode counters: verified spans, drafts, accepted drafts, and those by position."""

    def __init__(self) -> None:
        self.num_verified = self.num_drafted = self.num_accepted = 0
        self.accepted_by_position: list[int] = []

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified span."""
        self.num_verified += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.accepted_by_position += [0] * (num_drafted - len(self.accepted_by_position))
        for i in range(num_accepted):
            self.accepted_by_position[i] += 1


@dataclass(slots=True)
class FixedDrafts:
    """Always the same number of drafts."""

    max_drafts: int = 0
    step_times: StepTimeModel = field(default_factory=StepTimeModel)

    def begin_plan(self, width: int) -> None:
        """Nothing to decide."""

    def num_drafts(self, seq: Sequence) -> int:
        """Always `max_drafts`."""
        return self.max_drafts

    def record_acceptance(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Nothing changes."""

    def remove(self, seq: Sequence) -> None:
        """Nothing is kept."""


def draft_counts(max_drafts: int) -> tuple[int, ...]:
    """The numbers of drafts that are tried where up to `max_drafts` are possible."""
    return tuple(sorted({0, 1, 2, max_drafts // 2, 3 * max_drafts // 4, max_drafts} & set(range(max_drafts + 1))))


class AdaptiveDrafts:
    """Chooses the number of drafts with the most expected tokens a second; 0 unless drafting pays by `MARGIN`.

    d drafts bring 1 + a1 + a1 a2 + ... tokens, where ai is the probability that draft i is right if those before it
    were (with one probability for all: Leviathan et al., arXiv:2211.17192). The probabilities are measured. So is the
    time of a step for each number of drafts and width, since verification is nearly free for one row and expensive for
    many. A sequence whose own drafts keep missing is drafted less than the rest.

    step_times: with times that the executor measured at its start, only numbers of drafts that are expected to pay are
    tried. Without, each is tried for a few steps, as long as the ones before do not speak against it, and one again
    ever more rarely.

    catch_up_seconds: seconds for each token that a draft model has not been fed. A sequence is not drafted for if what
    is left of it cannot pay that back twice.
    """

    MARGIN = 1.05
    TRIES = 6
    """Steps for which a number of drafts is tried: the first two feed and draft different numbers."""
    SOON = 64
    AGAIN = 1024
    """Steps after which drafting is tried again where it is off, then twice as many. SOON where it is off by
    prediction: how often drafts are right is not predicted, and a few sequences with one draft each measure it."""
    CHECK = 128
    """Steps after which another number is tried where drafting is on, twice as many up to AGAIN while that changes
    nothing: what was measured in a slow moment must not last."""
    PROBES = 4
    """Sequences drafted for in a trial that only measures whether drafts are right."""
    HOPELESS = 0.25
    PRIOR = 8
    """Weight of the assumed acceptance rate, in tests; in the long run the last fifty count."""

    def __init__(
        self,
        max_drafts: int,
        step_times: StepTimeModel | None = None,
        *,
        catch_up_seconds: float = 0.0,
    ) -> None:
        self.max_drafts = max_drafts
        self.step_times = StepTimeModel() if step_times is None else step_times
        self.catch_up_seconds = catch_up_seconds
        has_initial = self.step_times.has_initial
        self.draft_counts = draft_counts(max_drafts)
        self.acceptance_rates = [0.7] * max_drafts
        """How often a draft is right where those before it were, by position. A position that was never tested has the
        rate of the last that was."""
        self._tests = [0] * max_drafts
        self.chosen = 0 if has_initial else max_drafts
        self._acceptance_by_sequence: dict[int, float] = {}
        self._saving = 0.0
        self._followed: set[int] = set()
        self._probed: set[int] = set()
        self._trial, self._left = max_drafts, 0
        self._waited, self._again, self._check = 0, self.SOON if has_initial else self.AGAIN, self.CHECK
        self._settled = self._turn = 0

    def begin_plan(self, width: int) -> None:
        """Choose a number of drafts, by trial or by prediction."""
        self._waited += 1
        if self._left > 0:
            self._left -= 1
            self.chosen = self._trial
            return
        self._probed.clear()
        untried = self._untried(width)
        if untried is not None:
            self._start_trial(untried)
            return
        seconds = self.step_times.expected_decode(width)
        self.chosen = self.best(seconds)
        if self.chosen:
            self._saving = (seconds[0] - seconds[self.chosen] / self.expected_tokens(self.chosen)) / max(1, width)
        else:
            self._followed.clear()
        if self._waited >= (self._check if self.chosen else self._again):
            self._retry(width)

    def _retry(self, width: int) -> None:
        """Measure another number of drafts anew, each in its turn; with initial times only the smallest other one."""
        if not self.chosen:
            self._again *= 2
        else:
            self._check = min(2 * self._check, self.AGAIN) if self.chosen == self._settled else self.CHECK
            self._settled = self.chosen
        others = [d for d in self.draft_counts if d != self.chosen][: 1 if self.step_times.has_initial else None]
        self._turn = next((d for d in others if d > self._turn), others[0])
        self.step_times.forget_decode(width, self._turn)
        self._start_trial(self._turn)

    def _untried(self, width: int) -> int | None:
        """The next number of drafts to try, from 0 up.

        None where one loses much, or where two say that the next loses: larger numbers lose too.
        """
        typical, before = self.step_times.decode(width), list[int]()
        for d in self.draft_counts[
            : 1 if self.step_times.has_initial else None
        ]:  # numbers with a prediction need no trial, but for 0, from which they are predicted
            tried = self.step_times.num_decode(width, d) >= self.TRIES - 2
            if len(before) > 1 and not tried:
                near, far = before[-2:]
                slope = (typical[far] - typical[near]) / (far - near)
                if self._gain(typical, d, typical[far] + slope * (d - far)) < 0.97:
                    return None
            if not tried:
                return d
            if self._gain(typical, d, typical[d]) < 0.75:  # the first draft pays for drafting at all
                return None
            before.append(d)
        return None

    def _gain(self, typical: Mapping[int, float], num_drafts: int, seconds: float) -> float:
        return self.expected_tokens(num_drafts) * typical[0] / max(seconds, 1e-9)

    def _start_trial(self, num_drafts: int) -> None:
        self.chosen = self._trial = num_drafts
        self._left, self._waited = self.TRIES - 1, 0

    def best(self, seconds: Mapping[int, float]) -> int:
        """The number of drafts to choose when steps take `seconds` by number of drafts."""
        speed = {d: self.expected_tokens(d) / took for d, took in seconds.items() if took > 0}
        found = max(speed, key=lambda d: speed[d], default=0)
        # A step without drafts that takes no time, on a virtual clock, cannot be made shorter.
        return found if found and 0 in speed and speed[found] > self.MARGIN * speed[0] else 0

    def expected_tokens(self, num_drafts: int) -> float:
        """Expected tokens of a row's step with so many drafts."""
        return sum(accumulate(self.acceptance_rates[:num_drafts], mul, initial=1.0))

    def num_drafts(self, seq: Sequence) -> int:
        """Drafts for one sequence: the chosen number, fewer near its end or where its own drafts miss."""
        order, length = seq.arrival, len(seq.tokens)
        tokens_left = seq.max_length - length
        # The step brings one token at least, and one ends the sequence.
        max_drafts = min(self.chosen, tokens_left - seq.num_inflight - 2)
        if max_drafts < 1:
            return 0
        chosen = self.draft_counts[bisect_right(self.draft_counts, max_drafts) - 1]  # no graph is captured for others
        if self._left > 0 and self.step_times.has_initial:
            if len(self._probed) < self.PROBES:
                self._probed.add(order)
            return int(order in self._probed)
        if order not in self._followed:
            if self.catch_up_seconds and tokens_left * self._saving < 2 * length * self.catch_up_seconds:
                return 0
            self._followed.add(order)
        own = self._acceptance_by_sequence.get(order, self.acceptance_rates[0])
        return chosen if own > self.HOPELESS or self._left else 1

    def record_acceptance(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Update the acceptance rates of positions, and of the sequence."""
        own = self._acceptance_by_sequence.get(seq.arrival, self.acceptance_rates[0])
        # drafts behind the first wrong one are not tested
        for i in range(min(num_drafted, num_accepted + 1)):
            hit = float(i < num_accepted)
            own += 0.1 * (hit - own)
            self._tests[i] += 1
            self.acceptance_rates[i] += max(0.02, 1.0 / (self.PRIOR + self._tests[i])) * (
                hit - self.acceptance_rates[i]
            )
        reached = max(1, sum(tests > 0 for tests in self._tests))
        self.acceptance_rates[reached:] = [self.acceptance_rates[reached - 1]] * (self.max_drafts - reached)
        self._acceptance_by_sequence[seq.arrival] = own

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that ended."""
        self._acceptance_by_sequence.pop(seq.arrival, None)
        self._followed.discard(seq.arrival)
