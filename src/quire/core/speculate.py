"""How many tokens to draft for a sequence's next step: measured acceptance against measured time."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Protocol

from quire.core.plan import Plan
from quire.core.sequence import Sequence


class Speculation(Protocol):
    """Decides depths, hears how drafts fared and what steps took. most: drafts a row can hold; 0: no speculation."""

    most: int

    def begin(self, width: int) -> None:
        """A plan is begun, with so many sequences that run or could."""

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
    """Measured seconds of pure decode steps at one width, by depth: the lower quartile of the last few, for what comes
    between (a noisy neighbour, the first step of a shape, which makes ready what the next ones find) only ever adds."""

    KEPT = 12

    def __init__(self) -> None:
        self.typical: dict[int, float] = {}
        self._last: dict[int, deque[float]] = {}

    def add(self, depth: int, seconds: float) -> None:
        last = self._last.setdefault(depth, deque(maxlen=self.KEPT))
        last.append(seconds)
        self.typical[depth] = sorted(last)[len(last) // 4]

    def count(self, depth: int) -> int:
        """How many were measured, of those that count."""
        return len(self._last.get(depth, ()))

    def doubt(self, depth: int) -> None:
        """What is measured next counts, what was until then."""
        self._last.pop(depth, None)


def depths(most: int) -> tuple[int, ...]:
    """Those that are tried where `most` can be drafted."""
    return tuple(sorted({0, 1, 2, most // 2, 3 * most // 4, most} & set(range(most + 1))))


def kind(width: int) -> int:
    """Widths up to the same power of two are of one kind: its exponent."""
    return max(0, width - 1).bit_length()


class Adaptive:
    """The depth with the most expected tokens a second, 0 unless drafting pays by `MARGIN`.

    Depth d brings 1 + a1 + a1 a2 + ... tokens when draft number i is right with probability ai where those before it
    were (with one probability for all of them: Leviathan et al., arXiv:2211.17192); they are measured. What a step
    costs at each depth is measured too, by width (rounded up to a power of two), since verifying is nearly free for one
    row and dear for many. A sequence whose own drafts keep missing is drafted less than the rest.

    paces: what the executor measured at its start, see `Description`: a depth not seen yet is expected to take as much
    more than none, and `share` of what context adds to that for each draft, so none is tried that is not expected to
    pay. Without them each is tried for a few steps, as long as those before do not speak against it, and one again
    ever more rarely.
    catch_up: seconds a token that a draft model lacks takes; a sequence is not drafted for if what is left of it cannot
    pay that back twice.
    """

    MARGIN = 1.05
    TRIES = 6
    """Steps for which a depth is tried: the first two are not alike in what they feed and what they draft."""
    SOON, AGAIN = 64, 1024
    """Steps after which drafting is tried again where it is off, then twice as many; sooner where it is off by what is
    foreseen, since how often drafts are right is not: a few sequences tell, by one draft each..."""
    CHECK = 128
    """...and another depth where it is on, twice as many up to AGAIN while that changes nothing: what was measured in a
    slow moment must not last."""
    PROBES = 4
    """Sequences drafted for in such a try, where it is only to learn whether drafts are right."""
    HOPELESS = 0.25
    PRIOR = 8
    """Tests that what is assumed of a position counts for; in the long run the last fifty count."""

    def __init__(
        self,
        most: int,
        paces: Mapping[tuple[int, int], float] = MappingProxyType({}),
        *,
        catch_up: float = 0.0,
        share: float = 0.0,
    ) -> None:
        self.most, self.catch_up, self.share = most, catch_up, share
        self.depths = depths(most)
        self.rates = [0.7] * most
        """How often a draft is right where those before it were, by position: easy stretches make them rise. One that
        was never put to the test is taken for as good as the last that was."""
        self._tests = [0] * most
        self.chosen = 0 if paces else most
        self._paces: dict[int, dict[int, float]] = {}
        for (width, depth), seconds in paces.items():
            self._paces.setdefault(kind(width), {})[depth] = seconds
        self._own: dict[int, float] = {}
        self._times: dict[int, _Times] = {}
        self._saving = 0.0
        self._followed: set[int] = set()
        self._probed: set[int] = set()
        self._trial, self._left = most, 0
        self._waited, self._again, self._check = 0, self.SOON if paces else self.AGAIN, self.CHECK
        self._settled = self._turn = 0

    def begin(self, width: int) -> None:
        self._waited += 1
        if self._left > 0:
            self._left -= 1
            self.chosen = self._trial
            return
        self._probed.clear()
        untried = self._untried(self._timed(width))
        if untried is not None:
            self._try(untried)
            return
        seconds = self.expected(width)
        self.chosen = self.best(seconds)
        if self.chosen:
            self._saving = (seconds[0] - seconds[self.chosen] / self.tokens(self.chosen)) / max(1, width)
        else:
            self._followed.clear()
        if self._waited >= (self._check if self.chosen else self._again):
            self._retry(self._timed(width))

    def _retry(self, times: _Times) -> None:
        """Measure another depth anew, each in its turn; where paces say how they differ, the least other one."""
        if not self.chosen:
            self._again *= 2
        else:
            self._check = min(2 * self._check, self.AGAIN) if self.chosen == self._settled else self.CHECK
            self._settled = self.chosen
        others = [d for d in self.depths if d != self.chosen][: 1 if self._paces else None]
        self._turn = next((d for d in others if d > self._turn), others[0])
        times.doubt(self._turn)
        self._try(self._turn)

    def _timed(self, width: int) -> _Times:
        return self._times.setdefault(kind(width), _Times())

    def expected(self, width: int) -> dict[int, float]:
        """Seconds of a step by depth: as measured, or by what the start says of how depths differ."""
        times, paces = self._timed(width), self._paces.get(kind(width), {})
        more = max(0.0, times.typical.get(0, 0.0) - paces.get(0, 0.0))
        return {d: pace + more * (1 + d * self.share) for d, pace in paces.items()} | times.typical

    def _untried(self, times: _Times) -> int | None:
        """The next depth to try, from 0 up: where one loses much, or two say that the next will, deeper ones do."""
        before = list[int]()
        for d in self.depths[: 1 if self._paces else None]:  # what is foreseen wants no trying, but for where it starts
            tried = times.count(d) >= self.TRIES - 2
            if len(before) > 1 and not tried:
                near, far = before[-2:]
                slope = (times.typical[far] - times.typical[near]) / (far - near)
                if self._gain(times, d, times.typical[far] + slope * (d - far)) < 0.97:
                    return None
            if not tried:
                return d
            if self._gain(times, d, times.typical[d]) < 0.75:  # a first draft bears what drafting costs at all
                return None
            before.append(d)
        return None

    def _gain(self, times: _Times, depth: int, seconds: float) -> float:
        return self.tokens(depth) * times.typical[0] / max(seconds, 1e-9)

    def _try(self, depth: int) -> None:
        self.chosen = self._trial = depth
        self._left, self._waited = self.TRIES - 1, 0

    def best(self, seconds: Mapping[int, float]) -> int:
        """The depth to choose when steps take `seconds` by depth."""
        speed = {d: self.tokens(d) / took for d, took in seconds.items() if took > 0}
        found = max(speed, key=lambda d: speed[d], default=0)
        return found if found and speed[found] > self.MARGIN * speed[0] else 0

    def tokens(self, depth: int) -> float:
        """Expected tokens of a row's step at this depth."""
        return sum(accumulate(self.rates[:depth], mul, initial=1.0))

    def depth(self, seq: Sequence) -> int:
        order, length = seq.order, len(seq.tokens)
        rest = seq.limit - length
        most = min(self.chosen, rest - seq.pending - 2)  # the step brings one at least, and one ends it
        if most < 1:
            return 0
        chosen = self.depths[bisect_right(self.depths, most) - 1]  # nothing was made ready for others
        if self._left > 0 and self._paces:
            if len(self._probed) < self.PROBES:
                self._probed.add(order)
            return int(order in self._probed)
        if order not in self._followed:
            if self.catch_up and rest * self._saving < 2 * length * self.catch_up:
                return 0
            self._followed.add(order)
        own = self._own.get(order, self.rates[0])
        return chosen if own > self.HOPELESS or self._left else 1

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        own = self._own.get(seq.order, self.rates[0])
        for i in range(min(fed, accepted + 1)):  # those past the first wrong one were never put to the test
            hit = float(i < accepted)
            own += 0.1 * (hit - own)
            self._tests[i] += 1
            self.rates[i] += max(0.02, 1.0 / (self.PRIOR + self._tests[i])) * (hit - self.rates[i])
        reached = max(1, sum(tests > 0 for tests in self._tests))
        self.rates[reached:] = [self.rates[reached - 1]] * (self.most - reached)
        self._own[seq.order] = own

    def forget(self, seq: Sequence) -> None:
        self._own.pop(seq.order, None)
        self._followed.discard(seq.order)

    def timed(self, plan: Plan, seconds: float) -> None:
        spans, drafts = plan.spans, plan.drafts
        depth = spans[0].rows - 1
        alike = all(s.n == s.rows == depth + 1 for s in spans) and all(d == depth for d in drafts)
        if alike and not plan.opened and depth in self.depths:
            self._timed(len(spans)).add(depth, seconds)
