"""Sums over ranks by memory that they write for each other: processes that share a file, and GPUs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.operands import Norm
from quire.ops.triton.all_reduce import BLOCK, EMPTY, buffer_bytes
from tests.forked import Popen

ROOT = Path(__file__).parents[3]

PROGRAMS = 8
MOST = PROGRAMS * BLOCK * 4 + 4096
"""Bytes: two turns of a program in float32."""

SHAPES = ((1, 64), (3, 7), (1, 5), (1, MOST // 4), (2, 1000), (2, 3), (2, 4096))
"""Of sums one after the other: few numbers and many by turns, so that a program sits out some."""


KINDS = (torch.float32, torch.float16, torch.float32)
TWO_SHOT = 1024
"""Bytes from which sums of three ranks that are normed have two shots."""


def asked(size: int) -> list[list[Tensor]]:
    """By sum, every rank's part."""
    random = torch.Generator().manual_seed(3)
    return [
        [torch.randn(shape, generator=random).to(KINDS[i % 3]) for _ in range(size)] for i, shape in enumerate(SHAPES)
    ]


ROWS = ((1, 96), (3, 7), (2, 96), (PROGRAMS + 2, 48), (5, 192), (1, 5), (1, 192))
"""Of sums that are normed: with one shot and with two by turns, and with several rows of a program."""


def normed(size: int) -> list[tuple[Any, ...]]:
    """By sum, every rank's part, and the other arguments of `PeerSum.add_norm`."""
    random = torch.Generator().manual_seed(4)

    def made(i: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(KINDS[i % 3])

    found = list[tuple[Any, ...]]()
    for i, (count, columns) in enumerate(ROWS):
        parts, residual = [made(i, count, columns) for _ in range(size)], made(i, count, columns)
        last, first = (
            Norm(made(i, columns), 1e-5, made(i, columns) if i == 1 else None, centred=i == 1) for _ in range(2)
        )
        how: tuple[Any, ...] = ((last,), (last, first, 0.3), (None,), (last, None, 1.0, made(i, 1)))[i % 4]
        found.append((parts, residual, *how))
    return found


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()


def results(ranks: list[subprocess.Popen[bytes]], size: int) -> None:
    """Check what `peers` prints. Where one has failed, the others wait for it."""
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    said = [rank.communicate()[0] for rank in ranks]
    assert not any(codes)
    by_rank, shots = zip(*map(json.loads, said), strict=True)
    assert all(each == ([1, 1, 1, 2, 2, 1, 1] if size > 2 else [1] * len(ROWS)) for each in shots)
    for parts, first, *others in zip(asked(size), *by_rank, strict=True):
        summed, *both, beside = first[:4]
        assert summed == digest(total(parts)) and beside == digest(torch.cat(parts, -1).repeat(3, 1))
        assert both == first[4:] and all(each == first[:4] for each in others)


def peers(size: int, shared: Path, most: int | str, environment: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [
        Popen(
            [sys.executable, "-m", "tests.ops.triton.peers", *map(str, (shared, rank, size, most))],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_sums_are_those_of_every_rank_in_float32_and_in_order(size: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_bytes(bytes([EMPTY]) * size * buffer_bytes(size, MOST))
    results(peers(size, shared, MOST, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}), size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_cards_have_the_bits_of_sums_and_norms_alone(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    results(peers(size, tmp_path / "met", "cuda", {}), size)


def total(parts: list[Tensor]) -> Tensor:
    first, *rest = parts
    made = first.float()
    for part in rest:
        made = made + part.float()
    return made.to(first.dtype)
