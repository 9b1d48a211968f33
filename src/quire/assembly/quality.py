"""The quality canary from settings: what it asks, what it tolerates, and what it found as facts of the engine."""

from __future__ import annotations

import logging

import torch

from quire.assembly.text import build_tokenizer
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.model_runner.memory import LayerShape, layer_shapes
from quire.models.base import Model
from quire.weights.canary import PROBE, Canary, Threshold
from quire.weights.kv import float8_layers

log = logging.getLogger(__name__)


def build_canary(settings: Settings) -> Canary | None:
    """None where none is wanted. Without a tokenizer the probe is of numbers from all over the vocabulary."""
    asked = settings.model
    if asked.canary == "off":
        return None
    return Canary(_probe(settings), _threshold(settings))


def _threshold(settings: Settings) -> Threshold | None:
    asked = settings.model
    return Threshold(asked.canary_min_agreement, asked.canary_max_kl) if asked.canary == "refuse" else None


def _probe(settings: Settings) -> tuple[int, ...]:
    try:
        return build_tokenizer(settings).encode(PROBE)
    except InvalidModel:
        return ()


def found(canary: Canary | None) -> dict[str, float]:
    """What loading showed, printed and as gauges; nothing where nothing is quantised."""
    if canary is None or canary.quality is None:
        return {}
    log.warning("quantised weights: %s", canary.quality)
    for suspect in canary.suspects:
        log.warning("quantised weights: %s", suspect)
    return canary.quality.facts


def build_kv(settings: Settings, model: Model, device: torch.device) -> tuple[tuple[LayerShape, ...], dict[str, float]]:
    """What each layer keeps a token, and facts about it.

    Raises InvalidConfig where float8 cannot be had, InvalidModel where it is below the canary's threshold.
    """
    if settings.cache.kv_cache_dtype == "auto":
        return layer_shapes(model.spec.kv_shapes, model.dtype), {}
    if device.type != "cpu":
        raise InvalidConfig(
            "--kv-cache-dtype fp8 works on a CPU only for now: leave it at auto", param="kv_cache_dtype"
        )
    layers, quality = float8_layers(model, _probe(settings), device)
    small = sum(layer.dtype is not model.dtype for layer in layers)
    log.warning("K/V in float8 in %d of %d layers: %s", small, len(layers), quality)
    threshold = _threshold(settings)
    if threshold is not None:
        threshold.check(quality, "--kv-cache-dtype fp8")
    kinds = {f"quire:canary_kv_{name.removeprefix('quire:canary_')}": value for name, value in quality.facts.items()}
    return layers, kinds | {"quire:kv_cache_float8_layers": float(small)}
