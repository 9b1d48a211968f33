"""RaggedBatch: the one attention metadata type. One call serves prefill, chunk, decode and verify.

Shape letters used everywhere: T tokens fed this step, S spans (sequences), R logits rows, P pages a table row holds,
H query heads, G key/value heads, D head dim, N pages in the pool, B tokens a page (block size), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch


class ImageTokens(NamedTuple):
    """The tokens of a step that hold the places of images: rows [M] int64 among its T tokens, and their embeddings
    [M, hidden] in place of the table's, or [M, 0] in stages of a pipeline that do not read them. features [M, hidden]
    each: what the first layers add to the residual stream after themselves (Meng et al. 2024, DeepStack)."""

    rows: torch.Tensor
    embeddings: torch.Tensor
    features: Sequence[torch.Tensor] = ()


class StateSlots(NamedTuple):
    """Where the states of recurrent layers are read and written, see `LayerState`.

    source [S] int64: the slot of the state that each span goes on from; slot 0 holds zeros, where a sequence begins.
    target [T] int64: the slot that takes the state after each token; 0: none does. snapshot [T] int64: a slot that
    takes it besides, or 0. All are read before any is written.
    """

    source: torch.Tensor
    target: torch.Tensor
    snapshot: torch.Tensor

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [M], slots [M]) of all states that are written."""
        wanted, besides = (each.nonzero()[:, 0] for each in (self.target, self.snapshot))
        return torch.cat((wanted, besides)), torch.cat((self.target[wanted], self.snapshot[besides]))


LONG = 3584
"""Queries above which a span is worth kernels of its own (`ops/triton/long_spans.py`; measured, H200)."""

SCORED_AT_ONCE = 128
"""Queries whose scores for all keys an indexer's kernels have in memory at once."""


class LongSpan(NamedTuple):
    """A span of more than LONG queries whose lengths the host knows: span number `span` feeds tokens first to first +
    queries of the step, after `past` tokens that are stored."""

    span: int
    first: int
    queries: int
    past: int


class LongSpans(NamedTuple):
    """The long spans of a step. alone: it has no others."""

    spans: Sequence[LongSpan] = ()
    alone: bool = False


NO_LONG_SPANS = LongSpans()


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One step's tokens, one span after the other, and where their K/V is stored.

    tokens [T] int64: ids to feed. positions [T] int64: of each, from 0. slots [T] int64: block * B + offset, where each
    token's K/V is written. query_start [S+1] int32: span s has tokens query_start[s]:query_start[s+1]. kv_len [S]
    int32: tokens that span s attends to, this step's included; its queries are the last of them (causal). page_table
    [S, P] int32: the block of positions p*B:(p+1)*B; after the end, block 0 (the null block). max_query, max_kv: bounds
    that the host knows, for the shapes of launches: kernels loop to kv_len. output_indices [R] int32: the tokens whose
    hidden states are needed, None for all; what follows the last attention is computed for them alone, see
    `select_outputs`. states: None where no layer is recurrent. images: None where no token holds the place of an image.
    rope_positions [3, T] int64: positions in time, height and width by which tokens are rotated (Bai et al. 2025,
    Qwen2.5-VL); [1, T]: one position for all three; None: `positions`. last_visible [T] int64: a later position up to
    which each token sees, any below its own for none; None: none does (causal). long_spans: those that the host knows
    to be long; none where the step is captured.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    kv_len: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    max_query: int
    max_kv: int
    output_indices: torch.Tensor | None = field(default=None, kw_only=True)
    states: StateSlots | None = field(default=None, kw_only=True)
    images: ImageTokens | None = field(default=None, kw_only=True)
    rope_positions: torch.Tensor | None = field(default=None, kw_only=True)
    last_visible: torch.Tensor | None = field(default=None, kw_only=True)
    long_spans: LongSpans = field(default=NO_LONG_SPANS, kw_only=True)

    def last_seen(self, ahead: int) -> torch.Tensor | None:
        """[T] the last position that each token sees, of those that its span has: `ahead` after its own, or
        `last_visible` where that is later. None: its own (causal)."""
        if not ahead:
            last = self.last_visible
            return None if last is None else torch.maximum(self.positions, last)
        until = self.positions + ahead
        return until if self.last_visible is None else torch.maximum(until, self.last_visible)

    def below(self, position: int) -> tuple[torch.Tensor, RaggedBatch]:
        """The tokens at positions below `position`: their rows, int64 [N], and a batch of them and the spans that have
        some."""
        counts = self.query_start.diff()
        kept = (position - self.kv_len + counts).clamp(min=0).minimum(counts)
        some = kept.nonzero()[:, 0]
        rows = (self.positions[: int(self.query_start[-1])] < position).nonzero()[:, 0]
        return rows, RaggedBatch(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            query_start=torch.nn.functional.pad(kept[some].cumsum(0, dtype=torch.int32), (1, 0)),
            kv_len=self.kv_len[some].clamp(max=position),
            page_table=self.page_table[some],
            page_size=self.page_size,
            max_query=self.max_query,
            max_kv=min(self.max_kv, position),
        )

    @staticmethod
    def of_chosen(slots: torch.Tensor) -> RaggedBatch:
        """A span for each row of slots [M, K], int32: one query, which attends to the tokens in these slots of pools of
        `LayerKV.by_token`."""
        count, seen = slots.shape
        last = slots[:, -1].long()
        return RaggedBatch(
            tokens=last,
            positions=torch.full_like(last, seen - 1),
            slots=last,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=slots.device),
            kv_len=torch.full((count,), seen, dtype=torch.int32, device=slots.device),
            page_table=slots,
            page_size=1,
            max_query=1,
            max_kv=seen,
        )

    def with_images(self, embedded: torch.Tensor) -> torch.Tensor:
        """embedded [T, hidden] with the embeddings of images in their places."""
        if self.images is None:
            return embedded
        return embedded.index_copy(0, self.images.rows, self.images.embeddings.to(embedded.dtype))

    def add_features(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """residual [T, hidden] after layer `layer`, with what images add there."""
        if self.images is None or layer >= len(self.images.features):
            return residual
        return residual.index_add(0, self.images.rows, self.images.features[layer].to(residual.dtype))

    def select_outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, n] of `output_indices` -> [T, n], each at its token's row; other rows are undefined."""
        if self.output_indices is None:
            return hidden
        whole = hidden.new_empty(len(self.positions), hidden.shape[1])
        return whole.index_copy_(0, self.output_indices.long(), hidden)


