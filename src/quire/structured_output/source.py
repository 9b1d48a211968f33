"""Structures in llguidance's notation, the bounds on its work, and its messages in words."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits, grammar_from

from quire.errors import InvalidRequest
from quire.parsers.reasoning import ThoughtStyle, thought_style
from quire.structured_output.call_rules import escaped
from quire.structured_output.schema import as_object, prepared
from quire.types import StructuredOutputsParams

SPACE = " "
"""The white space allowed by default where JSON allows any: at most one space, or a model could repeat it for ever."""

LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Below the library's defaults, since the work for one row delays the whole batch."""


def grammar_source(structure: StructuredOutputsParams, tokens: object = None) -> str:
    """The grammar of a structure, preceded by reasoning (any text up to its closing mark) where it may be.

    Two grammars in one document then, so that their rule names do not collide. tokens: not needed here. Raises
    InvalidRequest naming the request's field.
    """
    try:
        return _after_thoughts(structure)
    except (ValueError, RecursionError) as error:
        raise refusal(structure, str(error)) from error


def _after_thoughts(structure: StructuredOutputsParams) -> str:
    source = _alone(structure)
    ahead = structure.thoughts
    if ahead == "none" and not structure.begin:
        return source
    as_json = structure.kind[0] in ("json", "regex")
    answer = json.loads(source)["grammars"][0] if as_json else {"lark_grammar": source}
    if ahead == "none":
        only = f"start: {json.dumps(structure.begin)} @answer"
        return json.dumps({"grammars": [{"lark_grammar": only}, {**answer, "name": "answer"}]})
    style = style_of(structure)
    opens = " | ".join(map(json.dumps, style.opens))
    ends = "".join(f" & ~/(?s:.*){escaped(mark)}(?s:.*)/" for mark in style.ends)
    lines = [
        f"start: {'thoughts' if ahead == 'open' else f'(({opens}) thoughts)?'} {json.dumps(structure.begin)} @answer",
        f"thoughts: thought SPACE {json.dumps(style.between)}",
        "thought[lazy]: THOUGHT",
        f"THOUGHT: /(?s:.*)({'|'.join(map(escaped, style.closes))})/{ends}",
        "SPACE: /\\n{0,2}/",
    ]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**answer, "name": "answer"}]})


def _alone(structure: StructuredOutputsParams) -> str:
    kind, text = structure.kind
    if kind == "json":
        schema = prepared(json.loads(text), structure.param, close=structure.disable_additional_properties)
        compact = structure.disable_any_whitespace
        white = None if compact else structure.whitespace_pattern or SPACE
        options = {"whitespace_flexible": white is not None, "whitespace_pattern": white, "lenient": False}
        return str(LLMatcher.grammar_from_json_schema(json.dumps(as_object(schema)), overrides=options))
    if kind == "choice":
        # One terminal: as alternatives of a rule, each would be an item of the parser.
        texts = " | ".join(map(json.dumps, json.loads(text)))
        return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + texts))
    return str(grammar_from(kind, text))


def style_of(structure: StructuredOutputsParams) -> ThoughtStyle:
    """How the thoughts before a structure are marked."""
    style = thought_style(structure.reasoning_parser)
    assert style is not None, "a structure behind thoughts has a parser of them"
    return style


_COERCE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"


def refusal(structure: StructuredOutputsParams, why: str) -> InvalidRequest:
    """The error of a request whose structure cannot be used. why: the library's message."""
    what = {"json": "the JSON schema", "regex": "the regular expression", "choice": "the choice"}
    if why.startswith("NoExtension"):
        why = "nothing can satisfy it"
    name = what.get(structure.kind[0], "the grammar")
    text = message(why.replace(_COERCE, "Use anyOf"))
    return InvalidRequest(f"{structure.param}: {name} cannot be used: {text}", param=structure.param)


_MAX_MESSAGE = 400
"""The most characters of the library's message that are shown."""

_NOISE = re.compile(r"\s*<non-verbose/>|json-schema:///|Parser Error: ")
_ROW = re.compile(r".*Current row has (\d+) items; max is (\d+).*", re.DOTALL)


def message(why: str) -> str:
    """The library's message on one line, with its internal terms explained."""
    if wide := _ROW.fullmatch(why):
        return (
            f"it has {wide[1]} alternatives in one place, and at most {wide[2]} are allowed: use fewer alternatives "
            "(of fixed texts, an enum or a choice may have many more)"
        )
    text = " ".join(_NOISE.sub("", why).split())
    return text[:_MAX_MESSAGE] + "..." if len(text) > _MAX_MESSAGE else text
