"""Phi 3 and 4 (Abdin et al. 2024): Llama with fused matrices, part of each head rotated, and LongRoPE.

Phi 3.5 MoE has Mixtral's matrices, layer norms, and a router that was trained by SparseMixer.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.builder import ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.mistral import MIXTRAL_NAMES
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.ops.operands import Norm


class Phi3(Llama):
    """Phi 3, 3.5 and 4, mini to medium."""

    architectures = MappingProxyType({"Phi3ForCausalLM": "phi3"})
    qkv = ("qkv_proj",)
    mlp_names = ("gate_up_proj", "down_proj")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config, architecture)
        return replace(spec, windows=read_windows(config, spec.layers))


class PhiMoE(Llama):
    """Phi 3.5 MoE: each token's two experts have a softmax of their own, over those nearly as good."""

    architectures = MappingProxyType({"PhiMoEForCausalLM": "phimoe", "PhimoeForCausalLM": "phimoe"})
    expert_names = MIXTRAL_NAMES

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        if config.get(int, "num_experts_per_tok", default=2) != 2:
            raise InvalidModel("config.json: num_experts_per_tok must be 2: SparseMixer chooses two experts")
        spec = read_decoder(config.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6), architecture)
        experts = MoEConfig(
            num_experts=config.get(int, "num_local_experts", default=16),
            num_experts_per_token=2,
            width=spec.mlp,
            normalize_weights=False,
            # None but the best is within a margin of nothing; 0 would mean that there is no margin.
            margin=2 * config.get(float, "router_jitter_noise", default=0.01) or 1e-30,
        )
        return replace(
            spec,
            windows=read_windows(config, spec.layers),
            head_bias=config.get(bool, "lm_head_bias", default=False),
            experts=experts.checked(),
        )

    def make_norm(self, build: ModelBuilder, name: str) -> Norm:
        """A layer norm."""
        return build.layer_norm(name, self.spec.hidden, self.spec.norm_eps)
