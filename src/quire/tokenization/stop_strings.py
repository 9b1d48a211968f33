"""Stop strings, found in text as it comes, wherever token and chunk boundaries fall."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What may be told now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """The stop strings of one request as an automaton (Aho and Corasick, 1975), shared by its answers.

    A state is the longest end of the text so far that begins some stop string: exactly what must be held back.
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
        """Breadth first: where to go on from when a begun stop string turns out to be none."""
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                todo.append(child)

    def step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if not state:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def held(self, state: int) -> int:
        """How many characters of the text's end may still become a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        return self._found[state]


class StopFinder:
    """One answer's search. Text after a stop string is never told; the stop string itself only on request."""

    __slots__ = ("_held", "_include", "_state", "_stops")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops, self._include = stops, include
        self._state, self._held = 0, ""

    def feed(self, text: str) -> Found:
        stops, state = self._stops, self._state
        if not state and stops.first.isdisjoint(text):
            return Found(text)
        known = len(self._held)
        text = self._held + text
        for i in range(known, len(text)):
            state = stops.step(state, text[i])
            if (stop := stops.found(state)) is not None:
                self._state, self._held = 0, ""
                end = i + 1
                return Found(text[: end if self._include else end - len(stop)], stop)
        self._state = state
        sure = len(text) - stops.held(state)
        self._held = text[sure:]
        return Found(text[:sure])

    def flush(self) -> str:
        """The text held back, at an end that no stop string brought."""
        held, self._held, self._state = self._held, "", 0
        return held
