"""Attention over pages: project, norm where the model does, turn, write K/V, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers.basic import RMSNorm
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.ops.base import Angles, Ops
from quire.ops.ragged import LayerKV, RaggedBatch, select_rows
from quire.types import UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer's heads on this rank: `count` of queries, `kv` of keys and values, `dim` numbers each.

    window: how many positions a query sees, its own included. soft_cap: of the scores, 0 for none.
    """

    count: int
    kv: int
    dim: int
    scale: float
    window: int = UNLIMITED
    soft_cap: float = 0.0


class Attention:
    """One layer's. `norms` are those of q and of k (Qwen 3), or nothing."""

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        heads: Heads,
        ops: Ops,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        self.qkv, self.out, self.heads, self.ops = qkv, out, heads, ops
        self.norms = norms and (norms[0].settings, norms[1].settings)

    def __call__(
        self, x: Tensor, turn: Angles, batch: RaggedBatch, kv: LayerKV, wanted: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden], turn as `Rotary` makes it -> [T, hidden], or those of `wanted`."""
        h = self.heads
        q = self.ops.qk_norm_rope_store_kv(self.qkv(x), h.count, kv, batch, turn, self.norms)
        mixed = self.ops.attention(q, kv, batch, h.scale, h.window, h.soft_cap).flatten(1)
        return self.out(select_rows(mixed, wanted))
