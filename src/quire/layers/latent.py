"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): what is kept of a token is a short vector, its latent,
from which every head could make its key and its value, and a part of the key that is rotated and the same for all.

Keys and values are never made. The matrix that makes a head's key of a latent is multiplied with the query instead, and
the one that makes its value with the weighted mean of latents, so that attention reads C + R numbers a token, whatever
the number of heads.

Letters: N numbers of a head's query and key that are not rotated, R that are, C latents, E of a head's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvalidModel
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.quantization.base import Plain, WeightStorage
from quire.ops.base import Ops
from quire.ops.operands import Angles, Norm
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Sizes of an indexer: `heads` of `dim` numbers, of which the first `rotated` are, and `top` tokens that it
    chooses for each query."""

    heads: int
    dim: int
    top: int
    rotated: int

    def checked(self) -> IndexConfig:
        """Itself. Raises InvalidModel for sizes of nothing, and for keys that are smaller than what is rotated."""
        if min(self.heads, self.top) < 1 or self.dim < self.rotated:
            raise InvalidModel(
                "config.json: index_n_heads and index_topk must be above 0, and index_head_dim at least "
                f"qk_rope_head_dim ({self.rotated}), not {self.heads}, {self.top} and {self.dim}"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes: `plain` and `rotated` numbers of a query, `latents` that are kept of a token, `value` numbers of a head's
    value. queries: numbers that queries are made of, 0: of the residual stream itself. index: None where queries see
    all tokens before them."""

    plain: int
    rotated: int
    latents: int
    value: int
    queries: int = 0
    index: IndexConfig | None = None

    def checked(self) -> LatentConfig:
        """Itself. Raises InvalidModel for sizes of nothing."""
        if min(self.plain, self.rotated, self.latents, self.value) < 1 or self.rotated % 2:
            raise InvalidModel(
                "config.json: qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank and v_head_dim must be above 0, and "
                f"qk_rope_head_dim even, not {self.plain}, {self.rotated}, {self.latents} and {self.value}"
            )
        return self


class Decompression:
    """What makes keys and values of latents, [H (N + E), C], as matrices of each head that are multiplied with queries
    [H, N, C] and with means of latents [H, C, E]. A quantized one is dequantized: products by head are small.

    `join` must be called once its storage has its final form.
    """

    def __init__(self, stored: WeightStorage, config: LatentConfig) -> None:
        self.stored, self.config = stored, config
        nothing = torch.empty(0)
        self.keys, self.values = self._parts(stored.weight) if isinstance(stored, Plain) else (nothing, nothing)

    def join(self) -> None:
        """Dequantize."""
        if self.stored.quantized is not None:
            self.keys, self.values = self._parts(self.stored.quantized.dequantize().to(self.stored.matrix.dtype))

    def _parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Views of weight [H (N + E), C]."""
        heads = weight.view(-1, self.config.plain + self.config.value, self.config.latents)
        return heads[:, : self.config.plain], heads[:, self.config.plain :].transpose(1, 2)


class QueryProjection:
    """Of the residual stream: queries [T, H, N + R], latents with what is rotated of keys [T, C + R], and what queries
    are made of.

    first: one matrix that makes both, or two that are stored in different ways. In place of queries they may make what
    those are made of, which is normed and multiplied by `second`. kept: C + R.
    """

    def __init__(
        self,
        first: Sequence[ColumnParallelLinear],
        second: ColumnParallelLinear | None,
        norm: Norm | None,
        ops: Ops,
        kept: int,
    ) -> None:
        self.first, self.second, self.norm, self.ops, self.kept = first, second, norm, ops, kept

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> ([T, H (N + R)], [T, C + R], what queries are made of: x, or what was compressed of it)."""
        made = [each(x) for each in self.first]
        q, compressed = made if len(made) == 2 else (made[0][:, : -self.kept], made[0][:, -self.kept :])
        if self.second is not None and self.norm is not None:
            x = self.ops.norm(q.contiguous(), self.norm)
            q = self.second(x)
        return q, compressed, x


class Indexer:
    """Chooses what each query attends to (DeepSeek-AI 2025, DeepSeek-V3.2): queries of a few small heads, and one key a
    token, which is kept beside its latent. Every rank computes it whole."""

    def __init__(
        self,
        queries: ColumnParallelLinear,
        keys: ColumnParallelLinear,
        weights: WeightStorage,
        norm: Norm,
        config: IndexConfig,
        ops: Ops,
    ) -> None:
        self.queries, self.keys, self.weights, self.norm = queries, keys, weights, norm
        self.config, self.ops = config, ops

    def __call__(self, x: Tensor, source: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV) -> Tensor | None:
        """x [T, hidden], source [T, Q], what queries are made of -> see `Ops.choose_positions`; None: all tokens, since
        no sequence of the step is longer than `top`."""
        # Whatever the model's other heads are: halves, not neighbours, are turned together.
        turn = angles._replace(interleaved=False)
        self.ops.store_index_key(self.keys(x), kv, batch, turn, self.norm)
        if batch.max_kv <= self.config.top:
            return None
        q = self.queries(source).view(len(x), self.config.heads, self.config.dim)
        return self.ops.choose_positions(q, self.weights.apply(x), kv, batch, turn, self.config.top)


class LatentAttention:
    """Attention of one layer: project, store the latent, choose tokens, take queries into the space of latents, attend,
    make values, project back. scale: of scores. indexer: None where every token is attended to."""

    reader: None = None

    def __init__(
        self,
        project: QueryProjection,
        norm: Norm,
        decompression: Decompression,
        out: RowParallelLinear,
        config: LatentConfig,
        scale: float,
        ops: Ops,
        indexer: Indexer | None = None,
    ) -> None:
        self.project, self.norm, self.decompression, self.out = project, norm, decompression, out
        self.config, self.scale, self.ops, self.indexer = config, scale, ops, indexer

    def __call__(
        self, x: Tensor, angles: Angles, batch: RaggedBatch, kv: LayerKV, outputs: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden], angles from `Rotary` -> [T, hidden], or the rows `outputs` of it."""
        made, compressed, source = self.project(x)
        q = made.view(len(made), -1, self.config.plain + self.config.rotated)
        rotated = self.ops.norm_rope_store_latent(q, compressed, kv, batch, angles, self.norm)
        chosen = None if self.indexer is None else self.indexer(x, source, angles, batch, kv)
        absorbed = self.ops.heads_linear(q[..., : self.config.plain], self.decompression.keys)
        mixed = self.ops.latent_attention(absorbed, rotated, kv, batch, self.scale, chosen)
        return self.out(self.ops.heads_linear(select_rows(mixed, outputs), self.decompression.values).flatten(1))
