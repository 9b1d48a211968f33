"""Mistral, Llama with sliding windows, its successors, and Mixtral with experts (Jiang et al. 2023, 2024)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.layers.builder import ExpertNames, ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama
from quire.models.multimodal import nested, select_decoder
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows

MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    matrices=tuple(f"block_sparse_moe.experts.#.{name}" for name in ("w1", "w3", "w2")),
    correction="block_sparse_moe.e_score_correction_bias",
)
"""Of the experts of Mixtral and of MiniMax-M2."""


class Mistral(Llama):
    """Mistral 7B and later: layers with sliding windows."""

    architectures = MappingProxyType({"MistralForCausalLM": "mistral", "MinistralForCausalLM": "ministral"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config, architecture)
        return replace(spec, windows=read_windows(config, spec.layers))


class Ministral3(Mistral):
    """Ministral 3, and the text models of Mistral Small 3.1 and later: queries grow with their position."""

    architectures = MappingProxyType(
        {"Ministral3ForCausalLM": "ministral3", "Mistral3ForConditionalGeneration": "mistral3"}
    )

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        select_decoder(build)
        super().__init__(spec, build)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return Mistral.read(nested(config), architecture)


class Mixtral(Mistral):
    """Mistral with a mixture of experts in each layer."""

    architectures = MappingProxyType({"MixtralForCausalLM": "mixtral"})
    expert_names = MIXTRAL_NAMES

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Mistral.read(config, architecture)
        experts = MoEConfig(
            num_experts=config.get(int, "num_local_experts", default=8),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=2),
            width=spec.mlp,
        )
        return replace(spec, experts=experts.checked())
