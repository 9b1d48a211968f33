"""OLMo 2 (OLMo Team 2024): Llama with norms after attention and MLP, and q and k normed over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.basic import Attention, RMSNorm
from quire.layers.builder import ModelBuilder
from quire.models.llama import Block, Llama, MLPFunction, build_attention
from quire.models.spec import ModelSpec
from quire.ops.base import Angles
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows


class WholeNormAttention(Attention):
    """Attention whose projections of queries and keys are normed before they are split into heads."""

    def __init__(self, inner: Attention, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        super().__init__(inner.qkv, inner.out, inner.heads, inner.ops)
        self.q_norm = q_norm
        self.k_norm = k_norm

    def project(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> q, k and v side by side, [T, (heads + 2 kv_heads) head_dim]."""
        sizes = [count * self.heads.dim for count in (self.heads.count, self.heads.kv, self.heads.kv)]
        q, k, v = torch.split(self.qkv(x), sizes, -1)
        return torch.cat((self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v), -1)


class PostNormBlock(Block):
    """One layer: attention and MLP, each with a norm of what it adds to the residual stream."""

    def __init__(self, spec: ModelSpec, build: ModelBuilder, index: int, mlp: MLPFunction) -> None:
        scope = build.scope("self_attn")
        q_norm = scope.rms_norm("q_norm", spec.heads * spec.head_dim, spec.norm_eps)
        k_norm = scope.rms_norm("k_norm", spec.kv_heads * spec.head_dim, spec.norm_eps)
        self.attention = WholeNormAttention(build_attention(spec, build, index), q_norm, k_norm)
        self.after_attention = build.rms_norm("post_attention_layernorm", spec.hidden, spec.norm_eps)
        self.mlp = mlp
        self.after_mlp = build.rms_norm("post_feedforward_layernorm", spec.hidden, spec.norm_eps)

    def __call__(
        self, x: Tensor, residual: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV, output: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `Block.__call__`."""
        residual = residual + x
        x = self.after_attention(self.attention(residual, angles, batch, kv, output))
        residual = select_rows(residual, output) + x
        return self.after_mlp(self.mlp(residual)), residual


class Olmo2(Llama):
    """OLMo 2, on one rank."""

    architectures: ClassVar[Mapping[str, str]] = MappingProxyType({"Olmo2ForCausalLM": "olmo2"})

    @classmethod
    def make_block(cls, spec: ModelSpec, build: ModelBuilder, index: int) -> Block:
        """Layer `index`. Raises InvalidModel with several ranks, whose shares would each be normed alone."""
        if build.parallel.size > 1:
            raise InvalidModel(f"{spec.architecture}: norms of whole projections cannot be divided among ranks")
        return PostNormBlock(spec, build, index, cls.make_mlp(spec, build, index))
