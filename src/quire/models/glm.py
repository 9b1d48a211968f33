"""GLM 4 (GLM Team 2024): Llama with half of each head rotated, by neighbours, and biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.models.llama import BlockNorms, Llama
from quire.models.spec import Config, ModelSpec, interleave, read_decoder


class Glm(Llama):
    """GLM 4 of 2024, in transformers' format."""

    architectures = MappingProxyType({"GlmForCausalLM": "glm"})
    mlp_names = ("gate_up_proj", "down_proj")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = config.with_defaults(attention_bias=True, partial_rotary_factor=0.5)
        return interleave(replace(read_decoder(config, architecture), out_bias=False))


class Glm4(Glm):
    """GLM 4 and Z1 of April 2025: what attention and MLP add is normed, too."""

    architectures = MappingProxyType({"Glm4ForCausalLM": "glm4"})
    norms = BlockNorms(
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    )
