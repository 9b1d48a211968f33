"""Finds tool calls in the text of an answer, incrementally. Text that turns out not to be a call is content."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from quire.parsers.parts import TextPart, possible
from quire.parsers.tools.call import SPACE, Call, Value, escaped
from quire.parsers.tools.emitter import PartEmitter, Tools
from quire.parsers.tools.styles import Form, ToolStyle
from quire.types import UNLIMITED

_HEAD = re.compile(r"[\w.\-\[\]\s]")
_NAMED = re.compile(r"(?P<name>[\w.-]{1,256})(?:\[CALL_ID\][\w-]{1,64})?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 400
_LISTED = re.compile(r"\s*\[\s*([\w.]{0,256})\s*(.)?", re.DOTALL)

LONGEST = 1 << 14
"""The most characters of Python that are parsed."""


class Reader(PartEmitter):
    """A Splitter that finds the tool calls of one answer in one style, written as JSON objects or in Python.

    most: the number of calls that are returned; later ones are dropped. A call is returned as soon as its name is
    known; where it turns out to be invalid later, the rest is content. White space next to a call is dropped.
    """

    def __init__(self, style: ToolStyle, tools: Tools, *, most: int = UNLIMITED) -> None:
        super().__init__(most=most)
        self._style = style
        self._tools = tools
        self._state: Callable[[], bool] = self._start if style.bare else self._outside
        self._step: Callable[[str], bool] = self._open
        # Not read yet.
        self._text = ""
        # Read, and perhaps part of a call.
        self._raw: list[str] = []
        # A name, and the text between it and its arguments.
        self._head = ""
        self._form: Form = "known"
        self._call: Call | None = None
        self._value: Value | None = None
        self._list = self._sure = False

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        self._text += text
        while self._text and self._state():
            pass
        return self._take_parts()

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        self._ended = True
        source = self._text[: len(self._text) - possible(self._text, [self._style.end])]
        if self._state in (self._python, self._python_list) and self._run(source):
            self._text = ""
        self._leave()
        self._emit_content(self._text)
        self._emit_held()
        self._text = ""
        return self._take_parts()

    def _begin(self, name: str) -> None:
        """Emit the beginning of a call; the text that led to it is not content."""
        self._raw.clear()
        self._sure = True
        self._emit_call(name, unclosed=bool(self._style.end))

    # ---------------------------------------------------------------- states: each returns whether to go on

    def _start(self) -> bool:
        """At the beginning of the answer, where a call may stand without a mark."""
        bare = self._text.lstrip()
        self._emit_content(self._text[: len(self._text) - len(bare)])
        self._text = bare
        if not bare or any(mark.startswith(bare) and mark != bare for mark in self._style.marks):
            return False
        if bare[0] == "[" and not bare[1:].lstrip():
            return False
        self._state = self._outside
        if not any(bare.startswith(mark) for mark in self._style.marks) and bare[0] in "{[":
            self._form = "known"
            self._state = self._walk if bare[0] == "{" or bare[1:].lstrip()[0] == "{" else self._python_list
        return True

    def _outside(self) -> bool:
        marks = [*self._style.marks, self._style.end] if self._unclosed else list(self._style.marks)
        found = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if not found:
            kept = possible(self._text, marks)
            self._emit_content(self._text[: len(self._text) - kept])
            self._text = self._text[len(self._text) - kept :]
            return False
        at, _, mark = min(found)
        if any(other.startswith(self._text[at:]) and other != mark for other in marks):
            # A longer mark may begin with this one.
            return False
        self._emit_content(self._text[:at])
        self._text = self._text[at + len(mark) :]
        self._enter(mark)
        return True

    def _enter(self, mark: str) -> None:
        if mark not in self._style.marks:
            # An end mark after other content ends no call.
            if not self._unclosed:
                self._emit_content(mark)
            self._unclosed = False
            return
        self._form = self._style.marks[mark]
        self._state = self._python if self._form == "python" else self._walk
        self._raw = [mark]
        self._list = self._sure = False
        self._step = self._open

    def _walk(self) -> bool:
        """Read characters until one is invalid where it stands."""
        for i, c in enumerate(self._text):
            if not self._step(c):
                self._text = self._text[i:]
                self._leave()
                return True
            if not self._sure:
                self._raw.append(c)
        self._text = ""
        return False

    def _python(self) -> bool:
        """Python up to the end mark."""
        source, found, rest = self._text.partition(self._style.end)
        if found and self._run(source):
            self._text = rest
            self._unclosed = False
        elif not found and len(source) <= LONGEST:
            return False
        else:
            self._unclosed = False
        self._leave()
        return True

    def _python_list(self) -> bool:
        """The whole answer as Python, while it looks like a list of calls of known tools."""
        name = _LISTED.match(self._text)
        if len(self._text) <= LONGEST and name and (name[2] is None or (name[2] == "(" and name[1] in self._tools)):
            return False
        self._leave()
        return True

    def _leave(self) -> None:
        self._emit_content("".join(self._raw))
        self._raw.clear()
        self._state = self._outside

    def _run(self, source: str) -> bool:
        calls = python_calls(source, self._tools)
        for name, arguments in calls or ():
            self._begin(name)
            self._emit_arguments(arguments)
        return calls is not None

    # ---------------------------------------------------------------- steps: each returns whether a character is valid

    def _open(self, c: str) -> bool:
        """At the beginning of a call."""
        if c == "{":
            known = self._form == "known"
            accept = self._tools.__contains__ if known else bool
            self._call = Call(accept, bare=known, name_key=self._style.name_key)
            self._step = self._object
            return self._call.take(c)
        if c == "[" and not self._list:
            self._list = True
            return True
        if self._style.named and self._form == "any" and not self._list and (c.isalnum() or c == "_"):
            self._head = c
            self._step = self._name
            return True
        return c in SPACE

    def _object(self, c: str) -> bool:
        call = self._call
        assert call is not None
        if not call.take(c):
            return False
        if call.begun:
            if not self._sure:
                self._begin(call.name)
            if call.fragments:
                self._emit_arguments("".join(call.fragments))
                call.fragments.clear()
        if call.done:
            self._step = self._next
        return True

    def _name(self, c: str) -> bool:
        if c != "{":
            self._head += c
            return bool(_HEAD.fullmatch(c)) and len(self._head) <= _LONGEST_HEAD
        head = _NAMED.fullmatch(self._head)
        if head is None:
            return False
        self._begin(head["name"])
        self._value = Value()
        self._step = self._arguments
        return self._arguments(c)

    def _arguments(self, c: str) -> bool:
        value = self._value
        assert value is not None
        if not value.take(c):
            return False
        self._emit_arguments(escaped(c, value))
        if value.closed:
            self._step = self._next
        return True

    def _next(self, c: str) -> bool:
        """After a call: another call, or the end of the list."""
        if c == ("," if self._list else self._style.between[:1]) and c in ",;":
            self._sure = False
            self._step = self._open
            return True
        if c == "{" and not self._list and self._style.between == "\n":
            self._sure = False
            self._step = self._open
            return self._open(c)
        if c == "]" and self._list:
            self._step = SPACE.__contains__
            return True
        return c in SPACE


def python_calls(source: str, tools: Tools) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call, or None if `source` is not a sequence of calls of known tools.

    source: as `f(city="Paris", days=3)`, alone, in a list, or printed. It is parsed, never executed. tools: the names
    of the parameters of each tool, for positional arguments.
    """
    if len(source) > LONGEST:
        return None
    for text in (source, _one_line_strings(source)):
        try:
            body = ast.parse(text.strip()).body
            return [_call(one, tools) for line in body for one in _calls(line)] or None
        except SyntaxError:
            continue
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None
    return None


