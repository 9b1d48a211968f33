"""The layers of packages, checked by reading the source: which may import which, and what no module may do."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

LAYERS = (
    ("errors", "heap", "json_files", "spinning", "deprecated"),
    ("checks",),
    ("types",),
    ("values", "build"),
    ("ops", "parsers", "scheduler"),
    ("layers", "config", "tokenization", "token_masks", "multimodal"),
    ("engine", "model_runner", "models", "structured_output"),
    ("executors", "observability", "weights"),
    ("frontend",),
    ("server",),
    ("assembly",),
    ("sim", "llm", "async_llm", "replicas"),
    ("cli",),
    ("bench",),
)
"""Bottom up. A package may import itself and the layers below it, not others of its own layer."""

FORBIDDEN = {
    "model_runner": {"config", "tokenization"},
    "layers": {"config"},
    "models": {"config"},
    "ops": {"config"},
    "scheduler": {"config", "ops", "tokenization"},
    "server": {"engine", "model_runner", "torch"},
}
"""What the order of the layers alone would still allow."""

TORCH_FREE = (
    *(
        "types",
        "errors",
        "heap",
        "json_files",
        "spinning",
        "checks",
        "config",
        "tokenization",
        "parsers",
        "scheduler",
        "engine",
        "multimodal",
    ),
    *("observability", "frontend", "server", "sim", "cli"),
)
NEEDS_TORCH = {f"quire.cli.{name}" for name in ("check", "diff", "doctor", "inspect", "plan", "quantize", "verify")}
"""Commands that look at a model: they are imported when they are asked for."""
TORCH_FREE_MODULES = (
    *("quire.executors.synthetic", "quire.bench.engine"),
    *(
        "quire.assembly.text",
        "quire.assembly.tokenizer",
        "quire.assembly.tiers",
        "quire.assembly.backend",
        "quire.assembly.early_engine",
        "quire.assembly.engine_main",
        "quire.assembly.engine_start",
        "quire.assembly.rank_child",
        "quire.assembly.server",
        "quire.assembly.proxy",
        "quire.weights.locate",
        "quire.weights.hub",
        "quire.weights.cache",
    ),
)

LOADERS = {
    "quire.ops.triton.later",
    "quire.deprecated",
    "quire.cli.base",
    "quire.config.sources",
    "quire.assembly",
    "quire.scheduler.policy",
    "quire.models.registry",
    "quire.weights.hub",
    *(f"quire.bench.peers.{name}" for name in ("checkpoints", "llama_cpp", "openvino", "transformers")),
    "quire.assembly.engine",
    "quire.assembly.engine_main",
    "quire.assembly.engine_start",
    "quire.assembly.images",
    "quire.assembly.kv_offload",
    "quire.assembly.progress",
    "quire.assembly.ranks",
    "quire.assembly.rank_child",
    "quire.assembly.hf",
    "quire.assembly.text",
    "quire.cli.diff",
    "quire.cli.doctor",
    "quire.cli.late",
    "quire.bench.late",
    "quire.bench.simulate",
    "quire.cli.serve",
}
"""Old names, commands, a server's modules, which are imported beside the engine's, a user's scheduling policy, files of
settings, bars of progress and K/V tiers, which most starts do without, the hub's slow client, transformers, which is
compared with only where it is installed, accelerate and extras, which are looked for, kernels, which need Triton, and
what knows models, which needs torch: it is asked only where nothing can start anyway."""

READ_ONLY = ("Mapping[", "Sequence[", "Collection[")
"""Annotations under which mypy lets nobody write."""

LONGEST_FUNCTION = 64
BESIDE = ("training", "benchmarks")
"""Folders beside `src` whose functions are short, too."""


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted((SOURCE / "quire").rglob("*.py"))}
INSIDE = sorted(name for name in MODULES if "." in name and not name.endswith("__main__"))


@cache
def tree_of(module: str) -> ast.Module:
    """Not made by importing, which every worker does."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"), str(MODULES[module]))


