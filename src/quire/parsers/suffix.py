"""Marks with a suffix that each checkpoint chooses, as Hy3's and Hy4's: `<think:opensource>`, `<think:6124c78e>`.

Styles are declared with `DECLARED`; a parser's name with a suffix, such as `hy_v3:6124c78e`, is the style with another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

DECLARED = ":opensource"
SUFFIXED = frozenset({"hy_v3", "hy_v4"})
"""Parsers whose marks have a suffix."""

Style = TypeVar("Style")

_MARK = re.compile(r"<(?:think|tool_calls|tool_call|arg_key|arg_value)(:[^\s<>]+)?>")
_END = re.compile(r"(:[^\s<>]+)?>$")


def named(parser: str, tokens: Iterable[str]) -> str:
    """The parser's name with the suffix that the marks among `tokens` have, unless it is the one declared."""
    found = next(filter(None, map(_MARK.fullmatch, tokens)), None) if parser in SUFFIXED else None
    return parser if found is None or found[1] == DECLARED else f"{parser}:{(found[1] or '').removeprefix(':')}"


def declared(mark: str) -> str:
    """`mark` with the suffix that styles are declared with."""
    return _END.sub(DECLARED + ">", mark)


def styled(styles: Mapping[str, Style], parser: str) -> Style | None:
    """The style of a parser's name, which may have a suffix; None if there is none of that name."""
    name, colon, suffix = parser.partition(":")
    style = styles.get(name)
    return style if style is None or not colon else _with(style, suffix and f":{suffix}")


def _with(value: Any, suffix: str) -> Any:
    """`value`, a style or a part of one, with its marks' suffix replaced."""
    if isinstance(value, str):
        return value.replace(DECLARED, suffix)
    if isinstance(value, tuple):
        return tuple(_with(each, suffix) for each in value)
    if isinstance(value, Mapping):
        return {_with(key, suffix): _with(each, suffix) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: _with(getattr(value, field.name), suffix) for field in fields(value)})
    return value
