"""How many tokens to draft for a sequence's next step: measured acceptance against measured cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.core.sequence import Sequence

StepTime = Callable[[int, int], float]
"""(tokens fed, drafts made) -> predicted seconds of a step; 0 while nothing is known."""


class Speculation(Protocol):
    """Decides depths and hears how drafts fared. most: drafts a row can hold; 0 is no speculation."""

    most: int

    def depth(self, seq: Sequence, width: int) -> int:
        """Drafts to make after this step for `seq`, one of about `width` rows being answered."""

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        """Of `fed` drafts in a row `accepted` were right."""


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
    """Always as many: what the lattice runs, and what `--speculative-config` without adaptation means."""

    most: int = 0

    def depth(self, seq: Sequence, width: int) -> int:
        return self.most

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        """Nothing changes."""


class Adaptive:
    """The depth with the most expected tokens a second, 0 when drafting does not pay by `margin`.

    A draft is taken to be right with probability a, each on its own (Leviathan et al., arXiv:2211.17192): depth d brings
    (1 - a^(d+1)) / (1 - a) tokens. a is a moving average per sequence, begun at that of all. `time` predicts steps.
    A sequence at depth 0 drafts one token every `probe` steps, so that it notices when its text becomes predictable.
    """

    WEIGHT = 0.1

    def __init__(self, most: int, time: StepTime, *, margin: float = 0.05, probe: int = 64) -> None:
        self.most, self.time, self.margin, self.probe = most, time, margin, probe
        self.overall = 0.7
        self._rates: dict[int, float] = {}
        self._idle: dict[int, int] = {}

    def depth(self, seq: Sequence, width: int) -> int:
        rate = self._rates.get(seq.order, self.overall)
        base = self.time(width, 0)
        if not base:
            return self.most
        best, depth = (1.0 + self.margin) / base, 0
        expected = term = 1.0
        for d in range(1, self.most + 1):
            term *= rate
            expected += term
            speed = expected / self.time(width * (1 + d), width * d)
            if speed > best:
                best, depth = speed, d
        if depth:
            return depth
        idle = self._idle[seq.order] = self._idle.get(seq.order, 0) + 1
        return int(idle % self.probe == 0)

    def learn(self, seq: Sequence, fed: int, accepted: int) -> None:
        rate, overall = self._rates.get(seq.order, self.overall), self.overall
        for i in range(min(fed, accepted + 1)):  # those past the first wrong one were never put to the test
            hit = float(i < accepted)
            rate += self.WEIGHT * (hit - rate)
            overall += 0.1 * self.WEIGHT * (hit - overall)
        self.overall = overall
        if seq.finish is not None:
            self._rates.pop(seq.order, None)
            self._idle.pop(seq.order, None)
        else:
            self._rates[seq.order] = rate
