"""Texts that tests expect, in files: what a change does to them is a part of the change.

`UPDATE_EXPECTED=1 python -m pytest FILES` writes them anew; read the difference before it is committed.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def check(file: Path, text: str) -> None:
    """Fails with the difference unless `text` is what `file` has."""
    text = text.rstrip("\n") + "\n"
    if os.environ.get("UPDATE_EXPECTED"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    expected = file.read_text()
    if text != expected:
        names = f"expected ({file.name})", "now"
        changes = difflib.unified_diff(expected.splitlines(), text.splitlines(), *names, lineterm="", n=2)
        raise AssertionError("\n".join(["", *(line[:1000] for line in list(changes)[:80])]))
