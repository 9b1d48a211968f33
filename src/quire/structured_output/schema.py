"""Checks JSON schemas before they are compiled: depth, and keywords that are not supported, refused by name.

The compiler ignores some keywords that it does not support and refuses others without naming the place. A schema that
is enforced in part is worse than none, since the client trusts the answer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

from quire.errors import InvalidRequest

DEPTH = 64
"""The deepest nesting of schemas."""

_IN_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties")

OBEYED: frozenset[str] = frozenset(
    {
        *(*_IN_MAPS, *_IN_LISTS, *_ALONE),
        *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
"""Keywords that are enforced."""

TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of strings that are enforced."""

REFUSED: Mapping[str, str] = {
    "not": "say what is wanted instead, with enum, pattern or anyOf; only {}, true and false are negated",
    **dict.fromkeys(("if", "then", "else"), "use anyOf with one schema a case"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "use anyOf with one schema a case"),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), "leave it out, and check the answer"),
    "propertyNames": "use patternProperties with additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "additionalItems": "use prefixItems and items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "extends": "use allOf",
    "disallow": "say what is wanted instead",
    "divisibleBy": "use multipleOf",
    "x-guidance": "use whitespace_pattern of structured_outputs",
}
"""Keywords that would restrict the answer and are not supported, and what to use instead."""

EXACT = 1 << 53
"""The compiler keeps bounds as floats, which hold integers up to here."""

_INT64 = 1 << 63

_BOUNDS: Mapping[str, int] = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Keywords of bounds, and the sign of those that no smaller number than EXACT satisfies."""

_TAKEN: Mapping[str, tuple[Any, ...]] = {
    "not": ({}, True, False),
    "uniqueItems": (False,),
    "propertyNames": ({}, {"type": "string"}),
}
"""Values of these keywords that restrict nothing or, with `not`, everything, which generators of schemas write."""


_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))|"
    rf"{_LEAP}-02-29)"
)
_PATTERNS: Mapping[str, str] = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]"}
"""Patterns that formats are enforced by, besides the compiler's own, which has a 29 February in every year."""


def prepared(schema: Any, param: str, *, close: bool) -> Any:
    """The schema as it is to be enforced: checked, in keywords that the compiler knows, and closed where that is asked
    for. Raises InvalidRequest as `check_schema` does."""
    check_schema(schema, param)
    made = _in_known_words(schema)
    return closed(made) if close else made


def as_object(schema: Any) -> dict[str, Any]:
    """A schema that is `true` or `false` as an object, which options of the compiler can stand beside."""
    return dict(schema) if isinstance(schema, Mapping) else {"anyOf": [schema]}


def _in_known_words(schema: Any) -> Any:
    """A copy of a checked schema with `false` in place of schemas that nothing matches: {"not": {}}, as zod and TypeBox
    write a property that must not be there. Without keywords that restrict nothing, bounds as they can be kept, and
    formats as they can be enforced."""
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("not", False) is not False:
        return False
    made = {name: _exact(schema, name, value) for name, value in schema.items() if name not in _TAKEN}
    for name, value in made.items():
        if name in _IN_MAPS and isinstance(value, Mapping):
            made[name] = {key: _in_known_words(one) for key, one in value.items()}
        elif name in _IN_LISTS and isinstance(value, list):
            made[name] = [_in_known_words(one) for one in value]
        elif name in _ALONE:
            made[name] = _in_known_words(value)
    if pattern := _PATTERNS.get(schema.get("format", "")):
        made["allOf"] = [*made.get("allOf", ()), {"pattern": pattern}]
    return made


def _exact(schema: Mapping[str, Any], keyword: str, value: Any) -> Any:
    """A bound beyond EXACT as one of the next floats towards 0: the compiler would take the nearest, which may lie
    beyond the bound, and does not always exclude it where it should. Of integers it knows those of 64 bits."""
    if keyword not in _BOUNDS or not _is_number(value) or abs(value) <= EXACT:
        return value
    if schema.get("type") == "integer":
        value = max(-_INT64, min(value, _INT64))
    return math.nextafter(math.nextafter(float(value), 0), 0)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_schema(schema: Any, param: str) -> None:
    """Raise InvalidRequest naming the first keyword that is not supported, and its place.

    Keywords that JSON Schema does not define are annotations and are ignored, unless they differ from a defined one
    only in case.
    """
    known = {name.lower(): name for name in (*OBEYED, *REFUSED)}
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(DEPTH):
        deeper: list[tuple[str, Any]] = []
        for where, one in level:
            if isinstance(one, Mapping):
                _check_keywords(one, where or "the schema", known, param)
                deeper += _inside(one, where)
            elif not isinstance(one, bool):
                raise _refusal(f"{where or 'the schema'} must be a schema: an object, true or false", param)
        if not deeper:
            return
        level = deeper
    raise _refusal(f"the schema is nested more than {DEPTH} deep", param)


