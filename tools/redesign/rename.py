"""Rename symbols over the whole tree by a map, with types from mypy and scopes from LibCST.

    python tools/redesign/rename.py map.txt --index uses.json            # types of all attributes: minutes, once
    python tools/redesign/rename.py map.txt --uses uses.json             # say what would change
    python tools/redesign/rename.py map.txt --uses uses.json --write     # change it

A line of the map is `module: old = new, old = new`, where `old` is `Class`, `Class.member`, `function`,
`function(parameter or local)` or `Class.method(parameter or local)`; `*` stands for any part of a name.
Needs `pip install libcst mypy`.
"""

# ruff: noqa: N802 - LibCST finds its visitors by these names

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

FOLDERS = ("src/quire", "tests", "training")


class Map:
    """Old full names to new last parts."""

    def __init__(self, path: Path) -> None:
        self.exact: dict[str, str] = {}
        self.patterns: list[tuple[str, str]] = []
        self.untyped: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.used: set[str] = set()
        module = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            line = line.split("#")[0].rstrip()
            if not line:
                continue
            if not line.startswith(" "):
                module, _, line = line.partition(":")
            for pair in filter(None, (part.strip() for part in line.split(","))):
                old, eq, new = (part.strip() for part in pair.partition("="))
                if not eq or not re.fullmatch(r"\w+", new):
                    sys.exit(f"{path}:{number}: not a pair: {pair!r}")
                if module.startswith("untyped "):
                    self.untyped[module.removeprefix("untyped ")].append((old, new))
                    continue
                inner = re.fullmatch(r"([\w.*]+)\(([\w*]+)\)", old)
                full = f"{module}.{inner[1]}.<locals>.{inner[2]}" if inner else f"{module}.{old}"
                if "*" in full:
                    self.patterns.append((full, new))
                elif self.exact.setdefault(full, new) != new:
                    sys.exit(f"{path}:{number}: {full} is mapped twice")

    def get(self, full: str) -> str | None:
        found = self.exact.get(full)
        if found is not None:
            self.used.add(full)
            return found
        for pattern, new in self.patterns:
            if fnmatchcase(full, pattern):
                self.used.add(pattern)
                return new
        return None

    def members(self) -> set[str]:
        return {full.rsplit(".", 1)[-1] for full in (*self.exact, *(p for p, _ in self.patterns))}


Edit = tuple[int, int, str, str]  # line, column in characters, old, new


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Names(cst.CSTVisitor):
    """Edits of names that scopes explain: globals, imports, parameters, locals, definitions, class fields."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, module: str, names: Map) -> None:
        self.module, self.map, self.edits = module, names, set[Edit]()
        self.keywords = set[tuple[int, int]]()

    def _edit(self, node: cst.CSTNode, old: str, full: str) -> None:
        new = self.map.get(full)
        if new is not None and new != old:
            start = self.get_metadata(PositionProvider, node).start
            self.edits.add((start.line, start.column, old, new))

    def _full(self, node: cst.CSTNode) -> list[str]:
        found = self.get_metadata(QualifiedNameProvider, node, set())
        out = []
        for name in found:
            if name.source is QualifiedNameSource.LOCAL:
                out.append(f"{self.module}.{name.name}")
            elif name.source is QualifiedNameSource.IMPORT:
                out.append(name.name)
        return out

    def visit_Name(self, node: cst.Name) -> None:
        for full in self._full(node):
            if full.rsplit(".", 1)[-1] == node.value:
                self._edit(node, node.value, full)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        for full in self._full(node):
            self._edit(node.name, node.name.value, full)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        for full in self._full(node):
            self._edit(node.name, node.name.value, full)
        for line in node.body.body:
            if not isinstance(line, cst.SimpleStatementLine):
                continue
            for small in line.body:
                if isinstance(small, cst.Assign) and getattr(small.targets[0].target, "value", "") == "__slots__":
                    for element in getattr(small.value, "elements", ()):
                        text = element.value.evaluated_value
                        for full in self._full(node):
                            new = self.map.get(f"{full}.{text}")
                            if new is not None:
                                start = self.get_metadata(PositionProvider, element.value).start
                                self.edits.add((start.line, start.column + 1, text, new))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        for full in self._full(node):
            if full.rsplit(".", 1)[-1] == node.attr.value:
                self._edit(node.attr, node.attr.value, full)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar) or node.module is None:
            return
        base = cst.Module([]).code_for_node(node.module)
        for alias in node.names:
            if isinstance(alias.name, cst.Name):
                self._edit(alias.name, alias.name.value, f"{base}.{alias.name.value}")

    def visit_Param(self, node: cst.Param) -> None:
        for full in self._full(node.name):
            self._edit(node.name, node.name.value, full)

    def visit_Global(self, node: cst.Global) -> bool:
        return False

    def visit_Arg(self, node: cst.Arg) -> None:  # keywords are not names of this scope
        if node.keyword is not None:
            start = self.get_metadata(PositionProvider, node.keyword).start
            self.keywords.add((start.line, start.column))


def imported(module: str, path: Path, exports: dict[str, dict[str, str]]) -> None:
    """What a module binds by `from x import y`: re-exports are followed to where a name is made."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                exports[module][alias.asname or alias.name] = f"{node.module}.{alias.name}"


