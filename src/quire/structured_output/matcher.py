"""A compiled grammar as a constraint on one sequence."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from quire.scheduler.plan import Mask

EMPTY_MASK = b""
"""Allows no token: the row ends with an error of its own."""


_TELL = 400
"""Characters of the library's message that are told."""

_NOISE = re.compile(r"\s*<non-verbose/>|json-schema:///|Parser Error: ")
_ROW = re.compile(r".*Current row has (\d+) items; max is (\d+).*", re.DOTALL)


def reason(why: str) -> str:
    """The library's words for why a grammar cannot be followed, on one line; its own terms in those of its users."""
    if wide := _ROW.fullmatch(why):
        return (
            f"it has {wide[1]} ways to go on in one place, and at most {wide[2]} are taken: have fewer alternatives "
            "(of fixed texts, an enum or a choice may have many more)"
        )
    said = " ".join(_NOISE.sub("", why).split())
    return said[:_TELL] + "..." if len(said) > _TELL else said


class TimeBudget:
    """Processor time that one answer's masks may take: `once`, and `each` for every token, in seconds.

    The library bounds the work of a step; what it lets pass may still be hundreds of times the ordinary, and every row
    of the batch would wait for it.
    """

    def __init__(self, once: float = 0.5, each: float = 1e-3, clock: Callable[[], float] = time.thread_time) -> None:
        self.once, self.each, self.clock = once, each, clock


DEFAULT_BUDGET = TimeBudget()


class Matcher:
    """Follows one sequence (see core.constraint.Constraint).

    The state is a function of the tokens committed: what is new since the last call is consumed, and where the output
    is not the last one's continuation, matching starts again. Drafts are walked and rolled back. Tokens in `eos` are
    never fed to the library: after one, only they are allowed.
    """

    def __init__(self, matcher: LLMatcher, eos: frozenset[int], budget: TimeBudget = DEFAULT_BUDGET) -> None:
        self._matcher, self._eos, self._budget = matcher, eos, budget
        self._seen: list[int] = []
        self._over, self._why = False, ""
        self._time_spent = 0.0
        self._end = _bits(eos)

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        began = self._budget.clock()
        self._follow(output if isinstance(output, list) else list(output))
        made = self._walk(drafts)
        self._time_spent += self._budget.clock() - began
        if self._time_spent > self._budget.once + self._budget.each * len(output):
            self._why = self._why or "following it takes too much time: make it simpler"
        return made

    def why(self) -> str:
        return self._why

    def _follow(self, output: list[int]) -> None:
        known = len(self._seen)
        if output[:known] != self._seen:
            self._matcher.reset()
            self._over, known = False, 0
            self._seen = []
        fresh = output[known:]
        for token in fresh:
            self._over = self._over or token in self._eos
            if not self._over and not self._matcher.consume_token(token):
                self._why = reason(self._matcher.get_error()) or "the answer left it"
        self._seen += fresh

    def _walk(self, drafts: Sequence[int]) -> list[Mask]:
        """Masks up to the first draft that is not allowed. An end may be ignored, and then more come behind it."""
        matcher, mask, walked, over = self._matcher, self._mask(), 0, self._over
        made: list[Mask] = [mask]
        for draft in drafts:
            if not _allows(mask, draft):
                break
            over = over or draft in self._eos
            if not over:
                matcher.consume_token(draft)
                walked += 1
            mask = self._end if over else self._mask()
            made.append(mask)
        if walked:
            matcher.rollback(walked)
        return made

    def _mask(self) -> bytes:
        if self._over:
            return self._end
        if self._why:
            return EMPTY_MASK
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # then the mask would say that the text may end
            self._why = reason(self._matcher.get_error()) or "it cannot be followed any further"
            return EMPTY_MASK
        return mask


def _allows(mask: bytes, token: int) -> bool:
    at = token >> 3
    return at < len(mask) and bool(mask[at] >> (token & 7) & 1)


def _bits(tokens: frozenset[int]) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(max(tokens, default=0) // 8 + 1, "little")
