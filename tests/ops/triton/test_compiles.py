"""Every kernel compiles for every kind of card, within its shared memory, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = pytest.mark.nightly
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [
        pytest.param(80, 163, marks=SLOW, id="ampere"),
        pytest.param(86, 99, marks=SLOW, id="small-ampere"),
        pytest.param(89, 99, marks=SLOW, id="ada"),
        pytest.param(90, 227, id="hopper"),
        pytest.param(90, 227, marks=SLOW, id="hopper-float32"),
        pytest.param(100, 227, marks=SLOW, id="blackwell"),
        pytest.param(120, 99, marks=SLOW, id="small-blackwell"),
    ],
)
def test_every_kernel_compiles(capability: int, kilobytes: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    quick = request.node.callspec.id == "hopper"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton.compiling", str(capability), str(kilobytes << 10)]
        + ["float32"] * (not quick),
        cwd=ROOT,
        env=environment | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    expected = {"attention_kernel", "shared_kernel", "vector_kernel", "matrix_kernel", "choose_kernel"}
    assert {name for name, _, _ in kernels} >= expected
    for name, shared, spilled in kernels:
        assert shared <= kilobytes << 10, name
        assert spilled <= 96, f"{name} does not fit its registers"
