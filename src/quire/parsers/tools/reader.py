"""Calls of tools found in an answer's text as it comes. What is no call after all stays content, to the letter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from quire.parsers.parts import TextPart, joined, possible
from quire.parsers.tools.call import Call
from quire.parsers.tools.python import LONGEST, python_calls
from quire.parsers.tools.styles import Form, ToolStyle
from quire.parsers.tools.value import SPACE, Value, escaped
from quire.types import UNLIMITED

_HEAD = re.compile(r"[\w.\-\[\]\s]")
_NAMED = re.compile(r"(?P<name>[\w.-]{1,256})(?:\[CALL_ID\][\w-]{1,64})?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 400
_LISTED = re.compile(r"\s*\[\s*([\w.]{0,256})\s*(.)?", re.DOTALL)


class Reader:
    """Reads one answer in one style (a Splitter).

    tools: by name, the names of their parameters. most: calls told; those after them are left out.
    A call is told from the moment its name is certain. What breaks off later is content from there on. White space next
    to a call belongs to nobody.
    """

    def __init__(self, style: ToolStyle, tools: Mapping[str, Sequence[str]], *, most: int = UNLIMITED) -> None:
        self._style, self._tools, self._most = style, tools, most
        self._state: Callable[[], bool] = self._start if style.bare else self._outside
        self._step: Callable[[str], bool] = self._open
        self._text = ""  # not looked at
        self._raw = ""  # looked at, and perhaps part of a call
        self._head = ""  # a name and what stands between it and its arguments
        self._form: Form = "known"
        self._call: Call | None = None
        self._value: Value | None = None
        self._list = self._sure = self._unclosed = self._after_call = False
        self._calls = 0
        self._space = ""
        self._parts: list[TextPart] = []

    def feed(self, text: str) -> Sequence[TextPart]:
        self._text += text
        while self._text and self._state():
            pass
        return self._told()

    def flush(self) -> Sequence[TextPart]:
        python = self._state in (self._python, self._python_list)
        if (python and self._run(self._text)) or (self._unclosed and self._text == self._style.end):
            self._text = ""
        self._say(self._raw + self._text)
        if not self._after_call and self._space:
            self._parts.append(TextPart("content", self._space))
        self._text = self._raw = self._space = ""
        self._state = self._outside
        return self._told()

    def _told(self) -> Sequence[TextPart]:
        told, self._parts = joined(self._parts), []
        return told

    # ---------------------------------------------------------------- what is told

    def _say(self, text: str) -> None:
        text = text.lstrip() if self._after_call else self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._after_call = self._unclosed = False
            self._parts.append(TextPart("content", said))

    def _begin(self, name: str) -> None:
        """A call it is: what led to it is not content."""
        self._raw = self._space = ""
        self._sure = self._after_call = True
        self._unclosed = bool(self._style.end)
        self._calls += 1
        if self._calls <= self._most:
            self._parts.append(TextPart("call", name, self._calls - 1))

    def _tell(self, arguments: str) -> None:
        if self._calls <= self._most:
            self._parts.append(TextPart("arguments", arguments, self._calls - 1))

    # ---------------------------------------------------------------- states: whether to look again

    def _start(self) -> bool:
        """Nothing yet but white space: a call may stand here without a mark."""
        bare = self._text.lstrip()
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
            self._say(self._text[: len(self._text) - kept])
            self._text = self._text[len(self._text) - kept :]
            return False
        at, _, mark = min(found)
        if any(other.startswith(self._text[at:]) and other != mark for other in marks):
            return False  # a longer mark may begin with it
        self._say(self._text[:at])
        self._text = self._text[at + len(mark) :]
        self._enter(mark)
        return True

    def _enter(self, mark: str) -> None:
        if mark not in self._style.marks:
            if not self._unclosed:  # words stand between: it ends no call
                self._say(mark)
            self._unclosed = False
            return
        self._form = self._style.marks[mark]
        self._state, self._raw = (self._python if self._form == "python" else self._walk), mark
        self._list, self._sure, self._step = False, False, self._open

    def _walk(self) -> bool:
        """A character at a time, until one cannot come where it stands."""
        for i, c in enumerate(self._text):
            if not self._step(c):
                self._text = self._text[i:]
                self._leave()
                return True
            if not self._sure:
                self._raw += c
        self._text = ""
        return False

    def _python(self) -> bool:
        """Up to the end mark."""
        source, found, rest = self._text.partition(self._style.end)
        if found and self._run(source):
            self._text, self._unclosed = rest, False
        elif not found and len(source) <= LONGEST:
            return False
        else:
            self._unclosed = False
        self._leave()
        return True

    def _python_list(self) -> bool:
        """The whole answer, as long as it looks like calls of tools there are."""
        name = _LISTED.match(self._text)
        if len(self._text) <= LONGEST and name and (name[2] is None or (name[2] == "(" and name[1] in self._tools)):
            return False
        self._leave()
        return True

    def _leave(self) -> None:
        raw, self._raw = self._raw, ""
        self._say(raw)
        self._state = self._outside

    def _run(self, source: str) -> bool:
        calls = python_calls(source, self._tools)
        for name, arguments in calls or ():
            self._begin(name)
            self._tell(arguments)
        return calls is not None

    # ---------------------------------------------------------------- steps: whether a character may come here

    def _open(self, c: str) -> bool:
        """Where a call begins."""
        if c == "{":
            known = self._form == "known"
            self._call = Call(self._tools.__contains__ if known else bool, bare=known)
            self._step = self._object
            return self._call.take(c)
        if c == "[" and not self._list:
            self._list = True
            return True
        if self._style.named and self._form == "any" and not self._list and (c.isalnum() or c == "_"):
            self._head, self._step = c, self._name
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
            if call.name_sent:
                self._tell("".join(call.name_sent))
                call.name_sent.clear()
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
        self._value, self._step = Value(), self._arguments
        return self._arguments(c)

    def _arguments(self, c: str) -> bool:
        value = self._value
        assert value is not None
        if not value.take(c):
            return False
        self._tell(escaped(c, value))
        if value.closed:
            self._step = self._next
        return True

    def _next(self, c: str) -> bool:
        """After a call: another one, or the end of the list."""
        if c == ("," if self._list else self._style.between[:1]) and c in ",;":
            self._sure, self._step = False, self._open
            return True
        if c == "]" and self._list:
            self._step = SPACE.__contains__
            return True
        return c in SPACE
