"""EXAONE 4 (LG AI Research 2025): Llama with norms after attention and MLP, and q and k normed head by head.

The larger model's global layers have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.errors import InvalidModel
from quire.models.llama import BlockNorms, Llama
from quire.models.spec import Config, ModelSpec, read_decoder, read_locals, read_windows, without_rope


class Exaone4(Llama):
    """EXAONE 4."""

    architectures = MappingProxyType({"Exaone4ForCausalLM": "exaone4"})
    norms = BlockNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = replace(read_decoder(config, architecture), qk_norm="each")
        if config.fields.get("sliding_window") is None:
            return spec
        pattern = config.fields.get("sliding_window_pattern", 4)
        if not isinstance(pattern, str | int | None):
            raise InvalidModel("config.json: sliding_window_pattern must be a number or a text such as LLLG")
        every = len(pattern) if isinstance(pattern, str) else int(pattern or 0)
        spec = replace(spec, windows=read_windows(config, spec.layers, every=every))
        return without_rope(spec, (not local for local in read_locals(config, spec.layers, every=every)))