Use = tuple[int, int, str, list[str]]  # line, column in characters, name, full names it may stand for


def index(paths: list[Path]) -> dict[str, list[Use]]:
    """Attributes and keyword arguments of each file with the full names that mypy's types give them; slow."""
    from mypy import build
    from mypy.nodes import CallExpr, MemberExpr, MypyFile, RefExpr, TypeInfo
    from mypy.options import Options
    from mypy.traverser import TraverserVisitor
    from mypy.types import (
        CallableType,
        Instance,
        LiteralType,
        Overloaded,
        TupleType,
        TypeType,
        TypeVarType,
        UnionType,
        get_proper_type,
    )

    options = Options()
    options.python_version = sys.version_info[:2]
    options.export_types = options.preserve_asts = True
    options.check_untyped_defs = True
    options.incremental = False
    options.cache_dir = "/dev/null"
    options.show_traceback = True
    options.local_partial_types = True
    options.mypy_path = [str(Path("src").resolve()), str(Path.cwd())]
    options.namespace_packages = options.explicit_package_bases = True
    options.per_module_options = {
        f"{package}.*": {"follow_imports": "skip", "ignore_missing_imports": True}
        for package in (
            "torch",
            "transformers",
            "llguidance",
            "safetensors",
            "uvloop",
            "triton",
            "matplotlib",
            "onnxruntime",
            "onnx",
            "grpc",
            "google",
            "numpy",
            "openai",
            "anthropic",
            "hypothesis",
            "schemathesis",
            "playwright",
            "gguf",
            "sentencepiece",
            "tiktoken",
            "PIL",
        )
    }
    options.ignore_missing_imports = True
    sources = [build.BuildSource(str(path), module_of(path)) for path in paths]
    result = build.build(sources, options)
    known = {module_of(path): path for path in paths}
    uses: dict[str, list[Use]] = defaultdict(list)

    def infos(t: object) -> list[TypeInfo]:
        t = get_proper_type(t)  # type: ignore[arg-type]
        if isinstance(t, Instance):
            return [t.type]
        if isinstance(t, TupleType):
            return infos(t.partial_fallback)
        if isinstance(t, LiteralType):
            return infos(t.fallback)
        if isinstance(t, TypeType):
            return infos(t.item)
        if isinstance(t, TypeVarType):
            return infos(t.upper_bound)
        if isinstance(t, UnionType):
            return [info for item in t.items for info in infos(item)]
        if isinstance(t, CallableType) and t.is_type_obj():
            return infos(t.ret_type)
        if isinstance(t, Overloaded) and t.is_type_obj():
            return infos(t.items[0].ret_type)
        return []

    def owner(info: TypeInfo, name: str) -> str | None:
        for base in info.mro:
            if name in base.names:
                return base.fullname
        return None

    class Walk(TraverserVisitor):
        def __init__(self, path: Path, tree: MypyFile) -> None:
            super().__init__()
            self.path = str(path)
            self.lines = path.read_text().splitlines()
            self.keywords: dict[tuple[int, int, int, int], list[ast.keyword]] = {}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and node.keywords:
                    place = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
                    self.keywords[place] = node.keywords

        def char(self, line: int, column: int) -> int:
            return len(self.lines[line - 1].encode()[:column].decode())

        def add(self, line: int, column: int, name: str, fulls: list[str]) -> None:
            ours = [full for full in fulls if full.startswith(("quire.", "tests.", "training."))]
            if ours or not fulls:
                uses[self.path].append((line, self.char(line, column), name, ours))

        def visit_member_expr(self, e: MemberExpr, /) -> None:
            super().visit_member_expr(e)
            if isinstance(e.expr, RefExpr) and isinstance(e.expr.node, MypyFile):
                return
            line, column = e.end_line or e.line, (e.end_column or 0) - len(e.name)
            if isinstance(e.expr, RefExpr) and isinstance(e.expr.node, TypeInfo):
                found = [e.expr.node]
            else:
                t = result.types.get(e.expr)
                found = infos(t) if t is not None else []
            owners = {own for info in found if (own := owner(info, e.name)) is not None}
            self.add(line, column, e.name, sorted(f"{own}.{e.name}" for own in owners))

        def visit_call_expr(self, e: CallExpr, /) -> None:
            super().visit_call_expr(e)
            given = self.keywords.get((e.line, e.column, e.end_line or 0, e.end_column or 0), [])
            given = [k for k in given if k.arg]
            if not given:
                return
            callee = e.callee
            t = result.types.get(callee)
            kinds: list[TypeInfo] = []
            function = ""
            if isinstance(callee, RefExpr) and isinstance(callee.node, TypeInfo):
                kinds = [callee.node]
            elif isinstance(callee, MemberExpr) and callee.name == "_replace":
                kinds = infos(result.types.get(callee.expr)) if callee.expr in result.types else []
            elif isinstance(callee, RefExpr) and callee.fullname in ("dataclasses.replace", "msgspec.structs.replace"):
                kinds = infos(result.types.get(e.args[0])) if e.args[0] in result.types else []
            elif t is not None:
                proper = get_proper_type(t)
                if isinstance(proper, CallableType) and proper.is_type_obj():
                    kinds = infos(proper.ret_type)
                elif isinstance(proper, Instance):
                    own = owner(proper.type, "__call__")
                    function = f"{own}.__call__" if own else ""
                elif isinstance(callee, MemberExpr):
                    bases = infos(result.types.get(callee.expr)) if callee.expr in result.types else []
                    if isinstance(callee.expr, RefExpr) and isinstance(callee.expr.node, TypeInfo):
                        bases = [callee.expr.node]
                    for info in bases:
                        own = owner(info, callee.name)
                        if own:
                            function = f"{own}.{callee.name}"
                    if not bases and callee.fullname:
                        function = callee.fullname
            if not kinds and not function and isinstance(callee, RefExpr):
                function = callee.fullname or ""
            for keyword in given:
                name = keyword.arg or ""
                fulls = [f"{function}.<locals>.{name}"] if function else []
                for info in kinds:
                    for base in info.mro:
                        if "__init__" in base.names and base.fullname.startswith(("quire.", "tests.", "training.")):
                            plugin = base.names["__init__"].plugin_generated
                            if not plugin:
                                fulls.append(f"{base.fullname}.__init__.<locals>.{name}")
                                break
                        if name in base.names:
                            fulls.append(f"{base.fullname}.{name}")
                            break
                self.add(keyword.lineno, keyword.col_offset, f"{name}=", fulls)

    for module, path in known.items():
        tree = result.files.get(module)
        if tree is not None:
            tree.accept(Walk(path, tree))
    return uses


