"""Grammar rules of the arguments of a tool call in each format, in llguidance's Lark.

JSON schemas bind JSON. Where a format writes strings as they are, between tags, rules made here bind them: enums,
lengths and patterns of strings, and schemas of all other values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.parsers.tools.kinds import References, kinds_of, properties_of
from quire.parsers.tools.styles import CDATA, Nested, Notation, Parameters

JsonRule = Callable[[Any], str]
"""A JSON schema as the body of a rule."""


def argument_rules(name: str, form: Parameters | Notation | Nested | None, schema: Any, as_json: JsonRule) -> list[str]:
    """The rule `name`, which the arguments of a call match, and the rules it needs. form: None for JSON."""
    if isinstance(form, Parameters):
        return _parameter_rules(name, form, schema, as_json)
    if isinstance(form, Notation):
        return _Noted(form.quote, schema, as_json).rules(name)
    if isinstance(form, Nested):
        return _Elements(form.mark, schema, as_json).rules(name)
    return [f"{name}: {as_json(schema)}"]


def literal(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text)


def escaped(text: str) -> str:
    """`text` within a regular expression between slashes."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _parameter_rules(name: str, form: Parameters, schema: Any, as_json: JsonRule) -> list[str]:
    line = "\n" if form.lines else ""
    close = line + form.close
    required = schema.get("required") or ()
    order, rules = [], []
    for i, (key, each) in enumerate(properties_of(schema).items()):
        order.append(f"{name}_{i}" + ("" if key in required else "?"))
        kinds = kinds_of(each)
        values: list[tuple[Iterable[str], list[str]]] = []
        if "string" in kinds:
            values.append(([form.opening("string")], _string_rules(f"{name}_{i}_text", close, each)))
        if "string" in kinds and form.cdata:
            values.append(([CDATA[0]], _string_rules(f"{name}_{i}_cdata", CDATA[1] + close, each)))
        if "string" not in kinds or (form.typed and kinds != {"string"}):
            openings = dict.fromkeys(map(form.opening, sorted(kinds - {"string"}) or ["null"]))
            values.append((openings, [f"{name}_{i}_json: {as_json(_alone(each, schema))} {literal(close)}"]))
        either = " | ".join(
            f"{literal(opening + line)} {_named(body)}" for openings, body in values for opening in openings
        )
        rules.append(f"{name}_{i}: {literal(form.head(key))} ({either}){_then(form.space)}")
        rules += [rule for _, body in values for rule in body]
    return [f"{name}: {' '.join(order) or literal('')}", *rules]


def _named(rules: list[str]) -> str:
    """The name of the first rule."""
    return re.split(r"[\[:]", rules[0], maxsplit=1)[0]


def _then(space: str) -> str:
    return f" {literal(space)}" if space else ""


