"""Each kind of structure is compiled, and what cannot be is refused in words, whatever it is."""

from __future__ import annotations

import itertools
import json
from datetime import date, timedelta
from typing import Any

import pytest
import tokenizers

from quire.errors import InvalidRequest
from quire.scheduler.plan import NO_TOKEN_ALLOWED
from quire.scheduler.sequence import Sequence
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.tokenization.tokenizer import Tokenizer
from quire.types import Request, SamplingParams, StructuredOutputsParams
from tests.structured_output.little import END, allowed, compiler, tokenizer, tokens_of
from tests.tokenization.vocabulary import byte_level, sentencepiece, wordpiece


def obeys(text: str, **structure: Any) -> bool:
    """Whether `text`, token by token and then the end, is allowed."""
    matcher = compiler()(StructuredOutputsParams(**structure))()
    tokens = [*tokens_of(text), END]
    return all(token in allowed(matcher.masks(tokens[:i], ())[0]) for i, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        ({"json": {"type": "integer", "maximum": 12}}, ["12", "-3", "0"], ["13", "1.5", "a", ""]),
        ({"json": '{"enum":["ab",1]}'}, ['"ab"', "1"], ['"a"', "12"]),
        ({"json": {"type": "integer"}, "json_object": False}, ["7"], ["{}"]),
        ({"json_object": True}, ["{}", '{"a": [1, {}]}', '{"a":1}'], ["[]", "1", '{"a"}', "{}}"]),
        ({"regex": "a{2,3}b?"}, ["aa", "aaab"], ["a", "aab1", ""]),
        ({"regex": "^ab$"}, ["ab"], ["a", "abb"]),
        ({"choice": ["a", "ab"]}, ["a", "ab"], ["b", "aba", ""]),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a", "bb"]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a1", "a123"], ["a", "ab"]),
        ({"grammar": 'start: "a" %json {"type": "integer"}'}, ["a1"], ["a", "aa"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_each_kind_allows_what_it_says_and_nothing_else(
    structure: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert all(obeys(text, **structure) for text in good)
    assert not any(obeys(text, **structure) for text in bad)


def test_properties_that_are_not_listed_are_allowed_on_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert obeys('{"a":1}', json=schema) and not obeys('{"a":1,"b":2}', json=schema)
    assert obeys('{"a":1,"b":2}', json=schema, disable_additional_properties=False)
    assert obeys('{"a":1,"b":2}', json={**schema, "additionalProperties": {"type": "integer"}})


@pytest.mark.parametrize(("form", "time"), [("date", ""), ("date-time", "t10:00:00-01:00")])
def test_dates_are_those_that_there_are(form: str, time: str) -> None:
    schemas: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": ["null", "string"], "pattern": "^[12]"},
        {"maxLength": 40},
    ]
    first, last = date(1895, 2, 25), date(1896, 3, 2)
    real = [(first + timedelta(days=n)).isoformat() for n in range((last - first).days)]
    real += ["2000-02-29", "2024-02-29", "1904-02-29"]
    wrong = [
        "1895-02-29",
        "1900-02-29",
        "2023-02-29",
        "2100-02-29",
        "2024-02-30",
        "2023-04-31",
        "2023-13-01",
        "2023-00-10",
    ]
    for schema in schemas:
        ask = {**schema, "format": form}
        assert [one for one in real[::60] + real[-5:] if not obeys(json.dumps(one + time), json=ask)] == []
        assert [one for one in wrong if obeys(json.dumps(one + time), json=ask)] == []


def test_white_space_is_one_space_at_most_unless_said_otherwise() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert obeys("[1, 2 , 3 ]", json=schema) and not obeys("[1,  2]", json=schema)
    assert obeys("[1,2]", json=schema, disable_any_whitespace=True)
    assert not obeys("[1, 2]", json=schema, disable_any_whitespace=True)
    assert obeys("[1,   2]", json=schema, whitespace_pattern=" {1,3}")
    assert not obeys("[1,    2]", json=schema, whitespace_pattern=" {1,3}")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "strng"}}, "type in the schema must be one of string, number"),
    ({"json": {"type": "string", "format": "int32"}}, "the format 'int32' in the schema is not supported: use one of"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead"),
    ({"json": {"minimum": 5, "maximum": 3, "type": "integer"}}, "minimum (5) is greater than maximum (3)"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"$ref": "https://example.com/schema"}}, "not"),
    ({"json": {"$ref": "#/$defs/nowhere"}}, "nowhere"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "satisfy"),
    ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "Use anyOf"),
    ({"json": {"not": {"const": 1}}}, "the keyword 'not' in the schema is not supported"),
    ({"json": {"not": {}}}, "Unsatisfiable schema"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "\\bfoo"}, "not supported"),
    ({"regex": "(a{1000}){1000}"}, "complex"),
    ({"grammar": "garbage"}, "Expected ::="),
    ({"grammar": 'start: start "a"'}, "nothing can satisfy it"),
    ({"grammar": "start: a"}, "a"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "recursion"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "cannot be used"),
]


