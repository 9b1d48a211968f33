"""Words that are withdrawn: private terms of early versions, where the field has a term of its own.

`python -m tests.words src/quire/server` prints each use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = ("src", "docs", "README.md", "CONTRIBUTING.md")
FILES = {".py", ".md", ".css", ".js", ".html", ".proto", ".toml", ".yaml", ".yml"}
EXEMPT = {"src/quire/deprecated.py", "src/quire/server/static/tape.js"}
"""Have the old names: of documented imports, and of a field in saved files."""

_WORDS = """
    told tells nobody somebody anybody everybody whoever whomever lest nought twofold thereof
    grave graves bury buries buried waist rim house desk poured pour spell spells passage keeper
    lane lanes arena shelf ledger panes unfed patience foreseen storyteller workshop disguise reel
    unheard kin guilty strike strikes delicate rehearsal crowd crowded door doors
"""
WITHDRAWN = frozenset(_WORDS.split())
PHRASES = ("goes home", "go home", "went home", "sent away", "send away", "sat out", "is nobody's")

NAMES = re.compile(r"^> .*|\bforesee\b|\bbenchmarks\.doors\b|doors-cpu|\"doors\"|\"House\"|\blane_bases\b")
"""Names that stay: a model's answers in documentation, an option's value, a benchmark and its page, an old alias, an
argument of Gluon's."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PHRASE = re.compile("|".join(phrase.replace(" ", r"[\s_]+") for phrase in PHRASES), re.IGNORECASE)


def found(paths: Iterator[Path]) -> Iterator[str]:
    """A line for each use of a withdrawn word: in prose, in comments, and as part of a name."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            line = NAMES.sub("", line)
            words = {word for word in _WORD.findall(line) if word.lower() in WITHDRAWN}
            words.update(match.group() for match in _PHRASE.finditer(line))
            for word in sorted(words):
                yield f"{path.relative_to(ROOT)}:{number}: {word}: {line.strip()[:100]}"


def files(roots: Iterator[Path]) -> Iterator[Path]:
    """The files of code and prose under `roots`."""
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix in FILES and str(path.relative_to(ROOT)) not in EXEMPT:
                yield path


if __name__ == "__main__":
    for use in found(files(Path(argument).resolve() for argument in sys.argv[1:])):
        print(use)