def typed_edits(uses: dict[str, list[Use]], names: Map) -> tuple[dict[str, set[Edit]], list[str]]:
    """Edits of attributes and keyword arguments; and those of a renamed name that have no type."""
    wanted, edits, unknown = names.members(), defaultdict[str, set[Edit]](set), list[str]()
    for path, found in uses.items():
        lines = Path(path).read_text().splitlines()
        for line, column, name, fulls in found:
            bare = name.rstrip("=")
            if bare not in wanted:
                continue
            if not fulls:
                unknown.append(f"{path}:{line}: {name}  {lines[line - 1].strip()[:110]}")
            for full in fulls:
                new = names.get(full)
                if new is not None and new != bare:
                    edits[path].add((line, column, bare, new))
    return edits, unknown


def untyped_edits(path: Path, names: Map) -> set[Edit]:
    """By name alone: attributes (`.old`), keywords (`old=`) and names (`old`) in files that have no types."""
    out: set[Edit] = set()
    for pattern, pairs in names.untyped.items():
        if fnmatchcase(str(path), pattern):
            news, text = dict(pairs), path.read_text()
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                old, line, column = spelled(node)
                if old in news:
                    bare = old.strip(".=")
                    at = len(lines[line - 1].encode()[:column].decode())
                    out.add((line, at - len(bare) if old.startswith(".") else at, bare, news[old]))
    return out