FIELDS = tuple(each.name for each in fields(RaggedBatch))


def fields_of(batch: RaggedBatch) -> dict[str, Any]:
    """The fields of a batch, for a subclass that adds to them."""
    return {name: getattr(batch, name) for name in FIELDS}


def without_gates(qkv: torch.Tensor, queries: int, heads: int) -> torch.Tensor:
    """qkv [T, 2 queries + n], whose heads of queries are followed by as many numbers each -> [T, queries + n]."""
    asked = qkv[:, : 2 * queries].reshape(len(qkv), heads, 2, -1)[:, :, 0]
    return torch.cat((asked.flatten(1), qkv[:, 2 * queries :]), 1)


def select_rows(x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """Rows of x [T, n]; None: all."""
    return x if wanted is None else x.index_select(0, wanted)


class KVShape(NamedTuple):
    """K/V of one layer per token: `heads` keys of `key_dim` numbers and values of `value_dim`, and for each of them a
    key of `index_dim` numbers by which an indexer chooses what is attended to; 0: there is no indexer.

    The two differ where a layer keeps latents (`layers/latent.py`): values are the latents, which are also what keys
    begin with, and only the rest of a key is kept as one.
    """

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0

    @property
    def numbers(self) -> int:
        """Of a token."""
        return self.heads * (self.key_dim + self.value_dim + self.index_dim)


class StateShape(NamedTuple):
    """What a recurrent layer keeps of a sequence, whatever its length: the last `width` inputs of its convolution, of
    `channels` numbers each, in the model's dtype, and a float32 matrix [keys, values] for each of `heads`."""

    channels: int
    width: int
    heads: int
    keys: int
    values: int

    def nbytes(self, itemsize: int) -> int:
        """Bytes of one state, at `itemsize` bytes a number of the model's dtype."""
        return self.channels * self.width * itemsize + 4 * self.heads * self.keys * self.values


class LayerState(NamedTuple):
    """One recurrent layer's states: window [M, width, channels] and memory [M, heads, keys, values] float32, of M
    slots, see `StateShape`. Slot 0 is never written: it holds zeros."""

    window: torch.Tensor
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's K/V pool: k [N, G, B, D] and v [N, G, B, E], see `KVShape`. A block id indexes every layer's tensors.
    state: of a recurrent layer, which has no heads of K/V. index [N, G, B, I]: keys of the indexer, which are normed,
    so that float8 holds them as they are; None: there is no indexer.

    A (block, head) tile is contiguous, so that a kernel reads it in one run. k_scale and v_scale: what one stored unit
    represents, 1 unless the pool is float8.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = field(default=1.0, kw_only=True)
    v_scale: float = field(default=1.0, kw_only=True)
    state: LayerState | None = field(default=None, kw_only=True)
    index: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        """What a block consists of."""
        return (self.k, self.v) if self.index is None else (self.k, self.v, self.index)

    def by_token(self) -> LayerKV:
        """The same, as blocks of one token each, whose numbers are slots."""
        _, groups, _, _ = self.k.shape
        assert groups == 1, "tokens of several heads do not lie together"
        k, v = (each.view(-1, 1, 1, each.shape[-1]) for each in (self.k, self.v))
        return LayerKV(k, v, k_scale=self.k_scale, v_scale=self.v_scale)
