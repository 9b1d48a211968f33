"""How many tokens to draft for a sequence's next step: measured acceptance against measured time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.core.plan import Plan
from quire.core.sequence import Sequence


class Speculation(Protocol):
    """Decides depths, hears how drafts fared and what steps took. most: drafts a row can hold; 0: no speculation."""

    most: int

    def begin(self, width: int) -> None:
        """A plan is begun, with so many rows on the device."""

    def depth(self, seq: Sequence) -> int:
        """Drafts to make for `seq` once the step being planned has sampled."""

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        """Of `fed` drafts in a row `accepted` were right."""

    def forget(self, seq: Sequence) -> None:
        """It ended."""

    def timed(self, plan: Plan, seconds: float) -> None:
        """A step took so long."""


class Drafted:
    """Totals, as vLLM's spec_decode counters: verify spans, drafts fed, drafts accepted, and accepted by position."""

    def __init__(self) -> None:
        self.spans = self.fed = self.accepted = 0
        self.by_position: list[int] = []

    def learn(self, fed: int, accepted: int) -> None:
        self.spans += 1
        self.fed += fed
        self.accepted += accepted
        self.by_position += [0] * (fed - len(self.by_position))
        for i in range(accepted):
            self.by_position[i] += 1


@dataclass(slots=True)
class Fixed:
    """Always as many."""

    most: int = 0

    def begin(self, width: int) -> None:
        """Nothing to decide."""

    def depth(self, seq: Sequence) -> int:
        return self.most

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        """Nothing changes."""

    def forget(self, seq: Sequence) -> None:
        """Nothing is known of it."""

    def timed(self, plan: Plan, seconds: float) -> None:
        """Nothing changes."""


class _Times:
    """Measured seconds of pure decode steps at one width, by depth: moving averages."""

    def __init__(self) -> None:
        self.mean: dict[int, float] = {}
        self.count: dict[int, int] = {}

    def add(self, depth: int, seconds: float) -> None:
        count = self.count[depth] = self.count.get(depth, 0) + 1
        mean = self.mean.get(depth, seconds)
        # one slow step (a page fault, a noisy neighbour) must not decide: it counts for at most twice the mean
        self.mean[depth] = mean + (min(seconds, 2 * mean) - mean) * max(0.05, 1 / count)


class Adaptive:
    """The depth with the most expected tokens a second, 0 unless drafting pays by `MARGIN`.

    Depth d brings 1 + a + ... + a^d tokens when each draft is right with probability a (Leviathan et al.,
    arXiv:2211.17192); a is measured. What a step costs at each depth is measured too, by width (rounded to a power of
    two), since verifying is nearly free for one row and dear for many: each depth is tried for a few steps, and one
    again ever more rarely. A sequence whose own drafts keep missing is drafted less than the rest.
    """

    MARGIN = 1.05
    TRIES = 6
    """Steps for which a depth is tried: the first two are not alike in what they feed and what they draft."""
    AGAIN = 1024
    """Steps after which another depth is tried again, then twice as many: drafting one token where it was off."""
    HOPELESS = 0.25

    def __init__(self, most: int) -> None:
        self.most = most
        self.depths = sorted({0, 1, most // 2, most})
        self.rate = 0.7
        self.chosen = most
        self._rates: dict[int, float] = {}
        self._times: dict[int, _Times] = {}
        self._trial, self._left, self._steps, self._again = most, 0, 0, self.AGAIN

    def begin(self, width: int) -> None:
        times = self._times.setdefault(width.bit_length(), _Times())
        self._steps += 1
        if self._left > 0:
            self._left -= 1
            self.chosen = self._trial
            return
        untried = self._untried(times)
        if untried is not None:
            self._try(untried)
        else:
            self.chosen = self.best(times.mean)
            if self._steps >= self._again:
                self._again *= 2
                self._try(0 if self.chosen else 1)

    def _untried(self, times: _Times) -> int | None:
        """The next depth to try, from 0 up: where one loses clearly, deeper ones would lose more."""
        for d in self.depths:
            if times.count.get(d, 0) < self.TRIES - 2:
                return d
            if self.tokens(d) * times.mean[0] < 0.9 * times.mean[d]:
                return None
        return None

    def _try(self, depth: int) -> None:
        self.chosen = self._trial = depth
        self._left = self.TRIES - 1

    def best(self, seconds: dict[int, float]) -> int:
        """The depth to choose when steps take `seconds` by depth."""
        speed = {d: self.tokens(d) / took for d, took in seconds.items()}
        found = max(speed, key=lambda d: speed[d])
        return found if speed[found] > self.MARGIN * speed[0] else 0

    def tokens(self, depth: int) -> float:
        """Expected tokens of a row's step at this depth."""
        return sum(self.rate**i for i in range(depth + 1))

    def depth(self, seq: Sequence) -> int:
        own = self._rates.get(seq.order, self.rate)
        return self.chosen if own > self.HOPELESS or self._left else min(self.chosen, 1)

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        own = self._rates.get(seq.order, self.rate)
        for i in range(min(fed, accepted + 1)):  # those past the first wrong one were never put to the test
            hit = float(i < accepted)
            own += 0.1 * (hit - own)
            self.rate += 0.02 * (hit - self.rate)
        self._rates[seq.order] = own

    def forget(self, seq: Sequence) -> None:
        self._rates.pop(seq.order, None)

    def timed(self, plan: Plan, seconds: float) -> None:
        spans, drafts = plan.spans, plan.drafts
        depth = spans[0].rows - 1
        alike = all(s.n == s.rows == depth + 1 for s in spans) and all(d == depth for d in drafts)
        if alike and not plan.opened and depth in self.depths:
            self._times.setdefault(len(spans).bit_length(), _Times()).add(depth, seconds)
