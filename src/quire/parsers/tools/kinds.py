"""The JSON types of a parameter by its schema, and the text of a value as JSON: formats with tags do not mark types."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_DEEPEST = 64


def json_text(value: Any) -> str:
    """`value` as JSON, in UTF-8."""
    return json.dumps(value, ensure_ascii=False)


class References:
    """What references in the schema `root` refer to, each read once: chains and trees of references cost no more than
    their text, and the same one always gives the same object."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, Any] = {}

    def properties(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schemas of the properties of an object, those that are references replaced by what they refer to. Without
        those that must not be there (`false`), unless they are required, too."""
        given, required = schema.get("properties"), schema.get("required") or ()
        every = {name: self.resolved(each) for name, each in given.items()} if isinstance(given, Mapping) else {}
        return {name: each for name, each in every.items() if each is not False or name in required}

    def resolved(self, schema: Any, depth: int = 0) -> Any:
        """`schema` without a reference in itself or in its alternatives; those inside of its parts stay. A reference
        that leads to itself allows anything."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return schema
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref.startswith("#/"):
            if ref not in self._known:
                target = self._target(ref)
                self._known[ref] = True
                self._known[ref] = schema if target is None else self.resolved(target, depth + 1)
            return self._known[ref]
        alternatives = {
            name: [self.resolved(each, depth + 1) for each in schema[name]]
            for name in ("anyOf", "oneOf")
            if isinstance(schema.get(name), list)
        }
        return {**schema, **alternatives} if alternatives else schema

    def _target(self, ref: str) -> Any:
        target: Any = self._root
        for step in ref[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return target


class Properties(dict[str, Any]):
    """The schemas of properties by name, and the references that parts of them may contain."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.references = References(root)
        super().__init__(self.references.properties(root))


def properties_of(schema: Mapping[str, Any]) -> Properties:
    """See `References.properties`, of the properties of the root itself."""
    return Properties(schema)


_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_ALL = frozenset(_KINDS.values())
_PYTHON: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    return _KINDS.get(type(value), "null")


def kinds_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; all of them where it does not say, none for `false`."""
    return _kinds_of(schema, set())


def _kinds_of(schema: Any, seen: set[int], depth: int = 0) -> frozenset[str]:
    """seen: alternatives that were counted, which several may share."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _ALL
    given = schema.get("type")
    if isinstance(given, str | list):
        named = {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
        return frozenset(named) or _ALL
    if isinstance(schema.get("enum"), list):
        return frozenset(map(kind_of, schema["enum"]))
    if "const" in schema:
        return frozenset({kind_of(schema["const"])})
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            fresh = {id(each): each for each in schema[name] if id(each) not in seen}
            seen |= fresh.keys()
            return frozenset().union(*(_kinds_of(each, seen, depth + 1) for each in fresh.values()))
    return _ALL


def as_json(text: str, schema: Any, *, marked: bool = False) -> str:
    """The text of a value as JSON, by its schema: as it is where it is JSON of such a type, otherwise as a string.

    marked: the format marks strings that are written as they are, and this is none. Python's names of constants count
    as JSON's, and so do Python's lists and dicts where no string may stand, or anything may. A text in quotation marks
    is a string with quotation marks, unless strings are marked.
    """
    kinds = kinds_of(schema)
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    if bare[:1] in ("[", "{") and ("string" not in kinds or kinds == _ALL):
        bare = _from_python(bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return json_text(text)
    kind = _KINDS[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return bare if fits and (marked or kind != "string") else json_text(text)


def _from_python(text: str) -> str:
    """A list or dict as Python prints it as JSON; any other text as it is."""
    try:
        json.loads(text)
    except RecursionError:
        return text
    except ValueError:
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return text
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
