"""What a step needs beside weights and K/V, computed: the engine sizes its pool by it, and `quire plan` tells it."""

from __future__ import annotations

import torch

from quire.models.spec import ModelSpec
from quire.runner.memory import GIB, activation_bytes

LARGEST = 2048
"""Tokens up to which a step is captured on a GPU. Above, it takes longer than its launches."""

GRAPHS = GIB // 2
"""Set aside for what graphs hold beside tensors, and for the library's workspaces."""


def working_bytes(spec: ModelSpec, dtype: torch.dtype, *, tokens: int, captured: int, rows: int) -> int:
    """The largest step, the largest captured one, whose memory is kept apart, and graphs. captured: 0 for none."""
    projections = (2 * spec.mlp, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)

    def step(fed: int) -> int:
        return activation_bytes(
            tokens=fed, logits=rows, hidden=spec.hidden, widest=max(projections), vocab_size=spec.vocab, dtype=dtype
        )

    return step(tokens) + (step(min(tokens, captured)) + GRAPHS if captured else 0)
