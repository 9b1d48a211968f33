"""The step-time model: how long a step takes, from what is in it.

Learnt from every step. It bounds prompts by a latency target, chooses how many tokens to draft, delays plans until just
before the device runs dry, and says from when on a step counts as stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from quire.scheduler.plan import Plan


class StepCost(NamedTuple):
    """Seconds of a step, from what it feeds and reads. The default costs nothing; the first three alone are a line.

    base: of any step. per_token: of arithmetic, for each token fed. per_kv: for each position whose K/V is read, by
    each sequence. per_row: for each row of logits. per_pair: for each pair of a prompt's token and a position before
    it. weights: to read the weights that every token uses; per_expert: those of one expert in all layers, of `experts`
    of which a token uses `used_experts`. Reading weights and arithmetic overlap: together they take the p-norm of both,
    p = `overlap` (1: one after the other). per_draft: for each token that a draft model drafts, one after another.
    """

    base: float = 0.0
    per_token: float = 0.0
    per_kv: float = 0.0
    per_row: float = 0.0
    per_pair: float = 0.0
    weights: float = 0.0
    per_expert: float = 0.0
    experts: int = 0
    used_experts: int = 0
    overlap: float = 1.0
    per_draft: float = 0.0

    def scaled(self, factor: float, rows: float | None = None) -> StepCost:
        """So many times as long. rows: the factor of logits and drafts, where that differs."""
        rows = factor if rows is None else rows
        body = ("base", "per_token", "per_kv", "per_pair", "weights", "per_expert")
        changed = {name: getattr(self, name) * factor for name in body}
        return self._replace(**changed, per_row=self.per_row * rows, per_draft=self.per_draft * rows)

    def fixed(self, tokens: int, rows: int = 0) -> float:
        """Of a step, what does not depend on context."""
        read = self.weights + self.per_expert * self.distinct_experts(tokens)
        compute = self.per_token * tokens
        p = self.overlap
        both = read + compute if p == 1.0 else (read**p + compute**p) ** (1 / p)
        return self.base + both + self.per_row * rows

    def distinct_experts(self, tokens: int) -> float:
        """Experts of a layer that so many tokens use between them, where each token's are drawn evenly."""
        return self.experts * (1.0 - (1.0 - self.used_experts / self.experts) ** tokens) if self.experts else 0.0

    def seconds(self, tokens: int, kv: int = 0, rows: int = 0, pairs: float = 0.0) -> float:
        """Seconds of a step that feeds so many tokens, and attends to so many positions."""
        return self.fixed(tokens, rows) + (self.per_kv * kv + self.per_pair * pairs)


class LineFit:
    """Seconds of something as a line in how much there is of it, by least squares that forget."""

    DECAY = 0.98
    """The weight of a measurement, relative to the next one's."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much took so long."""
        decay = self.DECAY
        self._weight = self._weight * decay + 1.0
        self._x = self._x * decay + amount
        self._y = self._y * decay + seconds
        self._xx = self._xx * decay + amount * amount
        self._xy = self._xy * decay + amount * seconds

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return self._weight > 0

    def line(self) -> tuple[float, float]:
        """(seconds of any amount, seconds of each unit): the second is 0 while all were alike, both before the first
        measurement."""
        spread = self._weight * self._xx - self._x * self._x
        if self._weight < 2 or spread <= 1e-9 * self._xx * self._weight:
            return (self._y / self._weight if self._weight else 0.0), 0.0
        each = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - each * self._x) / self._weight), each


