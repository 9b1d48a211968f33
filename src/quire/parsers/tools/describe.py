"""Tools for models whose chat template knows of none: told in words, in the system message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.parsers.tools.styles import ToolStyle

_INTRODUCTION = """You can call functions. Here they are, one a line, as JSON:
{tools}

To call functions, answer with nothing but calls, written like this:
{example}
The results come with the next message."""


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, style: ToolStyle
) -> list[dict[str, Any]]:
    """`messages`, whose contents are texts, with `tools`, calls and results as text that any template can show."""
    shown: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role = message.get("role")
        if role == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if before == "tool":  # one message, for templates whose roles must alternate
                shown[-1]["content"] += "\n" + text
            else:
                shown.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            said = "\n".join(filter(None, (message.get("content"), spelled(message["tool_calls"], style))))
            shown.append({"role": role, "content": said})
        else:
            shown.append(dict(message))
        before = role
    return _introduced(shown, tools, style) if tools else shown


def spelled(calls: Sequence[Mapping[str, Any]], style: ToolStyle) -> str:
    """Calls as a model of this style writes them."""
    texts = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(style.head(function["name"]) + arguments + "}")
    return style.before + style.between.join(texts) + style.after


def _introduced(
    shown: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], style: ToolStyle
) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = style.before + style.head("NAME") + "{ARGUMENTS}}" + style.after
    words = _INTRODUCTION.format(tools=functions, example=example)
    if shown and shown[0].get("role") in ("system", "developer"):
        return [{**shown[0], "content": f"{shown[0].get('content') or ''}\n\n{words}".lstrip()}, *shown[1:]]
    return [{"role": "system", "content": words}, *shown]
