"""RaggedBatch: the one attention metadata type. One call serves prefill, chunk, decode and verify.

Shape letters used everywhere: T tokens fed this step, S spans (sequences), R logits rows, P pages a table row holds,
H query heads, G key/value heads, D head dim, N pages in the pool, B tokens a page (block size), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One step's tokens, back to back, and where their K/V lives.

    tokens [T] int64: ids to feed. positions [T] int64: of each, from 0. slots [T] int64: page * B + offset, where
    each token's K/V is written. query_start [S+1] int32: span s owns tokens query_start[s]:query_start[s+1].
    kv_len [S] int32: tokens span s attends to, this step's included; its queries are the last of them (causal).
    page_table [S, P] int32: page of positions p*B:(p+1)*B; past the end, page 0 (SPARE).
    max_query, max_kv: bounds known to the host, for launch shapes only: kernels loop to kv_len.
    wanted [R] int32: the tokens whose hidden states somebody asks for, None for all. Whatever stands behind the last
    attention is done for them alone, see `chosen` and `placed`.
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

    def select_outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, n] of what is wanted, each at its token's place -> [T, n], anything elsewhere."""
        if self.output_indices is None:
            return hidden
        whole = hidden.new_empty(len(self.positions), hidden.shape[1])
        return whole.index_copy_(0, self.output_indices.long(), hidden)


def select_rows(x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """Rows of x [T, n]."""
    return x if wanted is None else x.index_select(0, wanted)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's pages: k and v, each [N, G, B, D]. One page id indexes every layer's tensors.

    The layout keeps a (page, head) tile contiguous, so that a kernel reads it in one run. k_scale and v_scale: what
    one stored unit stands for, 1 unless the pages are float8.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = field(default=1.0, kw_only=True)
    v_scale: float = field(default=1.0, kw_only=True)
