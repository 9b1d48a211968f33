"""One answer told apart: thoughts first, then what is said and which tools are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.parsers.parts import PLAIN, Splitter, TextPart
from quire.parsers.reasoning import Thinking


class AnswerSplitter:
    """A Splitter of two: what `thinking` calls content is for `calls` to read."""

    __slots__ = ("_calls", "_thinking")

    def __init__(self, thinking: Splitter, calls: Splitter = PLAIN) -> None:
        self._thinking, self._calls = thinking, calls

    def feed(self, text: str) -> Sequence[TextPart]:
        return list(self._read(self._thinking.feed(text)))

    def flush(self) -> Sequence[TextPart]:
        return [*self._read(self._thinking.flush()), *self._calls.flush()]

    def _read(self, parts: Sequence[TextPart]) -> Iterator[TextPart]:
        for part in parts:
            if part.kind == "content":
                yield from self._calls.feed(part.text)
            else:
                yield part


class ReasoningCounter:
    """Counts the tokens of an answer's thoughts, marks included, however they come."""

    __slots__ = ("_thinking", "_undecided", "count")

    def __init__(self, *, inside: bool) -> None:
        self._thinking, self._undecided, self.count = Thinking(inside=inside), 0, 0

    @property
    def over(self) -> bool:
        """Nothing more is to be counted."""
        return self._thinking.state in ("after", "answer")

    def feed(self, texts: Sequence[str]) -> None:
        """texts: of each new token."""
        for text in texts:
            if self.over:
                return
            was = self._thinking.state
            self._thinking.feed(text)
            self._undecided += 1
            if was == "inside" or self._thinking.state in ("inside", "after"):
                self.count += self._undecided
            if self._thinking.state != "begin":
                self._undecided = 0
