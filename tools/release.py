"""Check that tag, version and changelog agree, and print the changelog's entry: `python -m tools.release v0.2.0`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """The entry of `version` in `changelog`, in Markdown, without its heading.

    ValueError: the tag is not v`version`, or the entry is missing, has no date or is empty.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and src/quire/__init__.py has version {version}")
    found = re.search(rf"^## {re.escape(version)} \(([^)]*)\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no entry '## {version} (YYYY-MM-DD)'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise ValueError(f"CHANGELOG.md has no date for {version}: '{found[1]}' is none")
    if not found[2].strip():
        raise ValueError(f"CHANGELOG.md says nothing of {version}")
    return found[2].strip() + "\n"


def main() -> None:
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "src/quire/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert version is not None
    try:
        print(notes(sys.argv[1], version[1], (ROOT / "CHANGELOG.md").read_text("utf-8")), end="")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
