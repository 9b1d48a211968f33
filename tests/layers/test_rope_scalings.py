"""Frequencies of rotary embeddings: which pairs of dimensions turn, and how fast."""

from __future__ import annotations

import pytest
import torch

from quire.layers.basic import RopeConfig, proportional


@pytest.mark.parametrize(
    ("share", "dim", "turning"), [(0.25, 16, 2), (0.5, 12, 3), (0.25, 12, 1), (1.0, 8, 4), (0.0, 8, 0)]
)
def test_a_share_of_the_pairs_turns_and_the_rest_does_not(share: float, dim: int, turning: int) -> None:
    plain = torch.arange(1.0, dim // 2 + 1)
    found = proportional(plain, RopeConfig(dim=dim, theta=1e4, kind="proportional", factor=2.0, share=share))
    assert found.tolist() == [*(plain[:turning] / 2.0).tolist(), *[0.0] * (dim // 2 - turning)]