def package(module: str) -> str:
    return module.split(".")[1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module named in an import, TYPE_CHECKING ones included, as far down as it is a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer they cross"
            base = node.module or ""
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_package_is_in_a_layer() -> None:
    known = {name for layer in LAYERS for name in layer}
    assert {package(module) for module in INSIDE} <= known


def crossed(module: str) -> Iterator[str]:
    """What a module imports that its package may not."""
    level = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    own = package(module)
    for target in imports(tree_of(module)):
        top, *below = target.split(".")
        other = below[0] if top == "quire" and below else top
        if other in FORBIDDEN.get(own, ()):
            yield f"{module} imports {target}"
        elif below and top == "quire" and other != own and level[other] >= level[own]:
            yield f"{module} imports {target}: not a lower layer"


def test_a_package_imports_only_itself_and_lower_layers() -> None:
    assert [line for module in INSIDE for line in crossed(module)] == []


def test_the_scheduler_needs_the_standard_library_only_and_reads_no_clock_and_no_environment() -> None:
    for module in (name for name in INSIDE if package(name) == "scheduler"):
        for target in imports(tree_of(module)):
            top = target.split(".")[0]
            assert top == "quire" or top in sys.stdlib_module_names, f"{module} imports {target}"
            assert top not in ("time", "datetime", "os"), f"{module} imports {target}"


def test_there_are_no_import_cycles() -> None:
    """`quire` itself is left out: it names `LLM` for type checkers and imports it on demand."""
    graph = {name: {t for t in imports(tree_of(name)) if t in MODULES and t != name} for name in INSIDE}
    for targets in graph.values():
        targets.discard("quire")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_stand_at_the_top_but_for_optional_packages() -> None:
    """A package of an extra may be imported where it is needed; nothing else may."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    optional = {
        requirement.replace("-", "_").split(">")[0].split("=")[0].split("<")[0].split("[")[0]
        for extra, requirements in extras.items()
        if extra != "dev"
        for requirement in requirements
    }
    optional |= {name.partition("_")[0] for name in optional if name.startswith("opentelemetry_")}
    for module, tree in ((module, tree_of(module)) for module in MODULES):
        for function in functions(tree):
            for target in imports(function):
                assert target.split(".")[0] in optional, f"{module}.{function.name} imports {target}"


def test_modules_are_loaded_by_name_only_where_it_must_be() -> None:
    loads = {module for module in INSIDE if {"importlib", "importlib.util"} & set(imports(tree_of(module)))}
    assert loads == LOADERS


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in ("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict")
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def mutable(module: str) -> Iterator[str]:
    """Lines of a module with state that can change."""
    for node in tree_of(module).body:
        frozen = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith(READ_ONLY)
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value) and not frozen:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) != "__all__":
                yield f"{module}: line {node.lineno}"
    for inner in ast.walk(tree_of(module)):
        if isinstance(inner, ast.Global):
            yield f"{module}: line {inner.lineno}"


def test_modules_hold_no_mutable_state() -> None:
    assert [line for module in MODULES for line in mutable(module)] == []


def long_functions(name: str, tree: ast.AST) -> Iterator[str]:
    for function in functions(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > LONGEST_FUNCTION:
            yield f"{name}: {function.name} is {length} lines long"


def test_functions_stay_short() -> None:
    trees = {module: tree_of(module) for module in MODULES}
    for path in (path for folder in BESIDE for path in ROOT.glob(f"{folder}/*.py")):
        trees[str(path)] = ast.parse(path.read_text("utf-8"), str(path))
    assert [line for name, tree in trees.items() for line in long_functions(name, tree)] == []


BLOCKED = """
import importlib, sys
sys.modules["torch"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_the_engine_and_the_server_import_with_torch_absent() -> None:
    inside = (name for name in INSIDE if package(name) in TORCH_FREE or name in TORCH_FREE_MODULES)
    free = ["quire", *(name for name in inside if name not in NEEDS_TORCH)]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *free], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_required_dependencies_are_few() -> None:
    assert len(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]) <= 16
