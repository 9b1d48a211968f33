"""Which test files lie nearest to a module: by its name, by what they import, and by what of it they mention.

Of files that are equally near, those that start processes come last: each of their tests takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from pathlib import Path

FAR = 99
"""Further than any chain of imports."""

_PROCESSES = frozenset({"subprocess", "Popen", "create_subprocess_exec"})
"""Words of tests that start processes."""


class Nearness:
    """The test files of the tree at `root`, and what each imports, directly or not."""

    def __init__(self, root: Path) -> None:
        files = [*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py")]
        self._root = root
        self._paths = {_module(root, file): file for file in files}
        self._sources = {name: file.read_text() for name, file in self._paths.items()}
        self._imports = {name: self._imported(name) for name in self._paths}
        self._add_lazy_imports()
        tests = (name for name in self._paths if name.startswith("tests.") and "test_" in name.rpartition(".")[2])
        self._words = {name: self._spoken(name) for name in self._paths if name.startswith("tests.")}
        self._distances = {name: self._from(name) for name in tests if not name.startswith("tests.mutation.")}

    def nearest(self, path: str, line: int = 0) -> list[str]:
        """Test files that reach the module at `path`, the nearest first; `line` says which of its functions counts."""
        target = _module(self._root, self._root / path)
        leaf = target.rpartition(".")[2]
        room = target.split(".")[1]
        names, around = self._names(target, line)
        ranked = []
        for test, distances in self._distances.items():
            distance = distances.get(target, FAR)
            if distance == FAR or "gpu" in test.rpartition(".")[2]:  # those are skipped here
                continue
            words = self._words[test]
            score = 10 * distance - 2 * min(5, len(names & words)) - 6 * min(2, len(around & words))
            score -= 20 * (test.rpartition(".")[2] in (f"test_{leaf}", f"test_{leaf}s", f"test_{leaf.rstrip('s')}"))
            score -= 8 * (test.split(".")[1] in (room, f"test_{room}"))
            score += 6 * bool(_PROCESSES & words)
            score -= 10 * (
                test.rpartition("test_")[2].rstrip("s") in (leaf.split("_")[0], leaf.split("_")[0].rstrip("s"))
            )
            ranked.append((score, str(self._paths[test].relative_to(self._root))))
        return [file for _, file in sorted(ranked)]

    def _spoken(self, test: str) -> set[str]:
        """Words of the file and of what it shares with others."""
        shared = (name for name in self._imports[test] if name.startswith("tests."))
        return {word for name in (test, *shared) for word in re.findall(r"\w+", self._sources[name])}

    def _imported(self, name: str) -> set[str]:
        """Modules that `name` imports anywhere in it; a string that is a module's name counts (lazy imports)."""
        found: set[str] = set()
        package = name if self._paths[name].name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(self._sources[name])):
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parts, *([base] if base else [])])
                found |= {base} | {f"{base}.{one.name}" for one in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("quire."):
                found.add(node.value.partition(":")[0])
        if name.startswith("tests."):
            parts = name.split(".")
            found |= {".".join([*parts[:i], "conftest"]) for i in range(2, len(parts))}
        return (found & self._paths.keys()) - {name}

    def _add_lazy_imports(self) -> None:
        """Modules that no import names, such as executors, belong to whatever composes their names."""
        imported = {other for name, others in self._imports.items() if name.startswith("quire") for other in others}
        lazy = self._paths.keys() - imported
        for name in self._paths:
            if name.startswith("quire."):
                prefixes = tuple(_prefixes(self._sources[name]))
                self._imports[name] |= {other for other in lazy if other.startswith(prefixes)} - {name}

    def _from(self, start: str) -> dict[str, int]:
        """How many imports lie between `start` and each module it reaches; what tests share is part of each."""
        seen, queue = {start: 0}, deque([start])
        while queue:
            name = queue.popleft()
            for other in self._imports[name]:
                far = seen[name] + (not other.startswith("tests."))
                if far < seen.get(other, FAR):
                    seen[other] = far
                    (queue.append if other.startswith("quire.") else queue.appendleft)(other)
        return seen

    def _names(self, target: str, line: int) -> tuple[set[str], set[str]]:
        """What the module defines, and the names of the definitions around `line`."""
        names: set[str] = set()
        around: set[str] = set()
        for node in ast.walk(ast.parse(self._sources[target])):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and len(node.name) > 3:
                names.add(node.name)
                if node.lineno <= line <= (node.end_lineno or node.lineno):
                    around.add(node.name)
        return {name for name in names if not name.startswith("__")}, around - {"__init__"}


def _prefixes(source: str) -> set[str]:
    """The beginnings of modules' names that the source completes at run time, such as "quire.assembly."."""
    strings = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr))
    first = (str(part.value) for node in strings for part in node.values[:1] if isinstance(part, ast.Constant))
    return {text for text in first if re.fullmatch(r"quire(\.\w+)*\.", text)}


def _module(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
