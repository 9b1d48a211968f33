"""Paged attention for any mix of spans: one kernel, and a list of pieces that says what each program reads.

Tiles of few rows serve decode and verification, which are bound by reading K/V: a block's tile is contiguous, and many
small programs keep the memory busy. Tiles of many rows serve prompts, which are bound by the matrix units. Softmax is
computed as blocks are read (Milakov and Gimelshein 2018; FlashAttention 2, Dao 2023), in powers of two. A sink is a
score without a value, which the first piece of a tile begins with.

Blocks that many sequences begin with are read once for several of them: a decode step has another kernel before
`attention`. A program attends for the queries of a few sequences together, as rows of one tile, over some of their
shared blocks; `attention` then begins where those end, with the partial results (Hydragen, Juravsky et al. 2024;
cascade attention in FlashInfer, Ye et al. 2024). Nothing is masked, for what is shared is in the past of all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV
from quire.ops.triton.attention_schedule import (
    FEW_SPANS,
    FIELDS,
    MOST_PIECES,
    MOST_RUNS,
    PREFIX_FIELDS,
    AttentionPlan,
    AttentionSchedule,
    PrefixPartials,
    PrefixSharing,
    Tiling,
    first_visible,
    spread,
)
from quire.ops.triton.cells import COARSE, FINE, all_joined, cell_of, first_block, joined
from quire.ops.triton.later import Later
from quire.ops.triton.launch import DeviceInfo, block, fetch, kernel, release, wait
from quire.ops.triton.rows import tanh
from quire.types import UNLIMITED

if TYPE_CHECKING:
    from quire.ops.triton import latent_mma, latent_parts
else:
    latent_mma = Later("latent_mma")
    latent_parts = Later("latent_parts")


@triton.jit
def fold_blocks(
    m, z, acc, q, rotated, position, floor, begin, end, k, v, pages, group, length, bend, cap, slope,
    CAP: tl.constexpr, MASKED: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add blocks begin to end of a sequence to running maximum m, sum z and weighted sum acc of each row.

    A score is the product, with a soft cap if there is one, times `slope`: from there on, powers of two. MASKED: some
    row may not see some of it: each sees positions `floor` to `position`. What is hidden from all is not read into v: a
    weight of 0 times NaN is NaN. A block's index in the table is read one block ahead, so that nothing waits for it.
    ROTATED: v has latents, which are keys, too, and k the rest of keys, so many numbers that are multiplied with
    `rotated`, the same for all groups of heads; there one unit of v is `bend` of k's. 0: k has all of keys.
    """
    i, d = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    KEPT: tl.constexpr = 1 if ROTATED else GROUPS
    if ROTATED:
        group *= 0
    coming = tl.load(pages + begin * COLUMNS // PAGE, mask=begin < end, other=0)
    for b in tl.range(begin, end, num_stages=STAGES):
        at = b * COLUMNS + i
        if PAGE % COLUMNS == 0:
            page = coming.to(tl.int64)
            coming = tl.load(pages + (b + 1) * COLUMNS // PAGE, mask=b + 1 < end, other=0)
            line = (page * KEPT + group) * PAGE + b * COLUMNS % PAGE + i
        else:
            page = tl.load(pages + at // PAGE, mask=at < length, other=0).to(tl.int64)
            line = (page * KEPT + group) * PAGE + at % PAGE
        place = line[:, None] * DIM + d[None, :]
        source = v if ROTATED else k
        if ROTATED and MASKED:
            keys = tl.load(source + place, mask=(at < length)[:, None] & (d < DIM)[None, :], other=0.0)
        elif DIM == BLOCK_D:
            keys = tl.load(source + place)
        else:
            keys = tl.load(source + place, mask=d[None, :] < DIM, other=0.0)
        x = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision=PRECISION)
        if ROTATED:
            if v.dtype.element_ty.primitive_bitwidth == 8:
                x *= bend
            e = tl.arange(0, rotated.shape[1])
            rest = tl.load(k + line[:, None] * ROTATED + e[None, :], mask=e[None, :] < ROTATED, other=0.0)
            x = tl.dot(rotated, tl.trans(rest.to(q.dtype)), x, input_precision=PRECISION)
        if CAP:
            x = tanh(x * bend) * cap
        if MASKED:
            seen = (at[None, :] <= position[:, None]) & (at[None, :] >= floor[:, None])
            x = tl.where(seen, x, -1e30)
        if ROTATED:
            values = keys
        elif MASKED:
            held = ((at < length) & (at >= tl.min(floor, 0)))[:, None]
            values = tl.load(v + place, mask=held & (d < DIM)[None, :], other=0.0)
        elif DIM == BLOCK_D:
            values = tl.load(v + place)
        else:
            values = tl.load(v + place, mask=d[None, :] < DIM, other=0.0)
        top = tl.maximum(m, tl.max(x, 1) * slope)
        weight = tl.exp2(x * slope - top[:, None])
        fade = tl.exp2(m - top)
        z = z * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
        m = top
    return m, z, acc


@triton.jit
def fold_cells(
    all_m, all_z, all_acc, m, z, acc, q, rotated, position, floor, begin, end, k, v, pages, group, length, bend, cap,
    slope, CAP: tl.constexpr, MASKED: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """As `fold_blocks`; where a cell begins, m, z and acc are those of the one before, which is added to all before
    it. FINE, COARSE: see `cell_of`; 0: there are none."""
    if FINE == 0:
        m, z, acc = fold_blocks(
            m, z, acc, q, rotated, position, floor, begin, end, k, v, pages, group, length, bend, cap, slope,
            CAP, MASKED, GROUPS, DIM, ROTATED, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION)  # fmt: skip
    else:
        stop = cell_of(tl.maximum(end - 1, 0), FINE, COARSE) + 1
        for cell in range(cell_of(begin, FINE, COARSE), tl.where(begin < end, stop, 0)):
            since, until = first_block(cell, FINE, COARSE), first_block(cell + 1, FINE, COARSE)
            if since >= begin:
                all_m, all_z, all_acc = joined(all_m, all_z, all_acc, m, z, acc)
                m, z, acc = tl.zeros_like(m) - 1e20, tl.zeros_like(z), tl.zeros_like(acc)
            m, z, acc = fold_blocks(
                m, z, acc, q, rotated, position, floor, tl.maximum(since, begin), tl.minimum(until, end), k, v, pages,
                group, length, bend, cap, slope,
                CAP, MASKED, GROUPS, DIM, ROTATED, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION)  # fmt: skip
    return all_m, all_z, all_acc, m, z, acc


@triton.jit
def fold_phases(
    all_m, all_z, all_acc, m, z, acc, queries, rotated, position, floor, low, high, begin, end, k, v, pages, group,
    length, bend, cap, slope, window, chunk,
    CAP: tl.constexpr, PHASES: tl.constexpr, WINDOWED: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """As `fold_cells`. PHASES: blocks that all rows see, the first of which is at `low` and the last at `high`, need no
    mask."""
    if PHASES:
        clear = begin
        if WINDOWED:
            clear = (first_visible(high, window, chunk) + COLUMNS - 1) // COLUMNS
            clear = tl.minimum(tl.maximum(clear, begin), end)
            all_m, all_z, all_acc, m, z, acc = fold_cells(
                all_m, all_z, all_acc, m, z, acc, queries, rotated, position, floor, begin, clear, k, v, pages, group,
                length, bend, cap, slope, CAP, True, GROUPS, DIM, ROTATED, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION,
                FINE, COARSE)  # fmt: skip
        edge = tl.maximum(tl.minimum((low + 1) // COLUMNS, end), clear)
        all_m, all_z, all_acc, m, z, acc = fold_cells(
            all_m, all_z, all_acc, m, z, acc, queries, rotated, position, floor, clear, edge, k, v, pages, group,
            length, bend, cap, slope, CAP, False, GROUPS, DIM, ROTATED, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION,
            FINE, COARSE)  # fmt: skip
        begin = edge
    all_m, all_z, all_acc, m, z, acc = fold_cells(
        all_m, all_z, all_acc, m, z, acc, queries, rotated, position, floor, begin, end, k, v, pages, group, length,
        bend, cap, slope, CAP, True, GROUPS, DIM, ROTATED, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION,
        FINE, COARSE)  # fmt: skip
    return all_m, all_z, all_acc, m, z, acc


@triton.jit
def ahead(
    k, v, pages, b, group, GROUPS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Prefetch block b's keys and values into L2, a line of 64 numbers at a time; of heads of any other size than a
    power of two only the first, of latents not the rest of keys."""
    LINES: tl.constexpr = DIM // 64 if DIM >= 64 and DIM & (DIM - 1) == 0 else 1
    at = b * COLUMNS + tl.arange(0, COLUMNS)
    page = tl.load(pages + at // PAGE).to(tl.int64)
    line = (page * (1 if ROTATED else GROUPS) + (0 if ROTATED else group)) * PAGE + at % PAGE
    place = line[:, None] * DIM + 64 * tl.arange(0, LINES)[None, :]
    fetch(v, place)
    if not ROTATED:
        fetch(k, place)


@triton.jit
def fold_parts(m, z, acc, row, real, parts, sums, count, lines, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add the first `count` parts of `PrefixPartials` to m, z and acc."""
    d = tl.arange(0, BLOCK_D)
    for run in range(count):
        line = row + run * lines
        part = tl.load(parts + line[:, None] * DIM + d[None, :], mask=real, other=0.0)
        total = tl.load(sums + line, mask=tl.max(real.to(tl.int32), 1) > 0, other=-1e30)
        top = tl.maximum(m, total)
        fade, weight = tl.exp2(m - top), tl.exp2(total - top)
        acc = acc * fade[:, None] + part * weight[:, None]
        z = z * fade + weight
        m = top
    return m, z, acc


@triton.jit
def sunk(m, sinks, head, here):
    """Maximum and sum of rows of such heads that begin with a sink where it is `here`, else with nothing."""
    sink = tl.load(sinks + head, mask=here, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    m = tl.maximum(m, sink)
    return m, tl.exp2(sink - m)


@triton.jit
def piece_of(pieces, at, FIELDS: tl.constexpr):
    """The fields of a piece, see `attention_schedule.FIELDS`."""
    piece = pieces + at * FIELDS
    token, n, first, length = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    begin, end, span, split = tl.load(piece + 4), tl.load(piece + 5), tl.load(piece + 6), tl.load(piece + 7)
    return token, n, first, length, begin, end, span, split, tl.load(piece + 8)


@triton.jit
def attend(
    at, token, n, first, length, begin, end, span, split, before, q, turned, k, v, table, sinks, last, arrived, out,
    parts, sums, begun_parts, begun_sums, bend, cap, slope, v_scale, window, chunk, lines, columns,
    CAP: tl.constexpr, SINKS: tl.constexpr, LAST: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, REAL: tl.constexpr, PHASES: tl.constexpr,
    WINDOWED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, AT_ONCE: tl.constexpr, BEGUN: tl.constexpr,
    FINE: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """Compute piece `at` of the list for one K/V head. SINKS: a tile begins with the sinks of its heads. LAST: tokens
    see positions up to `last`, or the end of their span, instead of their own. FINE: it is computed in cells, of which
    a piece has all, or with SPLIT one."""
    group = tl.program_id(0)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    pages = table + span.to(tl.int64) * columns
    query, head = (first + r) // SHARE, group * SHARE + (first + r) % SHARE
    position = length - n + query
    floor = first_visible(position, window, chunk) if WINDOWED else position * 0
    low = length - n + first // SHARE
    if LAST:
        position = tl.minimum(tl.load(last + token + query, mask=query < n, other=0), length - 1)
        low = tl.min(tl.where(query < n, position, length - 1), 0)
        end = tl.minimum(end, tl.max(position, 0) // COLUMNS + 1)
    row = (token + query).to(tl.int64) * (GROUPS * SHARE) + head
    place = row[:, None] * DIM + d[None, :]
    real = (query < n)[:, None] & (d < DIM)[None, :]
    queries, rotated = tl.load(q + place, mask=real, other=0.0), 0
    if ROTATED:
        e = tl.arange(0, BLOCK_R)
        kept = (query < n)[:, None] & (e < ROTATED)[None, :]
        rotated = tl.load(turned + row[:, None] * ROTATED + e[None, :], mask=kept, other=0.0)
    m = tl.full([ROWS], -1e20, tl.float32)  # above what hidden scores become: their weights are 0, whatever the row
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if SINKS:
        m, z = sunk(m, sinks, head, (query < n) & (split % 65536 == 0))
    if BEGUN:
        m, z, acc = fold_parts(m, z, acc, row, real, begun_parts, begun_sums, before, lines, DIM, BLOCK_D)
    all_m, all_z, all_acc = m, z, acc
    if FINE:
        m, z = tl.full([ROWS], -1e20, tl.float32), tl.zeros([ROWS], tl.float32)
    all_m, all_z, all_acc, m, z, acc = fold_phases(
        all_m, all_z, all_acc, m, z, acc, queries, rotated, position, floor, low,
        length - n + tl.minimum((first + ROWS - 1) // SHARE, n - 1), begin, end, k, v, pages, group, length, bend, cap,
        slope, window, chunk, CAP, PHASES, WINDOWED, GROUPS, DIM, ROTATED, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION,
        0 if SPLIT else FINE, COARSE)  # fmt: skip
    splits, base = split // 65536, at - split % 65536
    rows = tl.minimum(n * SHARE - first, ROWS)
    if FINE:
        if SPLIT and splits > 1:
            cell_handed_in(
                parts, sums, arrived, sinks, out, m, z, acc, v_scale, at, base, splits, group, token * SHARE + first,
                rows, SINKS, GROUPS, SHARE, DIM, ROWS, BLOCK_D, REAL, AT_ONCE)  # fmt: skip
        else:
            m, z, acc = joined(all_m, all_z, all_acc, m, z, acc)
            tl.store(out + place, (acc * (v_scale / tl.maximum(z, 1e-30))[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        acc = acc * (v_scale / tl.maximum(z, 1e-30))[:, None]
        if SPLIT and splits > 1:
            handed_in(parts, sums, arrived, out, acc, m + tl.log2(tl.maximum(z, 1e-30)), real, at, base, splits, group,
                      token * SHARE + first, rows, GROUPS, SHARE, DIM, ROWS, BLOCK_D, REAL, AT_ONCE)  # fmt: skip
        else:
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)


@kernel(do_not_specialize=["lines"])
def attention_kernel(
    q, turned, k, v, table, sinks, last, pieces, count, arrived, starts, out, parts, sums, begun_parts, begun_sums,
    bend, cap, slope, v_scale, window, chunk, lines, columns,
    CAP: tl.constexpr, SINKS: tl.constexpr, LAST: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, SEVERAL: tl.constexpr, REAL: tl.constexpr,
    PHASES: tl.constexpr, WINDOWED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    AT_ONCE: tl.constexpr, BEGUN: tl.constexpr, FINE: tl.constexpr, COARSE: tl.constexpr, FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program's pieces, several if SEVERAL, for one K/V head. SPLIT: a tile may be split into several pieces. PHASES:
    blocks that all rows see need no mask. REAL: the most rows there can be. FINE, COARSE: see `cell_of`; several
    cells are dealt out to programs in turn."""
    release(DEPENDENT)
    group, index, step = tl.program_id(0), tl.program_id(1), 1
    if SEVERAL and FINE:
        stop, step = tl.load(count), tl.num_programs(1)
    elif SEVERAL:
        index, stop = tl.load(starts + index), tl.load(starts + index + 1)
    else:
        stop = tl.minimum(index + 1, tl.load(count))
    token, n, first, length, begin, end, span, split, before = piece_of(pieces, index, FIELDS)
    if DEPENDENT:
        if index < stop:
            ahead(k, v, table + span.to(tl.int64) * columns, begin, group, GROUPS, DIM, ROTATED, PAGE, COLUMNS)
    wait(DEPENDENT)
    if SEVERAL:
        for at in range(index, stop, step):
            token, n, first, length, begin, end, span, split, before = piece_of(pieces, at, FIELDS)
            attend(
                at, token, n, first, length, begin, end, span, split, before, q, turned, k, v, table, sinks, last,
                arrived, out, parts, sums, begun_parts, begun_sums, bend, cap, slope, v_scale, window, chunk, lines,
                columns, CAP, SINKS, LAST, GROUPS, SHARE, DIM, ROTATED, BLOCK_R, PAGE, ROWS, COLUMNS, BLOCK_D, SPLIT,
                REAL, PHASES, WINDOWED, STAGES, PRECISION, AT_ONCE, BEGUN, FINE, COARSE)  # fmt: skip
    elif index < stop:
        attend(
            index, token, n, first, length, begin, end, span, split, before, q, turned, k, v, table, sinks, last,
            arrived, out, parts, sums, begun_parts, begun_sums, bend, cap, slope, v_scale, window, chunk, lines,
            columns, CAP, SINKS, LAST, GROUPS, SHARE, DIM, ROTATED, BLOCK_R, PAGE, ROWS, COLUMNS, BLOCK_D, SPLIT,
            REAL, PHASES, WINDOWED, STAGES, PRECISION, AT_ONCE, BEGUN, FINE, COARSE)  # fmt: skip


@triton.jit
def handed_in(
    parts, sums, arrived, out, acc, total, real, index, base, splits, group, first, rows,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    REAL: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store a piece's partial result; the program that stores the last one of a tile combines them."""
    line = (index * GROUPS + group) * ROWS + tl.arange(0, ROWS)
    place = line[:, None].to(tl.int64) * DIM + tl.arange(0, BLOCK_D)[None, :]
    tl.store(parts + place, acc, mask=real)
    tl.store(sums + line, total)
    tl.debug_barrier()
    if tl.atomic_add(arrived + base * GROUPS + group, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived + base * GROUPS + group, 0)
        together(
            parts, sums, out, base, splits, group, first, rows,
            GROUPS, SHARE, DIM, ROWS, BLOCK_D, REAL, AT_ONCE)  # fmt: skip


@triton.jit
def cell_handed_in(
    parts, sums, arrived, sinks, out, m, z, acc, v_scale, index, base, splits, group, first, rows,
    SINKS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, REAL: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store a cell's sums; the program that stores the last one of a tile adds them up in order. See `together`."""
    i, r, d = tl.arange(0, ROWS), tl.arange(0, REAL), tl.arange(0, BLOCK_D)
    line = (index * GROUPS + group) * REAL + i
    held = i < rows
    tl.store(
        parts + line[:, None].to(tl.int64) * DIM + d[None, :], acc, mask=held[:, None] & (d < DIM)[None, :]
    )  # fmt: skip
    tl.store(sums + 2 * line, m, mask=held)
    tl.store(sums + 2 * line + 1, z, mask=held)
    tl.debug_barrier()
    if tl.atomic_add(arrived + base * GROUPS + group, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived + base * GROUPS + group, 0)
        pair = first + r
        head = group * SHARE + pair % SHARE
        top, total = tl.full([REAL], -1e20, tl.float32), tl.zeros([REAL], tl.float32)
        if SINKS:
            top, total = sunk(top, sinks, head, r < rows)
        top, total, every = all_joined(
            top, total, parts, sums, base, splits, group, rows, GROUPS, DIM, BLOCK_D, REAL, AT_ONCE)  # fmt: skip
        row = (pair // SHARE).to(tl.int64) * (GROUPS * SHARE) + head
        every = every * (v_scale / tl.maximum(total, 1e-30))[:, None]
        inside = (r < rows)[:, None] & (d < DIM)[None, :]
        tl.store(out + row[:, None] * DIM + d[None, :], every.to(out.dtype.element_ty), mask=inside)


@triton.jit
def together(
    parts, sums, out, base, splits, group, first, rows,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    REAL: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of a tile and write the result. Many are read at once, since latency is the cost; each thread
    adds up its own numbers, so that none waits for others.

    Other multiprocessors wrote them, so this one's L1 cache is bypassed. REAL: a power of two that holds `rows`; row i
    is number first + i of the step's (token, head of this group) pairs.
    """
    r, d = tl.arange(0, REAL), tl.arange(0, BLOCK_D)
    m = tl.full([REAL], -1e30, tl.float32)
    z = tl.zeros([REAL], tl.float32)
    acc = tl.zeros([REAL, BLOCK_D], tl.float32)
    for begin in range(0, splits, AT_ONCE):
        totals, read = (), ()
        for s in tl.static_range(AT_ONCE):
            line = ((base + begin + s) * GROUPS + group) * ROWS + r
            held = (begin + s < splits) & (r < rows)
            totals += (tl.load(sums + line, mask=held, other=-1e30, cache_modifier=".cg"),)  # type: ignore[assignment]
            place = line[:, None].to(tl.int64) * DIM + d[None, :]
            mask = held[:, None] & (d < DIM)[None, :]
            read += (tl.load(parts + place, mask=mask, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        top = m
        for s in tl.static_range(AT_ONCE):
            top = tl.maximum(top, totals[s])
        fade = tl.exp2(m - top)
        acc *= fade[:, None]
        z *= fade
        for s in tl.static_range(AT_ONCE):
            weight = tl.exp2(totals[s] - top)
            acc += read[s] * weight[:, None]
            z += weight
        m = top
    pair = first + r
    row = (pair // SHARE).to(tl.int64) * (GROUPS * SHARE) + group * SHARE + pair % SHARE
    inside = (r < rows)[:, None] & (d < DIM)[None, :]
    tl.store(out + row[:, None] * DIM + d[None, :], (acc / z[:, None]).to(out.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """How a tile is computed. a_card: programs wanted per multiprocessor, which decides into how many pieces few tiles
    are split; 0: they are not split. run: blocks below which a piece is not worth splitting off, see `Tiling` for
    `short`. slim: it takes 160 registers per thread, others nearly all. parts: it is of latents, `stages` buffers of
    which are in shared memory: 1: `latent_mma` computes it; more: `latent_parts`, with latents cut into so many. cells:
    sums have one order, see `cells`."""

    rows: int
    columns: int
    warps: int
    stages: int
    a_card: int
    run: int = 1
    slim: bool = False
    parts: int = 0
    cells: bool = False
    short: int = UNLIMITED

    def blocks_of_cells(self) -> tuple[int, int]:
        """See `cells.cell_of`; there are none: 0."""
        return (FINE // self.columns, COARSE // self.columns) if self.cells else (0, 0)

    def spread(self, card: DeviceInfo, groups: int, spans: int) -> int:
        """Programs of each K/V head among which spans are divided: many spans, among as many as the GPU holds at
        once. `latent_mma` has one program a multiprocessor. Of few spans cells are divided, of others none."""
        if self.cells:
            return spread(replace(card, sms=card.units), groups, 2 if LEAST_CUT * spans * groups <= card.units else 0)
        if self.parts:
            return spread(card, groups, self.a_card)
        held = 2048 // (self.warps * (160 if self.slim else 256))
        return spread(card, groups, min(self.a_card, 1) * held if spans > FEW_SPANS else self.a_card)


def on_hopper(card: DeviceInfo) -> bool:
    """Whether operands of the matrix units can stay in shared memory; elsewhere they take registers."""
    return (9, 0) <= card.capability < (10, 0)


def width(q: Tensor, kv: LayerKV) -> int:
    """Bytes of a number as it is multiplied: as K/V has it, but with queries in float32 all becomes float32."""
    return q.element_size() if q.dtype is torch.float32 else kv.k.element_size()


def large(card: DeviceInfo, dim: int, wide: int) -> Tile:
    """A tile of many rows. Its columns are those of tiles of few rows, so that one can continue where the other
    ends."""
    columns = 64 if dim * wide <= 256 else 32 if dim * wide <= 512 else 16
    rows = 64 if dim * wide <= 512 and (on_hopper(card) or wide <= 2) else 32
    warps = 4 if on_hopper(card) or (dim <= 128 and wide <= 2) else 8
    return Tile(rows, columns, warps, 3 if on_hopper(card) and dim * wide <= 256 else 2, 0)


SHORT_BLOCKS = 24
"""Runs of 64 tokens of one or two spans above which pieces of two are faster (measured, H200): fewer are combined."""


def tiles(card: DeviceInfo, share: int, dim: int, wide: int, most: int, spans: int) -> list[tuple[Tile, int, int]]:
    """The launches for spans of up to `most` queries: (tile, least queries, most). wide: see `width`.

    A few queries are rows of one small tile; longer spans, if there can be any, use large tiles in a launch of their
    own. All are rows of one kind of tile where nothing may depend on the batch. A handful of spans is read in fewer
    and longer pieces, of which more blocks are loaded at once.
    """
    few = max(1, 64 // share)
    columns = large(card, dim, wide).columns
    warps, run = 2 if dim <= 128 and wide <= 2 else 4, 64 // columns
    small = Tile(16, columns, warps, 2, 4, run, slim=dim <= 64 and wide <= 2 and most == 1)
    if not card.sms:
        # Hopper's asynchronous units are the faster ones for a single query, too: 15 us instead of 23 (measured).
        one = (large(card, dim, wide) if on_hopper(card) and wide <= 2 else small)._replace(cells=True)
        return [(one, 1, most)]
    if spans <= 2:
        # The last program of a tile should have room for all that the others have made.
        small = small._replace(warps=4 if block(share) * dim >= 1024 else warps, short=SHORT_BLOCKS * run)
    if 2 < spans <= FEW_SPANS and on_hopper(card):
        small = small._replace(stages=4 if dim > 64 else 3, a_card=2)
    if most <= few:
        rows = max(16, block(most * share)) if most * share <= 64 else 64
        return [(small._replace(rows=rows, warps=small.warps if rows == 16 else 4), 1, most)]
    short = max(1, 16 // share)
    if on_hopper(card) and dim == 256 and wide <= 2:
        return [(small, 1, short), (Tile(128, 64, 8, 2, 0), short + 1, most)]
    return [(small, 1, short), (large(card, dim, wide), short + 1, most)]


LEAST_CUT = 1
"""Multiprocessors a program of uncut spans from which on their cells are divided among programs: 16 sequences of 8,000
take 156 us instead of 201, and of 576 tokens 28.0 instead of 29.3 (H200)."""

PART_RUN = 4
"""Blocks of a piece of a part of a chunk at least: short contexts are not worth combining (measured, H200)."""


def part_tiles(card: DeviceInfo, share: int, dim: int, wide: int, most: int, spans: int) -> list[tuple[Tile, int, int]]:
    """As `tiles`, of parts of chunks, which are bound by arithmetic as prompts are."""
    ((tile, least, _),) = tiles(card, share, dim, wide, most, spans)
    return [(tile._replace(run=PART_RUN * tile.run, stages=large(card, dim, wide).stages), least, most)]


MOST_SHARING = 64
"""Heads of a program at most that read the same latents; more are groups of so many, which read them again."""


MOST_CUT = 32
"""Heads up to which chunks of latents are cut: tiles of more have one query, and are as many as queries are."""

LATER_SPANS = 8
"""Spans up to which a kernel of its own combines their pieces of latents, which are more of each the fewer spans there
are: one program took 16 us for the 64 of one span, the kernel takes 3 (measured, H200)."""


def latent_tiles(
    card: DeviceInfo, share: int, dim: int, wide: int, most: int, spans: int, ringed: bool = False
) -> list[tuple[Tile, int, int]]:
    """As `tiles`, of latents, whose weighted sums fill the registers even of tiles of few rows (measured, H200).
    ringed: `latent_mma` takes those of 16 and of 32 rows."""
    if wide > 2 or card.shared < 200 << 10:
        sizes = [Tile(16, 16, 4, 2, 2)]
    elif ringed:
        few, more = Tile(16, 64, 8, 3, 1, 1 if spans <= LATER_SPANS else 2, parts=1), Tile(32, 32, 8, 5, 1, 4, parts=2)
        sizes = [few, more, Tile(64, 64, 8, 2, 1)]
    else:
        sizes = [Tile(16, 32, 4, 3, 1, 4), Tile(32, 32, 4, 3, 1, 4), Tile(64, 64, 8, 2, 1)]
    if not card.sms:
        return [(sizes[0], 1, most)]
    alone = next((tile for tile in sizes if share <= tile.rows), sizes[-1])
    whole = next((tile for tile in sizes if most * share <= tile.rows), None)
    if whole is not None:
        return [(whole, 1, most)]
    short = max(1, alone.rows // share)
    return [(alone, 1, short), (sizes[-1]._replace(a_card=0), short + 1, most)][: 1 + (most > short)]


def slopes(scale: float, soft_cap: float) -> tuple[float, float]:
    """What `fold_blocks` calls bend and slope, for products that are scaled by `scale`."""
    log2e = 1.4426950408889634
    return (scale / soft_cap, log2e) if soft_cap else (0.0, scale * log2e)


LONG_CONTEXT = 2048
"""Positions that a chunk's queries may see from which on they are divided among programs: with contexts of 1,000 tokens
that is faster, without any as fast on average (measured, H200)."""


def cut_chunks(
    batch: AttentionPlan, q: Tensor, groups: int, how: Scores, card: DeviceInfo, longest: int, most: int = UNLIMITED
) -> AttentionPlan:
    """The batch, in spans of a tile's queries where a step's tiles are too few to keep the GPU busy and each may have
    to read a long context: `tiles` divides the positions of such spans among programs. groups: of heads that read the
    same, up to `most` each. See `attention`."""
    heads, few = q.shape[1], 64 * groups // q.shape[1]
    reach = min(how.window, how.chunk, batch.max_kv)
    chunked = 0 < few < batch.max_query <= longest and how.is_causal(batch) and heads <= most * groups
    if card.sms and chunked and reach >= LONG_CONTEXT and 4 * len(q) * heads <= 5 * 64 * card.sms:
        return batch.in_spans_of(few)
    return batch


def attention(
    q: Tensor, kv: LayerKV, batch: AttentionPlan, how: Scores, card: DeviceInfo, begun: PrefixPartials | None = None,
    longest: int = UNLIMITED, rotated: Tensor | None = None, late: bool = False,
) -> Tensor:  # fmt: skip
    """See `Ops.attention`, and with `rotated` `Ops.latent_attention`. Rows that belong to no span are not written.
    begun: partial results over shared prefixes. longest: spans of more queries are left out. late: the preceding kernel
    makes the block table. That and the list of pieces are read before the wait: behind what makes them the kernel is
    launched without overlap, or waits first.
    """
    _, heads, dim = q.shape
    _, groups, page, _ = kv.k.shape
    if rotated is not None and heads % MOST_SHARING == 0:
        groups = heads // MOST_SHARING
    share = heads // groups
    out = torch.empty_like(q)
    window, chunk, soft_cap, sinks = how.window, how.chunk, how.soft_cap, how.sinks
    bend, slope = slopes(how.scale * kv.k_scale, soft_cap)
    if rotated is not None:
        bend = kv.v_scale / kv.k_scale
    last = batch.last(how.ahead)
    sharing = begun.sharing if begun else None
    turns, cut = 0, cut_chunks(batch, q, groups, how, card, longest, UNLIMITED if rotated is None else MOST_CUT)
    choose = tiles if cut is batch else part_tiles
    if rotated is not None:
        turns, choose = rotated.shape[-1], partial(latent_tiles, ringed=latent_mma.takes(q, rotated, kv, card))
    batch = cut
    longest = min(longest, batch.max_query)
    for tile, least, most in choose(card, share, dim, width(q, kv), longest, len(batch.kv_len)):
        room = tile.spread(card, groups, len(batch.kv_len)) if most * share <= tile.rows else 0
        cells = tile.blocks_of_cells()
        tiling = Tiling(
            share, tile.rows, tile.columns, least, most, room, tile.run, window, sharing, chunk, last is None,
            cells if room else (0, 0), tile.short,
        )  # fmt: skip
        work, fresh = batch.work(tiling, groups)
        bound = len(work.arrived)
        real, wide = min(tile.rows, block(most * share)), block(dim, 16)
        height = real if tile.cells else tile.rows
        parts = q.new_empty(bound * groups * height * dim if room else 1, dtype=torch.float32)
        sums = q.new_empty(2 * bound * groups * height if room else 1, dtype=torch.float32)
        several = work.several
        grid = groups, room if several else bound
        if tile.parts and rotated is not None:
            attend_ringed(
                *(q, rotated, kv, batch, tile, work, (out, parts, sums), slope, share, room, card, fresh, late)
            )
            continue
        attention_kernel[grid](
            *(q, q if rotated is None else rotated, kv.k, kv.v, batch.page_table, q if sinks is None else sinks),
            batch.kv_len if last is None else last,
            *work[:3],
            *(work.total if work.starts is None else work.starts, out, parts, sums),
            *(begun[:2] if begun else (parts, sums)),
            *(bend, soft_cap, slope, kv.v_scale, window, chunk, len(q) * heads, batch.page_table.stride(0)),
            CAP=soft_cap > 0, SINKS=sinks is not None, LAST=last is not None, GROUPS=groups, SHARE=share, DIM=dim,
            ROTATED=turns, BLOCK_R=block(turns, 16), PAGE=page, ROWS=tile.rows, COLUMNS=tile.columns, BLOCK_D=wide,
            SPLIT=room > 0, SEVERAL=several, REAL=real,
            PHASES=tile.rows >= 64, AT_ONCE=max(1, min(8 if tile.cells else 4 if several else 16,
            4096 * tile.warps // (real * wide))), WINDOWED=min(window, chunk) < batch.max_kv, STAGES=tile.stages,
            PRECISION=card.precision, BEGUN=begun is not None, FINE=cells[0], COARSE=cells[1], FIELDS=FIELDS,
            DEPENDENT=card.dependent,
            num_warps=tile.warps, **card.launch(fresh or late),
        )  # fmt: skip
    return out


def attend_ringed(
    q: Tensor, rotated: Tensor, kv: LayerKV, batch: AttentionPlan, tile: Tile, work: AttentionSchedule,
    results: tuple[Tensor, Tensor, Tensor], slope: float, share: int, room: int, card: DeviceInfo, fresh: bool,
    late: bool,
) -> None:  # fmt: skip
    """`attention` of one kind of tile by `latent_mma` or `latent_parts`. results: out, parts and sums. room: among how
    many programs spans are divided. fresh: the list has just been made."""
    (bound, groups), dim = work.arrived.shape, q.shape[2]
    several, later = work.several, room > 0 and len(batch.kv_len) <= LATER_SPANS
    sizes = {"GROUPS": groups, "SHARE": share, "DIM": dim, "ROWS": tile.rows, "FIELDS": FIELDS}
    grid = groups, room if several else bound
    attend = latent_mma.latent_kernel[grid]
    if tile.parts > 1:
        attend = partial(latent_parts.latent_kernel[grid], PARTS=tile.parts)
    attend(
        *(q, rotated, kv.k, kv.v, batch.page_table, *work[:3], work.starts if several else work.total, *results),
        *(slope, kv.v_scale, batch.page_table.stride(0)),
        ROTATED=rotated.shape[2], PAGE=kv.k.shape[2], COLUMNS=tile.columns, RING=tile.stages,
        SPLIT=room > 0, SEVERAL=several, LATER=later, LATE=late, AT_ONCE=max(1, 4096 * tile.warps // (tile.rows * dim)),
        DEPENDENT=card.dependent, num_warps=tile.warps, **sizes, **card.launch(fresh),
    )  # fmt: skip
    if later:
        rows = min(tile.rows, batch.max_query * share)
        latent_mma.combine_kernel[len(batch.kv_len) * groups, rows, 4](
            *(work.pieces, work.total, *results[1:], results[0]),
            SLICE=dim // 4, BOUND=block(bound), MOST=MOST_PIECES, DEPENDENT=card.dependent, num_warps=4, **sizes,
            **card.options,
        )  # fmt: skip


MIN_CASCADE_SPANS = 32
"""Spans from which on looking for shared prefixes pays, whether or not there are any."""

MIN_BYTES_SAVED = 16 << 20
"""Bytes of a layer's K/V that a group must save: about what can be read in the time of the launches."""

PROGRAMS_PER_SM = 2
"""Programs of `cascade_kernel` per multiprocessor."""


@kernel(do_not_specialize=["lines"])
def cascade_kernel(
    q, k, v, table, members, pieces, counts, parts, sums, bend, cap, slope, lines, columns,
    CAP: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FIELDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some of the pieces, for one K/V head: a fixed grid walks the list, which is mostly shorter than it could be."""
    group, first = tl.program_id(0), tl.program_id(1)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    total = tl.load(counts)
    if DEPENDENT:
        if first < total:
            span = tl.load(pieces + first * FIELDS + 2)
            begin = tl.load(pieces + first * FIELDS + 3) * (UNIT // COLUMNS)
            ahead(k, v, table + span.to(tl.int64) * columns, begin, group, GROUPS, DIM, 0, PAGE, COLUMNS)
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
            m, z, acc, queries, 0, r, r, begin, end, k, v, table + span.to(tl.int64) * columns, group, end * COLUMNS,
            bend, cap, slope, CAP, False, GROUPS, DIM, 0, PAGE, COLUMNS, BLOCK_D, STAGES, PRECISION)  # fmt: skip
        line = row + run * lines
        tl.store(parts + line[:, None] * DIM + d[None, :], acc / z[:, None], mask=real)
        tl.store(sums + line, m + tl.log2(z), mask=r < count * SHARE)


def cascade_attention(
    q: Tensor, kv: LayerKV, batch: AttentionPlan, how: Scores, card: DeviceInfo
) -> PrefixPartials | None:
    """Partial results of groups of sequences over the blocks that they share, from which `attention` continues; None
    where sharing is not looked for, which depends on shapes alone. q and the rest: see `Ops.attention`.

    The lists are read before the wait, so the kernel right after those that make them is launched without overlap.
    """
    tokens, heads, dim = q.shape
    _, groups, page, _ = kv.k.shape
    share, wide, spans = heads // groups, width(q, kv), len(batch.kv_len)
    tile = large(card, dim, wide)
    members = tile.rows // share
    limited = min(how.window, how.chunk) < batch.max_kv
    if not card.sms or batch.max_query > 1 or spans < MIN_CASCADE_SPANS or limited or members < 2:
        return None
    unit = math.lcm(page, tile.columns)
    slots = spread(card, groups, PROGRAMS_PER_SM)
    runs = max(1, min(MOST_RUNS, slots // -(-spans // members)))
    sharing = PrefixSharing(unit, members, runs, MIN_BYTES_SAVED // (2 * groups * dim * kv.k.element_size()))
    prefixes, fresh = batch.prefixes(sharing)
    parts = q.new_empty(MOST_RUNS, tokens, heads, dim, dtype=torch.float32)
    sums = q.new_empty(MOST_RUNS, tokens, heads, dtype=torch.float32)
    bend, slope = slopes(how.scale * kv.k_scale, how.soft_cap)
    cascade_kernel[(groups, min(slots, len(prefixes.pieces)))](
        *(q, kv.k, kv.v, batch.page_table, prefixes.members, prefixes.pieces, prefixes.counts, parts, sums),
        *(bend, how.soft_cap, slope, tokens * heads, batch.page_table.stride(0)),
        CAP=how.soft_cap > 0, GROUPS=groups, SHARE=share, DIM=dim, PAGE=page, UNIT=unit, ROWS=tile.rows,
        COLUMNS=tile.columns, BLOCK_D=block(dim, 16), STAGES=tile.stages, PRECISION=card.precision,
        FIELDS=PREFIX_FIELDS, DEPENDENT=card.dependent, num_warps=tile.warps, **card.launch(fresh),
    )  # fmt: skip
    return PrefixPartials(parts, sums, prefixes, sharing)
