"""JSON schemas by category, as JSONSchemaBench sorts what people use: drawn anew from a seed, all of them satisfiable.

What could go on for ever (texts, lists, numbers) is bounded, so that an answer of any model fits a bound of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

WORDS = ("name", "age", "city", "kind", "size", "colour", "owner", "note", "is_open", "count", "first name", "größe")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    "^[a-z]{2,8}$",
    "^\\d{3}-\\d{4}$",
    "^(red|green|blue)( dark)?$",
    "^[A-Z][a-z]+$",
    "^#[0-9a-fA-F]{6}$",
    "^v\\d+",
)


def text(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(4, 25)}


def integer(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    kinds: list[Schema] = [
        {"minimum": low, "maximum": low + rng.randrange(1, 1000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 7},
        {"minimum": 0, "maximum": 90, "multipleOf": rng.choice((2, 5, 7))},
    ]
    return {"type": "integer", **rng.choice(kinds)}


def number(rng: random.Random) -> Schema:
    """Steps that floats hold exactly; without one, digits may go on for ever."""
    low = rng.randrange(-9, 9)
    kinds: list[Schema] = [
        {"minimum": low, "maximum": low + 2.5},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 1},
        {"minimum": 0},
    ]
    return {"type": "number", "maximum": 1000, **rng.choice(kinds), "multipleOf": rng.choice((0.5, 0.25, 0.125))}


def enum(rng: random.Random) -> Schema:
    values: list[Any] = ["red", "deep blue", 'a "quoted" one', "größe", 3, 2.5, True, None, {"a": [1]}, [1, "b"]]
    return {"enum": rng.sample(values, rng.randrange(1, 6))}


def const(rng: random.Random) -> Schema:
    return {"const": rng.choice(["fixed", 7, -1.25, None, False, {"kind": "x", "n": [1, 2]}, ["a", {}], ""])}


def flag(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": rng.randrange(18, 40)}


def formatted(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}


LEAVES: tuple[Callable[[random.Random], Schema], ...] = (text, integer, number, enum, const, flag, pattern)


def leaf(rng: random.Random) -> Schema:
    return rng.choice(LEAVES)(rng)


def obj(rng: random.Random, inside: Callable[[random.Random], Schema] = leaf) -> Schema:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    made: Schema = {"type": "object", "properties": {name: inside(rng) for name in names}}
    made["required"] = rng.sample(names, rng.randrange(len(names) + 1))
    return {**made, "additionalProperties": False}


def array(rng: random.Random, inside: Callable[[random.Random], Schema] = leaf) -> Schema:
    low = rng.randrange(3)
    return {"type": "array", "items": inside(rng), "minItems": low, "maxItems": low + rng.randrange(4)}


def fixed_array(rng: random.Random) -> Schema:
    items = [leaf(rng) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def any_of(rng: random.Random) -> Schema:
    return {"anyOf": [leaf(rng), obj(rng), array(rng)][: rng.randrange(2, 4)]}


def one_of(rng: random.Random) -> Schema:
    """Distinguished by a constant, as typed unions are."""
    return {"oneOf": [_tagged(rng, tag) for tag in ("cat", "dog", "bird")[: rng.randrange(2, 4)]]}


def _tagged(rng: random.Random, tag: str) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"const": tag}, "is": leaf(rng)},
        "required": ["kind", "is"],
        "additionalProperties": False,
    }


def all_of(rng: random.Random) -> Schema:
    first = {"type": "object", "properties": {"a": integer(rng), "b": text(rng)}, "required": ["a"]}
    second = {"properties": {"b": {"maxLength": 9}, "c": flag(rng)}, "required": ["b", "c"]}
    return {"allOf": [first, second], "properties": {"a": True, "b": True, "c": True}, "additionalProperties": False}


def ref(rng: random.Random) -> Schema:
    where = rng.choice(["$defs", "definitions"])
    to = {"$ref": f"#/{where}/thing"}
    return {
        where: {"thing": obj(rng)},
        "type": "object",
        "properties": {"one": to, "more": {"type": "array", "items": to, "maxItems": 2}},
        "required": ["one"],
        "additionalProperties": False,
    }


def recursive(rng: random.Random) -> Schema:
    """A list with an end: deep enough is up to the model, so the values are small."""
    node = {
        "type": "object",
        "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["v", "next"] if rng.random() < 0.5 else ["v"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def pattern_properties(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"id": integer(rng)},
        "patternProperties": {"^x_[a-c]{1,2}$": leaf(rng)},
        "required": ["id"],
        "additionalProperties": False,
        "maxProperties": rng.randrange(1, 4),
    }


def mapping(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^[a-z]{1,6}$": leaf(rng)},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": rng.randrange(1, 4),
    }


def types(rng: random.Random) -> Schema:
    """A list of types, with keywords of each."""
    return {
        "type": rng.sample(["string", "integer", "boolean", "null"], 3),
        "maxLength": 8,
        "minimum": 0,
        "maximum": rng.randrange(9, 99),
    }


def nested(rng: random.Random) -> Schema:
    return obj(rng, lambda r: obj(r, lambda r: array(r, leaf)))


def described(rng: random.Random) -> Schema:
    """Annotations everywhere: none of them binds."""
    made = obj(rng, lambda r: {"title": "T", "description": "what it is", "default": 1, "x-order": 3, **leaf(r)})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:a:b", "title": "All", **made}


def call(rng: random.Random) -> Schema:
    """The arguments of a function, as in GlaiveAI-2K."""
    made = obj(rng, lambda r: r.choice([text, integer, enum, lambda r: array(r, text)])(r))
    return {**made, "required": list(made["properties"])}


def resource(rng: random.Random) -> Schema:
    """A manifest, as in Kubernetes."""
    labels = {"type": "object", "patternProperties": {"^[a-z]{1,5}$": text(rng)}, "additionalProperties": False}
    parts = {
        "apiVersion": {"const": "v1"},
        "kind": {"enum": ["Pod", "Service"]},
        "metadata": {
            "type": "object",
            "properties": {"name": pattern(rng), "labels": {**labels, "maxProperties": 2}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "spec": {"anyOf": [obj(rng), {"type": "null"}]},
    }
    return {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}


def event(rng: random.Random) -> Schema:
    """Flat, formats and lengths, as in Snowplow."""
    parts = {
        "at": formatted(rng),
        "id": {"type": "string", "format": "uuid"},
        "what": pattern(rng),
        "value": number(rng),
    }
    return {"type": "object", "properties": parts, "required": ["at", "what"], "additionalProperties": False}


CATEGORIES: Mapping[str, Callable[[random.Random], Schema]] = {
    made.__name__: made
    for made in (
        *(
            text,
            integer,
            number,
            enum,
            const,
            flag,
            pattern,
            formatted,
            obj,
            array,
            fixed_array,
            any_of,
            one_of,
            all_of,
        ),
        *(ref, recursive, pattern_properties, mapping, types, nested, described, call, resource, event),
    )
}


def schemas(each: int) -> list[tuple[str, Schema]]:
    """`each` of every category, with names."""
    return [
        (f"{name}-{i}", make(random.Random(f"{name} {i}"))) for name, make in CATEGORIES.items() for i in range(each)
    ]
