"""Tool calls as a model writes them, and prompts that ask a model without a format of its own to write them so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.parsers.tools.kinds import json_text
from quire.parsers.tools.styles import Nested, Notation, Style, TaggedStyle

_INTRODUCTION = """You can call functions. Here they are, one a line, as JSON:
{tools}

To call functions, answer with nothing but calls, written like this:
{example}
The results come with the next message."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    style: Style,
    *,
    system: bool = True,
) -> list[dict[str, Any]]:
    """`messages`, whose contents are strings, or lists of parts with images, with `tools`, calls and results in them.

    system: tools may be described in a system message of their own; otherwise the first message begins with them.
    """
    shown: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role = message.get("role")
        if role == "tool":
            content = _joined("<tool_response>\n", message.get("content") or "", "\n</tool_response>")
            # Adjacent results make one message, for templates whose roles must alternate.
            if before == "tool":
                shown[-1]["content"] = _joined(shown[-1]["content"], "\n", content)
            else:
                shown.append({"role": "user", "content": content})
        elif message.get("tool_calls"):
            body, calls = message.get("content"), calls_text(message["tool_calls"], style)
            shown.append({"role": role, "content": _joined(body, "\n", calls) if body else calls})
        else:
            shown.append(dict(message))
        before = role
    return _with_tools(shown, tools, style, system) if tools else shown


def _joined(*contents: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Contents of messages one behind the other: a text, or a list of parts where one of them is."""
    if all(isinstance(each, str) for each in contents):
        return "".join(map(str, contents))
    lists = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
    return [part for each in lists for part in each]


def calls_text(calls: Sequence[Mapping[str, Any]], style: Style) -> str:
    """Calls as a model of this style writes them."""
    texts = []
    for i, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments") or {}
        texts.append(style.head(function["name"], i) + written(arguments, style) + style.finish)
    return style.before + style.between.join(texts) + style.after


def written(arguments: Any, style: Style) -> str:
    """Arguments as a model of this style writes them. A text is taken for arguments that are written already."""
    form = style.form if isinstance(style, TaggedStyle) else None
    if isinstance(arguments, str):
        return arguments
    if isinstance(form, Notation):
        return _noted(arguments, form.quote)
    if isinstance(form, Nested):
        return _nested(arguments, form.mark)
    if form is None or not isinstance(arguments, Mapping):
        return json_text(arguments)
    return "".join(form.written(key, value) for key, value in arguments.items())


def _noted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_noted(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_noted(each, quote) for each in value) + "]"
    return json_text(value)


def _nested(value: Any, mark: str) -> str:
    """Elements without a value of null are left out of objects."""
    if isinstance(value, Mapping):
        pairs = [(key, each) for key, each in value.items() if each is not None]
        return "".join(f"{mark}<{key}>{_nested(each, mark)}{mark}</{key}>" for key, each in pairs)
    if isinstance(value, list):
        return "".join(f"{mark}<item>{_nested(each, mark)}{mark}</item>" for each in value)
    return value if isinstance(value, str) else json_text(value)


def _with_tools(
    shown: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], style: Style, system: bool
) -> list[dict[str, Any]]:
    functions = "\n".join(json_text(tool["function"]) for tool in tools)
    form = style.form if isinstance(style, TaggedStyle) else None
    arguments = written({"PARAMETER": "VALUE"}, style) if form else "{ARGUMENTS}"
    example = style.before + style.head("NAME") + arguments + style.finish + style.after
    text = _INTRODUCTION.format(tools=functions, example=example)
    if shown and shown[0].get("role") in ("system", "developer"):
        body = shown[0].get("content")
        return [{**shown[0], "content": _joined(body, "\n\n", text) if body else text}, *shown[1:]]
    if shown and not system:
        return [{**shown[0], "content": _joined(text, "\n\n", shown[0].get("content") or "")}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]
