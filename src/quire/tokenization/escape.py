"""Escapes control characters in text for logs and terminals."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Line breaks, other control characters, and characters that change the direction of text."""


def escape_control(text: str) -> str:
    """The text on one line, with control characters as escape sequences."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def escape_control_lines(text: str) -> str:
    """The lines, escaped and indented, so that none looks like the beginning of a log record."""
    return "\n".join(f"    {escape_control(line)}" for line in text.split("\n"))
