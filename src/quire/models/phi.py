"""Phi 3 and 4 (Abdin et al. 2024): Llama with fused matrices, part of each head rotated, and LongRoPE."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.models.llama import Llama
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows


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
