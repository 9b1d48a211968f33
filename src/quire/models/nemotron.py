"""Decoders with MLPs of two matrices and relu^2: Arcee (AFM), which is else Llama, and Nemotron (Minitron)."""

from __future__ import annotations

from types import MappingProxyType

from quire.layers.builder import ModelBuilder
from quire.models.llama import Llama, MLPFunction
from quire.models.spec import Config, ModelSpec, read_decoder
from quire.ops.operands import Norm


class Arcee(Llama):
    """AFM (Arcee 2025)."""

    architectures = MappingProxyType({"ArceeForCausalLM": "arcee"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return read_decoder(config.with_defaults(hidden_act="relu2"), architecture)

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`."""
        spec, names = self.spec, ("up_proj", "down_proj")
        return build.scope("mlp").mlp(*names, spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)


class Nemotron(Arcee):
    """Nemotron 3 and 4, and Minitron (NVIDIA 2024): layer norms that store their weight less 1, half of each head
    rotated."""

    architectures = MappingProxyType({"NemotronForCausalLM": "nemotron"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return Arcee.read(config.with_defaults(partial_rotary_factor=0.5, norm_eps=1e-5), architecture)

    def make_norm(self, build: ModelBuilder, name: str) -> Norm:
        """A layer norm whose weight lacks 1."""
        return build.layer_norm(name, self.spec.hidden, self.spec.norm_eps, shift=1.0)
