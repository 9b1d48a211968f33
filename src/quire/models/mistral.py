"""Mistral 7B and after: Llama whose layers may see a window only (Jiang et al. 2023)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.llama import Llama
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows


class Mistral(Llama):
    """See `base.Model`."""

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        spec = read_decoder(config, architecture)
        return replace(spec, windows=read_windows(config, spec.layers))
