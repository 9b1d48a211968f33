"""Llama 2, 3, 3.1, 3.2 and models made like them (Touvron et al. 2023; Dubey et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from quire.layers.basic import Heads
from quire.layers.builder import ModelBuilder
from quire.models.spec import Config, ModelSpec, read_decoder
from quire.ops.base import Angles
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows

MLPFactory = Callable[[Tensor], Tensor]
"""[T, hidden] -> [T, hidden]: an MLP, or experts."""


class Block:
    """One layer: attention and `mlp`, each behind a norm of the residual stream."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, index: int, mlp: MLPFactory) -> None:
        self.before_attention = build.rms_norm("input_layernorm", spec.hidden, spec.norm_eps)
        self.attention = build.scope("self_attn").attention(
            spec.hidden,
            Heads(
                count=spec.heads,
                kv=spec.kv_heads,
                dim=spec.head_dim,
                scale=spec.head_dim**-0.5,
                window=spec.windows[index],
            ),
            bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            norm_eps=spec.norm_eps if spec.qk_norm else None,
        )
        self.before_mlp = build.rms_norm("post_attention_layernorm", spec.hidden, spec.norm_eps)
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor, turn: Angles, batch: RaggedBatch, kv: LayerKV, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the layer before added, and the stream without it -> the same after this layer. All [T, hidden], or of
        `wanted` alone."""
        x, residual = self.before_attention.add(x, residual)
        x = self.attention(x, turn, batch, kv, wanted)
        x, residual = self.before_mlp.add(x, select_rows(residual, wanted))
        return self.mlp(x), residual


class Llama:
    """See `base.Model`."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec, self.ops, self.dtype = spec, build.ops, build.dtype
        body = build.scope("model")
        body.ignore("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
        self.embedding = body.embedding("embed_tokens", spec.vocab, spec.hidden)
        self.rotary = body.rotary(spec.rope)
        layers = [body.scope(f"layers.{i}") for i in range(spec.layers)]
        self.blocks = [Block(spec, layer, i, self.make_mlp(spec, layer, i)) for i, layer in enumerate(layers)]
        self.norm = body.rms_norm("norm", spec.hidden, spec.norm_eps)
        self.head = build.head("lm_head", spec.hidden, spec.vocab, self.embedding if spec.tie else None)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        return read_decoder(config, architecture)

    @staticmethod
    def make_mlp(spec: ModelSpec, build: ModelBuilder, index: int) -> MLPFactory:
        """What stands behind a layer's second norm."""
        return build.scope("mlp").gated_mlp(spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        batch = self.ops.prepare(batch)
        turn = self.rotary(batch.positions)
        residual = self.embedding(batch.tokens)
        x = residual.new_zeros(residual.shape)
        for block, cache in zip(self.blocks, kv, strict=True):
            x, residual = block(
                x, residual, turn, batch, cache, batch.output_indices if block is self.blocks[-1] else None
            )
        return batch.select_outputs(self.norm.add(x, residual)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
