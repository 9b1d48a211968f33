"""Qwen 2, 2.5 and 3: Llama with biases on q, k and v (2), or with q and k normed (3)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.llama import Llama
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.values import MANY


class Qwen2(Llama):
    """See `base.Model`. Yang et al. 2024."""

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        spec = read_decoder(config, architecture)
        return replace(spec, qkv_bias=True, out_bias=False, windows=windows(config, spec.layers))


class Qwen3(Llama):
    """See `base.Model`. Yang et al. 2025."""

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        spec = read_decoder(config, architecture)
        return replace(spec, qk_norm=True, windows=windows(config, spec.layers))


def windows(config: Config, layers: int) -> tuple[int, ...]:
    """Off unless `use_sliding_window`; configs without `layer_types` mean layers from `max_window_layers` on."""
    if not config.get(bool, "use_sliding_window", default=False):
        return (MANY,) * layers
    each = read_windows(config, layers)
    first = 0 if config.fields.get("layer_types") else config.get(int, "max_window_layers", default=layers)
    return (MANY,) * min(first, layers) + each[first:]
