"""What a model thinks before it answers, told apart from the answer: `<think>...</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quire.parsers.parts import TextPart, possible
from quire.types import Ahead

ReasoningParser = Literal["none", "deepseek_r1", "qwen3"]

OPEN, CLOSE = "<think>", "</think>"


def parser_of(template: str | None) -> ReasoningParser:
    """Which parser a model needs, by its chat template."""
    if template is None or CLOSE not in template:
        return "none"
    return "qwen3" if "enable_thinking" in template else "deepseek_r1"


def thinks_first(parser: ReasoningParser, prompt: str, begun: str = "") -> bool:
    """Whether an answer to `prompt` begins with thoughts although no mark in it says so (see `thoughts_ahead`)."""
    return thoughts_ahead(parser, prompt, begun) == "open"


def thoughts_ahead(parser: ReasoningParser, prompt: str, begun: str = "", *, off: bool = False) -> Ahead:
    """Which thoughts an answer to `prompt` may have before it.

    begun: the part of an answer that it goes on with. off: the client wants none. A mark at the prompt's end, or the
    last one in `begun`, decides; without one, DeepSeek's models think first, and Qwen's may write a mark.
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
    """Splits thoughts from the answer; white space around the marks belongs to neither.

    inside: the text begins with thoughts, whether or not a mark says so. `state`: 'begin' while that is not known,
    then 'inside', 'after' the mark, and 'answer' once the answer has begun.
    """

    __slots__ = ("_inside", "_said", "_space", "_text", "state")

    def __init__(self, *, inside: bool) -> None:
        self._inside, self._said = inside, False
        self.state: Literal["begin", "inside", "after", "answer"] = "begin"
        self._text = self._space = ""

    def feed(self, text: str) -> Sequence[TextPart]:
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
        """All but white space that may turn out to stand before the mark."""
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
        parts: list[TextPart] = []
        if self.state == "begin" and not self._inside:
            parts.append(TextPart("content", self._text))
        elif self.state in ("begin", "inside"):
            self._say(self._text, parts)
        self.state, self._text = "answer", ""
        return [part for part in parts if part.text]