def spelled(node: ast.AST) -> tuple[str, int, int]:
    """How the map writes an untyped name; its line and byte column, of its end where it is an attribute."""
    match node:
        case ast.Attribute():
            return f".{node.attr}", node.end_lineno or 1, node.end_col_offset or 0
        case ast.keyword(arg=str()):
            return f"{node.arg}=", node.lineno, node.col_offset
        case ast.Name():
            return node.id, node.lineno, node.col_offset
        case ast.arg():
            return node.arg, node.lineno, node.col_offset
    return "", 1, 0


def scoped_edits(path: Path, names: Map) -> set[Edit]:
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()), unsafe_skip_copy=True)
    visitor = Names(module_of(path), names)
    wrapper.visit(visitor)
    return {e for e in visitor.edits if (e[0], e[1]) not in visitor.keywords}


def apply(path: Path, edits: set[Edit]) -> str:
    lines = path.read_text().splitlines(keepends=True)
    seen: dict[tuple[int, int], str] = {}
    for line, column, old, new in sorted(edits, reverse=True):
        if seen.setdefault((line, column), new) != new:
            sys.exit(f"{path}:{line}: two new names for {old}: {new} and {seen[line, column]}")
        text = lines[line - 1]
        if text[column : column + len(old)] != old:
            sys.exit(f"{path}:{line}:{column}: expected {old!r}, found {text[column : column + 20]!r}")
    done = set()
    for line, column, old, new in sorted(edits, reverse=True):
        if (line, column) in done:
            continue
        done.add((line, column))
        text = lines[line - 1]
        lines[line - 1] = text[:column] + new + text[column + len(old) :]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("map", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--unknown", type=Path, help="write what has no type into this file")
    parser.add_argument("--index", type=Path, help="write what mypy knows of every attribute into this file")
    parser.add_argument("--uses", type=Path, help="such a file")
    args = parser.parse_args()
    names = Map(args.map)
    paths = sorted(p for folder in FOLDERS for p in Path(folder).rglob("*.py") if not p.name.endswith("_pb2.py"))
    if args.index:
        args.index.write_text(json.dumps(index(paths)))
        return
    typed, unknown = typed_edits(json.loads(args.uses.read_text()), names)
    total = 0
    written: dict[Path, str] = {}
    for path in paths:
        edits = typed[str(path)] | scoped_edits(path, names) | untyped_edits(path, names)
        if edits:
            total += len(edits)
            written[path] = apply(path, edits)
    for path, text in written.items():
        ast.parse(text)
        if args.write:
            path.write_text(text)
    unused = set(names.exact) | {p for p, _ in names.patterns}
    unused -= names.used
    for full in sorted(unused):
        print(f"never seen: {full}")
    if args.unknown:
        args.unknown.write_text("\n".join(unknown) + "\n")
    print(f"{total} names in {len(written)} files; {len(unknown)} attributes and keywords without a type")


if __name__ == "__main__":
    main()
