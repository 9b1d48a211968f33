"""Every kernel compiles for every kind of card, within its shared memory, on a machine that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.triton.programs import said

SLOW = pytest.mark.nightly


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
    arguments = [str(capability), str(kilobytes << 10), *["float32"] * (not quick)]
    kernels = said("compiling", *arguments, cache=tmp_path)
    expected = {"attention_kernel", "shared_kernel", "vector_kernel", "matrix_kernel", "choose_kernel"}
    assert {name for name, _, _ in kernels} >= expected
    for name, shared, spilled in kernels:
        assert shared <= kilobytes << 10, name
        assert spilled <= 96, f"{name} does not fit its registers"
