"""Tool calls between tags: the name, then the arguments as JSON, as tagged parameters, or in Gemma's notation."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

from quire.parsers.parts import TextPart
from quire.parsers.tools.call import Value, escaped
from quire.parsers.tools.emitter import PartEmitter, Tools, schema_of
from quire.parsers.tools.kinds import Properties, as_json, json_text, kinds_of
from quire.parsers.tools.styles import CDATA, Nested, Notation, Parameters, TaggedStyle
from quire.parsers.tools.tape import Reading, Tape
from quire.types import UNLIMITED

_LONGEST_HEAD = 400
_DEEPEST = 64


class TaggedReader(PartEmitter):
    """A Splitter that finds the tool calls of one answer in one tagged style.

    A call is returned as soon as its name is known and its arguments have begun; where it turns out to be invalid
    later, the rest is content. The arguments of a call that is cut off are cut off too, never completed.
    """

    def __init__(self, style: TaggedStyle, tools: Tools, *, most: int = UNLIMITED) -> None:
        super().__init__(most=most)
        self._style = style
        self._tools = tools
        self._tape = Tape()
        self._reading: Iterator[None] = self._read()

    def feed(self, text: str) -> Sequence[TextPart]:
        """See Splitter."""
        self._tape.append(text)
        next(self._reading, None)
        return self._take_parts()

    def flush(self) -> Sequence[TextPart]:
        """See Splitter."""
        self._ended = self._tape.ended = True
        next(self._reading, None)
        self._emit_held()
        return self._take_parts()

    def _read(self) -> Iterator[None]:
        style, tape = self._style, self._tape
        marks = (style.begin, *style.opens, *style.closes)
        while mark := (yield from tape.until(marks, self._emit_content)):
            if mark == style.begin:
                yield from self._call()
            elif mark in style.opens:
                self._held.append(mark)
            elif not self._unclosed:
                # An end mark that ends no call.
                self._emit_content(mark)

    def _call(self) -> Generator[None]:
        style = self._style
        head, mark = yield from self._tape.head(style.head_ends, _LONGEST_HEAD)
        named = re.fullmatch(style.named, head)
        if named is None or not mark:
            self._emit_content(style.begin + head + mark)
            return
        name = named["name"]
        if isinstance(style.form, Parameters):
            # A section's end mark is still to come.
            self._emit_call(name, unclosed=mark not in style.closes or bool(style.opens))
            if mark in style.closes:
                self._emit_arguments("{}")
            else:
                yield from self._parameters(name, style.form, opened=mark == style.form.open)
        elif isinstance(style.form, Notation):
            self._emit_call(name, unclosed=True)
            reader = _NotationReader(self._tape, style.form.quote, self._emit_arguments, self._emit_content)
            self._end((yield from reader.object()))
        elif isinstance(style.form, Nested):
            self._emit_call(name, unclosed=True)
            nested = _NestedReader(self._tape, style.form.mark, self._emit_arguments, self._emit_content)
            yield from nested.whole(self._tools.get(name, {}))
        else:
            yield from self._json(name, style.begin + head + mark)

    def _json(self, name: str, raw: str) -> Generator[None]:
        """Arguments in JSON. raw: the text of the call so far, which is content if no object follows."""
        first = yield from self._tape.peek()
        space = self._tape.space
        if first != "{":
            if first and (yield from self._tape.mark(self._style.closes)):
                self._emit_call(name, unclosed=True)
                self._emit_arguments("{}")
            else:
                self._emit_content(raw + space)
            return
        self._emit_call(name, unclosed=True)
        value = Value()
        pieces: list[str] = []

        def wanted(c: str) -> bool:
            if value.closed or not value.take(c):
                return False
            pieces.append(escaped(c, value))
            return True

        reading = self._tape.take(wanted)
        for _ in reading:
            self._emit_arguments("".join(pieces))
            pieces.clear()
            yield
        self._emit_arguments("".join(pieces))
        self._end(value.closed)

    def _end(self, valid: bool) -> None:
        """The arguments of a call have ended. Behind invalid ones all is content, the end mark too; those that are cut
        off are not invalid."""
        self._unclosed = self._unclosed and (valid or self._ended)

    def _parameters(self, tool: str, form: Parameters, *, opened: bool) -> Generator[None]:
        """Tagged parameters as one object. opened: the mark of the first has been read."""
        tape = self._tape
        openings = form.openings
        before = "{"
        while True:
            mark = form.open if opened else (yield from tape.mark((form.open, *self._style.closes)))
            opened = False
            if mark != form.open:
                break
            key, found = yield from tape.head((form.key_end,), _LONGEST_HEAD)
            opening = (yield from tape.mark(openings)) if found and openings else ""
            if not found or (openings and not opening):
                self._emit_arguments(before + ("" if tape.exhausted else "}"))
                self._emit_content(form.open + key + found)
                return
            key = html.unescape(key.strip()) if form.escaped else key.strip()
            self._emit_arguments(f"{before}{json_text(key)}: ")
            before = ", "
            schema = schema_of(self._tools, tool, key)
            is_text = opening == form.opening("string") if form.typed else kinds_of(schema) == {"string"}
            if not (yield from self._value(schema, form, is_text=is_text)):
                return
        # Where the answer is cut off, so are the arguments.
        self._emit_arguments(("{" if before == "{" else "") + ("}" if mark or not tape.cut else ""))

    def _value(self, schema: Any, form: Parameters, *, is_text: bool) -> Generator[None, None, bool]:
        """One value as JSON, by its schema. is_text: it is known to be a string. Returns whether its end was found."""
        tape = self._tape
        marks: tuple[str, ...] = (form.close,)
        if form.lines:
            yield from tape.optional("\n")
            marks = ("\n" + form.close, form.close)
        if form.cdata and (yield from tape.optional(CDATA[0])):
            marks = (CDATA[1] + form.close,)
        if is_text:
            # The only kind whose text is known before it has ended.
            self._emit_arguments('"')
            found = yield from tape.until(marks, lambda text: self._emit_arguments(json_text(text)[1:-1]))
            self._emit_arguments('"' if found else "")
            return bool(found)
        pieces: list[str] = []
        found = yield from tape.until(marks, pieces.append)
        if found:
            self._emit_arguments(as_json("".join(pieces), schema, marked=bool(form.typed)))
        return bool(found)


class _NotationReader:
    """Gemma's notation, which is JSON with bare keys and with strings between marks, as JSON.

    emit: called with JSON. refuse: called with text that is not valid where it stands.
    """

    def __init__(self, tape: Tape, quote: str, emit: Callable[[str], None], refuse: Callable[[str], None]) -> None:
        self._tape = tape
        self._quote = quote
        self._emit = emit
        self._refuse = refuse

    def object(self, depth: int = 0) -> Generator[None, None, bool]:
        """The rest of an object, behind its brace. Returns whether it was valid up to its end."""
        tape = self._tape
        self._emit("{")
        before = ""
        while True:
            if (yield from tape.mark(("}",))):
                self._emit("}")
                return True
            if before and not (yield from tape.mark((",",))):
                return False
            quote = yield from tape.mark((self._quote,))
            key, found = yield from tape.head((quote,) if quote else (":", ",", "}", "<"), _LONGEST_HEAD)
            colon = (yield from tape.mark((":",))) if quote and found else found
            if colon != ":":
                self._refuse(quote + key + found)
                return False
            self._emit(f"{before}{json_text(key.strip())}: ")
            before = ", "
            if not (yield from self._value(depth + 1)):
                return False

    def _list(self, depth: int) -> Generator[None, None, bool]:
        tape = self._tape
        self._emit("[")
        before = ""
        while True:
            if (yield from tape.mark(("]",))):
                self._emit("]")
                return True
            if before and not (yield from tape.mark((",",))):
                return False
            self._emit(before)
            before = ", "
            if not (yield from self._value(depth + 1)):
                return False

    def _value(self, depth: int) -> Generator[None, None, bool]:
        tape = self._tape
        if depth > _DEEPEST:
            return False
        if (yield from tape.mark((self._quote,))):
            self._emit('"')
            found = yield from tape.until((self._quote,), lambda text: self._emit(json_text(text)[1:-1]))
            self._emit('"' if found else "")
            return bool(found)
        mark = yield from tape.mark(("{", "["))
        if mark:
            return (yield from self.object(depth) if mark == "{" else self._list(depth))
        pieces: list[str] = []

        def wanted(c: str) -> bool:
            pieces.append(c)
            return c not in ",}]<\n" and len(pieces) <= _LONGEST_HEAD

        if (yield from tape.take(wanted)):
            return False
        self._emit(as_json("".join(pieces[:-1]), True))
        return True


class _NestedReader:
    """Elements within elements as JSON, by the schemas of the properties.

    emit: called with JSON. refuse: called with text that is not valid where it stands.
    """

    def __init__(self, tape: Tape, mark: str, emit: Callable[[str], None], refuse: Callable[[str], None]) -> None:
        self._tape = tape
        self._mark = f"{mark}<"
        self._emit = emit
        self._refuse = refuse
        self._refused = ""
        """What is not valid where it stands. It follows the arguments, which it ends."""
        self._resolved: Callable[[Any], Any] = lambda schema: schema

    def whole(self, properties: Collection[str]) -> Generator[None]:
        """All arguments, up to and with the end mark of the call. properties: their schemas, where they are known."""
        if isinstance(properties, Properties):
            self._resolved = properties.references.resolved
        schemas = properties if isinstance(properties, Mapping) else {}
        self._emit("{")
        first = yield from self._tag()
        yield from self._object(first, schemas, 0)
        self._refuse(self._refused)

    def _close(self, bracket: str, *, found: bool) -> bool:
        """End an object or a list. found: its end mark. Where the answer is cut off, so are the arguments."""
        if found or not (self._tape.exhausted or self._tape.cut):
            self._emit(bracket)
        return found

    def _tag(self) -> Reading:
        """The next tag without its brackets; empty where none comes next."""
        if not (yield from self._tape.mark((self._mark,))):
            return ""
        tag, found = yield from self._tape.head((">",), _LONGEST_HEAD)
        if not found:
            self._refused = self._mark + tag
        return tag if found else ""

    def _object(self, tag: str, schemas: Mapping[str, Any], depth: int) -> Generator[None, None, bool]:
        """Properties, the first of which `tag` opens, up to an end mark. Returns whether it was found."""
        before = ""
        while tag and not tag.startswith("/"):
            self._emit(f"{before}{json_text(tag)}: ")
            before = ", "
            if not (yield from self._value(tag, self._resolved(schemas.get(tag, True)), depth + 1)):
                return self._close("}", found=False)
            tag = yield from self._tag()
        return self._close("}", found=bool(tag))

    def _list(self, tag: str, items: Any, depth: int) -> Generator[None, None, bool]:
        """The entries of a list, the first of which `tag` opens, up to an end mark. Returns whether it was found."""
        before = ""
        while tag and not tag.startswith("/"):
            self._emit(before)
            before = ", "
            if not (yield from self._value(tag, items, depth + 1)):
                return self._close("]", found=False)
            tag = yield from self._tag()
        return self._close("]", found=bool(tag))

    def _value(self, key: str, schema: Any, depth: int) -> Generator[None, None, bool]:
        """The value of an element, up to and with its end mark. Returns whether that was found."""
        tape, kinds = self._tape, kinds_of(schema)
        close = f"{self._mark}/{key}>"
        if depth > _DEEPEST:
            return False
        if kinds == {"string"}:
            self._emit('"')
            found = yield from tape.until((close,), lambda text: self._emit(json_text(text)[1:-1]))
            self._emit('"' if found else "")
            return bool(found)
        pieces: list[str] = []
        if not (yield from tape.until((self._mark,), pieces.append)):
            return False
        tag, found = yield from tape.head((">",), _LONGEST_HEAD)
        text = "".join(pieces)
        if found and tag == f"/{key}":
            empty = "" if "string" in kinds or text.strip() else "[]" if "array" in kinds else "{}"
            self._emit(empty if empty and kinds & {"array", "object"} else as_json(text, schema))
            return True
        if not found or tag.startswith("/") or text.strip():
            self._emit(as_json(text, schema))
            self._refused = self._mark + tag + found
            return False
        about = schema if isinstance(schema, Mapping) else {}
        if tag == "item" and "array" in kinds:
            self._emit("[")
            return (yield from self._list(tag, self._resolved(about.get("items", True)), depth))
        self._emit("{")
        given = about.get("properties")
        return (yield from self._object(tag, given if isinstance(given, Mapping) else {}, depth))
