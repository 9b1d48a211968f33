"""Apertus (Swiss AI 2025): Llama with q and k of each head normed, and MLPs of two matrices with xIELU between them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.layers.builder import ModelBuilder
from quire.models.llama import BlockNorms, Llama, MLPFunction
from quire.models.spec import Config, ModelSpec, read_decoder


class Apertus(Llama):
    """Apertus 8B and 70B."""

    architectures = MappingProxyType({"ApertusForCausalLM": "apertus"})
    norms = BlockNorms("attention_layernorm", before_mlp="feedforward_layernorm")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = config.with_defaults(hidden_act="xielu", rms_norm_eps=1e-5, rope_theta=12e6)
        return replace(read_decoder(config, architecture), qk_norm="each")

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`."""
        spec, names = self.spec, ("up_proj", "down_proj")
        return build.scope("mlp").mlp(*names, spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)
