"""JSON read a character at a time: whether it can go on like that, and whether it is complete."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

SPACE = " \t\r\n"
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_SCALAR_CHARS = frozenset("0123456789+-.eEtrufalsn")
_HEX = frozenset("0123456789abcdefABCDEF")
_LONGEST_SCALAR = 400
_DEEPEST = 200


class _At(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of a list
    KEY = auto()
    FIRST_KEY = auto()  # or the end of an object
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the list or object
    TEXT = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    DONE = auto()


class Value:
    """One JSON value, which begins with the first character taken.

    Line breaks and tabs may stand in texts as they are, as models write them.
    """

    __slots__ = ("_at", "_hex", "_key", "_scalar", "_stack")

    def __init__(self) -> None:
        self._at, self._stack = _At.VALUE, ""
        self._hex, self._scalar, self._key = 0, "", False

    @property
    def closed(self) -> bool:
        """Nothing can follow."""
        return self._at is _At.DONE

    @property
    def complete(self) -> bool:
        """It may end here: numbers have no end of their own."""
        return self.closed or (self._at is _At.SCALAR and not self._stack and bool(_SCALAR.fullmatch(self._scalar)))

    @property
    def in_text(self) -> bool:
        return self._at is _At.TEXT

    def take(self, c: str) -> bool:
        """Whether `c` may come here."""
        at = self._at
        if at is _At.TEXT:
            return self._text(c)
        if at is _At.ESCAPE:
            self._at, self._hex = (_At.HEX, 4) if c == "u" else (_At.TEXT, 0)
            return c in 'u"\\/bfnrt'
        if at is _At.HEX:
            self._hex -= 1
            self._at = _At.HEX if self._hex else _At.TEXT
            return c in _HEX
        if at is _At.SCALAR:
            if c in _SCALAR_CHARS:
                self._scalar += c
                return len(self._scalar) <= _LONGEST_SCALAR
            if not self._stack or not _SCALAR.fullmatch(self._scalar):
                return False
            self._at = _At.NEXT
        return (c in SPACE and bool(self._stack)) or self._structure(c)

    def _text(self, c: str) -> bool:
        if c == "\\":
            self._at = _At.ESCAPE
        elif c == '"':
            self._at = _At.COLON if self._key else self._after()
        return c >= " " or c in SPACE

    def _after(self) -> _At:
        return _At.NEXT if self._stack else _At.DONE

    def _structure(self, c: str) -> bool:
        at = self._at
        if c in "]}":
            return self._close(c)
        if at is _At.NEXT:
            self._at = _At.KEY if self._stack[-1] == "{" else _At.VALUE
            return c == ","
        if at is _At.COLON:
            self._at = _At.VALUE
            return c == ":"
        if at is _At.DONE:
            return False
        self._key = at in (_At.KEY, _At.FIRST_KEY)
        if c == '"':
            self._at = _At.TEXT
            return True
        if self._key:
            return False
        if c in "{[":
            self._stack += c
            self._at = _At.FIRST_KEY if c == "{" else _At.FIRST_VALUE
            return len(self._stack) <= _DEEPEST
        self._scalar, self._at = c, _At.SCALAR
        return c in _SCALAR_CHARS

    def _close(self, c: str) -> bool:
        opened, first = ("{", _At.FIRST_KEY) if c == "}" else ("[", _At.FIRST_VALUE)
        if self._at not in (_At.NEXT, first) or not self._stack.endswith(opened):
            return False
        self._stack = self._stack[:-1]
        self._at = self._after()
        return True


def escaped(c: str, value: Value) -> str:
    """`c`, which `value` took, as JSON wants it: within a text, a line break or tab is spelled."""
    return _ESCAPES.get(c, c) if value.in_text else c


_ESCAPES: Mapping[str, str] = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
