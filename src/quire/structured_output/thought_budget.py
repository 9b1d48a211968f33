"""A bound on the tokens of thoughts: where it is reached, the closing mark follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.parsers.reasoning import ThoughtStyle
from quire.scheduler.constraint import Constraint
from quire.scheduler.plan import Mask
from quire.types import Ahead

_SPACE = b" \t\r\n"


class Thought(NamedTuple):
    """How far an answer is. place: before its first mark is known, inside a thought, or behind its thoughts.

    text: the last bytes, of which a mark may be incomplete. spent: tokens of thoughts so far. forced: the tokens that
    must follow.
    """

    place: str
    text: bytes = b""
    spent: int = 0
    forced: tuple[int, ...] = ()


class BudgetRules:
    """How thoughts begin and end, in tokens. Immutable; shared by the sequences of a request.

    style: how thoughts are marked. piece: the bytes of a token. encode: text to token ids. budget: the most tokens
    between the opening and the closing mark; marks are not counted, and the closing one is written where it is reached.
    """

    def __init__(
        self,
        style: ThoughtStyle,
        ahead: Ahead,
        budget: int,
        *,
        piece: Callable[[int], bytes],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._piece = piece
        self._encode = encode
        self._budget = budget
        self._close = style.closes[0]
        self._opens = tuple(mark.encode() for mark in style.opens)
        self._ends = tuple(mark.encode() for mark in (*style.closes, *style.ends))
        self._keep = max(map(len, (*self._opens, *self._ends))) - 1
        # Thoughts in channels may begin again, behind other messages.
        self._again = style.channels
        first = {"open": "inside", "possible": "again" if style.channels else "begin", "none": "over"}[ahead]
        self.first = self._bounded(Thought(first))

    def after(self, thought: Thought, token: int) -> Thought:
        """The state after one more token."""
        place, text, spent, forced = thought
        if place == "over":
            return thought
        text += self._piece(token)
        if place == "inside":
            return self._inside(Thought(place, text, spent + (not forced), forced[1:]))
        if place == "begin":
            bare = text.lstrip(_SPACE)
            if any(len(bare) < len(mark) and mark.startswith(bare) for mark in self._opens):
                return Thought(place, bare, spent)
            mark = next((mark for mark in self._opens if bare.startswith(mark)), None)
            return Thought("over") if mark is None else self._inside(Thought("inside", bare[len(mark) :], spent))
        mark = next((mark for mark in self._opens if mark in text), None)
        if mark is None:
            return Thought(place, text[-self._keep :], spent)
        return self._inside(Thought("inside", text[text.index(mark) + len(mark) :], spent))

    def _inside(self, thought: Thought) -> Thought:
        if any(mark in thought.text for mark in self._ends):
            return Thought("again" if self._again else "over", spent=thought.spent)
        return self._bounded(thought._replace(text=thought.text[-self._keep :]))

    def _bounded(self, thought: Thought) -> Thought:
        """With the tokens of the closing mark, or of the rest of it, where the budget is spent."""
        if thought.place != "inside" or thought.spent < self._budget or thought.forced:
            return thought
        close = self._close
        begun = next((n for n in range(len(close) - 1, 0, -1) if thought.text.endswith(close[:n].encode())), 0)
        return thought._replace(forced=tuple(self._encode(close[begun:])))


class ThoughtBudget:
    """The Constraint of one sequence whose thoughts are bounded. inner: what else the sequence obeys."""

    def __init__(self, rules: BudgetRules, inner: Constraint) -> None:
        self._rules = rules
        self._inner = inner
        self._thought = rules.first
        self._seen: list[int] = []

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask]:
        """See Constraint."""
        self._follow(output)
        made = list[Mask]()
        thought = self._thought
        for mask, draft in zip(self._inner.masks(output, drafts), (*drafts, None), strict=False):
            forced = thought.forced[:1]
            made.append(only(forced[0]) if forced else mask)
            if draft is None or (forced and draft != forced[0]):
                break
            thought = self._rules.after(thought, draft)
        return made

    def why(self) -> str:
        """See Constraint."""
        return self._inner.why()

    def beginning(self) -> Sequence[int]:
        """None: tokens of thoughts are counted one by one."""
        return ()

    def _follow(self, output: Sequence[int]) -> None:
        """Take what is new in the output; where it does not continue the last one, begin again."""
        if len(output) < len(self._seen) or (self._seen and output[len(self._seen) - 1] != self._seen[-1]):
            self._seen, self._thought = [], self._rules.first
        for token in output[len(self._seen) :]:
            self._thought = self._rules.after(self._thought, token)
            self._seen.append(token)


def only(token: int) -> bytes:
    """A mask that allows one token."""
    return (1 << token).to_bytes(token // 8 + 1, "little")