def _check_keywords(schema: Mapping[str, Any], where: str, known: Mapping[str, str], param: str) -> None:
    for name, value in schema.items():
        if name in OBEYED:
            continue
        if name in REFUSED:
            if value not in _TAKEN.get(name, ()):
                raise _refusal(f"the keyword {name!r} in {where} is not supported: {REFUSED[name]}", param)
        elif name.lower() in known:
            raise _refusal(f"unknown keyword {name[:64]!r} in {where}. Did you mean {known[name.lower()]!r}?", param)
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(name), bool):
            raise _refusal(f"{name} in {where} must be a number, as since draft 6", param)
    for name, sign in _BOUNDS.items():
        if _is_number(bound := schema.get(name)) and sign * bound >= EXACT:
            allowed = "less than 2^53" if sign > 0 else "greater than -2^53"
            raise _refusal(f"{name} in {where} must be {allowed}: numbers beyond are not exact", param)
    _check_type(schema, where, param)
    if isinstance(schema.get("items"), list):
        raise _refusal(f"items in {where} is a list: use prefixItems", param)


def _check_type(schema: Mapping[str, Any], where: str, param: str) -> None:
    named = schema.get("type", [])
    types = named if isinstance(named, list) else [named]
    for name in types:
        if name not in TYPES:
            raise _refusal(f"type in {where} must be one of {', '.join(TYPES)}, not {repr(name)[:64]}", param)
    known = "format" not in schema or schema["format"] in FORMATS
    if not known and "string" in types and not schema.keys() & {"enum", "const"}:
        what = f"the format {repr(schema['format'])[:64]} in {where} is not supported"
        raise _refusal(f"{what}: use one of {', '.join(FORMATS)}, or a pattern, or leave it out", param)


def _inside(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for name in _IN_MAPS:
        held = schema.get(name)
        if isinstance(held, Mapping):
            yield from ((f"{where}/{name}/{key[:64]}", one) for key, one in held.items())
    for name in _IN_LISTS:
        held = schema.get(name)
        if isinstance(held, list):
            yield from ((f"{where}/{name}/{i}", one) for i, one in enumerate(held))
    for name in _ALONE:
        if name in schema:
            yield f"{where}/{name}", schema[name]


def closed(schema: Any) -> Any:
    """A copy of a checked schema in which objects have no properties but those listed.

    `additionalProperties: false` is added to each schema that has `properties` and neither `additionalProperties` nor
    `patternProperties`. Not where several schemas describe the same object (`allOf`, or `properties` beside `anyOf`,
    `oneOf` or `$ref`), since each of them would exclude the properties of the others, and not where a property is
    required that is not listed.
    """
    whole = copy.deepcopy(schema)
    schemas = list(_subschemas(whole))
    waiting = [part for one in schemas if len(parts := _parts(one, whole)) > 1 for group in parts for part in group]
    combined: set[int] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and id(one) not in combined:
            combined.add(id(one))
            waiting += [part for group in _parts(one, whole) for part in group]
    for one in schemas:
        if id(one) not in combined and _closable(one):
            one["additionalProperties"] = False
    return whole


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """`schema` and all schemas in it that are objects."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += [inner for _, inner in _inside(one, "")]


def _parts(schema: Mapping[str, Any], whole: Any) -> list[list[Any]]:
    """The schemas that describe the value that `schema` describes: groups that all hold, of each group one."""
    parts: list[list[Any]] = [[schema]] if "properties" in schema else []
    for name in ("anyOf", "oneOf", "allOf"):
        members = schema.get(name)
        if isinstance(members, list):
            parts += [[one] for one in members] if name == "allOf" else [members]
    if isinstance(ref := schema.get("$ref"), str):
        parts.append([_target(ref, whole)])
    return parts


def _target(ref: str, whole: Any) -> Any:
    """What a reference within the schema points to; None if that is nothing."""
    found = whole
    for key in unquote(ref.removeprefix("#")).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isascii() and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def _closable(schema: Mapping[str, Any]) -> bool:
    listed, required, least = schema.get("properties"), schema.get("required", []), schema.get("minProperties", 0)
    return (
        isinstance(listed, dict)
        and not schema.keys() & {"additionalProperties", "patternProperties"}
        and isinstance(required, list)
        and all(name in listed for name in required if isinstance(name, str))
        and not (isinstance(least, int) and least > len(listed))
    )


def _refusal(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param=param, code="unsupported_schema")
