"""How each family of models writes tool calls, and prompts that ask a model without its own format to do so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ToolParser = Literal["hermes", "llama3_json", "mistral", "gemma"]

Form = Literal["any", "known", "python"]
"""What follows a mark: a call in JSON; one only if it names a known tool; or calls in Python, up to the end mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle:
    """The format of tool calls of one family.

    marks: texts that a call begins with, and the form of what follows. end: text that ends calls, or empty. special:
    the marks are special tokens, which decoding omits by default. named: a name may stand between mark and arguments.
    bare: at the beginning of an answer, calls may stand without a mark.

    id_prefix, id_length: of the ids of calls, for templates that check them. arguments: the key of the arguments.
    before, between, after: the text around and between the calls of an answer.
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
        """The text of a call up to its arguments; a closing brace follows them."""
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
"""A list of objects after the mark, or (since 2025) a name and arguments after each mark."""

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
"""Python or JSON in a fence, as the prompt asks."""

STYLES: Mapping[str, ToolStyle] = {style.name: style for style in (HERMES, LLAMA3, MISTRAL, GEMMA)}


def style_of(template: str | None) -> ToolStyle:
    """The style of a chat template; Hermes where the template does not show one."""
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


_INTRODUCTION = """You can call functions. Here they are, one a line, as JSON:
{tools}

To call functions, answer with nothing but calls, written like this:
{example}
The results come with the next message."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, style: ToolStyle
) -> list[dict[str, Any]]:
    """`messages`, whose contents are strings, with `tools`, calls and results written into the contents."""
    shown: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role = message.get("role")
        if role == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            # Adjacent results make one message, for templates whose roles must alternate.
            if before == "tool":
                shown[-1]["content"] += "\n" + text
            else:
                shown.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            content = "\n".join(filter(None, (message.get("content"), calls_text(message["tool_calls"], style))))
            shown.append({"role": role, "content": content})
        else:
            shown.append(dict(message))
        before = role
    return _with_tools(shown, tools, style) if tools else shown


def calls_text(calls: Sequence[Mapping[str, Any]], style: ToolStyle) -> str:
    """Calls as a model of this style writes them."""
    texts = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(style.head(function["name"]) + arguments + "}")
    return style.before + style.between.join(texts) + style.after


def _with_tools(
    shown: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], style: ToolStyle
) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = style.before + style.head("NAME") + "{ARGUMENTS}}" + style.after
    text = _INTRODUCTION.format(tools=functions, example=example)
    if shown and shown[0].get("role") in ("system", "developer"):
        return [{**shown[0], "content": f"{shown[0].get('content') or ''}\n\n{text}".lstrip()}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]
