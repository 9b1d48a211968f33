"""Operations whose rows have bits of their own at next to no cost, for small models on a CPU that keeps its word.

`fixed` makes every product and every sum in a way that no library can change, and pays for it. Here the library's own
products and attention are used wherever they give a row the same bits in any company: oneDNN's packed products of up to
some thousand columns do, for any number of rows; torch's attention does for any number of sequences and for a multiple
of LEAST queries, as long as a query always sees the same number of positions. So each reads whole runs of RUN positions
up to its own, masked past it, whoever it is computed with. `holds` asks this machine whether all of that is so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.packed import can_pack, pack, packed_linear
from quire.ops.paged_attention import PagedAttentionMetadata, visible
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.types import UNLIMITED

RUN = 64
"""Positions of K/V read at a time."""

LEAST = 4
"""Rows of queries are attended by as many, some of them twice where they are fewer. Torch takes them in blocks of 32 to
256, and makes products of fewer than these, all there are or left over at the end, in ways of their own."""


class SteadyOps(BatchInvariantOps):
    """See `base.Ops`. As `ReferenceOps`, up to rounding."""

    rows = UNLIMITED

    def prepare(self, batch: RaggedBatch) -> PagedAttentionMetadata:
        return batch if isinstance(batch, PagedAttentionMetadata) else PagedAttentionMetadata.cut(batch, RUN)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return ReferenceOps.rope(self, q, k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return ReferenceOps.silu_mul(self, gate_up)

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        window: int = UNLIMITED,
        soft_cap: float = 0.0,
    ) -> Tensor:
        paged = self.prepare(batch)
        if soft_cap or window < UNLIMITED:
            return super().attention(q, kv, paged, scale, window, soft_cap)
        parts = [attend(q, kv, paged, index, scale) for index in range(len(paged.groups))]
        if len(parts) == 1 and len(parts[0]) == len(q) and isinstance(paged.groups[0].rows, slice):
            return parts[0]
        out = torch.zeros_like(q)
        for group, part in zip(paged.groups, parts, strict=True):
            out[group.rows] = part
        return out


def attend(q: Tensor, kv: LayerKV, paged: PagedAttentionMetadata, index: int, scale: float) -> Tensor:
    """One group's queries over its pages -> [S * n, H, D]."""
    group, (_, heads, dim), groups = paged.groups[index], q.shape, kv.k.shape[1]
    spans, n, share = len(group.kv_len), group.n, heads // groups
    k = paged.read(kv.k, index, kv.k_scale, q.dtype)[:, :, : group.longest]
    v = paged.read(kv.v, index, kv.v_scale, q.dtype)[:, :, : group.longest]
    rows = n * share
    some = q[group.rows].view(spans, n, groups, share, dim).permute(0, 2, 3, 1, 4).reshape(spans, groups, rows, dim)
    some = filled(some)
    seen = mask(paged, index, share, q.dtype)
    out = F.scaled_dot_product_attention(some, k, v, seen, scale=scale)[:, :, :rows]
    return out.reshape(spans, groups, share, n, dim).permute(0, 3, 1, 2, 4).reshape(spans * n, heads, dim)


def filled(x: Tensor) -> Tensor:
    """[S, G, rows, D], the first rows repeated behind the last up to a multiple of LEAST."""
    rows = x.shape[2]
    return x if rows % LEAST == 0 else x[:, :, torch.arange(-(-rows // LEAST) * LEAST) % rows]


def mask(paged: PagedAttentionMetadata, index: int, share: int, dtype: torch.dtype) -> Tensor:
    """[S, 1, rows or 1, L]: what is added to scores, for `filled` rows."""
    key = (index, share)
    made = paged.masks.get(key)
    if made is None:
        seen = visible(paged.groups[index], UNLIMITED, share)
        assert seen is not None
        made = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
        made = made if made.shape[2] == 1 else filled(made)
        paged.masks[key] = made
    return made


@torch.inference_mode()
def holds(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether this machine's libraries do what is said above. Of float32 MKL does the attention, and does not."""
    if not can_pack(dtype, torch.device("cpu")):
        return False
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    x, q, k, v = some(96, 256), some(3, 4, 96, 32), some(3, 4, 2 * RUN, 32), some(3, 4, 2 * RUN, 32)
    weight = pack(some(512, 256))
    seen = torch.zeros(1, 1, 1, 2 * RUN, dtype=dtype)
    seen[..., RUN + 7 :] = -math.inf

    def attended(spans: slice, rows: slice) -> Tensor:
        return F.scaled_dot_product_attention(q[spans, :, rows], k[spans], v[spans], seen)

    return _alike(lambda rows: packed_linear(x[rows], weight, None), 0, (1, 2, 3, 8, 17, 50)) and all(
        _alike(lambda rows, spans=spans: attended(spans, rows)[0], 1, (LEAST, 8, 36, 68))  # type: ignore[misc]
        and torch.equal(attended(spans, slice(0, 8))[0], attended(slice(0, 3), slice(0, 8))[0])
        for spans in (slice(0, 1), slice(0, 2))
    )


def _alike(way: Callable[[slice], Tensor], rows: int, counts: tuple[int, ...]) -> bool:
    """Whether some rows at a time, along that dimension, come out as all at once."""
    whole = way(slice(0, 96))
    return all(torch.equal(way(slice(5, 5 + n)), whole.narrow(rows, 5, n)) for n in counts)
