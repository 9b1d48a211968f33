"""What all readers of tool calls share: the parts found so far, and the white space around calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.parsers.parts import TextPart, joined
from quire.types import UNLIMITED

Tools = Mapping[str, Collection[str]]
"""The parameters of each tool, by the tool's name: their names, or a mapping from names to JSON schemas."""


def schema_of(tools: Tools, tool: str, parameter: str) -> Any:
    """The JSON schema of a parameter; true, which allows anything, where none is known."""
    parameters = tools.get(tool)
    return parameters.get(parameter, True) if isinstance(parameters, Mapping) else True


class PartEmitter:
    """Collects parts. White space next to a call is dropped, as are the marks that lead to one.

    most: the number of calls that are returned; later ones are dropped.
    """

    def __init__(self, *, most: int = UNLIMITED) -> None:
        self._most = most
        self._calls = 0
        # Whether a call came last; and whether its end marks are still to come.
        self._after_call = self._unclosed = False
        # Whether the answer has ended.
        self._ended = False
        # White space and opening marks, which are content only if no call follows.
        self._held: list[str] = []
        self._parts: list[TextPart] = []

    def _take_parts(self) -> Sequence[TextPart]:
        parts = joined(self._parts)
        self._parts = []
        return parts

    def _emit_content(self, text: str) -> None:
        if self._ended and self._unclosed:
            # Marks of a call, cut off with the answer.
            return
        content = text.rstrip()
        if content:
            held = "".join(self._held) + content
            self._parts.append(TextPart("content", held.lstrip() if self._after_call else held))
            self._after_call = self._unclosed = False
            self._held.clear()
        if len(content) < len(text):
            self._held.append(text[len(content) :])

    def _emit_held(self) -> None:
        """At the end of the answer: what was held back is content after all, but for white space after a call, and what
        belongs to one that is cut off."""
        text = "".join(self._held)
        self._held.clear()
        text = text.strip() if self._after_call else text
        if text and not self._unclosed:
            self._parts.append(TextPart("content", text))

    def _emit_call(self, name: str, *, unclosed: bool) -> None:
        """Emit the beginning of a call. unclosed: an end mark may follow the call."""
        self._held.clear()
        self._after_call = True
        self._unclosed = unclosed
        self._calls += 1
        if self._calls <= self._most:
            self._parts.append(TextPart("call", name, self._calls - 1))

    def _emit_arguments(self, arguments: str) -> None:
        if self._calls <= self._most:
            self._parts.append(TextPart("arguments", arguments, self._calls - 1))
