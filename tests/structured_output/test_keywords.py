"""Every keyword of JSON Schema in every place: which are enforced, and how the others are refused, as written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.structured_output.llguidance import LlguidanceCompiler, message
from quire.structured_output.schema import DEPTH, OBEYED, REFUSED, check_schema
from quire.tokenization.tokenizer import Tokenizer
from quire.types import StructuredOutputsParams
from tests.expected import check
from tests.tokenization.vocabulary import wordpiece

EXPECTED = Path(__file__).parent / "expected"


def said(schema: Any) -> str:
    try:
        check_schema(schema, "response_format")
    except InvalidRequest as error:
        return f"{error} ({error.param}, {error.code})"
    return "taken"


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


SCHEMAS: list[Any] = [
    *(True, False, {}, 5, None, "x", []),
    *({"title": "x", "default": 1, "examples": [], "$comment": "", "x-mine": {"not": {}}},),
    *({"not": value} for value in ({}, True, False, {"type": "null"}, {"not": {}}, None)),
    *({"Type": "object"}, {"UNIQUEITEMS": True}, {"minlength": 1}),
    *({"uniqueItems": False}, {"uniqueItems": 0}, {"uniqueItems": None}),
    *({"exclusiveMinimum": True}, {"exclusiveMaximum": False}, {"exclusiveMinimum": 1}),
    *({"type": ["string", "null"], "format": "date"}, {"type": ["string", "x" * 80]}, {"type": []}),
    *({"items": {"type": "string", "format": "password"}}, {"type": "integer", "format": "int32"}, {"format": "int32"}),
    *({"type": "string", "format": 5}, {"type": "string", "format": "byte", "enum": ["a"]}),
    *({"items": [{}]}, {"items": {"items": [1]}}, {"items": 5}, {"additionalProperties": False}),
    *({"properties": {"a": {"not": {}}}}, {"properties": {"a": 5}}, {"properties": 5}, {"properties": {"x" * 70: 1}}),
    *({"$defs": {"a": {"if": {}}}}, {"definitions": {"a": {"then": {}}}}, {"patternProperties": {"^a": {"else": {}}}}),
    *({"anyOf": [{}, {"contains": 1}]}, {"oneOf": [5]}, {"allOf": [{"allOf": [{"extends": {}}]}]}, {"prefixItems": 5}),
    *({"prefixItems": [{}, {"dependencies": {}}]}, {"additionalProperties": {"additionalItems": {}}}),
    *({"enum": [{"not": 1}], "const": {"if": 1}},),
    *({"properties": {"b": {"not": {}}}, "not": {}}, {"properties": {"b": {"items": {"not": {}}}, "a": {"if": {}}}}),
]


def test_schemas_are_taken_or_refused_as_written_down() -> None:
    lines = [f"{name}: {said({name: 1})}" for name in sorted({*OBEYED, *REFUSED})]
    lines += [f"{schema} -> {said(schema)}" for schema in SCHEMAS]
    check(EXPECTED / "keywords.txt", "\n".join(lines))


def test_schemas_are_nested_as_deep_as_the_limit_and_no_deeper() -> None:
    assert said(nested(DEPTH - 1)) == "taken"
    assert said(nested(DEPTH)).startswith(f"response_format: the schema is nested more than {DEPTH} deep")


def test_a_structure_that_the_tokenizer_cannot_have_is_refused_by_its_field() -> None:
    compiler = LlguidanceCompiler(lambda: Tokenizer(wordpiece()))
    with pytest.raises(InvalidRequest) as refused:
        compiler(StructuredOutputsParams(regex="a", param="guided_regex"))
    assert refused.value.param == "guided_regex" and str(refused.value).startswith("guided_regex: ")


@pytest.mark.parametrize(
    ("why", "shown"),
    [
        ("a\n  b <non-verbose/>", "a b"),
        ("json-schema:///x Parser Error: y", "x y"),
        ("Current row has 1001 items; max is 1000; z", "it has 1001 alternatives in one place"),
        ("x" * 400, "x" * 400),
        ("x" * 401, "x" * 400 + "..."),
    ],
)
def test_the_librarys_words_are_made_one_short_line(why: str, shown: str) -> None:
    said = message(why)
    assert said == shown if "alternatives" not in shown else said.startswith(shown + ", and at most 1000 are allowed")
