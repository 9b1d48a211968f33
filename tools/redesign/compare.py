"""Check that two trees of Python files differ by the map's names alone, docstrings and comments apart.

    python tools/redesign/compare.py OLD_TREE NEW_TREE tools/redesign/map.txt

Exits with 1 and names the place where a file has another shape, or a name that the map does not give.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from rename import FOLDERS, Map


def without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                line
                for line in body
                if not (
                    isinstance(line, ast.Expr)
                    and isinstance(line.value, ast.Constant)
                    and isinstance(line.value.value, str)
                )
            ] or [ast.Pass()]
    return tree


def sort_key(node: ast.AST) -> str:
    return ast.dump(node)


def differences(old: object, new: object, pairs: set[tuple[str, str]], where: str) -> list[str]:
    """Where the trees differ by more than the pairs. Imported names and `__slots__` may stand in another order."""
    if type(old) is not type(new):
        return [f"{where}: {old!r} became {new!r}"]
    if isinstance(old, ast.AST) and isinstance(new, ast.AST):
        line = getattr(new, "lineno", None)
        where = where.split(":")[0] + f":{line}" if line else where
        return [
            each
            for field in old._fields
            for each in differences(getattr(old, field, None), getattr(new, field, None), pairs, where)
        ]
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{where}: {len(old)} became {len(new)} items"]
        if all(isinstance(one, ast.alias) for one in old):  # ruff sorts imports
            left = {new_name(one.name, pairs) for one in old} - {one.name for one in new}
            return (
                [f"{where}: {sorted(map(str, left))} are imported no more"]
                if any(
                    not (one.name in {n.name for n in new} or any((one.name, n.name) in pairs for n in new))
                    for one in old
                )
                else []
            )
        return [each for a, b in zip(old, new, strict=True) for each in differences(a, b, pairs, where)]
    if old != new and not (isinstance(old, str) and isinstance(new, str) and (old, new) in pairs):
        return [f"{where}: {old!r} became {new!r}"]
    return []


def new_name(name: str, pairs: set[tuple[str, str]]) -> str:
    return next((new for old, new in pairs if old == name), name)


def main() -> None:
    before, after, names = Path(sys.argv[1]), Path(sys.argv[2]), Map(Path(sys.argv[3]))
    pairs = {(full.rsplit(".", 1)[-1], new) for full, new in (*names.exact.items(), *names.patterns)}
    pairs |= {(old.lstrip(".").rstrip("="), new) for each in names.untyped.values() for old, new in each}
    found = []
    for folder in FOLDERS:
        for path in sorted((before / folder).rglob("*.py")):
            twin = after / path.relative_to(before)
            trees = [without_docstrings(ast.parse(one.read_text())) for one in (path, twin)]
            imports = [
                sorted((n for n in tree.body if isinstance(n, ast.ImportFrom)), key=lambda n: n.module or "")
                for tree in trees
            ]
            for tree, head in zip(trees, imports, strict=True):
                tree.body = [*head, *(n for n in tree.body if not isinstance(n, ast.ImportFrom))]
            found += differences(*trees, pairs, f"{path.relative_to(before)}:0")
    print("\n".join(found[:200]))
    print(f"{len(found)} differences beside the map's")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
