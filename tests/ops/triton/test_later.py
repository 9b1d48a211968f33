"""Kernels that most models do not use are imported by those that do."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from quire.ops.triton import attention, ops
from quire.ops.triton.later import Later


def later(module: ModuleType) -> dict[str, Later]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Later)}


@pytest.mark.parametrize(("user", "count"), [(ops, 16), (attention, 2)])
def test_what_is_asked_of_a_module_is_there(user: ModuleType, count: int) -> None:
    tree = ast.parse(Path(str(user.__file__)).read_text(encoding="utf-8"))
    asked = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in later(user)
    }
    assert {name for name, _ in asked} == set(later(user)) and len(later(user)) == count
    for name, attribute in asked:
        module = import_module(later(user)[name]._module)
        assert getattr(later(user)[name], attribute) is getattr(module, attribute)


def test_none_of_them_is_imported_with_the_operations() -> None:
    names = {each._module for user in (ops, attention) for each in later(user).values()}
    code = (
        "import sys, quire.ops.triton.ops, quire.ops.triton.precompile\n"
        "assert 'triton' in sys.modules and 'triton.experimental' not in sys.modules\n"
        f"print(*({names} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
