"""Sums over ranks by memory that they write for each other: here, processes that share a file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.ops.triton.all_reduce import BLOCK, PROGRAMS, buffer_bytes
from tests.forked import Popen

ROOT = Path(__file__).parents[3]

MOST = PROGRAMS * BLOCK * 4 + 4096
"""Bytes: two turns of a program in float32."""

SHAPES = ((1, 64), (3, 7), (1, 5), (1, MOST // 4), (2, 1000), (2, 3), (3, 4096))
"""Of sums one after the other: few numbers and many by turns, so that a program sits out some."""


def asked(size: int) -> list[list[Tensor]]:
    """By sum, every rank's part."""
    random = torch.Generator().manual_seed(3)
    kinds = [torch.float32, torch.float16, torch.float32]
    return [
        [torch.randn(shape, generator=random).to(kinds[i % 3]) for _ in range(size)] for i, shape in enumerate(SHAPES)
    ]


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_sums_are_those_of_every_rank_in_float32_and_in_order(size: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with shared.open("wb") as file:
        file.truncate(size * buffer_bytes(size, MOST))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ranks = [
        Popen(
            [sys.executable, "-m", "tests.ops.triton.peers", *map(str, (shared, rank, size, MOST))],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    found = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    assert len(set(found)) == 1
    for got, (first, *rest) in zip(json.loads(found[0]), asked(size), strict=True):
        total = first.float()
        for part in rest:
            total = total + part.float()
        assert got == digest(total.to(first.dtype))
