"""What many sequences begin with is read once for several of them: a step of decode has a kernel ahead of `attention`.

A program attends for the queries of a few sequences together, rows of one tile, over some of the pages that all of
them begin with; `attention` then begins where those end, with what was made of them (Hydragen, Juravsky et al. 2024;
the cascade of FlashInfer, Ye et al. 2024). Nothing is masked, for what is shared is in the past of all.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.ragged import LayerKV
from quire.ops.triton.attention import ahead, fold_blocks, large, slopes
from quire.ops.triton.attention_schedule import AttentionPlan, spread
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait
from quire.ops.triton.shared_prefixes import FIELDS, MOST_RUNS, PrefixPartials, PrefixSharing

CROWD = 32
"""Spans from which on looking for what they share pays, whether or not they do."""

WORTH = 16 << 20
"""Bytes of a layer's K/V that a group has to be spared: about what the launches take to read."""

A_CARD = 2
"""Programs on a multiprocessor."""


@kernel(do_not_specialize=["lines"])
def cascade_kernel(
    q, k, v, table, members, pieces, counts, parts, sums, bend, cap, slope, lines, columns,
    CAP: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FIELDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some of the pieces, one K/V head: a fixed grid walks the list, for most of what could be in it never is."""
    group, first = tl.program_id(0), tl.program_id(1)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    total = tl.load(counts)
    if DEPENDENT:
        if first < total:
            span = tl.load(pieces + first * FIELDS + 2)
            begin = tl.load(pieces + first * FIELDS + 3) * (UNIT // COLUMNS)
            ahead(k, v, table + span.to(tl.int64) * columns, begin, group, GROUPS, DIM, PAGE, COLUMNS)
    wait(DEPENDENT)
    release(DEPENDENT)
    for index in range(first, total, tl.num_programs(1)):
        piece = pieces + index * FIELDS
        offset, count, span = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
        begin, end, run = tl.load(piece + 3), tl.load(piece + 4), tl.load(piece + 5)
        begin, end = begin * (UNIT // COLUMNS), end * (UNIT // COLUMNS)
        token = tl.load(members + offset + r // SHARE, mask=r < count * SHARE, other=0).to(tl.int64)
        row = token * (GROUPS * SHARE) + group * SHARE + r % SHARE
        real = (r < count * SHARE)[:, None] & (d < DIM)[None, :]
        queries = tl.load(q + row[:, None] * DIM + d[None, :], mask=real, other=0.0)
        m = tl.full([ROWS], -1e20, tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        m, z, acc = fold_blocks(
            m, z, acc, queries, r, begin, end, k, v, table + span.to(tl.int64) * columns, group, end * COLUMNS,
            bend, cap, slope, 0, CAP, False, GROUPS, DIM, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION)  # fmt: skip
        line = row + run * lines
        tl.store(parts + line[:, None] * DIM + d[None, :], acc / z[:, None], mask=real)
        tl.store(sums + line, m + tl.log2(z), mask=r < count * SHARE)


def cascade_attention(
    q: Tensor, kv: LayerKV, batch: AttentionPlan, scale: float, window: int, soft_cap: float, card: DeviceInfo
) -> PrefixPartials | None:
    """What groups of sequences make of the pages they share, for `attention` to go on from; None where none is looked
    for: that depends on shapes alone. q and the rest: see `Ops.attention`.

    The lists are read before the wait, so the kernel right behind those that make them is launched plainly.
    """
    tokens, heads, dim = q.shape
    _, groups, page, _ = kv.k.shape
    share, wide, spans = heads // groups, kv.k.element_size(), len(batch.kv_len)
    tile = large(card, dim, wide)
    members = tile.rows // share
    if not card.sms or batch.max_query > 1 or spans < CROWD or window < batch.max_kv or members < 2:
        return None
    unit = math.lcm(page, tile.columns)
    slots = spread(card, groups, A_CARD)
    runs = max(1, min(MOST_RUNS, slots // -(-spans // members)))
    sharing = PrefixSharing(unit, members, runs, WORTH // (2 * groups * dim * wide))
    prefixes, fresh = batch.prefixes(sharing)
    parts = q.new_empty(MOST_RUNS, tokens, heads, dim, dtype=torch.float32)
    sums = q.new_empty(MOST_RUNS, tokens, heads, dtype=torch.float32)
    bend, slope = slopes(scale * kv.k_scale, soft_cap)
    cascade_kernel[(groups, min(slots, len(prefixes.pieces)))](
        *(q, kv.k, kv.v, batch.page_table, prefixes.members, prefixes.pieces, prefixes.counts, parts, sums),
        *(bend, soft_cap, slope, tokens * heads, batch.page_table.stride(0)),
        CAP=soft_cap > 0, GROUPS=groups, SHARE=share, DIM=dim, PAGE=page, UNIT=unit, ROWS=tile.rows,
        COLUMNS=tile.columns, BLOCK_D=block(dim, 16), STAGES=tile.stages, PRECISION=card.precision, FIELDS=FIELDS,
        DEPENDENT=card.dependent, num_warps=tile.warps, **({} if fresh else card.options),
    )  # fmt: skip
    return PrefixPartials(parts, sums, prefixes, sharing)
