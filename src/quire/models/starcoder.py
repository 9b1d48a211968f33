"""StarCoder 2 (Lozhkov et al. 2024): layer norms and biases as in GPT-2, RoPE and windows as in Mistral."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from quire.layers.builder import ModelBuilder
from quire.models.llama import Llama, MLPFunction
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.ops.operands import Norm


class StarCoder2(Llama):
    """StarCoder 2."""

    architectures = MappingProxyType({"Starcoder2ForCausalLM": "starcoder2"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        bias = config.get(bool, "use_bias", default=True)
        defaults = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5}
        spec = read_decoder(config.with_defaults(**defaults), architecture)
        return replace(spec, qkv_bias=bias, out_bias=bias, mlp_bias=bias, windows=read_windows(config, spec.layers))

    def make_norm(self, build: ModelBuilder, name: str) -> Norm:
        """A layer norm."""
        return build.layer_norm(name, self.spec.hidden, self.spec.norm_eps)

    def make_mlp(self, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`."""
        spec, names = self.spec, ("c_fc", "c_proj")
        return build.scope("mlp").mlp(*names, spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)
