"""GLM 4 (GLM Team 2024): Llama with half of each head rotated, by neighbours, and biases on q, k and v.

GLM 4.5 and 4.6 (GLM Team 2025) have experts, and rotate halves instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from quire.layers.builder import ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import BlockNorms, Llama
from quire.models.mtp import deepseek_names, make_mtp
from quire.models.spec import Config, ModelSpec, QKNorm, interleave, read_decoder


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


class Glm4Moe(Llama):
    """GLM 4.5 and 4.6."""

    architectures = MappingProxyType({"Glm4MoeForCausalLM": "glm4_moe"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        super().__init__(spec, build)
        self.mtp = make_mtp(self, build, partial(deepseek_names, spec))

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = config.with_defaults(partial_rotary_factor=0.5, rms_norm_eps=1e-5)
        spec = read_decoder(config, architecture)
        width = config.get(int, "moe_intermediate_size", default=1408)
        experts = MoEConfig(
            num_experts=config.get(int, "n_routed_experts", "num_local_experts", default=128),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=8),
            width=width,
            normalize_weights=config.get(bool, "norm_topk_prob", default=True),
            sigmoid=True,
            corrected=True,
            groups=config.get(int, "n_group", default=1),
            used_groups=config.get(int, "topk_group", default=1),
            scale=config.get(float, "routed_scaling_factor", default=1.0),
            shared=width * config.get(int, "n_shared_experts", default=1),
            dense_layers=frozenset(range(min(spec.layers, config.get(int, "first_k_dense_replace", default=1)))),
        )
        normed = config.get(bool, "use_qk_norm", default=False)
        drafts = config.get(int, "num_nextn_predict_layers", default=0)
        norms: QKNorm = "each" if normed else ""
        return replace(spec, out_bias=False, qk_norm=norms, experts=experts.checked(), draft_layers=drafts)
