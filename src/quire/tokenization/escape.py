"""Text that is safe on a line of its own, in a log or on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What ends lines, moves cursors, or turns the direction of text."""


def escape_control(text: str) -> str:
    """The same text on one line, what a terminal would obey spelled out."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def escape_control_lines(text: str) -> str:
    """The same lines, each harmless and indented: none of them can pass for the beginning of something else."""
    return "\n".join(f"    {escape_control(line)}" for line in text.split("\n"))
