"""A tool's call written as a JSON object, read a character at a time: what is certain is told at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Literal

from quire.parsers.tools.value import SPACE, Value, escaped

_NAME = re.compile(r"[\w.:/-]{1,256}")

_ROLES: Mapping[str, str] = {"name": "name", "arguments": "arguments", "parameters": "arguments"}


class Call:
    """An object with a `name` and `arguments` (or `parameters`), in any order and among others.

    accept: whether a tool of this name may be called. bare: an object without arguments is no call.
    Once `begun`, the name is certain, and `told` has the fragments of the arguments since it was last emptied.
    Arguments that come as a text are those that the text spells.
    """

    __slots__ = (
        "_accept",
        "_at",
        "_bare",
        "_given",
        "_pieces",
        "_role",
        "_streams",
        "_value",
        "done",
        "name",
        "name_sent",
    )

    def __init__(self, accept: Callable[[str], bool], *, bare: bool) -> None:
        self._accept, self._bare = accept, bare
        self._at: Literal["open", "first", "key", "colon", "value", "next", "done"] = "open"
        self._role = "other"
        self._value: Value | None = None
        self._pieces: list[str] = []
        self._given = self._streams = self.done = False
        self.name = ""
        self.name_sent: list[str] = []

    @property
    def begun(self) -> bool:
        return self._given and bool(self.name)

    def take(self, c: str) -> bool:
        """Whether `c` may come here."""
        value = self._value
        if value is not None:
            if value.take(c):
                self._collect(c, value)
                return not value.closed or self._ended()
            if not (value.complete and self._ended()):
                return False
        return c in SPACE or self._structure(c)

    def _structure(self, c: str) -> bool:
        """Between the keys and values of the object itself."""
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
            (self.name_sent if self._streams else self._pieces).append(escaped(c, value))

    def _ended(self) -> bool:
        """A key or a value is complete. Whether it may be what it is."""
        self._value = None
        if self._role == "key":
            self._at, self._role = "colon", _ROLES.get(json.loads("".join(self._pieces)), "other")
            return not (self._role == "name" and self.name) and not (self._role == "arguments" and self._given)
        self._at = "next"
        if self._role == "name":
            return self._named(json.loads("".join(self._pieces)))
        if self._role == "arguments" and not self._streams:
            return self._spelled("".join(self._pieces))
        return True

    def _named(self, name: object) -> bool:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not self._accept(name):
            return False
        self.name = name
        return True

    def _spelled(self, value: str) -> bool:
        """Arguments that are no object: only a text that spells one, or null, can be meant as one."""
        try:
            given = json.loads(value)
            text = given if isinstance(given, str) else value
            spelled = json.loads(text, parse_constant=_refuse)
            text.encode()  # no half of a pair, which no answer could carry
        except (ValueError, RecursionError):
            return False
        if not isinstance(spelled, dict | None):
            return False
        self._given = True
        self.name_sent.append("{}" if spelled is None else text)
        return True

    def _finish(self) -> bool:
        self._at, self.done = "done", True
        if not self._given and not self._bare:
            self._given = True
            self.name_sent.append("{}")
        return self.begun


def _refuse(constant: str) -> None:
    """Python's NaN and Infinity, which no JSON has."""
    raise ValueError(f"{constant} is not JSON")
