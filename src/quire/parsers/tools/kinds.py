"""The JSON types of a parameter by its schema, and the text of a value as JSON: formats with tags do not mark types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_DEEPEST = 64


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of the properties of an object, those that are references replaced by what they refer to."""
    given = schema.get("properties")
    return {name: _resolved(each, schema) for name, each in given.items()} if isinstance(given, Mapping) else {}


def _resolved(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """`schema` without a reference in itself or in its alternatives; those inside of its parts stay."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/"):
        target: Any = root
        for step in ref[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return schema if target is None else _resolved(target, root, depth + 1)
    alternatives = {
        name: [_resolved(each, root, depth + 1) for each in schema[name]]
        for name in ("anyOf", "oneOf")
        if isinstance(schema.get(name), list)
    }
    return {**schema, **alternatives} if alternatives else schema


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


def kinds_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _ALL
    given = schema.get("type")
    if isinstance(given, str | list):
        named = {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
        return frozenset(named) or _ALL
    if isinstance(schema.get("enum"), list):
        return frozenset(_KINDS.get(type(value), "null") for value in schema["enum"])
    if "const" in schema:
        return frozenset({_KINDS.get(type(schema["const"]), "null")})
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return frozenset().union(*(kinds_of(each, depth + 1) for each in schema[name]))
    return _ALL


def as_json(text: str, schema: Any) -> str:
    """The text of a value as JSON, by its schema: as it is where it is JSON of such a type, otherwise as a string.

    Python's names of constants count as JSON's. A text in quotation marks is a string with quotation marks.
    """
    kinds = kinds_of(schema)
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return quoted(text)
    kind = _KINDS[type(value)]
    fits = kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return bare if fits and kind != "string" else quoted(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
