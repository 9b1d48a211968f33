"""Command R and R7B (Cohere 2024): attention and MLP read the same layer norm, side by side, and logits are scaled."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import HeadNormAttention, NormLayer
from quire.layers.builder import ModelBuilder
from quire.models.llama import Block, BlockNorms, Llama
from quire.models.spec import (
    Config,
    ModelSpec,
    QKNorm,
    interleave,
    read_decoder,
    read_locals,
    read_windows,
    without_rope,
)
from quire.ops.operands import Angles, Norm, Norms
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows


class ParallelBlock(Block):
    """One layer: attention and MLP of the same normed input."""

    leaves_sums = False

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
    """Command R, and R+, which norms queries and keys by layer norms of each head."""

    architectures = MappingProxyType({"CohereForCausalLM": "cohere"})
    block = ParallelBlock
    norms = BlockNorms("input_layernorm")
    attention = HeadNormAttention

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        normed: QKNorm = "each" if config.get(bool, "use_qk_norm", default=False) else ""
        config = config.with_defaults(tie_word_embeddings=True, layer_norm_eps=1e-5)
        spec = interleave(read_decoder(config, architecture))
        return replace(spec, logit_scale=config.get(float, "logit_scale", default=0.0625), qk_norm=normed)

    def make_norm(self, build: ModelBuilder, name: str) -> Norm:
        """A layer norm without bias."""
        return build.layer_norm(name, self.spec.hidden, self.spec.norm_eps, bias=False)

    def make_qk_norms(self, build: ModelBuilder) -> Norms:
        """Weights of each head."""
        spec, build = self.spec, build.for_heads(self.spec.heads, self.spec.kv_heads)
        q, k = (
            Norm(build.by_head(f"{name}.weight", heads, spec.head_dim), spec.norm_eps, centred=True)
            for name, heads in zip(self.qk_norms, (spec.heads, spec.kv_heads), strict=True)
        )
        return Norms(q, k)


class Cohere2(Cohere):
    """Command R7B and A: every fourth layer is global, and has no rotary embedding."""

    architectures = MappingProxyType({"Cohere2ForCausalLM": "cohere2"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        if config.get(bool, "use_qk_norm", default=False):
            raise InvalidModel("config.json: use_qk_norm is not supported for Cohere 2; try --executor hf")
        spec = Cohere.read(config, architecture)
        every = config.get(int, "sliding_window_pattern", "_sliding_window_pattern", default=4)
        spec = replace(spec, windows=read_windows(config, spec.layers, every=every))
        return without_rope(spec, (not local for local in read_locals(config, spec.layers, every=every)))
