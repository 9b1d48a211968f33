"""How models write calls of tools, by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ToolParser = Literal["hermes", "llama3_json", "mistral", "gemma"]

Form = Literal["any", "known", "python"]
"""What follows a mark: a call as JSON; one only if it names a tool there is; or calls as Python, up to the end mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle:
    """One family's way.

    marks: what a call begins with, and what follows it. end: what ends calls, or nothing. special: marks are special
    tokens, which text leaves out unless they are asked for. named: after a mark, a name may stand before the arguments.
    bare: at an answer's beginning, calls may stand without a mark.

    id_prefix, id_length: what the id of a call looks like, where a template minds.
    arguments: the key of the arguments. before, between, after: what a whole answer of calls is written with.
    """

    name: ToolParser
    marks: Mapping[str, Form]
    end: str = ""
    special: bool = False
    named: bool = False
    bare: bool = False
    id_prefix: str = "call_"
    id_length: int = 24
    arguments: str = "arguments"
    before: str = ""
    between: str = ""
    after: str = ""

    def head(self, name: str) -> str:
        """A call up to its arguments; a brace follows them."""
        return f'{{"name": "{name}", "{self.arguments}": '


HERMES = ToolStyle(
    name="hermes",
    marks={"<tool_call>": "any"},
    end="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)
"""Nous Research's Hermes, and Qwen."""

LLAMA3 = ToolStyle(
    name="llama3_json",
    marks={"<|python_tag|>": "any"},
    special=True,
    bare=True,
    arguments="parameters",
    between="; ",
)
"""Llama 3.1 and later: an object, or several with semicolons between."""

MISTRAL = ToolStyle(
    name="mistral",
    marks={"[TOOL_CALLS]": "any"},
    special=True,
    named=True,
    bare=True,
    id_prefix="",
    id_length=9,
    before="[",
    between=", ",
    after="]",
)
"""A list of objects after the mark, or (since 2025) a name and arguments after each."""

GEMMA = ToolStyle(
    name="gemma",
    marks={"```tool_code": "python", "```tool_call": "any", "```json": "known"},
    end="```",
    bare=True,
    arguments="parameters",
    before="[",
    between=", ",
    after="]",
)
"""Python in a fence, or JSON, as the prompt asks."""

STYLES: Mapping[str, ToolStyle] = MappingProxyType({style.name: style for style in (HERMES, LLAMA3, MISTRAL, GEMMA)})


def style_of(template: str | None) -> ToolStyle:
    """The style that a chat template speaks; Hermes where it speaks none."""
    for mark, style in _SIGNS:
        if template is not None and mark in template:
            return style
    return HERMES


_SIGNS = (
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
    ("<|eom_id|>", LLAMA3),
    ("<|start_header_id|>", LLAMA3),
    ("<start_of_turn>", GEMMA),
)
