"""Kernels with queries that see later positions: windows on both sides, and images whose tokens see each other."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.types import UNLIMITED
from tests.ops import test_mask
from tests.ops.triton.device import DEVICE, moved

EVERY = {"usual": TritonOps(DEVICE), "batch-invariant": BatchInvariantTritonOps(DEVICE)}

SHORT, MIXED = [(0, 1), (9, 1), (0, 5)], [(0, 1), (63, 150), (7, 33), (90, 9), (0, 70)]


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("spans", "window", "ahead", "chunk", "image"),
    [
        (SHORT, UNLIMITED, UNLIMITED, UNLIMITED, 0),
        (MIXED, UNLIMITED, UNLIMITED, UNLIMITED, 0),
        (MIXED, 20, 19, UNLIMITED, 0),
        (MIXED, UNLIMITED, 0, UNLIMITED, 40),
        (MIXED, 20, 0, UNLIMITED, 100),
        (SHORT, 3, 2, UNLIMITED, 4),
        (MIXED, UNLIMITED, 0, 65, 40),
        (MIXED, UNLIMITED, 2, UNLIMITED, 100),
    ],
)
def test_what_a_token_sees_is_one_mask(
    kind: str, spans: list[tuple[int, int]], window: int, ahead: int, chunk: int, image: int
) -> None:
    s: dict[str, Any] = {"spans": spans, "window": window, "ahead": ahead, "chunk": chunk, "image": image, "seed": 1}
    test_mask.check(EVERY[kind], s, lambda x: x.to(DEVICE) if isinstance(x, Tensor) else moved(x))
