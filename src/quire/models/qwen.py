"""Qwen 2, 2.5 and 3: Llama with biases on q, k and v (2), or with q and k normed (3), or that and experts (3 MoE)."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama, MLPFactory
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.types import UNLIMITED


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


class Qwen3Moe(Qwen3):
    """See `base.Model`."""

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        spec = Qwen3.read(config, architecture)
        plain = config.fields.get("mlp_only_layers") or []
        if not isinstance(plain, list):
            raise InvalidModel("config.json: mlp_only_layers must be a list of layers")
        step = max(1, config.get(int, "decoder_sparse_step", default=1))
        mixture = MoEConfig(
            num_experts=config.get(int, "num_experts", "num_local_experts"),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=8),
            width=config.get(int, "moe_intermediate_size"),
            normalize_weights=config.get(bool, "norm_topk_prob", default=False),
            dense_layers=frozenset(i for i in range(spec.layers) if i in plain or (i + 1) % step),
        )
        return replace(spec, experts=mixture.checked())

    @staticmethod
    def make_mlp(spec: ModelSpec, build: ModelBuilder, index: int) -> MLPFactory:
        assert spec.experts is not None
        if index in spec.experts.dense_layers:
            return Qwen3.make_mlp(spec, build, index)
        return build.scope("mlp").experts(spec.hidden, spec.experts, spec.activation)


def windows(config: Config, layers: int) -> tuple[int, ...]:
    """Off unless `use_sliding_window`; configs without `layer_types` mean layers from `max_window_layers` on."""
    if not config.get(bool, "use_sliding_window", default=False):
        return (UNLIMITED,) * layers
    each = read_windows(config, layers)
    first = 0 if config.fields.get("layer_types") else config.get(int, "max_window_layers", default=layers)
    return (UNLIMITED,) * min(first, layers) + each[first:]
