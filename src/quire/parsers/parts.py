"""Pieces of an answer told apart: what is said, what is thought, and which tools are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]


class TextPart(NamedTuple):
    """Some text of one kind. `call`: the text is the name of the tool that call number `call` begins to call.

    `arguments`: a fragment of that call's arguments; all of them together are a JSON object, as the model wrote it.
    """

    kind: Kind
    text: str
    call: int = 0


class Splitter(Protocol):
    """Tells the parts of one answer, whatever pieces its text comes in.

    However a text is cut, the parts told are the same once those that follow one another are joined.
    """

    def feed(self, text: str) -> Sequence[TextPart]:
        """What is certain after `text`."""

    def flush(self) -> Sequence[TextPart]:
        """What was held back, at the end."""


class PlainSplitter:
    """Everything is content."""

    __slots__ = ()

    def feed(self, text: str) -> Sequence[TextPart]:
        return (TextPart("content", text),) if text else ()

    def flush(self) -> Sequence[TextPart]:
        return ()


PLAIN = PlainSplitter()


def joined(parts: Iterable[TextPart]) -> list[TextPart]:
    """Neighbours of one kind and call as one. A call's beginning stands alone."""
    pieces: list[tuple[TextPart, list[str]]] = []
    for part in parts:
        if pieces and part.kind != "call" and part[::2] == pieces[-1][0][::2]:
            pieces[-1][1].append(part.text)
        elif part.text or part.kind == "call":
            pieces.append((part, [part.text]))
    return [TextPart(first.kind, "".join(texts), first.call) for first, texts in pieces]


def possible(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
