"""Incremental detokenization, and stop strings in the text that comes out.

Whatever pieces the tokens come in, the text is that of decoding them together, and never ends in half a character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
        data = self._held + b"".join(map(self._piece, tokens))
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


class StopStrings:
    """The stop strings of a request as an automaton (Aho and Corasick, 1975), shared by its `n` answers.

    A state is the longest suffix of the text that is a prefix of some stop string: exactly what must be held back.
    The first stop string to be completed ends the text; of several completed by the same character, the longest.
    """

    __slots__ = ("_depth", "_fail", "_found", "_next", "first")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()
        self.first = frozenset(self._next[0])
        """The characters that stop strings begin with."""

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._found.append(None)
            state = self._next[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        """Set the failure links, breadth first: the state to continue from where a stop string is not completed."""
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                todo.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after `char`."""
        while char not in self._next[state]:
            if not state:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def held(self, state: int) -> int:
        """The number of characters at the end of the text that may begin a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._found[state]


class StopFinder:
    """Finds the stop strings of one answer. What follows a stop string is dropped, and itself too unless `include`."""

    __slots__ = ("_held", "_include", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> Found:
        """Search the next piece of text."""
        stops = self._stops
        state = self._state
        if not state and stops.first.isdisjoint(text):
            return Found(text)
        known = len(self._held)
        text = self._held + text
        for i in range(known, len(text)):
            state = stops.step(state, text[i])
            if (stop := stops.found(state)) is not None:
                self._state = 0
                self._held = ""
                end = i + 1
                return Found(text[: end if self._include else end - len(stop)], stop)
        self._state = state
        sure = len(text) - stops.held(state)
        self._held = text[sure:]
        return Found(text[:sure])

    def flush(self) -> str:
        """The text held back, where the text ends without a stop string."""
        held = self._held
        self._held = ""
        self._state = 0
        return held
