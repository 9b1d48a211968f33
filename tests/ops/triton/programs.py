"""Programs of these tests: compilers for cards, run without the interpreter in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

HANG = 6000.0
"""Seconds: compiling everything takes minutes, and ten times that on a busy machine is no hang."""


def said(program: str, *arguments: str, cache: Path) -> Any:
    """What a program beside this file prints, as JSON. cache: where compiled kernels are kept."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.ops.triton.{program}", *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
