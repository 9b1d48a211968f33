"""Who begins with whose pages: found on the device once a step, from page tables alone.

The page tables of a step are the paths of a tree, and a node is worth its depth times those who are spared reading it.
Each span takes the best node on its path; those who take the same one are a group, which reads it together. Only pages
wholly in the past count: they are the same for all and nobody writes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import RaggedBatch
from quire.ops.triton.launch import block, kernel

FIELDS = 6
"""Numbers a piece has: where its tokens begin among `members`, how many those are, a span that has the pages, first
unit, end unit, and which run it is."""

LEAST = 4
"""Spans of a group."""

MOST_RUNS = 8
"""Pieces that a group's pages are cut into."""

LONG = 1024
"""Tokens a piece has at most, as far as there may be more runs."""


class PrefixSharing(NamedTuple):
    """What the lists depend on, besides page tables and lengths.

    unit: tokens, of which all depths are multiples, and of which a page's are a divisor. members: spans that a program
    attends for. runs: how many pieces a group's pages are cut into if they are short. worth: tokens that a group has to
    be spared.
    """

    unit: int
    members: int
    runs: int
    worth: int

    def bound(self, spans: int) -> int:
        """More pieces than this there cannot be."""
        return (-(-spans // self.members) + spans // LEAST) * MOST_RUNS


class SharedPrefixes(NamedTuple):
    """begun [2, S] int32: tokens of each span that its group reads, and how many pieces those are cut into. members [S]
    int32: the groups' tokens, group by group. pieces [bound, FIELDS] int32. counts [2] int32: pieces, members."""

    begun: Tensor
    members: Tensor
    pieces: Tensor
    counts: Tensor


class PrefixPartials(NamedTuple):
    """What groups made of the pages they share. parts [MOST_RUNS, T, H, D] and sums [MOST_RUNS, T, H] float32: for each
    piece and query the weighted mean of v, and the logarithm to base two of the sum of weights."""

    parts: Tensor
    sums: Tensor
    prefixes: SharedPrefixes
    sharing: PrefixSharing


@kernel(do_not_specialize=["spans", "worth"])
def depth_kernel(
    query_start, kv_len, table, chosen, spans, columns, worth,
    PAGE: tl.constexpr, UNIT: tl.constexpr, LEAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program i: the best node on span i's path, as (depth in units, first span below it); depth 0 is none."""
    mine = tl.program_id(0)
    s, p = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_P)
    inside = s < spans
    n = tl.load(query_start + s + 1, mask=inside, other=0) - tl.load(query_start + s, mask=inside, other=0)
    whole = (tl.load(kv_len + s, mask=inside & (n == 1), other=1) - 1) // PAGE
    agreed = tl.minimum(whole, tl.sum(tl.where(s == mine, whole, 0), 0))
    begin, reach = 0, tl.max(tl.where(s == mine, 0, agreed), 0)
    while begin < reach:
        at = begin + p
        theirs = tl.load(table + s[:, None] * columns + at[None, :], mask=at[None, :] < agreed[:, None], other=0)
        own = tl.load(table + mine * columns + at, mask=at < reach, other=0)
        differs = (theirs != own[None, :]) & (at[None, :] < agreed[:, None])
        agreed = tl.minimum(agreed, tl.min(tl.where(differs, at[None, :], 1 << 30), 1))
        begin += BLOCK_P
        reach = tl.max(tl.where((s == mine) | (agreed < begin), 0, agreed), 0)
    units = agreed * PAGE // UNIT
    depth, best = 0, 0
    deep = tl.max(units, 0)
    while deep > 0:
        count = tl.sum((units >= deep).to(tl.int32), 0)
        spared = tl.where((count >= LEAST) & (deep * (count - 1) * UNIT >= worth), deep * (count - 1), 0)
        depth, best = tl.where(spared > best, deep, depth), tl.maximum(spared, best)
        deep = tl.max(tl.where(units < deep, units, 0), 0)
    tl.store(chosen + mine, depth)
    tl.store(chosen + spans + mine, tl.min(tl.where(units >= depth, s, BLOCK_S), 0))


@kernel(do_not_specialize=["spans", "worth"])
def gather_kernel(
    query_start, chosen, begun, members, pieces, counts, spans, worth,
    UNIT: tl.constexpr, MEMBERS: tl.constexpr, RUNS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
    LONG: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program i: the group whose first member is span i, if there is one. Where it stands in the lists matters not."""
    mine = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    depth, first = tl.load(chosen + mine), tl.load(chosen + spans + mine)
    same = tl.load(chosen + s, mask=s < spans, other=-1) == depth
    same &= tl.load(chosen + spans + s, mask=s < spans, other=-1) == first
    same = tl.where(depth > 0, same, s == mine)
    if tl.min(tl.where(same, s, BLOCK_S), 0) < mine:
        return
    count = tl.sum(same.to(tl.int32), 0)
    depth = tl.where((count >= LEAST) & (depth * UNIT * (count - 1) >= worth), depth, 0)
    runs = tl.minimum(tl.maximum((depth * UNIT + LONG - 1) // LONG, RUNS), MOST)
    size = tl.maximum((depth + runs - 1) // runs, 1)
    runs = (depth + size - 1) // size
    tl.store(begun + s, depth * UNIT, mask=same)
    tl.store(begun + spans + s, runs, mask=same)
    if depth == 0:
        return
    tiles = (count + MEMBERS - 1) // MEMBERS
    offset = tl.atomic_add(counts + 1, count)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    tl.store(members + offset + rank, tl.load(query_start + s, mask=same, other=0), mask=same)
    t = tl.arange(0, BLOCK_T)
    tile, run, here = t // runs, t % runs, t < tiles * runs
    to = pieces + (tl.atomic_add(counts, tiles * runs) + t) * FIELDS
    tl.store(to, offset + tile * MEMBERS, mask=here)
    tl.store(to + 1, tl.minimum(count - tile * MEMBERS, MEMBERS), mask=here)
    tl.store(to + 2, mine, mask=here)
    tl.store(to + 3, run * size, mask=here)
    tl.store(to + 4, tl.minimum(run * size + size, depth), mask=here)
    tl.store(to + 5, run, mask=here)


def find_shared_prefixes(batch: RaggedBatch, sharing: PrefixSharing) -> SharedPrefixes:
    """The lists for a batch. Nothing is read back: it may be captured."""
    spans = len(batch.kv_len)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=batch.kv_len.device)

    chosen, begun, members = ints(2, spans), ints(2, spans), ints(spans)
    pieces, counts = ints(sharing.bound(spans), FIELDS), ints(2).zero_()
    size, most = block(spans, 16), -(-spans // sharing.members) * MOST_RUNS
    depth_kernel[(spans,)](
        *(batch.query_start, batch.kv_len, batch.page_table, chosen, spans, batch.page_table.stride(0), sharing.worth),
        PAGE=batch.page_size, UNIT=sharing.unit, LEAST=LEAST, BLOCK_S=size, BLOCK_P=16, num_warps=4,
    )  # fmt: skip
    gather_kernel[(spans,)](
        *(batch.query_start, chosen, begun, members, pieces, counts, spans, sharing.worth),
        UNIT=sharing.unit, MEMBERS=sharing.members, RUNS=sharing.runs, MOST=MOST_RUNS, LEAST=LEAST, LONG=LONG,
        BLOCK_S=size, BLOCK_T=block(most), FIELDS=FIELDS, num_warps=4,
    )  # fmt: skip
    return SharedPrefixes(begun, members, pieces, counts)
