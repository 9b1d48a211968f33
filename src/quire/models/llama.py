"""Llama 2, 3, 3.1, 3.2 and models built like them (Touvron et al. 2023; Dubey et al. 2024); Mistral and Mixtral.

Mistral is Llama with sliding windows, Mixtral is Mistral with experts (Jiang et al. 2023, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Protocol

from torch import Tensor

from quire.layers.basic import Attention, Heads
from quire.layers.builder import ModelBuilder
from quire.layers.moe import MoEConfig
from quire.models.spec import Config, ModelSpec, read_decoder, read_windows
from quire.ops.base import Angles
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows


class MLPFunction(Protocol):
    """An MLP, or experts."""

    def __call__(self, x: Tensor, batch: RaggedBatch | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. batch: whose tokens x is of; rows of its null block may be left out."""


def build_attention(spec: ModelSpec, build: ModelBuilder, index: int, *, norm_shift: float = 0.0) -> Attention:
    """`self_attn` of layer `index`. norm_shift: added to the weights of its norms, if any."""
    heads = Heads(
        count=spec.heads,
        kv=spec.kv_heads,
        dim=spec.head_dim,
        scale=spec.scale or spec.head_dim**-0.5,
        window=spec.windows[index],
        soft_cap=spec.score_cap,
    )
    return build.scope("self_attn").attention(
        spec.hidden,
        heads,
        bias=spec.qkv_bias,
        out_bias=spec.out_bias,
        norm_eps=spec.norm_eps if spec.qk_norm else None,
        norm_shift=norm_shift,
    )


class Block:
    """One layer: attention and `mlp`, each after a norm of the residual stream."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, index: int, mlp: MLPFunction) -> None:
        self.before_attention = build.rms_norm("input_layernorm", spec.hidden, spec.norm_eps)
        self.attention = build_attention(spec, build, index)
        self.before_mlp = build.rms_norm("post_attention_layernorm", spec.hidden, spec.norm_eps)
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV, output: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(output of the layer before, residual stream without it), both [T, hidden] -> the same after this layer.

        output: indices of the rows to return, None for all.
        """
        x, residual = self.before_attention.add(x, residual)
        x = self.attention(x, angles, batch, kv, output)
        x, residual = self.before_mlp.add(x, select_rows(residual, output))
        return self.mlp(x, batch if output is None else None), residual


class Llama:
    """A decoder of Llama's structure, see `registry.Model`. Others override `read`, `make_block` or `make_mlp`."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType({"LlamaForCausalLM": "llama"})

    def __init__(self, spec: ModelSpec, build: ModelBuilder) -> None:
        self.spec = spec
        self.ops = build.ops
        self.dtype = build.dtype
        body = build.scope("model")
        body.ignore("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
        self.embedding = body.embedding("embed_tokens", spec.vocab, spec.hidden)
        self.rotary = body.rotary(spec.rope)
        self.blocks = [self.make_block(spec, body.scope(f"layers.{i}"), i) for i in range(spec.layers)]
        self.norm = body.rms_norm("norm", spec.hidden, spec.norm_eps)
        self.head = build.head("lm_head", spec.hidden, spec.vocab, self.embedding if spec.tie else None)

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        return read_decoder(config, architecture)

    @classmethod
    def make_block(cls, spec: ModelSpec, build: ModelBuilder, index: int) -> Block:
        """Layer `index`."""
        return Block(spec, build, index, cls.make_mlp(spec, build, index))

    @classmethod
    def make_mlp(cls, spec: ModelSpec, build: ModelBuilder, index: int) -> MLPFunction:
        """The MLP of layer `index`."""
        return build.scope("mlp").gated_mlp(spec.hidden, spec.mlp, spec.activation, bias=spec.mlp_bias)

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """See `registry.Model`."""
        batch = self.ops.prepare(batch)
        angles = self.rotary(batch.positions)
        residual = self.embedding(batch.tokens)
        x = residual.new_zeros(residual.shape)
        for block, cache in zip(self.blocks, kv, strict=True):
            output = batch.output_indices if block is self.blocks[-1] else None
            x, residual = block(x, residual, angles, batch, cache, output)
        return batch.select_outputs(self.norm.add(x, residual)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """See `registry.Model`."""
        return self.head(hidden)


class Mistral(Llama):
    """Mistral 7B and later: layers with sliding windows."""

    architectures = MappingProxyType({"MistralForCausalLM": "mistral"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = read_decoder(config, architecture)
        return replace(spec, windows=read_windows(config, spec.layers))


class Mixtral(Mistral):
    """Mistral with a mixture of experts in each layer."""

    architectures = MappingProxyType({"MixtralForCausalLM": "mixtral"})

    @staticmethod
    def read(config: Config, architecture: str) -> ModelSpec:
        """See `registry.Architecture`."""
        spec = Mistral.read(config, architecture)
        experts = MoEConfig(
            num_experts=config.get(int, "num_local_experts", default=8),
            num_experts_per_token=config.get(int, "num_experts_per_tok", default=2),
            width=spec.mlp,
        )
        return replace(spec, experts=experts.checked())

    @classmethod
    def make_mlp(cls, spec: ModelSpec, build: ModelBuilder, index: int) -> MLPFunction:
        """The experts of layer `index`."""
        assert spec.experts is not None
        names = ("w1", "w3", "w2")
        return build.scope("block_sparse_moe").experts(spec.hidden, spec.experts, spec.activation, names=names)
