"""OLMo 2 and 3 (OLMo Team 2024, 2025): Llama with norms after attention and MLP, q and k normed over all heads at once.

OLMo 3 has sliding windows in three of four layers. OLMoE (Muennighoff et al. 2024) has experts, and norms before.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.moe import MoEConfig
from quire.models.llama import BlockNorms, Llama
from quire.models.spec import Config, ModelSpec, read_decoder, read_two_ropes, read_windows


class Olmo2(Llama):
    """OLMo 2, on one rank."""

    architectures = MappingProxyType({"Olmo2ForCausalLM": "olmo2"})
    norms = BlockNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return replace(read_decoder(config, architecture), qk_norm="together")


class Olmo3(Olmo2):
    """OLMo 3: every fourth layer is global, and the others' RoPE is not scaled."""

    architectures = MappingProxyType({"Olmo3ForCausalLM": "olmo3"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Olmo2.read(config, architecture)
        spec = replace(spec, windows=read_windows(config, spec.layers, every=4))
        theta = config.get(float, "rope_theta", default=500_000.0)
        return read_two_ropes(config, spec, theta, theta, every=4)


class Olmoe(Llama):
    """OLMoE, on one rank."""

    architectures = MappingProxyType({"OlmoeForCausalLM": "olmoe"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        if config.get(float, "clip_qkv", default=0.0):
            raise InvalidModel("config.json: clip_qkv is not supported; try --executor hf")
        spec = read_decoder(config.with_defaults(rms_norm_eps=1e-5), architecture)
        experts = MoEConfig(
            num_experts=config.get(int, "num_experts", "num_local_experts", default=64),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=8),
            width=spec.mlp,
            normalize_weights=config.get(bool, "norm_topk_prob", default=False),
        )
        return replace(spec, qk_norm="together", experts=experts.checked())
