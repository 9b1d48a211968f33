"""Single-line faults: drawn at random from the syntax tree of the code, or given in a file."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """In the file `path` (relative to the repository), `old` becomes `new`; `line` counts from 1, 0 where unknown.

    Lines move: of several that are equal to `old`, the nearest to `line` is meant.
    """

    path: str
    line: int
    old: str
    new: str


class DoesNotApply(ValueError):
    """The text to be replaced is not there, is there more than once, or the result is not Python."""


def read(file: Path) -> list[Fault]:
    """The faults of a JSON file: objects of "path", "old", "new" and maybe "line", in a list or one a line."""
    text = file.read_text()
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(row) for row in text.splitlines() if row]
    return [Fault(row["path"], int(row.get("line", 0)), row["old"], row["new"]) for row in rows]


def planted(root: Path, fault: Fault) -> tuple[Path, str, int]:
    """The file that `fault` changes, its source with the fault in it, and the line.

    `old` is a whole line (indentation may be left out) or, where no line is equal to it, a piece of the file.
    """
    path = _found(root, fault.path)
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.strip() == fault.old.strip()]
    if fault.line:
        at = sorted(at, key=lambda i: abs(i + 1 - fault.line))[:1]
    if len(at) > 1:
        raise DoesNotApply(f'{len(at)} lines are equal to it: give "line"')
    if at:
        whole = lines[at[0]]
        indent = whole[: len(whole) - len(whole.lstrip())]
        fresh = fault.new.rstrip("\n")
        if fault.old.lstrip() == fault.old:
            fresh = indent + fresh.lstrip() if fresh.strip() else indent + "pass"
        changed = "".join([*lines[: at[0]], (fresh if fresh.strip() else indent + "pass") + "\n", *lines[at[0] + 1 :]])
        line = at[0] + 1
    elif source.count(fault.old) == 1 and fault.old.strip():
        changed = source.replace(fault.old, fault.new)
        line = source[: source.index(fault.old)].count("\n") + 1
    else:
        raise DoesNotApply(f"the text is there {source.count(fault.old) if fault.old.strip() else 0} times")
    try:
        tree = ast.parse(changed)
    except SyntaxError as error:
        raise DoesNotApply(f"the result is not Python: {error}") from None
    if ast.dump(tree) == ast.dump(ast.parse(source)):
        raise DoesNotApply("it changes nothing")
    return path, changed, line


def _found(root: Path, path: str) -> Path:
    for name in (path, f"{path}.py", f"src/quire/{path}", f"src/quire/{path}.py", f"src/{path}"):
        if (root / name).is_file():
            return root / name
    raise DoesNotApply("there is no such file")


def drawn(root: Path, rooms: list[str], count: int, seed: int) -> list[Fault]:
    """`count` faults from the files of `rooms` (folders or modules of src/quire), at most one a function."""
    everywhere: list[tuple[str, Fault]] = []
    for room in rooms:
        place = root / "src/quire" / room
        files = sorted(place.rglob("*.py")) if place.is_dir() else [_found(root, room)]
        for file in files:
            if not file.name.endswith("_pb2.py"):
                everywhere += candidates(file.read_text(), str(file.relative_to(root)))
    random.Random(seed).shuffle(everywhere)
    chosen: list[Fault] = []
    seen: set[str] = set()
    for where, fault in everywhere:
        if len(chosen) == count:
            break
        if where in seen:
            continue
        try:
            planted(root, fault)
        except DoesNotApply:
            continue
        seen.add(where)
        chosen.append(fault)
    return sorted(chosen)


def candidates(source: str, path: str) -> list[tuple[str, Fault]]:
    """Every fault that is drawn from, each with the name of the function it lies in."""
    lines = source.splitlines()
    walk = _Walk()
    walk.visit(ast.parse(source))
    found = []
    for where, node, text in walk.found:
        line = lines[node.lineno - 1]
        start, end = (_characters(line, at) for at in (node.col_offset, node.end_col_offset or 0))
        found.append((f"{path}:{where}", Fault(path, node.lineno, line, line[:start] + text + line[end:])))
    return found


def _characters(line: str, offset: int) -> int:
    return len(line.encode()[:offset].decode())


_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_UNSPOKEN = {"log", "logger", "_log", "warnings"}
_PASSED_BY = {"__repr__", "__str__"}


class _Walk(ast.NodeVisitor):
    """Collects (function, node, text that takes its place)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.expr | ast.stmt, str]] = []
        self.names: list[str] = []

    def put(self, node: ast.expr | ast.stmt, text: str) -> None:
        if node.lineno == node.end_lineno:
            self.found.append((".".join(self.names), node, text))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _PASSED_BY:
            return
        self.names.append(node.name)
        for value in [*node.args.defaults, *(one for one in node.args.kw_defaults if one), *node.body]:
            self.visit(value)
        self.names.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for one in node.body:
            self.visit(one)
        self.names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value and "TypeAlias" not in ast.dump(node.annotation):
            self.visit(node.value)
            if self.names and isinstance(node.target, ast.Attribute):
                self.put(node, "pass")

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # places inside of it are not known before Python 3.12

    def visit_Raise(self, node: ast.Raise) -> None:
        self.put(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.put(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets):
            return
        self.generic_visit(node)
        if all(isinstance(one, (ast.Attribute, ast.Subscript)) for one in node.targets):
            self.put(node, "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.put(node, "pass")
        if (other := _COUNTED.get(type(node.op))) is not None:
            self.put(node, ast.unparse(ast.AugAssign(node.target, other(), node.value)))

    def visit_Delete(self, node: ast.Delete) -> None:
        self.put(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call):
            return
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value).split(".")[-1] in _UNSPOKEN:
            return
        self.generic_visit(node)
        self.put(node, "pass")

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARED[type(op)](), *node.ops[i + 1 :]]
            self.put(node, ast.unparse(ast.Compare(node.left, ops, node.comparators)))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        other = _COUNTED.get(type(node.op))
        said = any(isinstance(one, (ast.JoinedStr, ast.List, ast.Tuple)) for one in (node.left, node.right))
        if other is not None and not said and not _spoken(node.left) and not _spoken(node.right):
            self.put(node, f"({ast.unparse(ast.BinOp(node.left, other(), node.right))})")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        for i in range(len(node.values)):
            left = [*node.values[:i], *node.values[i + 1 :]]
            self.put(node, f"({ast.unparse(left[0] if len(left) == 1 else ast.BoolOp(node.op, left))})")
        self.put(
            node, f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})"
        )

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            self.put(node, f"({ast.unparse(node.operand)})")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        self.put(node, f"({ast.unparse(node.body)})")
        self.put(node, f"({ast.unparse(node.orelse)})")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.put(node, str(not node.value))
        elif isinstance(node.value, int):
            self.put(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.put(node, repr(node.value * 2 or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _CALLED and len(node.args) <= 2 and not node.keywords:
            self.put(node, ast.unparse(ast.Call(ast.Name(_CALLED[node.func.id]), node.args, [])))
        for word in node.keywords:
            if word.arg:
                rest = [one for one in node.keywords if one is not word]
                self.put(node, ast.unparse(ast.Call(node.func, node.args, rest)))
        if len(node.args) == 2 and all(isinstance(one, (ast.Name, ast.Attribute)) for one in node.args):
            self.put(node, ast.unparse(ast.Call(node.func, node.args[::-1], node.keywords)))


def _spoken(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
