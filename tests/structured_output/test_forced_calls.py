"""Forced calls in the format of each family: names and arguments are bound by the grammar."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.parsers.parts import TextPart
from quire.parsers.reasoning import THOUGHTS, bounded
from quire.parsers.tools.rendering import calls_text
from quire.parsers.tools.styles import STYLES, TaggedStyle
from quire.server.limits import Limits
from quire.server.tools import ToolSet, make_tool_set
from quire.structured_output.llguidance import LlguidanceCompiler
from quire.types import StructuredOutputsParams
from tests.parsers.families import SCHEMAS, answer_reader
from tests.server.doubles import TOKENIZER, says

COMPILE = LlguidanceCompiler(lambda: TOKENIZER)
FORMED = [name for name, style in STYLES.items() if isinstance(style, TaggedStyle) and style.form]


@cache
def compiled(structure: StructuredOutputsParams) -> Any:
    return COMPILE(structure)


def allows(structure: StructuredOutputsParams | None, text: str) -> bool:
    """Whether the masks let `text` be the whole answer."""
    assert structure is not None
    follow = compiled(structure)()
    output: list[int] = []
    # The tests' vocabulary ends texts with <|end|>, which is a mark within gpt-oss's.
    for token in [*(token for piece in text.partition("<|end|>") for token in letters(piece)), *says("")]:
        [mask] = follow.masks(output, [])
        if not (token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1):
            return False
        output.append(token)
    return True


def letters(text: str) -> list[int]:
    """The tokens of a text; of an end mark, those of its letters."""
    pieces = list(text) if text == "<|end|>" else [text]
    return [token for piece in pieces for token in TOKENIZER.encode(piece, add_special_tokens=False)]


def tool_set(name: str, choice: Any = "required", schemas: dict[str, Any] = SCHEMAS, **about: Any) -> ToolSet:
    tools = [{"type": "function", "function": {"name": n, "parameters": s, **about}} for n, s in schemas.items()]
    return make_tool_set(tools, choice, None, STYLES[name], Limits())


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return calls_text([{"function": {"name": n, "arguments": a}} for n, a in calls], STYLES[name])


WITHOUT_NULL = ("minimax_m3",)
"""Their templates leave out arguments that are null."""

WEATHER = ("weather", {"city": "Ulm, <b>", "days": 3, "hot": None, "places": [{"name": "a", "at": 1.5}, {"name": ""}]})


@pytest.mark.parametrize("name", STYLES)
def test_a_forced_call_has_the_name_and_the_arguments_of_a_tool(name: str) -> None:
    form = tool_set(name).structure(None)
    for call in (WEATHER, ("weather", {"city": ""}), ("now", {})):
        text = written(name, call)
        assert allows(form, text), text
        parts = answer_reader(name, {n: s["properties"] for n, s in SCHEMAS.items()})
        read = [*parts.feed(text), *parts.flush()]
        wanted = {key: value for key, value in call[1].items() if value is not None or name not in WITHOUT_NULL}
        assert read[0] == TextPart("call", call[0]) and json.loads("".join(p.text for p in read[1:])) == wanted
    assert not allows(form, "No.")
    assert not allows(form, written(name, ("whether", {"city": "x"})))
    assert not allows(form, written(name, ("weather", {"days": 3}))), "city is required"
    assert not allows(form, written(name, ("weather", {"city": "x", "days": "soon"})))
    assert not allows(form, written(name, ("weather", {"city": "x", "places": [{"at": 1.5}]})))
    assert not allows(form, written(name, ("weather", {"city": "x", "town": "y"})))
    assert allows(form, written(name, WEATHER, ("now", {}))) == (STYLES[name].most > 1)


@pytest.mark.parametrize("name", STYLES)
def test_a_named_tool_is_called_once(name: str) -> None:
    form = tool_set(name, {"type": "function", "function": {"name": "now"}}).structure(None)
    assert allows(form, written(name, ("now", {})))
    assert not allows(form, written(name, ("weather", {"city": "x"})))
    assert not allows(form, written(name, ("now", {}), ("now", {})))


STRINGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"},
        "part": {"type": "string", "pattern": "ab"},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", FORMED)
def test_strings_between_tags_obey_their_schemas_too(name: str) -> None:
    form = tool_set(name, schemas={"f": STRINGS}).structure(None)
    for key, good, bad in (
        ("unit", "F", "K"),
        ("code", "ab/12", "ab12"),
        ("part", "xaby", "xay"),
        ("short", "abc", "abcd"),
        ("short", "\n", ""),
    ):
        assert allows(form, written(name, ("f", {key: good}))), (key, good)
        assert not allows(form, written(name, ("f", {key: bad}))), (key, bad)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4"])
def test_a_schema_without_properties_takes_no_arguments(name: str) -> None:
    form = tool_set(name, schemas={"f": {"type": "object", "properties": {}}}).structure(None)
    assert allows(form, written(name, ("f", {})))
    assert not allows(form, written(name, ("f", {"a": 1})))


NEVERS: list[Any] = [False, {"not": {}}, {"not": True, "description": "zod's never"}, {"$ref": "#/$defs/never"}]


@pytest.mark.parametrize("never", NEVERS, ids=str)
@pytest.mark.parametrize("name", STYLES)
def test_an_argument_that_must_not_be_there_is_not(name: str, never: Any) -> None:
    within = {"type": "object", "properties": {"x": {"type": "integer"}, "y": never}, "required": ["x"]}
    properties = {"city": {"type": "string"}, "town": never, "at": within}
    schema = {"type": "object", "properties": properties, "$defs": {"never": {"not": {}}}}
    if "$ref" not in str(never):
        form = tool_set(name, schemas={"f": schema}).structure(None)
        assert allows(form, written(name, ("f", {"city": "x", "at": {"x": 1}})))
        assert not allows(form, written(name, ("f", {"city": "x", "town": "y"})))
        assert not allows(form, written(name, ("f", {"at": {"x": 1, "y": 2}})))
    with pytest.raises(InvalidRequest, match=r"(?i)unsatisfiable|nothing can satisfy"):
        allows(tool_set(name, schemas={"f": {**schema, "required": ["town"]}}).structure(None), "")


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.before and not style.bare])
def test_strict_tools_bind_calls_and_leave_text_free(name: str) -> None:
    form = tool_set(name, "auto", strict=True).structure(None)
    call = written(name, ("weather", {"city": "x"}))
    assert allows(form, "Just < text.")
    assert allows(form, "So: " + call + " ok")
    assert not allows(form, "So: " + call.replace("weather", "whether"))


@pytest.mark.parametrize("name", [name for name, style in THOUGHTS.items() if style.opens])
def test_a_structure_binds_what_comes_after_the_thoughts_of_each_family(name: Any) -> None:
    style = THOUGHTS[name]
    wanted = StructuredOutputsParams(choice=("yes", "no"), begin=style.answer)
    thoughts = f"Hm {{}}.{style.closes[0]}{style.between}{style.answer}"
    inside = bounded(wanted, name, "open", None)
    assert allows(inside, thoughts + "no") and not allows(inside, thoughts + "maybe") and not allows(inside, "no")
    possible = bounded(wanted, name, "possible", None)
    assert allows(possible, style.opens[0] + thoughts + "no") and allows(possible, style.answer + "yes")
    assert not allows(possible, style.opens[0] + thoughts + "maybe")
    none = bounded(wanted, name, "none", None)
    assert allows(none, "no") and not allows(none, "maybe")
    for mark in style.closes[1:]:
        assert not allows(inside, f"Hm.{mark} maybe")
    for mark in style.ends:
        assert not allows(inside, f"Hm.{mark}{thoughts}no")


def test_a_structure_follows_the_recipient_of_an_answer_that_has_no_thoughts() -> None:
    wanted = StructuredOutputsParams(choice=("yes", "no"), begin=THOUGHTS["functionary_v3_2"].answer)
    form = bounded(wanted, "functionary_v3_2", "none", None)
    assert allows(form, "all\nno") and not allows(form, "no") and not allows(form, "all\nmaybe")
    assert allows(bounded(wanted, "qwen3", "none", None), "no")


def test_calls_or_a_structure_follow_the_thoughts_of_gpt_oss() -> None:
    style = THOUGHTS["openai_gptoss"]
    wanted = StructuredOutputsParams(json={"type": "object", "properties": {}, "additionalProperties": False})
    form = bounded(tool_set("openai", "auto").structure(wanted, style.answer), "openai_gptoss", "possible", None)
    thoughts = f"{style.opens[0]}Hm.{style.closes[0]}{style.between}"
    call = written("openai", ("now", {}))
    for before in ("", thoughts):
        assert allows(form, before + call) and allows(form, f"{before}{style.answer}{{}}")
        assert not allows(form, before + "{}") and not allows(form, before + call.replace("now", "later"))


def test_a_schema_that_cannot_be_compiled_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        tool_set(
            "qwen3_coder", schemas={"f": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}}
        ).structure(None)
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)["}}}
    form = tool_set("qwen3_coder", schemas={"f": bad}).structure(None)
    assert form is not None
    with pytest.raises(InvalidRequest, match="tool_choice"):
        COMPILE(form)


TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "left": {"$ref": "#/$defs/node"},
                "right": {"$ref": "#/$defs/node"},
            },
            "required": ["name"],
        },
        "nest": {"type": "array", "items": {"$ref": "#/$defs/nest"}},
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "nest": {"$ref": "#/$defs/nest"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", STYLES)
def test_schemas_that_refer_to_themselves_bind_calls(name: str) -> None:
    form = tool_set(name, schemas={"plant": TREE}).structure(None)
    tree = {"name": "a", "left": {"name": "b", "right": {"name": ""}}, "right": {"name": "c"}}
    assert allows(form, written(name, ("plant", {"root": tree, "nest": [[], [[]]]})))
    assert not allows(form, written(name, ("plant", {"root": {"name": "a", "left": {"name": "b", "up": {}}}})))
    assert not allows(form, written(name, ("plant", {"nest": [[1]]})))
