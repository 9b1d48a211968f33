"""Parts of an answer: content, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]


class TextPart(NamedTuple):
    """Some text of one kind. `call`: the text is the name of the tool, and `call` the number of the call it begins.

    `arguments`: a fragment of that call's arguments; all of them together are a JSON object, as the model wrote it.
    """

    kind: Kind
    text: str
    call: int = 0


class Splitter(Protocol):
    """Splits one answer into parts, incrementally.

    However the text is cut into pieces, the parts are the same once adjacent ones are joined.
    """

    def feed(self, text: str) -> Sequence[TextPart]:
        """The parts that are certain after `text`."""

    def flush(self) -> Sequence[TextPart]:
        """The text held back, at the end of the answer."""


class PlainSplitter:
    """All text is content."""

    __slots__ = ()

    def feed(self, text: str) -> Sequence[TextPart]:
        """The text as it is."""
        return (TextPart("content", text),) if text else ()

    def flush(self) -> Sequence[TextPart]:
        """Nothing: no text is held back."""
        return ()


PLAIN = PlainSplitter()


def joined(parts: Iterable[TextPart]) -> list[TextPart]:
    """Adjacent parts of one kind and call as one part. The beginning of a call is never joined."""
    pieces: list[tuple[TextPart, list[str]]] = []
    for part in parts:
        if pieces and part.kind != "call" and part[::2] == pieces[-1][0][::2]:
            pieces[-1][1].append(part.text)
        elif part.text or part.kind == "call":
            pieces.append((part, [part.text]))
    return [TextPart(first.kind, "".join(texts), first.call) for first, texts in pieces]


def possible(text: str, markers: Iterable[str]) -> int:
    """The number of characters at the end of `text` that may be the beginning of a marker."""
    most = 0
    for marker in markers:
        first = marker[:1]
        at = text.find(first, max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(first, at + 1)
        if at >= 0:
            most = max(most, len(text) - at)
    return most
