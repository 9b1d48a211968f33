"""OLMo 2 (OLMo Team 2024): Llama with norms after attention and MLP, and q and k normed over all heads at once."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.models.llama import BlockNorms, Llama
from quire.models.spec import Config, ModelSpec, read_decoder


class Olmo2(Llama):
    """OLMo 2, on one rank."""

    architectures = MappingProxyType({"Olmo2ForCausalLM": "olmo2"})
    norms = BlockNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return replace(read_decoder(config, architecture), qk_norm="together")
