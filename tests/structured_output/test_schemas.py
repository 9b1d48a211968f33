"""Generated schemas of every category on the embedded model: answers finish, and what finishes validates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from quire import LLM, SamplingParams
from quire.errors import InvalidRequest
from quire.types import StructuredOutputsParams
from tests.structured_output.schemas import CATEGORIES, Schema, schemas

MOST = 400
"""Tokens an answer may take."""

CHECKER = FormatChecker()
CHECKER.checks("date", raises=ValueError)(lambda text: bool(date.fromisoformat(text)))
CHECKER.checks("time", raises=ValueError)(lambda text: time.fromisoformat(_second(text)) is not None)
CHECKER.checks("date-time", raises=ValueError)(lambda text: bool(datetime.fromisoformat(_second(text))))


def _second(text: str) -> str:
    """RFC 3339 has leap seconds, and fractions of any length; Python has neither."""
    head, _, rest = text.replace(":60", ":59").replace("z", "Z").replace("t", "T").partition(".")
    return head + rest.lstrip("0123456789")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", dtype="float32", max_num_seqs=64) as llm:
        yield llm


def unfinished(llm: LLM, asked: Sequence[tuple[str, Schema]], temperature: float) -> list[str]:
    """Names of those that did not finish; all others are valid JSON, and valid."""
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=MOST, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for i, (_, schema) in enumerate(asked)
    ]
    outputs = llm.generate(["Once upon a time there was a list of things: "] * len(asked), params, use_tqdm=False)
    left = []
    for (name, schema), output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            left.append(name)
            continue
        assert answer.finish_reason == "stop" and answer.stop_reason is None, (name, answer)
        Draft202012Validator.check_schema(schema)
        errors = list(Draft202012Validator(schema, format_checker=CHECKER).iter_errors(json.loads(answer.text)))
        assert not errors, f"{name}: {errors[0].message} in {answer.text}"
    return left


def test_a_slice_of_every_category_finishes_and_validates(llm: LLM) -> None:
    asked = schemas(2)
    assert len(asked) == 2 * len(CATEGORIES) >= 40
    assert unfinished(llm, asked, 1.0) == []


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_whole_set_finishes_and_validates(llm: LLM, temperature: float) -> None:
    asked = schemas(14)
    assert len(asked) >= 300
    left = unfinished(llm, asked, temperature)
    assert len(left) <= len(asked) // 100, left


def test_texts_and_numbers_without_bounds_are_cut_by_max_tokens_and_right_so_far(llm: LLM) -> None:
    for schema in ({"type": "number"}, {"type": "string"}, {"type": "array", "items": {"enum": [1]}}):
        params = SamplingParams(
            temperature=1.0,
            seed=3,
            max_tokens=30,
            structured_outputs=StructuredOutputsParams(json=schema),
            logit_bias={34: 1},
        )
        answer = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == 30
        else:
            Draft202012Validator(schema).validate(json.loads(answer.text))


def test_an_object_of_any_kind_is_an_object(llm: LLM) -> None:
    asked = [
        SamplingParams(
            temperature=t, seed=7, max_tokens=MOST, structured_outputs=StructuredOutputsParams(json_object=True)
        )
        for t in (0.0, 0.5, 1.0)
    ]
    for output in llm.generate(["The dog has a name and an age: "] * 3, asked, use_tqdm=False):
        answer = output.outputs[0]
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


def test_a_broken_schema_is_refused_before_anything_runs(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "strng"}))
    with pytest.raises(InvalidRequest, match="type in the schema must be one of string"):
        llm.generate("x", bad, use_tqdm=False)
    assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].finish_reason == "length"
