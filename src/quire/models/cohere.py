"""Command R and R7B (Cohere 2024): attention and MLP read the same layer norm, side by side, and logits are scaled."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import NormLayer
from quire.layers.builder import ModelBuilder
from quire.models.llama import Block, BlockNorms, Llama
from quire.models.spec import Config, ModelSpec, interleave, read_decoder, read_locals, read_windows, without_rope
from quire.ops.base import Angles, Norm
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows


class ParallelBlock(Block):
    """One layer: attention and MLP of the same normed input."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        after: NormLayer,
        angles: Angles,
        batch: RaggedBatch,
        kv: LayerKV,
        output: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `Block.__call__`."""
        x, residual = self.before_attention.add(x, residual, after)
        mixed = self.attention(x, angles, batch, kv, output)
        x = self.mlp(select_rows(x, output), batch if output is None else None)
        return x + mixed, select_rows(residual, output)


class Cohere(Llama):
    """Command R. Its larger sibling R+, which norms queries and keys by layer norms, is not supported."""

    architectures = MappingProxyType({"CohereForCausalLM": "cohere"})
    block = ParallelBlock
    norms = BlockNorms("input_layernorm")

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        if config.get(bool, "use_qk_norm", default=False):
            raise InvalidModel("config.json: use_qk_norm is not supported for Cohere; try --executor hf")
        config = config.with_defaults(tie_word_embeddings=True, layer_norm_eps=1e-5)
        spec = interleave(read_decoder(config, architecture))
        return replace(spec, logit_scale=config.get(float, "logit_scale", default=0.0625))

    def make_norm(self, build: ModelBuilder, name: str) -> Norm:
        """A layer norm without bias."""
        return build.layer_norm(name, self.spec.hidden, self.spec.norm_eps, bias=False)


class Cohere2(Cohere):
    """Command R7B and A: every fourth layer is global, and has no rotary embedding."""

    architectures = MappingProxyType({"Cohere2ForCausalLM": "cohere2"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Cohere.read(config, architecture)
        every = config.get(int, "sliding_window_pattern", "_sliding_window_pattern", default=4)
        spec = replace(spec, windows=read_windows(config, spec.layers, every=every))
        return without_rope(spec, (not local for local in read_locals(config, spec.layers, every=every)))