def _one_line_strings(source: str) -> str:
    """Python whose strings contain line breaks, as some templates write them, with these escaped."""
    made: list[str] = []
    quote = escape = ""
    for c in source:
        if c == "\n" and quote:
            made.append("n" if escape else "\\n")
        else:
            made.append(c)
        if not quote:
            quote = c if c in "'\"" else ""
        elif c == quote and not escape:
            quote = ""
        escape = c if c == "\\" and not escape else ""
    return "".join(made)


def _calls(line: ast.stmt) -> Sequence[ast.expr]:
    """The calls of one line. Raises ValueError if it has none."""
    value = line.value if isinstance(line, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print":
        return value.args
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts
    if value is None:
        raise ValueError("not a call")
    return [value]


def _call(one: ast.expr, tools: Tools) -> tuple[str, str]:
    if not isinstance(one, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(one.func)
    if name not in tools:
        raise ValueError("not a tool")
    given: dict[str, Any] = {key: ast.literal_eval(value) for key, value in zip(tools[name], one.args, strict=False)}
    if len(given) < len(one.args):
        raise ValueError("more arguments than parameters")
    for keyword in one.keywords:
        if keyword.arg is None or keyword.arg in given:
            raise ValueError("an argument without a name, or given twice")
        given[keyword.arg] = ast.literal_eval(keyword.value)
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    # Raises for a lone surrogate, which no response could carry.
    text.encode()
    return name, text
