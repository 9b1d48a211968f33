"""Whatever JSON a model writes in place of a call, reading it raises nothing and every split reads the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.parsers.parts import TextPart, joined
from quire.parsers.tools.kinds import kinds_of, properties_of
from quire.parsers.tools.readers import reader_of
from quire.parsers.tools.rendering import calls_text
from quire.parsers.tools.styles import STYLES, Parameters, TaggedStyle
from tests.pairs import in_turn

TOOLS: dict[str, dict[str, Any]] = {"weather": {"city": {}, "days": {"type": "integer"}}, "now": {}}

scalars: Any = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()  # NaN and infinities too, which Python writes and JSON has not
    | st.text(max_size=6)
    | st.sampled_from(["", "{}", "null", "true", "[1]", '{"a": NaN}', '{"a": 1', "weather", "\ud800", "</tool_call>"])
)
values: Any = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("name", "arguments", "parameters", "id")
objects: Any = st.fixed_dictionaries(
    {}, optional={key: values | st.just("weather") if key == "name" else values for key in KEYS}
)
calls: Any = values | objects | st.fixed_dictionaries({"name": st.sampled_from(sorted(TOOLS)), "arguments": values})


def written(name: str, call: Any, *, ascii: bool) -> Iterator[str]:
    """Answers in which `call` stands wherever a model of this style may put one."""
    text = json.dumps(call, ensure_ascii=ascii)
    argument = call.get("arguments") if isinstance(call, dict) else call
    yield text
    yield f"[{text}, {text}]"
    yield f"{text}; {text}"
    yield json.dumps({"name": "weather", "arguments": json.dumps(argument)}, ensure_ascii=ascii)
    style = STYLES[name]
    yield calls_text([{"function": {"name": "weather", "arguments": each}} for each in (call, argument)], style)
    if isinstance(style, TaggedStyle):
        yield f"So: {style.before}{style.head('weather')}{text}{style.finish}{style.after} and"
        yield f"{style.begin}{text}{style.finish}{style.before}{style.begin}now{style.head_ends[0]}{text}"
        if isinstance(style.form, Parameters):
            form = style.form
            value = f"{form.key_end}{form.space}{form.value_open}{text}{form.close}"
            given = f"{form.open}city{value}\n{form.open}days{value}{form.open}{text}{value}"
            yield f"{style.head('weather')}{given}{style.finish}{text}"
        return
    for mark in style.marks:
        yield f"So: {mark}{text}{style.end} and"
        yield f"{mark}weather[ARGS]{text}"
        yield f"{mark}\n[weather({argument!r}, days={call!r})]\n{style.end}"
    yield f"[weather(city={argument!r}), now()]"


def pieces(parts: list[TextPart]) -> list[TextPart]:
    for part in parts:
        part.text.encode()
    return joined(parts)


def parse(name: str, *texts: str) -> list[TextPart]:
    reader, parts = reader_of(STYLES[name], TOOLS), []
    for text in texts:
        parts += reader.feed(text)
    return pieces([*parts, *reader.flush()])


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def check(name: str, text: str, most: int = 1 << 20) -> None:
    """Read `text` whole, letter by letter, and in two pieces, cut at each place or at `most` of them, evenly."""
    text = text.encode(errors="replace").decode()  # as detokenised: no half of a pair
    whole = parse(name, text)
    assert parse(name, *text) == whole
    step = 1 + len(text) // most
    for at in range(len(text) % step, len(text), step):
        assert parse(name, text[:at], text[at:]) == whole
    made = [part for part in whole if part.kind == "call"]
    arguments = [part for part in whole if part.kind == "arguments"]
    assert len(arguments) == len(made)
    # Without an end mark, arguments that are not complete are those of an answer that is cut off.
    finish = STYLES[name].finish
    if finish and not any(part.kind == "content" for part in whole):
        complete = arguments if text.rstrip().endswith(finish.rstrip()) else arguments[:-1]
        assert all(isinstance(json.loads(part.text, parse_constant=refuse), dict) for part in complete)


@pytest.mark.parametrize("cuts", [3, pytest.param(1 << 20, marks=pytest.mark.nightly)], ids=["few cuts", "all cuts"])
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=3, deadline=None)
@given(call=calls, ascii=st.booleans())
@example(call={"name": "weather", "arguments": [1]}, ascii=True)
@example(call={"name": "weather", "arguments": 7}, ascii=True)
@example(call={"name": "weather", "arguments": True}, ascii=True)
@example(call={"name": "weather", "arguments": "null"}, ascii=True)
@example(call={"name": "weather", "arguments": '{"a": NaN}'}, ascii=True)
@example(call={"name": "weather", "arguments": '{"a": 1'}, ascii=True)
def test_any_json_in_any_place_of_a_call_is_read_the_same_in_every_split(
    name: str, cuts: int, call: Any, ascii: bool
) -> None:
    """In CI letter by letter and at three places of each text, and at all places of one value, of every second form, in
    the test below."""
    for text in written(name, call, ascii=ascii):
        check(name, text, most=cuts)


@pytest.mark.parametrize("name", in_turn(STYLES))
def test_a_call_is_read_the_same_cut_at_every_place(name: str) -> None:
    for text in written(name, {"name": "weather", "arguments": '{"a": 1'}, ascii=True):
        check(name, text)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=200, deadline=None)
@given(call=calls, ascii=st.booleans())
def test_any_json_at_length(name: str, call: Any, ascii: bool) -> None:
    for text in written(name, call, ascii=ascii):
        check(name, text, most=16)


def test_what_is_out_of_place_follows_the_arguments_that_it_ends() -> None:
    """Objects within others are closed, too."""
    mark = "]<]minimax[>["
    begin, rest = f'{mark}<invoke name="weather">{mark}<a>{mark}<b>', f"{mark}</x>y{mark}</b>{mark}</a>{mark}</invoke>"
    text = f"{mark}<tool_call>\n{begin}{rest}\n{mark}</tool_call>"
    check("minimax_m3", text)
    call, arguments, content = parse("minimax_m3", text)
    assert (call.text, json.loads(arguments.text)) == ("weather", {"a": {"b": ""}})
    assert content.text == f"{rest}\n{mark}</tool_call>"


@pytest.mark.parametrize("given", [[1], [], 7, 0, True, False, -1.5, "[1]", "7", "true", '"{}"', '{"a": NaN}'])
def test_arguments_that_are_no_object_are_no_call(given: Any) -> None:
    text = json.dumps({"name": "weather", "arguments": given})
    assert parse("llama3_json", text) == [TextPart("content", text)]


@pytest.mark.parametrize("given", [None, "null", "{}", {}])
def test_arguments_that_are_null_or_empty_are_an_empty_object(given: Any) -> None:
    text = json.dumps({"name": "weather", "arguments": given})
    assert parse("llama3_json", text) == [TextPart("call", "weather"), TextPart("arguments", "{}")]


def test_references_that_branch_at_every_level_are_read_once() -> None:
    """Read each time, these would be a billion."""
    levels = 30
    definitions: dict[str, Any] = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(levels)}
    definitions[f"x{levels}"] = {"type": "integer"}
    found = properties_of({"properties": {"a": {"$ref": "#/$defs/x0"}}, "$defs": definitions})
    assert kinds_of(found["a"]) == {"integer"}
    itself = properties_of({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}})
    assert "object" in kinds_of(itself["a"])
