"""Keywords that would not be obeyed are refused by name, and where they stand; annotations are fine."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.structured_output.schema import DEPTH, OBEYED, REFUSED, check_schema, closed


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(schema, "response_format")
    assert caught.value.param == "response_format"
    return str(caught.value)


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_that_cannot_be_obeyed_is_named_with_its_place(keyword: str) -> None:
    bad: dict[str, Any] = {keyword: {"type": "integer"}}
    assert f"the keyword {keyword!r} in the schema is not supported: {REFUSED[keyword]}" in refusal(bad)
    assert "in /properties/a/items/anyOf/1 " in refusal(
        {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, bad]}}}}
    )
    assert "in /$defs/x/additionalProperties " in refusal({"$defs": {"x": {"additionalProperties": bad}}})


def test_annotations_and_data_that_looks_like_keywords_are_fine() -> None:
    check_schema(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "not",
            "x-order": ["not"],
            "properties": {"not": {"type": "string"}, "if": True, "minlength": False},
            "enum": [{"not": 1}],
            "const": {"contains": 1},
            "default": {"uniqueItems": True},
            "examples": [{"if": 1}],
            "uniqueItems": False,
        },
        "guided_json",
    )
    check_schema(True, "guided_json")


@pytest.mark.parametrize("keyword", sorted(k for k in OBEYED if k != k.lower()))
def test_a_keyword_in_the_wrong_case_is_not_taken_for_an_annotation(keyword: str) -> None:
    assert f"unknown keyword {keyword.lower()!r} in /items. Did you mean {keyword!r}?" in refusal(
        {"items": {keyword.lower(): 1}}
    )


def test_what_older_drafts_meant_otherwise_is_refused() -> None:
    assert "exclusiveMinimum in the schema must be a number" in refusal({"minimum": 1, "exclusiveMinimum": True})
    assert "use prefixItems" in refusal({"items": [{"type": "string"}]})


@pytest.mark.parametrize("bad", [3, "a", None, [1]])
def test_what_is_no_schema_is_refused_with_its_place(bad: Any) -> None:
    assert "/properties/a must be a schema" in refusal({"properties": {"a": bad}})


def test_depth_is_bounded_without_recursion() -> None:
    schema: dict[str, Any] = {}
    for _ in range(DEPTH - 1):
        schema = {"items": schema}
    check_schema(schema, "x")
    for _ in range(5000):
        schema = {"items": schema}
    assert f"more than {DEPTH} deep" in refusal(schema)


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
SHUT: Any = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"items": A, "prefixItems": [A]}, {"items": SHUT, "prefixItems": [SHUT]}),
        ({"anyOf": [A, B]}, {"anyOf": [SHUT, {**B, "additionalProperties": False}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        (
            {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": A}},
            {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": SHUT}},
        ),
        ({"properties": {"x": A}}, {"properties": {"x": SHUT}, "additionalProperties": False}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
    ],
)
def test_an_object_that_lists_its_properties_has_no_others(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["z"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {"allOf": [{"anyOf": [A, B]}, {"oneOf": [B]}]},
        {**A, "anyOf": [B]},
        {**A, "$ref": "#/$defs/b~1~0c", "$defs": {"b/~c": B}},
        {"allOf": [A, {"$ref": "#/$defs/x"}], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": B}},
        {"allOf": [A, {"$ref": "#/$defs/0/1"}, {"$ref": "#"}, {"$ref": "#/none/0"}, {"$ref": "x"}]},
    ],
)
def test_objects_that_others_describe_too_or_that_say_themselves_stay_as_they_are(schema: Any) -> None:
    assert closed(schema) == schema
