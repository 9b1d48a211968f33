"""Who attends to what: a list of equal pieces, made on the device once a forward, walked by a fixed grid.

A graph's launches cannot depend on lengths, so lengths become data. A span's query heads that share a K/V head are
laid out as rows, query by query; a tile is up to `rows` of them, a piece is a tile and some of the blocks of K/V it
sees. When there are too few tiles to fill the card, each is split along K/V into pieces of about equal length, and
whichever ends last puts them together (Flash-Decoding, Dao et al. 2023, with lengths read on the device).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton.launch import Card, block
from quire.ops.triton.prefixes import Prefixes, Sharing, found
from quire.values import MANY

FIELDS = 9
"""Numbers a piece has: first token, queries, first row, K/V length, first block, end block, span, in one number its
place among the tile's pieces and, from bit 16 on, how many those are, and how many parts of `Begun` it goes on from."""


class Tiling(NamedTuple):
    """What a list of pieces depends on, besides lengths. The same for every layer of most models.

    share: query heads a K/V head. rows, columns: a tile's size, columns being tokens. least, most: queries of the
    spans it is for. spread: how many pieces to add at most, 0 not to split. run: blocks a piece has at least where a
    tile is split. window: as `Ops.attention`. sharing: spans begin behind what they share in that way; None: do not.
    """

    share: int
    rows: int
    columns: int
    least: int
    most: int
    spread: int
    run: int
    window: int
    sharing: Sharing | None = None

    def bound(self, batch: RaggedBatch) -> int:
        """More pieces than this there cannot be."""
        spans, tokens = len(batch.kv_len), len(batch.positions)
        at_most = min(spans, tokens // self.least)
        if not at_most:
            return 1
        whole = at_most if self.most * self.share <= self.rows else tokens * self.share // self.rows + at_most
        return max(1, whole + min(self.spread, whole * (MOST_PIECES - 1)))


MOST_PIECES = 64
"""Of one tile."""


class Work(NamedTuple):
    """pieces [bound, FIELDS] int32, of which `total` [1] are there; arrived [bound, G] int32, all 0 between kernels."""

    pieces: Tensor
    total: Tensor
    arrived: Tensor


@triton.jit
def work_kernel(
    query_start, kv_len, begun, pieces, count, spans, window, least, most,
    SHARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPREAD: tl.constexpr, RUN: tl.constexpr,
    MOST: tl.constexpr, BEGUN: tl.constexpr, BLOCK_S: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: all spans at once, a piece of each at a time. Long ones come first, so that none ends alone."""
    s = tl.arange(0, BLOCK_S)
    inside = s < spans
    start = tl.load(query_start + s, mask=inside, other=0)
    n = tl.load(query_start + s + 1, mask=inside, other=0) - start
    length = tl.load(kv_len + s, mask=inside, other=0)
    chosen = inside & (n >= least) & (n <= most)
    tiles = tl.where(chosen, (n * SHARE + ROWS - 1) // ROWS, 0)
    behind = tl.load(begun + s, mask=inside, other=0) if BEGUN else 0
    parts = tl.load(begun + spans + s, mask=inside, other=0) if BEGUN else 0
    first = tl.maximum(length - n + 1 - window, behind) // COLUMNS
    seen = tl.where(chosen, (length + COLUMNS - 1) // COLUMNS - first, 0)
    splits = tl.where(chosen, 1, 0)
    if SPREAD > 0:
        each = tl.maximum((tl.sum(seen * tiles, 0) + SPREAD - 1) // SPREAD, RUN)
        splits = tl.minimum((seen + each - 1) // each, MOST)
    total = tiles * splits
    if BLOCK_S <= 512:
        longer = (seen[:, None] > seen[None, :]) | ((seen[:, None] == seen[None, :]) & (s[:, None] < s[None, :]))
        begin = tl.sum(tl.where(longer, total[:, None], 0), 0)
    else:
        begin = tl.cumsum(total, 0) - total
    tl.store(count, tl.sum(total, 0))
    for j in range(tl.max(total, 0)):
        tile = tiles - 1 - j // tl.maximum(splits, 1)
        part = j % tl.maximum(splits, 1)
        low = tile * ROWS // SHARE
        high = tl.minimum((tile * ROWS + ROWS - 1) // SHARE, n - 1)
        low_block = tl.maximum(length - n + low + 1 - window, behind) // COLUMNS
        blocks = (length - n + high) // COLUMNS + 1 - low_block
        size = (blocks + splits - 1) // tl.maximum(splits, 1)
        from_block = tl.minimum(part * size, blocks)
        to = pieces + (begin + j) * FIELDS
        here = j < total
        tl.store(to, start, mask=here)
        tl.store(to + 1, n, mask=here)
        tl.store(to + 2, tile * ROWS, mask=here)
        tl.store(to + 3, length, mask=here)
        tl.store(to + 4, low_block + from_block, mask=here)
        tl.store(to + 5, low_block + tl.minimum(from_block + size, blocks), mask=here)
        tl.store(to + 6, s, mask=here)
        tl.store(to + 7, part + splits * 65536, mask=here)
        tl.store(to + 8, tl.where(part == 0, parts, 0), mask=here)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(RaggedBatch):
    """A batch and the lists its layers share: made by the first that asks, found by the rest."""

    lists: dict[tuple[Tiling, int], Work] = field(default_factory=dict)
    shared: dict[Sharing, Prefixes] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: RaggedBatch) -> Planned:
        return cls(
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            kv_len=batch.kv_len,
            page_table=batch.page_table,
            page_size=batch.page_size,
            max_query=batch.max_query,
            max_kv=batch.max_kv,
            wanted=batch.wanted,
        )

    def work(self, tiling: Tiling, groups: int) -> tuple[Work, bool]:
        """The list for a tiling, and whether it has only now been made."""
        if tiling.window >= self.max_kv:
            tiling = tiling._replace(window=MANY)
        fresh = (tiling, groups) not in self.lists
        if fresh:
            self.lists[tiling, groups] = listed(self, tiling, groups)
        return self.lists[tiling, groups], fresh

    def prefixes(self, sharing: Sharing) -> tuple[Prefixes, bool]:
        """Who shares what, and whether it has only now been found."""
        fresh = sharing not in self.shared
        if fresh:
            self.shared[sharing] = found(self, sharing)
        return self.shared[sharing], fresh


def listed(batch: Planned, tiling: Tiling, groups: int) -> Work:
    """The list for a batch. Nothing is read back: it may be captured."""
    device, spans = batch.kv_len.device, len(batch.kv_len)
    bound = tiling.bound(batch)
    pieces = torch.empty(bound, FIELDS, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    arrived = torch.zeros(bound, groups, dtype=torch.int32, device=device)
    begun = batch.prefixes(tiling.sharing)[0].begun if tiling.sharing else batch.kv_len
    size = block(spans, 16)
    work_kernel[(1,)](
        *(batch.query_start, batch.kv_len, begun, pieces, count, spans, tiling.window, tiling.least, tiling.most),
        SHARE=tiling.share, ROWS=tiling.rows, COLUMNS=tiling.columns, SPREAD=tiling.spread, RUN=tiling.run,
        MOST=MOST_PIECES, BEGUN=tiling.sharing is not None, BLOCK_S=size, FIELDS=FIELDS,
        num_warps=max(1, min(8, size // 32)),
    )  # fmt: skip
    return Work(pieces, count, arrived)


def spread(card: Card, groups: int, a_card: int) -> int:
    """Pieces to add at most, so that there are `a_card` programs a multiprocessor over all K/V heads."""
    return -(-card.sms * a_card // groups)
