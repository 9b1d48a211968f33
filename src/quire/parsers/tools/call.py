"""Tool calls in JSON, read character by character, so that each part is known as soon as possible."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

SPACE = " \t\r\n"
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_SCALAR_CHARS = frozenset("0123456789+-.eEtrufalsn")
_HEX = frozenset("0123456789abcdefABCDEF")
_LONGEST_SCALAR = 400
_DEEPEST = 200


_ValueState = Literal[
    "value", "first value", "key", "first key", "colon", "next", "text", "escape", "hex", "scalar", "done"
]
"""What comes next, or what is being read. The first value or key may be the end of its list or object instead."""


@dataclass(slots=True, eq=False)
class Value:
    """A JSON value, read character by character from its first one.

    Strings may contain line breaks and tabs unescaped, as models write them.
    """

    _at: _ValueState = "value"
    _stack: str = ""
    _hex: int = 0
    _scalar: str = ""
    _key: bool = False

    @property
    def closed(self) -> bool:
        """Whether the value has ended."""
        return self._at == "done"

    @property
    def complete(self) -> bool:
        """Whether the value may end here; a number has no end mark of its own."""
        return self.closed or (self._at == "scalar" and not self._stack and bool(_SCALAR.fullmatch(self._scalar)))

    @property
    def in_text(self) -> bool:
        """Whether the next character is part of a string."""
        return self._at == "text"

    def take(self, c: str) -> bool:
        """Read `c`. Returns whether it may come here."""
        at = self._at
        if at == "text":
            return self._text(c)
        if at == "escape":
            self._at = "hex" if c == "u" else "text"
            self._hex = 4
            return c in 'u"\\/bfnrt'
        if at == "hex":
            self._hex -= 1
            self._at = "hex" if self._hex else "text"
            return c in _HEX
        if at == "scalar":
            if c in _SCALAR_CHARS:
                self._scalar += c
                return len(self._scalar) <= _LONGEST_SCALAR
            if not self._stack or not _SCALAR.fullmatch(self._scalar):
                return False
            self._at = "next"
        return (c in SPACE and bool(self._stack)) or self._structure(c)

    def _text(self, c: str) -> bool:
        if c == "\\":
            self._at = "escape"
        elif c == '"':
            self._at = "colon" if self._key else self._after()
        return c >= " " or c in SPACE

    def _after(self) -> _ValueState:
        return "next" if self._stack else "done"

    def _structure(self, c: str) -> bool:
        at = self._at
        if c in "]}":
            return self._close(c)
        if at == "next":
            self._at = "key" if self._stack[-1] == "{" else "value"
            return c == ","
        if at == "colon":
            self._at = "value"
            return c == ":"
        if at == "done":
            return False
        self._key = at in ("key", "first key")
        if c == '"':
            self._at = "text"
            return True
        if self._key:
            return False
        if c in "{[":
            self._stack += c
            self._at = "first key" if c == "{" else "first value"
            return len(self._stack) <= _DEEPEST
        self._scalar = c
        self._at = "scalar"
        return c in _SCALAR_CHARS

    def _close(self, c: str) -> bool:
        opening = "{" if c == "}" else "["
        first = "first key" if c == "}" else "first value"
        if self._at not in ("next", first) or not self._stack.endswith(opening):
            return False
        self._stack = self._stack[:-1]
        self._at = self._after()
        return True


def escaped(c: str, value: Value) -> str:
    """`c`, which `value` has just read, as valid JSON: within a string, a line break or tab is escaped."""
    return _ESCAPES.get(c, c) if value.in_text else c


_ESCAPES: Mapping[str, str] = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


_NAME = re.compile(r"[\w.:/-]{1,256}")

_ARGUMENTS = ("arguments", "parameters", "args")


@dataclass(slots=True, eq=False)
class Call:
    """A call as a JSON object with a `name` and `arguments` (`parameters`, `args`), in any order, among other keys.

    accept: whether a tool of this name may be called. bare: an object without arguments is not a call. name_key: the
    key of the name; empty where the only key is the name, and its value the arguments.
    Once `begun`, the name is known, and `fragments` holds the text of the arguments that the caller has not taken yet.
    Arguments in a string are the JSON that the string holds.
    """

    accept: Callable[[str], bool]
    bare: bool
    name_key: str = "name"
    name: str = ""
    fragments: list[str] = field(default_factory=list)
    done: bool = False
    _at: Literal["open", "first", "key", "colon", "value", "next", "done"] = "open"
    _role: str = "other"
    _value: Value | None = None
    _pieces: list[str] = field(default_factory=list)
    _given: bool = False
    _streams: bool = False

    @property
    def begun(self) -> bool:
        """Whether the name is known and the arguments have begun."""
        return self._given and bool(self.name)

    def take(self, c: str) -> bool:
        """Read `c`. Returns whether it may come here."""
        value = self._value
        if value is not None:
            if value.take(c):
                self._collect(c, value)
                return not value.closed or self._ended()
            if not (value.complete and self._ended()):
                return False
        return c in SPACE or self._structure(c)

    def _structure(self, c: str) -> bool:
        """Read a character between the keys and values of the object itself."""
        at = self._at
        if at == "open":
            self._at = "first"
            return c == "{"
        if at == "colon":
            self._at = "value"
            return c == ":"
        if at == "value":
            return self._begin(c)
        if at == "next" and c == ",":
            self._at = "key"
            return True
        if at in ("first", "key") and c == '"':
            self._role = "key"
            return self._begin(c)
        return c == "}" and at in ("first", "next") and self._finish()

    def _begin(self, c: str) -> bool:
        self._value, self._pieces = Value(), []
        self._streams = self._role == "arguments" and c == "{"
        self._given = self._given or self._streams
        if not self._value.take(c):
            return False
        self._collect(c, self._value)
        return True

    def _collect(self, c: str, value: Value) -> None:
        if self._role != "other":
            (self.fragments if self._streams else self._pieces).append(escaped(c, value))

    def _ended(self) -> bool:
        """A key or a value is complete. Returns whether it is valid."""
        self._value = None
        if self._role == "key":
            self._at = "colon"
            return self._keyed(json.loads("".join(self._pieces)))
        self._at = "next"
        if self._role == "name":
            return self._named(json.loads("".join(self._pieces)))
        if self._role == "arguments" and not self._streams:
            return self._parse_arguments("".join(self._pieces))
        return True

    def _keyed(self, key: str) -> bool:
        """A key, which says what its value is. Returns whether it may come here."""
        if not self.name_key:
            self._role = "arguments"
            return not self.name and self._named(key)
        self._role = "name" if key == self.name_key else "arguments" if key in _ARGUMENTS else "other"
        return not (self._role == "name" and self.name) and not (self._role == "arguments" and self._given)

    def _named(self, name: object) -> bool:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not self.accept(name):
            return False
        self.name = name
        return True

    def _parse_arguments(self, value: str) -> bool:
        """Arguments that are not an object must be a string that holds one, or null."""
        try:
            given = json.loads(value)
            text = given if isinstance(given, str) else value
            parsed = json.loads(text, parse_constant=_refuse)
            # Raises for a lone surrogate, which no response could carry.
            text.encode()
        except (ValueError, RecursionError):
            return False
        if not isinstance(parsed, dict | None):
            return False
        self._given = True
        self.fragments.append("{}" if parsed is None else text)
        return True

    def _finish(self) -> bool:
        self._at = "done"
        self.done = True
        if not self._given and not self.bare:
            self._given = True
            self.fragments.append("{}")
        return self.begun


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is not JSON")
