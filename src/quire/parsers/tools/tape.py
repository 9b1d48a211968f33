"""Text that arrives in pieces, read by generators that yield where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache

from quire.parsers.parts import possible
from quire.parsers.tools.call import SPACE

Reading = Generator[None, None, str]
"""Yields when all text so far is read; returns what was found."""


class Tape:
    """A text, the place up to which it is read, and whether it has ended.

    What is read is the same however the text is cut: a mark is only looked for where enough text follows to know.
    """

    __slots__ = ("_at", "_text", "cut", "ended", "space")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        # Whether the text ended within a mark that was looked for.
        self.cut = False
        # The white space that was skipped last.
        self.space = ""

    def append(self, text: str) -> None:
        """More text. What has been read is forgotten."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def exhausted(self) -> bool:
        """Whether the text has ended and all of it is read."""
        return self.ended and self._at == len(self._text)

    def until(self, marks: Sequence[str], said: Callable[[str], object]) -> Reading:
        """Read up to and with the first of `marks`, and return it; empty if the text ends before.

        said: called with the text before the mark, piece by piece. No mark may begin with another.
        """
        while True:
            found = _any_of(tuple(marks)).search(self._text, self._at)
            if found:
                said(self._text[self._at : found.start()])
                self._at = found.end()
                return found[0]
            end = len(self._text) - (0 if self.ended else possible(self._text[self._at :], marks))
            said(self._text[self._at : end])
            self._at = end
            if self.ended:
                return ""
            yield

    def back(self, mark: str) -> None:
        """Return to the beginning of `mark`, which has just been read."""
        self._at -= len(mark)

    def mark(self, marks: Sequence[str]) -> Reading:
        """Read one of `marks` if it comes next, behind white space, which is read in any case."""
        yield from self._skip()
        while True:
            for mark in marks:
                if self._text.startswith(mark, self._at):
                    self._at += len(mark)
                    return mark
            rest = self._text[self._at :]
            possible_mark = any(mark.startswith(rest) for mark in marks)
            if self.ended or not possible_mark:
                self.cut = possible_mark
                return ""
            yield

    def peek(self) -> Reading:
        """The next character behind white space, which is read; empty at the end."""
        yield from self._skip()
        return self._text[self._at : self._at + 1]

    def _skip(self) -> Generator[None]:
        """Read white space, up to a character that is none or to the end."""
        pieces: list[str] = []
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                pieces.append(self._text[self._at])
                self._at += 1
            if self._at < len(self._text) or self.ended:
                self.space = "".join(pieces)
                return
            yield

    def optional(self, mark: str) -> Generator[None, None, bool]:
        """Read `mark` if it comes next. Returns whether it did."""
        while not self.ended and len(self._text) - self._at < len(mark) and mark.startswith(self._text[self._at :]):
            yield
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) * found
        return found

    def head(self, marks: Sequence[str], most: int) -> Generator[None, None, tuple[str, str]]:
        """Read up to one of `marks` within `most` characters: the text before it, and the mark.

        Where there is none: all that was read, and an empty mark.
        """
        pieces: list[str] = []
        while True:
            found = _any_of(tuple(marks)).search(self._text, self._at, self._at + most)
            if found:
                pieces.append(self._text[self._at : found.start()])
                self._at = found.end()
                return "".join(pieces), found[0]
            if self.ended or len(self._text) - self._at >= most:
                read = self._text[self._at : self._at + most]
                self._at += len(read)
                return "".join(pieces) + read, ""
            yield

    def take(self, wanted: Callable[[str], bool]) -> Generator[None, None, bool]:
        """Read characters while `wanted` returns true. Returns whether it did so up to the end of the text."""
        while True:
            for i in range(self._at, len(self._text)):
                if not wanted(self._text[i]):
                    self._at = i
                    return False
            self._at = len(self._text)
            if self.ended:
                return True
            yield


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
