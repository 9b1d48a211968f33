"""The reader of each style of tool calls."""

from __future__ import annotations

from quire.parsers.parts import Splitter
from quire.parsers.tools.emitter import Tools
from quire.parsers.tools.reader import Reader
from quire.parsers.tools.styles import Style, ToolStyle
from quire.parsers.tools.tagged import TaggedReader
from quire.types import UNLIMITED


def reader_of(style: Style, tools: Tools, *, most: int = UNLIMITED) -> Splitter:
    """A Splitter that finds the tool calls of one answer. most: calls that are returned; later ones are dropped."""
    if isinstance(style, ToolStyle):
        return Reader(style, tools, most=most)
    return TaggedReader(style, tools, most=most)
