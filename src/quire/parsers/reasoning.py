"""Splits an answer into reasoning, `<think>...</think>`, and content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from quire.parsers.parts import PLAIN, Splitter, TextPart, possible
from quire.types import Ahead

ReasoningParser = Literal["none", "deepseek_r1", "qwen3"]

OPEN, CLOSE = "<think>", "</think>"


def parser_of(template: str | None) -> ReasoningParser:
    """The parser that a model with this chat template needs."""
    if template is None or CLOSE not in template:
        return "none"
    return "qwen3" if "enable_thinking" in template else "deepseek_r1"


def thoughts_ahead(parser: ReasoningParser, prompt: str, begun: str = "", *, off: bool = False) -> Ahead:
    """Which reasoning may precede an answer to `prompt`.

    begun: the part of the answer that is already there, when an answer is continued. off: the client disabled
    reasoning. The last mark in `begun`, or a mark at the end of the prompt, decides; without one, DeepSeek's models
    always reason first, and Qwen's may write an opening mark.
    """
    if parser == "none":
        return "none"
    if begun:
        return "open" if begun.rfind(OPEN) > begun.rfind(CLOSE) else "none"
    end = prompt[-64:].rstrip()
    if end.endswith(OPEN):
        return "open"
    if end.endswith(CLOSE) or off:
        return "none"
    return "open" if parser == "deepseek_r1" else "possible"


class Thinking:
    """A Splitter of reasoning and content; white space around the marks belongs to neither.

    inside: the text begins with reasoning, even without an opening mark. `state`: 'begin' while that is not known, then
    'inside', 'after' the closing mark, and 'answer' once the content has begun.
    """

    __slots__ = ("_inside", "_said", "_space", "_text", "state")

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._said = False
        self.state: Literal["begin", "inside", "after", "answer"] = "begin"
        self._text = self._space = ""

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        if self.state == "answer":
            return (TextPart("content", text),) if text else ()
        self._text += text
        parts: list[TextPart] = []
        if self.state == "begin":
            self._begin(parts)
        if self.state == "inside":
            self._think(parts)
        if self.state == "after":
            self._after(parts)
        return parts

    def _begin(self, parts: list[TextPart]) -> None:
        bare = self._text.lstrip()
        if len(bare) < len(OPEN) and OPEN.startswith(bare):
            return
        if bare.startswith(OPEN):
            self.state, self._text = "inside", bare.removeprefix(OPEN)
        elif self._inside:
            self.state = "inside"
        else:
            self.state = "answer"
            parts.append(TextPart("content", self._text))
            self._text = ""

    def _think(self, parts: list[TextPart]) -> None:
        said, found, rest = self._text.partition(CLOSE)
        if found:
            self.state, self._text = "after", rest
        else:
            kept = possible(said, (CLOSE,))
            said, self._text = said[: len(said) - kept], said[len(said) - kept :]
        self._say(said, parts)

    def _say(self, text: str, parts: list[TextPart]) -> None:
        """Emit all but trailing white space, which may turn out to precede the closing mark."""
        text = self._space + text if self._said else text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._said = True
            parts.append(TextPart("reasoning", said))

    def _after(self, parts: list[TextPart]) -> None:
        bare = self._text.lstrip()
        self._text = ""
        if bare:
            self.state = "answer"
            parts.append(TextPart("content", bare))

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        parts: list[TextPart] = []
        if self.state == "begin" and not self._inside:
            parts.append(TextPart("content", self._text))
        elif self.state in ("begin", "inside"):
            self._say(self._text, parts)
        self.state, self._text = "answer", ""
        return [part for part in parts if part.text]


class AnswerSplitter:
    """Two Splitters in sequence: the content that `thinking` finds is fed to `calls`."""

    __slots__ = ("_calls", "_thinking")

    def __init__(self, thinking: Splitter, calls: Splitter = PLAIN) -> None:
        self._thinking = thinking
        self._calls = calls

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        return list(self._read(self._thinking.feed(text)))

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        return [*self._read(self._thinking.flush()), *self._calls.flush()]

    def _read(self, parts: Sequence[TextPart]) -> Iterator[TextPart]:
        for part in parts:
            if part.kind == "content":
                yield from self._calls.feed(part.text)
            else:
                yield part


class ReasoningCounter:
    """Counts the reasoning tokens of an answer, marks included."""

    __slots__ = ("_thinking", "_undecided", "count")

    def __init__(self, *, inside: bool) -> None:
        self._thinking = Thinking(inside=inside)
        self._undecided = 0
        self.count = 0

    @property
    def over(self) -> bool:
        """Whether the reasoning has ended."""
        return self._thinking.state in ("after", "answer")

    def feed(self, texts: Sequence[str]) -> None:
        """Count new tokens, given the text of each."""
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
