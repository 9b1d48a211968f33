"""Mistral 7B and after, Llama whose layers may see a window only; Mixtral, with experts (Jiang et al. 2023, 2024)."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.builder import ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.llama import Llama, MLPFactory
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows


class Mistral(Llama):
    """See `base.Model`."""

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        spec = read_decoder(config, architecture)
        return replace(spec, windows=read_windows(config, spec.layers))


class Mixtral(Mistral):
    """See `base.Model`."""

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        spec = Mistral.read(config, architecture)
        mixture = MoEConfig(
            num_experts=config.get(int, "num_local_experts", default=8),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=2),
            width=spec.mlp,
        )
        return replace(spec, experts=mixture.checked())

    @staticmethod
    def make_mlp(spec: ModelSpec, build: ModelBuilder, index: int) -> MLPFactory:
        assert spec.experts is not None
        return build.scope("block_sparse_moe").experts(
            spec.hidden, spec.experts, spec.activation, names=("w1", "w3", "w2")
        )
