"""MiniMax-M2 (MiniMax 2025): Llama with experts, half of each head rotated, and q and k normed over all heads at once.

The router's sigmoid weighs experts; a correction only helps to choose them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.mistral import MIXTRAL_NAMES
from quire.models.spec import Config, ModelSpec, read_decoder


class MiniMaxM2(Llama):
    """MiniMax-M2, on one rank."""

    architectures = MappingProxyType({"MiniMaxM2ForCausalLM": "minimax_m2"})
    expert_names = MIXTRAL_NAMES

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        config = config.with_defaults(head_dim=128, rope_theta=5e6)
        head_dim = config.get(int, "head_dim")
        share = config.get(int, "rotary_dim", default=head_dim) / max(1, head_dim)
        spec = read_decoder(config.with_defaults(partial_rotary_factor=share), architecture)
        experts = MoEConfig(
            num_experts=config.get(int, "num_local_experts", "num_experts", default=256),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=8),
            width=spec.mlp,
            sigmoid=True,
            corrected=True,
        )
        return replace(spec, qk_norm="together", experts=experts.checked())
