"""Which tests execute which statement: a copy of the tree in which each statement of a function leaves a mark.

The marks are bytes of one file that all processes map, those that tests start too. What a test has set when it ends is
written down with its time, so that a fault's tests can be chosen: those that execute it, the cheapest first.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HITS = """\
import mmap, os

_file = os.open({file!r}, os.O_RDWR)
hits = mmap.mmap(_file, {size})
os.close(_file)
"""
_CHUNK = 8.0
"""Seconds of tests of one file that are run together."""


class Span(NamedTuple):
    """A statement: its file, relative to the repository, and its first and last line."""

    path: str
    first: int
    last: int


def marked(source: str, path: str, start: int) -> tuple[str, list[Span]]:
    """`source` with a mark before each statement of its functions, and the statements; `start` numbers the first."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    spans: list[Span] = []
    before: dict[int, str] = {}
    for statement in _statements(tree, inside=False):
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        line = lines[first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        if len(indent) != statement.col_offset or line.lstrip().startswith("elif"):
            continue
        before[first] = f"{indent}_mutation_hits[{start + len(spans)}] = 1\n"
        spans.append(Span(path, first, statement.end_lineno or first))
    if not spans:
        return source, []
    future = (
        one.end_lineno or 0 for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"
    )
    after = max(future, default=0)
    known = "from quire_hits import hits as _mutation_hits\n"
    parts = [before.get(i, "") + line + known * (i == after) for i, line in enumerate(lines, 1)]
    return known * (after == 0) + "".join(parts), spans


def _statements(node: ast.AST, inside: bool) -> Iterator[ast.stmt]:
    """Statements of functions, but not of kernels, whose source is compiled by Triton, and no docstrings."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if any("jit" in ast.unparse(one) for one in node.decorator_list):
            return
        inside = True
    elif isinstance(node, ast.ClassDef):
        inside = False
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        below = getattr(node, name, None)
        for one in below if isinstance(below, list) else ():
            text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if inside and isinstance(one, ast.stmt) and not text:
                yield one
            yield from _statements(one, inside)


def mark(tree: Path) -> list[Span]:
    """Marks all modules of the tree at `tree`; the statements in the order of their bytes."""
    spans: list[Span] = []
    for file in sorted((tree / "src/quire").rglob("*.py")):
        text, more = marked(file.read_text(), str(file.relative_to(tree)), len(spans))
        file.write_text(text)
        spans += more
    bytes_ = tree / "hits.bin"
    bytes_.write_bytes(bytes(len(spans)))
    (tree / "src/quire_hits.py").write_text(HITS.format(file=str(bytes_), size=len(spans)))
    return spans


def measure(root: Path, tree: Path, tests: list[str], out: Path) -> int:
    """Runs `tests` in `tree`, a copy of `root` that is marked here, and appends to `out` what each executes.

    `out` begins with the statements and their modules' hashes; where it is there, it has to be of the same modules.
    What pytest returned is returned; tests that fail are not written down.
    """
    sources = {str(file.relative_to(root)): _hash(file) for file in sorted((root / "src/quire").rglob("*.py"))}
    head = {"sources": sources, "spans": mark(tree)}
    if not out.exists():
        out.write_text(json.dumps(head) + "\n")
    with out.open() as old:
        if json.loads(next(old))["sources"] != sources:
            raise ValueError(f"{out} is of other sources: remove it")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"),
        *("-p", "tests.mutation.marking", "-o", "addopts=--strict-markers", "-m", "not nightly and not gpu"),
        *tests,
    ]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "MUTATION_MARKS": str(out.resolve())}
    process = subprocess.Popen(command, cwd=tree, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def packed(hits: bytes) -> str:
    return base64.b64encode(zlib.compress(hits)).decode()


def _defined(level: list[ast.stmt], line: int) -> set[str]:
    """The name of the function or class, or the names of the variables, that `line` is part of the definition of."""
    names: set[str] = set()
    while here := [node for node in level if node.lineno <= line <= (node.end_lineno or 0)]:
        node, level = here[0], []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return {node.name}
        if isinstance(node, ast.ClassDef):
            names, level = {node.name}, node.body
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)} or names
    return names


class _Test(NamedTuple):
    name: str
    seconds: float
    hits: bytes


class Marks:
    """What `measure` wrote to `file`, for the tree at `root`."""

    def __init__(self, file: Path, root: Path) -> None:
        with file.open() as lines:
            head = json.loads(next(lines))
            rows = {row["test"]: row for row in map(json.loads, lines)}  # the last time counts
        self._spans = [Span(*span) for span in head["spans"]]
        self._same = {
            path for path, was in head["sources"].items() if (root / path).exists() and _hash(root / path) == was
        }
        self._sources = {path: (root / path).read_text() for path in self._same}
        self._trees = {path: ast.parse(source).body for path, source in self._sources.items()}
        self._by_path: dict[str, list[int]] = defaultdict(list)
        for i, span in enumerate(self._spans):
            self._by_path[span.path].append(i)
        self._tests = [_Test(name, row["seconds"], base64.b64decode(row["hits"])) for name, row in rows.items()]
        self.files = {test.name.partition("::")[0] for test in self._tests}
        """Test files of which the marks tell."""
        self._recorded = {name for name in self.files if "expected" in (root / name).read_text()}

    def _innermost(self, path: str, line: int) -> int | None:
        """The statement of a function that `line` is part of."""
        around = [i for i in self._by_path.get(path, ()) if self._spans[i].first <= line <= self._spans[i].last]
        return min(around, key=lambda i: self._spans[i].last - self._spans[i].first, default=None)

    def _executing(self, path: str, line: int) -> set[int]:
        """The statement of `line`; or those that name what is defined there, directly or through its module."""
        queue, seen, found = [(path, line)], set[str](), set[int]()
        while queue:
            where, at = queue.pop()
            if (statement := self._innermost(where, at)) is not None:
                found.add(statement)
            elif where == path:
                for name in _defined(self._trees[path], at) - seen:
                    seen.add(name)
                    word = re.compile(rf"\b{name}\b")
                    for other, source in self._sources.items():
                        if other == path or (Path(path).stem in source and name in source):
                            queue += ((other, i) for i, text in enumerate(source.splitlines(), 1) if word.search(text))
        return found

    def tests(self, path: str, line: int) -> list[list[str]] | None:
        """The tests that execute `line` of the module at `path`, in groups, those to run first first.

        A line that is no statement of a function, or is part of a kernel, is executed by the statements that name what
        it defines. None where the marks do not tell: there is no such statement, or the module has changed since.
        """
        wanted = self._executing(path, line) if path in self._same else set()
        if not wanted:
            return None
        files: dict[str, list[_Test]] = defaultdict(list)
        for test in sorted(self._tests, key=lambda test: test.seconds):
            hits = zlib.decompress(test.hits)
            if any(hits[i] for i in wanted):
                files[test.name.partition("::")[0]].append(test)
        folder = path.split("/")[2]
        groups: list[tuple[float, list[str]]] = []
        for file, tests in files.items():
            near = (file in self._recorded) + (file.split("/")[1] == folder or Path(path).stem in file)
            group: list[str] = []
            cost = spent = 0.0
            for test in tests:
                if group and cost + test.seconds > _CHUNK:
                    groups.append(((spent + 1) / 4**near, group))
                    group, cost = [], 0.0
                group.append(test.name)
                cost, spent = cost + test.seconds, spent + test.seconds
            groups.append(((spent + 1) / 4**near, group))
        return [group for _, group in sorted(groups)]
