"""Granite 3 and 4 (IBM 2024, 2025): Llama whose embeddings, sums, scores and logits are scaled; 4 with Mamba layers."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.layers.basic import NO_ROPE
from quire.layers.builder import GATED, ExpertNames, ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.bamba import make_mixer, read_kinds, read_mamba
from quire.models.llama import Llama, Mixer, MLPFunction
from quire.models.spec import Config, ModelSpec, read_decoder


class Granite(Llama):
    """Granite 3."""

    architectures = MappingProxyType({"GraniteForCausalLM": "granite"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        divisor = config.get(float, "logits_scaling", default=1.0)
        if divisor <= 0:
            raise InvalidModel(f"config.json: logits_scaling must be above 0, not {divisor:g}")
        return replace(
            read_decoder(config, architecture),
            scale=config.get(float, "attention_multiplier", default=1.0),
            embedding_scale=config.get(float, "embedding_multiplier", default=1.0),
            residual_scale=config.get(float, "residual_multiplier", default=1.0),
            logit_scale=1.0 / divisor,
        )


class GraniteMoe(Granite):
    """Granite 3 with a mixture of experts, and in some models one that all tokens share."""

    architectures = MappingProxyType(
        {"GraniteMoeForCausalLM": "granitemoe", "GraniteMoeSharedForCausalLM": "granitemoeshared"}
    )
    expert_names = ExpertNames(
        router="block_sparse_moe.router.layer",
        matrices=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
        shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
        apart=tuple(f"block_sparse_moe.experts.#.{name}" for name in GATED),
    )

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Granite.read(config, architecture)
        shares = architecture == "GraniteMoeSharedForCausalLM"
        experts = MoEConfig(
            num_experts=config.get(int, "num_local_experts", default=8),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=2),
            width=spec.mlp,
            shared=config.get(int, "shared_intermediate_size", default=0) if shares else 0,
        )
        return replace(spec, experts=experts.checked())


class GraniteHybrid(GraniteMoe):
    """Granite 4: attention or Mamba 2 in each layer, and an MLP, beside experts in some models."""

    architectures = MappingProxyType({"GraniteMoeHybridForCausalLM": "granitemoehybrid"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Granite.read(config, architecture)
        rotated = config.get(str, "position_embedding_type", default="nope") == "rope"
        shared = config.get(int, "shared_intermediate_size", default=1024)
        experts = None
        if count := config.get(int, "num_local_experts", default=8):
            used = config.get(int, "num_experts_per_tok", default=2)
            experts = MoEConfig(num_experts=count, num_experts_per_token=used, width=spec.mlp, shared=shared).checked()
        spec = read_mamba(config, spec, read_kinds(config, spec.layers))
        return replace(spec, experts=experts, mlp=shared, rope=spec.rope if rotated else NO_ROPE)

    def make_attention(self, build: ModelBuilder, index: int) -> Mixer:
        """`self_attn` or `mamba` of layer `index`."""
        return make_mixer(self.spec, build, index) or super().make_attention(build, index)

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`, or its experts and the MLP beside them."""
        if self.spec.experts is not None:
            return super().make_mlp(build, index)
        names = ("input_linear", "output_linear")
        return build.scope("shared_mlp").gated_mlp(self.spec.hidden, self.spec.mlp, self.spec.activation, names=names)
