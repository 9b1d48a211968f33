"""Calls of tools written as Python: `f(city="Paris", days=3)`, alone, in a list, or printed."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 1 << 14
"""Characters of Python that are read."""


def python_calls(source: str, tools: Mapping[str, Sequence[str]]) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call, or None if `source` is anything but calls of known tools.

    tools: the names of each tool's parameters, for arguments given by position. Nothing is run.
    """
    if len(source) > LONGEST:
        return None
    try:
        body = ast.parse(source.strip()).body
        return [_call(one, tools) for line in body for one in _calls(line)] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _calls(line: ast.stmt) -> Sequence[ast.expr]:
    """The calls of one line. Raises ValueError if it is something else."""
    value = line.value if isinstance(line, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print":
        return value.args
    if isinstance(value, ast.List | ast.Tuple):
        return value.elts
    if value is None:
        raise ValueError("not a call")
    return [value]


def _call(one: ast.expr, tools: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    if not isinstance(one, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(one.func)
    if name not in tools:
        raise ValueError("not a tool")
    given: dict[str, Any] = {key: ast.literal_eval(value) for key, value in zip(tools[name], one.args, strict=False)}
    if len(given) < len(one.args):
        raise ValueError("more arguments than parameters")
    for keyword in one.keywords:
        if keyword.arg is None or keyword.arg in given:
            raise ValueError("an argument without a name, or given twice")
        given[keyword.arg] = ast.literal_eval(keyword.value)
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    text.encode()  # no half of a pair, which no answer could carry
    return name, text