def _alone(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of the schema `root` with what it may refer to."""
    held = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**held, **schema} if isinstance(schema, Mapping) else schema


def _string_rules(name: str, close: str, schema: Any) -> list[str]:
    """A string as it is, up to and with `close`, which it cannot contain."""
    about = schema if isinstance(schema, Mapping) and kinds_of(schema) == {"string"} else {}
    values = about.get("enum") or ([about["const"]] if "const" in about else ())
    if values:
        return [f"{name}: ({' | '.join(literal(value) for value in values)}) {literal(close)}"]
    most = about.get("maxLength")
    terms = [f"/(?s:.{{{about.get('minLength', 0)},{'' if most is None else most}}})/"]
    if isinstance(about.get("pattern"), str):
        terms.append(_pattern(about["pattern"]))
    terminal = name.upper()
    return [f"{name}[suffix={literal(close)}]: {terminal}", f"{terminal}: {' & '.join(terms)}"]


def _pattern(pattern: str) -> str:
    """A regular expression that a part of the text matches, as a terminal."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner if after else inner[:-1]
    return "/" + f"{before}({inner}){after}".replace("/", "\\/").replace("\\\\/", "\\/") + "/"


class _Noted:
    """Rules of values in Gemma's notation. What is neither text nor plain, such as anyOf, is any value."""

    def __init__(self, quote: str, root: Any, as_json: JsonRule) -> None:
        self._quote = quote
        self._root = root
        self._references = References(root)
        self._as_json = as_json
        self._rules: list[str] = []
        # Schemas of objects and lists and their rules, by identity: references lead to one in itself, and repeatedly.
        self._made: dict[int, tuple[Any, str]] = {}
        self._any = ""

    def rules(self, name: str) -> list[str]:
        """The rule of the whole, and those it needs."""
        self._value(name, self._root)
        return self._rules

    def _value(self, name: str, schema: Any) -> None:
        kinds = kinds_of(schema)
        about = schema if isinstance(schema, Mapping) else {}
        if kinds == {"string"}:
            self._rules.append(f"{name}: {literal(self._quote)} {name}_text")
            self._rules += _string_rules(f"{name}_text", self._quote, about)
        elif id(about) in self._made:
            self._rules.append(f"{name}: {self._made[id(about)][1]}")
        elif kinds == {"object"} and isinstance(about.get("properties"), Mapping):
            self._made[id(about)] = about, name
            self._object(name, about)
        elif kinds == {"array"} and "items" in about:
            self._made[id(about)] = about, name
            self._list(name, f"{name}_item")
            self._value(f"{name}_item", self._references.resolved(about["items"]))
        elif not kinds & {"string", "object", "array"}:
            self._rules.append(f"{name}: {self._as_json(_alone(schema, self._root))}")
        else:
            self._rules.append(f"{name}: {self._whatever(name)}")

    def _list(self, name: str, item: str) -> None:
        self._rules.append(f'{name}: "[" ({item} ("," {item})*)? "]"')

    def _object(self, name: str, schema: Mapping[str, Any]) -> None:
        """Properties in order. The rule `_none_i` goes on before the first of them, `_some_i` behind it."""
        required = schema.get("required") or ()
        resolved = self._references.properties(schema)
        self._rules.append(f'{name}: "{{" {name}_none_0 "}}"')
        for i, (key, each) in enumerate(resolved.items()):
            pair, more = f"{name}_pair_{i}", f"{name}_some_{i + 1}"
            skip = "" if key in required else f" | {name}_none_{i + 1}"
            comma = f'"," {pair}' if key in required else f'("," {pair})?'
            self._rules.append(f"{name}_none_{i}: {pair} {more}{skip}")
            self._rules.append(f"{name}_some_{i}: {comma} {more}")
            self._rules.append(f"{pair}: {literal(key + ':')} {name}_{i}")
            self._value(f"{name}_{i}", each)
        for rule in ("none", "some"):
            self._rules.append(f'{name}_{rule}_{len(resolved)}: ""')

    def _whatever(self, name: str) -> str:
        """The rule of any value."""
        if not self._any:
            self._any = f"{name}_any"
            plain = self._as_json({"type": ["number", "boolean", "null"]})
            pair = f"{self._any}_key {self._any}"
            self._list(f"{self._any}_list", self._any)
            self._rules += [
                f"{self._any}: {literal(self._quote)} {self._any}_text | {self._any}_plain | {self._any}_list"
                f' | "{{" ({pair} ("," {pair})*)? "}}"',
                f"{self._any}_plain: {plain}",
                f"{self._any}_key: /[\\w-]+:/",
                *_string_rules(f"{self._any}_text", self._quote, True),
            ]
        return self._any


class _Elements:
    """Rules of values as elements within elements. An object without properties and what may be of several kinds is
    JSON, or any text where that may be a string."""

    def __init__(self, mark: str, root: Any, as_json: JsonRule) -> None:
        self._mark = mark
        self._root = root
        self._references = References(root)
        self._as_json = as_json
        self._rules: list[str] = []
        # Schemas of objects and lists and their rules, by identity: references lead to one in itself, and repeatedly.
        self._made: dict[int, tuple[Any, str]] = {}

    def rules(self, name: str) -> list[str]:
        """The rule of the whole, and those it needs."""
        self._object(name, self._root)
        return self._rules

    def _element(self, name: str, key: str, schema: Any) -> None:
        """The rule of an element `key` with its value."""
        close = f"{self._mark}</{key}>"
        kinds = kinds_of(schema)
        about = schema if isinstance(schema, Mapping) else {}
        begin = f"{name}: {literal(f'{self._mark}<{key}>')}"
        if "string" in kinds:
            self._rules.append(f"{begin} {name}_text")
            self._rules += _string_rules(f"{name}_text", close, about)
            return
        self._rules.append(f"{begin} {name}_value {literal(close)}")
        inner = f"{name}_value"
        if id(about) in self._made:
            self._rules.append(f"{inner}: {self._made[id(about)][1]}")
        elif kinds == {"object"} and about.get("properties"):
            self._made[id(about)] = about, inner
            self._object(inner, about)
        elif kinds == {"array"} and "items" in about:
            self._made[id(about)] = about, inner
            self._rules.append(f"{inner}: {inner}_item*")
            self._element(f"{inner}_item", "item", self._references.resolved(about["items"]))
        else:
            self._rules.append(f"{inner}: {self._as_json(_alone(schema, self._root))}")

    def _object(self, name: str, schema: Mapping[str, Any]) -> None:
        required = schema.get("required") or ()
        resolved = self._references.properties(schema)
        order = [f"{name}_{i}" + ("" if key in required else "?") for i, key in enumerate(resolved)]
        self._rules.append(f"{name}: {' '.join(order) or literal('')}")
        for i, (key, each) in enumerate(resolved.items()):
            self._element(f"{name}_{i}", key, each)
