"""What follows a body: the language model's head, a classifier, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire.layers.basic import AnyEmbedding
from quire.layers.builder import ModelBuilder
from quire.layers.linear import LMHead
from quire.models.spec import ModelSpec

Classify = Callable[[Tensor], Tensor]
"""Pooled hidden states [N, hidden] -> [N, classes], before softmax or sigmoid."""


def lm_head(spec: ModelSpec, build: ModelBuilder, tied: AnyEmbedding | None, **scales: Any) -> LMHead | None:
    """The head of a model that generates; None for others, whose checkpoints may hold one nevertheless."""
    if spec.generates:
        return build.head("lm_head", spec.hidden, spec.vocab, tied if spec.tie else None, **scales)
    build.ignore("lm_head.*")
    return None


def score_head(spec: ModelSpec, build: ModelBuilder) -> Classify | None:
    """The classifier of a decoder, one matrix; None where it has none."""
    if spec.classes:
        return build.dense("score", spec.hidden, spec.classes).apply
    build.ignore(*() if spec.generates else ("score.*",))
    return None


def next_token_logits(head: LMHead | None, hidden: Tensor) -> Tensor:
    """Logits by `head`. Raises ValueError for a model without one, which no request to generate reaches."""
    if head is None:
        raise ValueError("a pooling model has no logits")
    return head(hidden)
