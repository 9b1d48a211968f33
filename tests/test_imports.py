"""What commands and processes import before they do anything: packages that take long, where they need not be.

One process has the command line, and a child of it runs each row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from quire.cli import main
from quire.cli.base import LazyGroup

SOURCE = Path(__file__).parents[1] / "src"

SERVER = frozenset(("starlette", "uvicorn", "prometheus_client"))
TEXT = frozenset(("jinja2", "tokenizers", "llguidance", "numpy"))
SHOWN = frozenset(("rich",))
COMPILERS = frozenset(("torch._dynamo", "torch._inductor", "sympy", "torch.utils.cpp_extension"))
RARE = frozenset(("torch", "yaml", "ssl", "transformers", "huggingface_hub", "safetensors", "ray"))
ALL = SERVER | TEXT | SHOWN | COMPILERS | RARE

HELP_WITHOUT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": ALL,
        "bench": ALL,
        **dict.fromkeys(("quantize", "inspect", "plan", "check", "diff", "verify", "doctor"), ALL - {"ssl"}),
        "serve": ALL - {"ssl"},
        "executor": ALL - {"ssl"},
        "export-onnx": ALL - {"ssl"},
        "pull": ALL - SHOWN - {"ssl"},
        "list": ALL - SHOWN - {"ssl"},
        "rm": ALL - SHOWN - {"ssl"},
        "config": ALL - SHOWN - {"ssl"},
        "version": ALL - SHOWN - {"ssl"},
        "generate": {"torch", "jinja2", "yaml"} | SERVER,
        "run": {"torch", "jinja2", "yaml"} | SERVER,
        "chat": {"torch", "jinja2", "yaml"} | SERVER,
        "bench latency": {"torch", "jinja2", "yaml"} | SERVER,
        "bench throughput": {"torch", "jinja2", "yaml"} | SERVER,
        "bench startup": {"torch", "jinja2", "yaml"} | SERVER,
    }
)
"""By command, what its help imports nothing of."""

PROCESSES: Mapping[str, tuple[str, frozenset[str]]] = MappingProxyType(
    {
        "serve, before the engine's process": ("import quire.cli.serve", ALL - {"ssl"}),
        "engine, before its settings": ("import quire.assembly.engine_start", ALL - {"ssl"}),
        "server": ("import quire.assembly.server", SHOWN | COMPILERS | RARE - {"ssl"}),
        "engine that is ready, and a rank": (
            "import quire.assembly.engine_child, quire.assembly.rank_process\n"
            "from quire.assembly.engine import build_engine\n"
            "from quire.config import Settings\n"
            "build_engine(Settings.of(device='cpu', canary='off')).close()",
            SERVER | SHOWN | COMPILERS | {"jinja2", "yaml", "transformers", "huggingface_hub", "ray"},
        ),
    }
)
"""By process, what it runs, and what of these packages it imports nothing of."""

RUN = """
import json, os, sys
import quire.cli
for name, code in json.load(sys.stdin):
    if not (child := os.fork()):
        said, sys.stdout = sys.stdout, open(os.devnull, "w")
        exec(code)
        print(json.dumps([name, sorted(sys.modules)]), file=said, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def commands(group: LazyGroup, prefix: str = "") -> list[str]:
    found = []
    for name, member in group.members.items():
        found.append(prefix + name)
        if isinstance(member, LazyGroup):
            found += commands(member, f"{prefix}{name} ")
    return found


@pytest.fixture(scope="module")
def imported() -> Mapping[str, frozenset[str]]:
    """All modules, by row."""
    helped = {name: f"quire.cli.main.main({[*name.split(), '--help']}, standalone_mode=False)" for name in helps()}
    rows = helped | {name: code for name, (code, _) in PROCESSES.items()}
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(list(rows.items())),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    return {name: frozenset(modules) for name, modules in map(json.loads, done.stdout.splitlines())}


def helps() -> list[str]:
    return ["", *commands(main)]


@pytest.mark.parametrize("command", HELP_WITHOUT)
def test_help_imports_what_it_needs(command: str, imported: Mapping[str, frozenset[str]]) -> None:
    assert HELP_WITHOUT[command] & imported[command] == set()


def test_no_help_imports_torch(imported: Mapping[str, frozenset[str]]) -> None:
    assert [command for command in helps() if "torch" in imported[command]] == []


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_what_it_needs(process: str, imported: Mapping[str, frozenset[str]]) -> None:
    assert PROCESSES[process][1] & imported[process] == set()
