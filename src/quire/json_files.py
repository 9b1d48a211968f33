"""JSON objects in files that may be missing, damaged, or written by several processes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none or it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object whole, or leave what is there. Raises OSError."""
    new = path.with_suffix(f".{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(json.dumps(value), "utf-8")
    new.replace(path)
