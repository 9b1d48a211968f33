"""Incremental detokenization, and stop strings in the text that comes out.

Whatever pieces the tokens come in, the text is that of decoding them together, and never ends in half a character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

_REPLACEMENT = "�"
_MAX_INCOMPLETE = 16
"""Tokens after which an incomplete character is emitted as it is; UTF-8 has at most four bytes a character."""


class Detokenizer(Protocol):
    """Decodes one sequence of tokens."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The new text that later tokens cannot change: all of it, or less."""

    def flush(self) -> str:
        """The rest of the text, at the end: U+FFFD for an incomplete character, or nothing."""


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: UTF-8 is decoded up to the last complete character.

    At most three bytes are held back, so the cost of a token is constant.
    """

    __slots__ = ("_held", "_piece")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._piece = pieces.__getitem__
        self._held = b""

    def feed(self, tokens: Sequence[int]) -> str:
        """See Detokenizer."""
        data = b"".join(map(self._piece, tokens))
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        """See Detokenizer."""
        held = self._held
        self._held = b""
        return held.decode("utf-8", "replace")


class WindowDetokenizer:
    """For any other decoder: decode a short window with and without the new token, and return the difference.

    The window begins with the tokens of the last piece of text, so that spaces between words are those of the whole
    text. context: the tokens before the text (the end of the prompt), whose text is not returned.
    """

    __slots__ = ("_decode", "_ids", "_read")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-_MAX_INCOMPLETE:])
        self._read = len(self._ids)

    def feed(self, tokens: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join(map(self._feed, tokens))

    def _feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MAX_INCOMPLETE:
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        known = self._decode(self._ids[: self._read])
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """See Detokenizer."""
        return self._emit(self._decode(self._ids)) if len(self._ids) > self._read else ""


class NoText:
    """Decodes nothing (`detokenize=False`)."""

    def feed(self, tokens: Sequence[int]) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class Found(NamedTuple):
    """The text that is certain, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


@dataclass(slots=True, eq=False, repr=False)
class _State:
    """A prefix of a stop string, of `depth` characters.

    fail: the state of its longest proper suffix that is such a prefix; None for the empty prefix. found: the longest
    stop string that ends here.
    """

    depth: int = 0
    fail: _State | None = None
    found: str | None = None
    next: dict[str, _State] = field(default_factory=dict)

    def step(self, char: str) -> _State:
        """The state after `char`."""
        state = self
        while char not in state.next:
            if state.fail is None:
                return state
            state = state.fail
        return state.next[char]


class StopStrings:
    """The stop strings of a request as an automaton (Aho and Corasick, 1975), shared by its `n` answers.

    A state is the longest suffix of the text that is a prefix of some stop string: exactly what must be held back.
    The first stop string to be completed ends the text; of several completed by the same character, the longest.
    first: the characters that stop strings begin with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.start = _State()
        for stop in stops:
            state = self.start
            for char in stop:
                state = state.next.setdefault(char, _State(state.depth + 1, self.start))
            state.found = stop
        self.first = frozenset(self.start.next)
        self._link()

    def _link(self) -> None:
        """Set `fail` breadth first: the state to continue from where a stop string is not completed."""
        todo = deque(self.start.next.values())
        while todo:
            state = todo.popleft()
            for char, child in state.next.items():
                fail = child.fail = (state.fail or self.start).step(char)
                child.found = child.found or fail.found
                todo.append(child)


class StopFinder:
    """Finds the stop strings of one answer. What follows a stop string is dropped, and itself too unless `include`."""

    __slots__ = ("_held", "_include", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = stops.start
        self._held = ""

    def feed(self, text: str) -> Found:
        """Search the next piece of text."""
        state = self._state
        if not state.depth and self._stops.first.isdisjoint(text):
            return Found(text)
        known = len(self._held)
        text = self._held + text
        for end in range(known + 1, len(text) + 1):
            state = state.step(text[end - 1])
            if state.found is not None:
                self.flush()
                return Found(text[: end if self._include else end - len(state.found)], state.found)
        self._state = state
        sure = len(text) - state.depth
        self._held = text[sure:]
        return Found(text[:sure])

    def flush(self) -> str:
        """The text held back, where the text ends without a stop string."""
        held = self._held
        self._held = ""
        self._state = self._stops.start
        return held
