"""DeepSeek V2, V3 and R1, and models built like them: Kimi K2, GLM 4.7 Flash (DeepSeek-AI 2024; Moonshot AI 2025).

Llama's blocks with latent attention (`layers/latent.py`) and mixtures of many small experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.latent import IndexConfig, LatentAttention, LatentConfig
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.mtp import deepseek_names, make_mtp
from quire.models.spec import Config, ModelSpec, interleave, read_decoder, read_scaling

NEXTN = "num_nextn_predict_layers"

LATENT_EPS = 1e-6
"""Of the norms of latents and of what queries are made of, whatever the model's own."""


class DeepseekV2(Llama):
    """DeepSeek V2, V2.5, V2 Lite and Coder V2: a softmax router, over groups that are as good as their best expert."""

    architectures = MappingProxyType({"DeepseekV2ForCausalLM": "deepseek_v2"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        super().__init__(spec, build)
        self.mtp = make_mtp(self, build, partial(deepseek_names, spec))

    def make_attention(self, build: ModelBuilder, index: int) -> LatentAttention:
        """`self_attn` of layer `index`."""
        spec = self.spec
        assert spec.latent is not None
        how = spec.latent, spec.scale, LATENT_EPS
        return build.scope("self_attn").latent_attention(spec.hidden, spec.heads, *how, bias=spec.qkv_bias)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = interleave(read_latents(config, architecture))
        experts = replace(read_experts(config, spec), group_best=1)
        # As DeepSeek's own code has it; transformers scales always, and normalizes never.
        if experts.normalize_weights and experts.num_experts_per_token > 1:
            experts = replace(experts, scale=1.0)
        else:
            experts = replace(experts, normalize_weights=False)
        if config.get(str, "topk_method", default="greedy") == "greedy":
            experts = replace(experts, groups=1, used_groups=1)
        return replace(spec, experts=experts.checked())


class DeepseekV3(DeepseekV2):
    """DeepSeek V3, V3.1 and R1, Kimi K2 and GLM 4.7 Flash: a sigmoid router with a correction."""

    architectures = MappingProxyType(
        {"DeepseekV3ForCausalLM": "deepseek_v3", "Glm4MoeLiteForCausalLM": "glm4_moe_lite"}
    )

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = config.with_defaults(norm_topk_prob=True, first_k_dense_replace=1)
        spec = read_latents(config, architecture)
        experts = replace(read_experts(config, spec), sigmoid=True, corrected=True)
        spec = interleave(spec) if config.get(bool, "rope_interleave", default=True) else spec
        # None of these models has biases in its MLPs, whatever config.json says.
        return replace(spec, mlp_bias=False, experts=experts.checked(), draft_layers=config.get(int, NEXTN, default=0))


class DeepseekV32(DeepseekV3):
    """DeepSeek V3.2: attention to the `index_topk` tokens that an indexer chooses for each query. Where no sequence may
    be longer, it is V3, and the indexer is not loaded (`ModelSpec.for_length`)."""

    architectures = MappingProxyType({"DeepseekV32ForCausalLM": "deepseek_v32"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        if spec.latent is not None and spec.latent.index is None:
            build.ignore("model.layers.*.self_attn.indexer.*")
        super().__init__(spec, build)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = DeepseekV3.read(config.with_defaults(first_k_dense_replace=3), architecture)
        latent = spec.latent
        if latent is None or not latent.queries:
            raise InvalidModel("config.json: q_lora_rank is missing, of which the indexer makes its queries")
        index = IndexConfig(
            heads=config.get(int, "index_n_heads", default=64),
            dim=config.get(int, "index_head_dim", default=128),
            top=config.get(int, "index_topk", default=2048),
            rotated=latent.rotated,
        )
        return replace(spec, latent=replace(latent, index=index.checked()))


def read_latents(config: Config, architecture: str) -> ModelSpec:
    """What all of them share but for experts. Raises InvalidModel for biases without compressed queries."""
    latent = LatentConfig(
        plain=config.get(int, "qk_nope_head_dim"),
        rotated=config.get(int, "qk_rope_head_dim"),
        latents=config.get(int, "kv_lora_rank"),
        value=config.get(int, "v_head_dim"),
        queries=config.get(int, "q_lora_rank", default=0),
    ).checked()
    spec = read_decoder(Config({**config.fields, "head_dim": latent.rotated}, config.where), architecture)
    if spec.qkv_bias and not latent.queries:
        raise InvalidModel("config.json: attention_bias is supported with q_lora_rank only")
    scaling = read_scaling(config)
    strength = 0.0 if spec.rope.kind == "default" else scaling.get(float, "mscale_all_dim", default=0.0)
    gain = 1.0 + 0.1 * strength * math.log(max(spec.rope.factor, 1.0))
    size = latent.latents + latent.rotated
    scale = (latent.plain + latent.rotated) ** -0.5 * gain * gain
    return replace(spec, latent=latent, kv_heads=1, head_dim=size, scale=scale)


def read_experts(config: Config, spec: ModelSpec) -> MoEConfig:
    """Experts, and which layers have none. Raises InvalidModel for a pattern of layers that is not supported."""
    if config.get(int, "moe_layer_freq", default=1) != 1:
        raise InvalidModel("config.json: moe_layer_freq other than 1 is not supported")
    width = config.get(int, "moe_intermediate_size")
    return MoEConfig(
        num_experts=config.get(int, "n_routed_experts", "num_local_experts", "num_experts"),
        num_experts_per_token=config.get(int, "num_experts_per_tok"),
        width=width,
        normalize_weights=config.get(bool, "norm_topk_prob", default=False),
        groups=config.get(int, "n_group", default=1),
        used_groups=config.get(int, "topk_group", default=1),
        scale=config.get(float, "routed_scaling_factor", default=1.0),
        shared=width * config.get(int, "n_shared_experts", default=0),
        dense_layers=read_dense_layers(config, spec.layers),
    )


def read_dense_layers(config: Config, layers: int) -> frozenset[int]:
    """Those of `mlp_layer_types` that are "dense", or the first `first_k_dense_replace`."""
    kinds = config.fields.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(min(layers, config.get(int, "first_k_dense_replace", default=0))))
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise InvalidModel(f"{config.where}: mlp_layer_types must be a list of num_hidden_layers times dense or sparse")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
