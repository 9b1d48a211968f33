"""Llama with other numbers, biases or names: Seed-OSS, InternLM 3, SmolLM 3, Helium and Hunyuan.

Falcon 3, Yi, Solar and many more are called Llama by their config.json.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.models.llama import Llama
from quire.models.spec import FULL, SLIDING, Config, ModelSpec, interleave, read_decoder, read_windows, without_rope


class SeedOss(Llama):
    """Seed-OSS (ByteDance 2025): biases on q, k and v."""

    architectures = MappingProxyType({"SeedOssForCausalLM": "seed_oss"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config.with_defaults(attention_bias=True, head_dim=128), architecture)
        return replace(spec, out_bias=config.get(bool, "attention_out_bias", default=False))


class InternLM3(Llama):
    """InternLM 3 (Shanghai AI Laboratory 2025): its names of biases."""

    architectures = MappingProxyType({"InternLM3ForCausalLM": "internlm3"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        bias = config.get(bool, "bias", "mlp_bias", default=False)
        qkv_bias = config.get(bool, "qkv_bias", "attention_bias", default=False)
        return replace(read_decoder(config, architecture), qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bias)


class SmolLM3(Llama):
    """SmolLM 3 (Hugging Face 2025): every fourth layer has no rotary embedding; windows are of these layers."""

    architectures = MappingProxyType({"SmolLM3ForCausalLM": "smollm3"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config.with_defaults(tie_word_embeddings=True), architecture)
        every = max(1, config.get(int, "no_rope_layer_interval", default=4))
        rotated = config.fields.get("no_rope_layers") or [(i + 1) % every for i in range(spec.layers)]
        if not isinstance(rotated, list) or len(rotated) < spec.layers:
            raise InvalidModel("config.json: no_rope_layers must be a list of num_hidden_layers numbers")
        kinds = config.fields.get("layer_types") or [FULL if each else SLIDING for each in rotated[: spec.layers]]
        own = Config({**config.fields, "layer_types": kinds}, config.where)
        if config.get(bool, "use_sliding_window", default=False):
            spec = replace(spec, windows=read_windows(own, spec.layers))
        return without_rope(spec, (not each for each in rotated[: spec.layers]))


class Helium(Llama):
    """Helium (Kyutai 2025): heads are rotated by neighbours."""

    architectures = MappingProxyType({"HeliumForCausalLM": "helium"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = interleave(read_decoder(config.with_defaults(head_dim=128), architecture))
        return replace(spec, out_bias=False)


class HunYuan(Llama):
    """Hunyuan without experts (Tencent 2025): q and k of each head are normed after they are rotated."""

    architectures = MappingProxyType({"HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"})
    qk_norms = ("query_layernorm", "key_layernorm")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return replace(read_decoder(config, architecture), qk_norm="after_rope")
