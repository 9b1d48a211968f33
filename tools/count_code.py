"""Counts files and lines of code under folders: without blank lines, comments and docstrings.

`python tools/count_code.py src/quire`
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of `source` that hold a token of code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main(root: Path) -> None:
    """Prints files and lines of each folder, and of all but `bench`."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        folder = str(path.parent.relative_to(root))
        files[folder] += 1
        lines[folder] += code_lines(path.read_text())
    for folder in sorted(files):
        print(f"{folder:40}{files[folder]:5}{lines[folder]:8}")
    counted = [folder for folder in files if folder.partition("/")[0] != "bench"]
    print(f"{'all but bench':40}{sum(files[f] for f in counted):5}{sum(lines[f] for f in counted):8}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