@pytest.mark.parametrize(("structure", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_compiled_is_refused_in_words(structure: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler()(StructuredOutputsParams(**structure, param="guided_it"))
    said = str(caught.value)
    assert said.startswith("guided_it: ") and words in said, said
    assert caught.value.param == "guided_it" and len(said) < 600 and "\n" not in said


def test_a_first_mask_that_takes_too_long_is_refused() -> None:
    ticks = iter((0.0, 5.0))
    slow = LlguidanceCompiler(tokenizer, clock=lambda: next(ticks))
    with pytest.raises(InvalidRequest, match="too complex"):
        slow(StructuredOutputsParams(regex="a*"))


def metaspace() -> tokenizers.Tokenizer:
    core = sentencepiece()
    core.decoder = tokenizers.decoders.Metaspace()
    return core


BY_BYTES = (byte_level(), sentencepiece(), sentencepiece(strip=False))


@pytest.mark.parametrize(
    ("core", "text"),
    [
        *itertools.product((*BY_BYTES, metaspace()), ("the dog é 日", " dog")),
        *itertools.product(BY_BYTES, ("€😀", "a\n\x00b")),
    ],
)
def test_tokenizers_of_every_kind_are_spelled_to_the_byte(core: tokenizers.Tokenizer, text: str) -> None:
    end = "</s>" if core.token_to_id("</s>") else "<|end|>"
    own = Tokenizer(core, {"eos_token": end})
    matcher = LlguidanceCompiler(lambda: own)(StructuredOutputsParams(choice=(text,)))()
    tokens, said = list[int](), b""
    while True:
        mask = matcher.masks(tokens, ())[0] or b""
        found = [t for t in range(own.vocab_size) if t >> 3 < len(mask) and mask[t >> 3] >> (t & 7) & 1]
        if found == [core.token_to_id(end)]:
            break
        tokens.append(max(found))
        said += own.token_text(tokens[-1])[1]
    assert said.decode() == text


@pytest.mark.parametrize(
    ("own", "words"),
    [(Tokenizer(wordpiece(), {"eos_token": "dog"}), "byte-level"), (Tokenizer(byte_level(), {}), "end-of-text token")],
)
def test_a_tokenizer_that_cannot_be_used_is_named_as_the_reason(own: Tokenizer, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        LlguidanceCompiler(lambda: own)(StructuredOutputsParams(regex="a"))


def test_a_choice_may_have_as_many_texts_as_there_is_room_for() -> None:
    """One of them the beginning of others."""
    texts = [f"c{i}" for i in range(9000)]
    matcher = compiler()(StructuredOutputsParams(choice=tuple(texts)))()
    for text in ("c0", "c7", "c4321", "c8999"):
        tokens = tokens_of(text)
        assert all(tokens[i] in allowed(matcher.masks(tokens[:i], ())[0]) for i in range(len(tokens)))
        assert END in allowed(matcher.masks(tokens, ())[0])
    assert END not in allowed(matcher.masks(tokens_of("c"), ())[0])
    assert tokens_of("c9")[-1] in allowed(matcher.masks(tokens_of("c"), ())[0])
    assert not set(tokens_of("0")) & allowed(matcher.masks(tokens_of("c8999"), ())[0])
    assert matcher.why() == ""


def alternatives(count: int) -> dict[str, Any]:
    alone: dict[str, Any] = {"type": "object", "additionalProperties": False}
    return {"anyOf": [{**alone, "properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(count)]}


def test_more_alternatives_than_can_be_followed_are_refused_as_that() -> None:
    compiler()(StructuredOutputsParams(json=alternatives(900)))
    with pytest.raises(InvalidRequest) as caught:
        compiler()(StructuredOutputsParams(json=alternatives(1200), param="response_format"))
    why = "response_format: the JSON schema cannot be used: it has 1200 alternatives in one place, and at most 1000 "
    assert str(caught.value).startswith(why) and caught.value.param == "response_format"


def test_a_grammar_that_ends_in_the_middle_of_an_answer_says_why() -> None:
    """Too wide where no compiler looks: the answer ends with that, not with what other fields could have excluded."""
    late = {"type": "object", "properties": {"a": {"const": "a" * 30}, "b": alternatives(1200)}, "required": ["a", "b"]}
    structure = StructuredOutputsParams(json=late, param="response_format")
    matcher = compiler()(structure)()
    begun, over = tokens_of('{"a": "' + "a" * 30), tokens_of('{"a": "' + "a" * 30 + '", "b": {')
    assert allowed(matcher.masks(begun, ())[0]) and matcher.why() == ""
    assert not allowed(matcher.masks(over, ())[0])
    request = Request(id="r", prompt=(1,), max_new_tokens=9, sampling=SamplingParams(structured_outputs=structure))
    failed = Sequence(request, 0, [1], 10, matcher).error_output(NO_TOKEN_ALLOWED)
    assert (failed.status, failed.param) == (400, "response_format")
    assert "it has 1201 alternatives in one place" in str(failed.error) and "bad_words" not in str(failed.error)
    plain = Sequence(request, 0, [1], 10, compiler()(StructuredOutputsParams(regex="a"))())
    assert plain.error_output(NO_TOKEN_ALLOWED).error == NO_TOKEN_ALLOWED
