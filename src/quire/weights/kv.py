"""K/V in float8: scales from what a probe makes of them, and the model's own dtype where eight bits do not do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.model_runner.memory import LayerShape, allocate
from quire.models.registry import Model
from quire.ops.quantized import E4M3, E4M3_MAX, to_fp8
from quire.weights.canary import PAGE, Quality, answers, compare, pages, probe

ROOM = 4.0
"""Other texts may make numbers so many times as large as the probe's largest."""

MAX_RELATIVE_ERROR = 0.06
"""Median share of a number that rounding may take: 3 bits of mantissa take 0.02 to 0.03, losing small ones far more."""


def float8_layers(model: Model, encoded: Sequence[int], device: torch.device) -> tuple[tuple[LayerShape, ...], Quality]:
    """What each layer shall keep, and how the model then answers the probe beside how it does in its own dtype."""
    tokens = probe(model.spec.vocab, encoded)
    caches = pages(model, len(tokens), device)
    reference = answers(model, tokens, device, caches)
    layers = []
    for cache in caches:
        heads, _, dim = cache.k.shape[1:]
        scales = [scale_of(written(pool, len(tokens))) for pool in (cache.k, cache.v)]
        rough = any(scale is None for scale in scales)
        kept = [1.0 if rough or scale is None else scale for scale in scales]
        layers.append(LayerShape(heads, dim, model.dtype if rough else E4M3, *kept))
    room = allocate(layers, pages=-(-len(tokens) // PAGE), page_size=PAGE, device=device)
    return tuple(layers), compare(reference, answers(model, tokens, device, room), tokens)


def written(pool: Tensor, count: int) -> Tensor:
    """The probe's part of its pages [N, G, B, D] -> [count, G, D] float32."""
    return pool[1:].transpose(1, 2).flatten(0, 1)[:count].float()


def scale_of(found: Tensor) -> float | None:
    """What a stored unit shall stand for; None where float8 would lose what most numbers say."""
    largest = float(found.abs().max())
    if not 0 < largest < float("inf"):
        return None
    scale = largest * ROOM / E4M3_MAX
    apart = (to_fp8(found, scale).float() * scale - found).abs() / found.abs().clamp(min=1e-30)
    return scale if float(apart.median()) < MAX_RELATIVE_ERROR else None