class StepTimeModel(LineFit):
    """Predicts a step's seconds: on average (`fit`), at least, at most, and of a decode step by its drafts.

    initial: seconds of a decode step by (width, drafts), as the executor measured at its start without context.
    kv_share: of what context adds to a step, the share that each draft adds again.
    """

    NUM_RECENT = 64
    """Steps that `fastest` looks at."""
    MIN_KNOWN = 4
    """Similar steps without which `fastest` predicts nothing."""
    SIMILAR, FEW = 1.125, 8
    """A step is similar with at most so many times the tokens, and so many more: a few cost nothing."""
    DEARER = 1.001
    """How much more the cheapest token of a prompt costs with each step that has prompts, until a step is as cheap."""
    MANY = 64
    """Tokens of prompts that say what one costs."""
    APART = 16
    """By how many tokens of a prompt two steps differ that say what one more costs."""
    FEW_STEPS = 4
    """Steps with prompts of which the least says what fewer tokens would not have spared."""
    CHEAPER = 1.25
    """How many times less a token of a prompt costs at least than in the last step with prompts."""
    NUM_DECODE = 12
    """Decode steps of one width and number of drafts that are looked at."""

    def __init__(
        self, initial: Mapping[tuple[int, int], float] = MappingProxyType({}), *, kv_share: float = 0.0
    ) -> None:
        self.kv_share = kv_share
        self.num_steps = 0
        super().__init__()
        self._recent: deque[tuple[int, float]] = deque(maxlen=self.NUM_RECENT)
        self._fastest: dict[int, float | None] = {}
        self._longest = self._rate = self._steep = self._cheap = self._marginal = 0.0
        self._max_tokens = self._context = 0
        self._prompts: deque[tuple[int, float]] = deque(maxlen=self.FEW_STEPS)
        self._plain, self._by_context = LineFit(), LineFit()
        self._decode: dict[tuple[int, int], deque[float]] = {}
        self._typical: dict[int, dict[int, float]] = {}
        self._initial: dict[int, dict[int, float]] = {}
        for (width, num_drafts), seconds in initial.items():
            self._initial.setdefault(width_class(width), {})[num_drafts] = seconds

    @property
    def recent(self) -> Iterable[tuple[int, float]]:
        """(tokens, seconds) of the last steps that `fastest` looks at, oldest first."""
        return self._recent

    @property
    def has_initial(self) -> bool:
        """Whether the executor measured decode steps at its start."""
        return bool(self._initial)

    def record(
        self,
        plan: Plan,
        seconds: float,
        *,
        latency: float | None = None,
        waited: bool = False,
        context: int | None = None,
    ) -> int:
        """A step took `seconds` of the device. Returns how many tokens of prompts it fed.

        latency: seconds from launch to commit, where a step before it ran first. waited: it still ran when the engine
        came to wait for it, so that `seconds` is exact. context: tokens that the last span's sequence has
        computed, if that is known.
        """
        num_tokens = sum([span[1] for span in plan.spans])
        self.num_steps += 1
        if plan.encode:
            # What the encoder took says nothing of tokens.
            self._longest = max(self._longest, seconds if latency is None else latency)
            return 0
        self.add(num_tokens, seconds)
        fed = num_tokens - sum([span[2] for span in plan.spans])
        if fed > 0:
            last = plan.spans[-1]
            if context is None or last[1] == last[2]:
                context = self._context
            else:
                context -= last[1] // 2
            self._record_prompts(fed, seconds - self.without_prompts(len(plan.spans)), context)
        else:
            self._plain.add(num_tokens, seconds)
        if waited:
            self._recent.append((num_tokens, seconds))
            self._fastest.clear()
        self._record_longest(num_tokens, seconds if latency is None else latency)
        if plan.num_drafts and not plan.new_sequences:
            self._record_decode(plan, seconds)
        return fed

    def _record_prompts(self, num_tokens: int, seconds: float, context: int) -> None:
        """So many tokens of prompts, after `context` others, added so much to a step. Few say nothing but that it is
        less than was thought, and no less than the cheapest of many."""
        fed, added = self._prompts[-1] if self._prompts else (num_tokens, seconds)
        if abs(num_tokens - fed) >= self.APART and abs(context - self._context) <= num_tokens + fed:
            marginal = max(0.0, (seconds - added) / (num_tokens - fed))
            self._marginal = (marginal + (self._marginal or marginal)) / 2
        self._prompts.append((num_tokens, seconds))
        thought = self._token_after(context)
        each = max(seconds / num_tokens, thought / self.CHEAPER)
        self._steep = each if num_tokens >= self.MANY else max(min(each, thought), self._cheap)
        self._context = context
        if num_tokens >= self.MANY:
            self._by_context.add(context, seconds / num_tokens)
        if num_tokens >= self.MANY and each > 0.0:
            self._cheap = min(each, self._cheap * self.DEARER or each)

    def _record_longest(self, num_tokens: int, seconds: float) -> None:
        self._longest = max(self._longest, seconds)
        if num_tokens > 2 * self._max_tokens:  # what few tokens cost says little of many: part of it is the step's own
            self._rate = 0.0
        self._max_tokens = max(self._max_tokens, num_tokens)
        if 2 * num_tokens >= self._max_tokens and seconds > self._rate * num_tokens:
            self._rate = seconds / num_tokens

    def _record_decode(self, plan: Plan, seconds: float) -> None:
        """Only of steps whose spans are all alike.

        The prediction is the lower quartile of the last few: noise, and the first step of a shape, only add.
        """
        num_drafts = plan.spans[0].num_samples - 1
        alike = all(s.num_tokens == s.num_samples == num_drafts + 1 for s in plan.spans)
        if alike and all(d == num_drafts for d in plan.num_drafts):
            width = width_class(len(plan.spans))
            last = self._decode.setdefault((width, num_drafts), deque(maxlen=self.NUM_DECODE))
            last.append(seconds)
            self._typical.setdefault(width, {})[num_drafts] = sorted(last)[len(last) // 4]

    def without_prompts(self, running: int) -> float:
        """Seconds of a step of so many sequences, one token each."""
        base, each = (self._plain if self._plain.measured else self).line()
        return base + each * running

    def _token_after(self, context: int) -> float:
        """What a token of a prompt took in the last step with prompts, and what context has been seen to add."""
        return max(self._steep + self._by_context.line()[1] * (context - self._context), min(self._cheap, self._steep))

    def prompt_token(self, context: int = 0) -> float:
        """Seconds that a token of a prompt adds to a step after `context` others: as those of the last one did, and
        what more context adds; before any, by the line. It falls by a fifth at most from one step to the next, so that
        one that was measured badly lets in few too many."""
        return self._token_after(context) if self._steep else self.line()[1]

    def prompts_apart(self) -> tuple[float, float]:
        """Of what prompts added to the last steps: seconds that fewer tokens would not have spared, and those of each
        token."""
        each = max(self._marginal or self._steep, self.cheapest_token())
        return max(0.0, min((added - each * fed for fed, added in self._prompts), default=0.0)), each

    def cheapest_token(self) -> float:
        """As `prompt_token`, of the step whose tokens cost least."""
        return self._cheap or self.line()[1]

    def fit(self) -> StepCost:
        """The line through the steps so far, by least squares that forget; per_token is 0 while all were alike."""
        return StepCost(*self.line())

    def fastest(self, num_tokens: int) -> float | None:
        """Seconds that a step of so many tokens takes at least: the least of similar ones; None: too few are known."""
        if num_tokens not in self._fastest:  # asked several times between two steps
            limit = self.SIMILAR * num_tokens + self.FEW
            known = [seconds for other, seconds in self._recent if other <= limit]
            self._fastest[num_tokens] = min(known) if len(known) >= self.MIN_KNOWN else None
        return self._fastest[num_tokens]

    def forget_fastest(self) -> None:
        """The device has become faster: measure anew."""
        self._recent.clear()
        self._fastest.clear()

    def longest(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens has been seen to take at most, from launch to commit."""
        return max(self._longest, self._rate * num_tokens)

    def decode(self, width: int) -> dict[int, float]:
        """Seconds of a decode step of so many sequences, by number of drafts, as measured."""
        return self._typical.get(width_class(width), {})

    def expected_decode(self, width: int) -> dict[int, float]:
        """As `decode`, completed by what the start said of how numbers of drafts differ."""
        measured, initial = self.decode(width), self._initial.get(width_class(width), {})
        more = max(0.0, measured.get(0, 0.0) - initial.get(0, 0.0))
        return {d: seconds + more * (1 + d * self.kv_share) for d, seconds in initial.items()} | measured

    def num_decode(self, width: int, num_drafts: int) -> int:
        """How many such decode steps have been measured, of those that count."""
        return len(self._decode.get((width_class(width), num_drafts), ()))

    def forget_decode(self, width: int, num_drafts: int) -> None:
        """Measure such decode steps anew; until then what was predicted stands."""
        self._decode.pop((width_class(width), num_drafts), None)


def width_class(width: int) -> int:
    """Widths up to the same power of two are alike: its exponent."""
    return max(0, width - 1).bit_length()
