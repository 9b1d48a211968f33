"""Attention of 16 rows to latents, which go from memory into a ring of buffers in shared memory.

A multiprocessor has one program. While its warps multiply a tile, the next ones are on their way, those of its next
piece, too: nothing is waited for between pieces. Latents are read from shared memory twice, as keys and as values, and
queries stay in registers. What earlier steps wrote is asked for before the preceding kernel has ended. Written in
Gluon, Triton's language of explicit layouts, which its interpreter does not run: where there is no GPU, and for what
does not fit (`takes`), `attention` has the same results.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon.language as gl
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.ops.ragged import LayerKV
from quire.ops.triton import launch
from quire.ops.triton.gluon_language import LEAST, barrier, copy, release, wait
from quire.ops.triton.launch import DeviceInfo, Kernel, kernel

PIECE = gl.constexpr(128)
"""Numbers of queries and keys whose products are summed by themselves."""


@gluon.jit
def listed(place):
    """A number of the lists, which all layers read: it stays in the L2 cache while latents pass through it."""
    return gl.load(place, eviction_policy="evict_last")


@gluon.jit
def lines_of(table, block, length, PAGE: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a block's tokens are in the pools; those past `length`: anywhere."""
    at = block * COLUMNS + gl.arange(0, COLUMNS, LAYOUT)
    page = gl.load(table + at // PAGE, mask=at < length, other=0, eviction_policy="evict_last")
    return page.to(gl.int64) * PAGE + at % PAGE


@gluon.jit
def copy_tile(shared, source, line, block, length, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for a block's numbers [tokens, DIM]; zeros past `length`."""
    COLUMNS: gl.constexpr = shared.shape[0]
    at = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    copy(shared, source + line[:, None] * DIM + d[None, :], mask=(at < length)[:, None] & (d < DIM)[None, :])


@gluon.jit
def next_block(at, block, end, length, row, stop, pieces, columns, FIELDS: gl.constexpr):
    """A cursor's next block: of its piece, or the first one of the next piece, if that is before `stop`."""
    block += 1
    if block >= end:
        at += 1
        if at < stop:
            piece = pieces + at * FIELDS
            length, block, end = listed(piece + 3), listed(piece + 4), listed(piece + 5)
            row = listed(piece + 6).to(gl.int64) * columns
    return at, block, end, length, row


@gluon.jit
def ask(
    slot, cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE: gl.constexpr, LAYOUT: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    """Ask for the cursor's block, if its piece is before `stop`, and go on to the next one, whose lines are looked up.

    cursor: piece, block, end of the piece's blocks, length, first page in the table, and lines of the block's tokens.
    """
    COLUMNS: gl.constexpr = latents.shape[1]
    at, block, end, length, row, line = cursor
    seen = gl.where(at < stop, length, 0)
    copy_tile(latents.index(slot), v, line, block, seen, latents.shape[2], LAYOUT)
    copy_tile(rests.index(slot), k, line, block, seen, rests.shape[2], LAYOUT)
    async_copy.commit_group()
    at, block, end, length, row = next_block(at, block, end, length, row, stop, pieces, columns, FIELDS)
    seen = gl.where(at < stop, length, 0)
    return at, block, end, length, row, lines_of(table + row, block, seen, PAGE, COLUMNS, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def pieces_of(starts, count, index, SEVERAL: gl.constexpr, LATE: gl.constexpr, DEPENDENT: gl.constexpr):
    """The first piece of program `index`, and the one after its last. LATE: nothing may be read before the wait."""
    if LATE:
        wait(DEPENDENT)
        release(DEPENDENT)
    if SEVERAL:
        stop, index = listed(starts + index + 1), listed(starts + index)
    else:
        stop = gl.minimum(index + 1, listed(count))
    return index, stop


@gluon.jit
def place_cursor(
    pieces, table, columns, index, stop, PAGE: gl.constexpr, COLUMNS: gl.constexpr, RING: gl.constexpr,
    FIELDS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The cursor at a program's first block, and whether the first ones are of one piece and all in the past: no kernel
    of this step writes to those."""
    # Where this program has no piece it reads what nothing was written to, and masks it.
    piece, live = pieces + index * FIELDS, index < stop
    n, length = listed(piece + 1), gl.where(live, listed(piece + 3), 0)
    block, end = gl.where(live, listed(piece + 4), 0), listed(piece + 5)
    row = listed(piece + 6).to(gl.int64) * columns
    line = lines_of(table + row, block, length, PAGE, COLUMNS, gl.SliceLayout(1, COPIED))
    early = live & (block + RING - 1 <= end) & ((block + RING - 1) * COLUMNS <= length - n)
    return (index, block, end, length, row, line), early


@gluon.jit
def ask_first(
    cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE: gl.constexpr, LAYOUT: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    """Ask for as many blocks as are on their way at once."""
    for s in gl.static_range(latents.shape[0] - 1):
        cursor = ask(s, cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, LAYOUT, FIELDS)
    return cursor


@gluon.jit
def read_queries(
    q, turned, token, n, first, group, GROUPS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr,
    ROTATED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """A tile's queries: what is rotated of them, and the rest, PIECE numbers each."""
    WARPS: gl.constexpr = gl.num_warps()
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    read = (numbers_of(turned, token, n, first, group, GROUPS, SHARE, ROTATED, ROWS, 0, ROTATED, R),)
    for j in gl.static_range(DIM // PIECE):
        part = numbers_of(q, token, n, first, group, GROUPS, SHARE, DIM, ROWS, j * PIECE, PIECE, Q)
        read = read + (part,)  # type: ignore[assignment]
    return read


@gluon.jit
def numbers_of(
    x, token, n, first, group, GROUPS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr,
    START: gl.constexpr, WIDE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Numbers START to START + WIDE of a tile's rows of x [tokens, heads, DIM]."""
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    d = START + gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
    row = (token + r // SHARE).to(gl.int64) * (GROUPS * SHARE) + group * SHARE + r % SHARE
    return gl.load(x + row[:, None] * DIM + d[None, :], mask=(r // SHARE < n)[:, None], other=0.0)


@gluon.jit
def fold_tile(m, z, acc, held, weights, keys, rest, number, position, slope):
    """Add tile `number` of a sequence to running maximum m, sums z of each column and weighted sum acc, as
    `attention.fold_blocks`. position: of the query of each row."""
    SUMS: gl.constexpr = acc.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    COLUMNS: gl.constexpr = keys.shape[0]
    none = gl.zeros_like(z)
    x = mma_v2(held[0], rest.permute((1, 0)).load(B), none)
    for j in gl.static_range(keys.shape[1] // PIECE):
        part = keys.slice(j * PIECE, PIECE, dim=1).permute((1, 0)).load(B)
        # Sums of their own: products wait for each other.
        x += mma_v2(held[1 + j], part, none)
    at = number * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
    x = gl.where(at[None, :] <= position[:, None], x, -1e30)
    top = gl.maximum(m, gl.max(x, 1) * slope)
    weight = gl.exp2(x * slope - top[:, None])
    fade = gl.exp2(m - top)
    z = z * fade[:, None] + weight
    weights.store(weight.to(weights.dtype))
    acc *= fade[:, None]
    for j in gl.static_range(COLUMNS // 32):
        chosen = weights.slice(j * 32, 32, dim=1).load(A)
        acc = mma_v2(chosen, keys.slice(j * 32, 32, dim=0).load(B), acc)
    return top, z, acc


@gluon.jit
def together(
    parts, sums, out, base, splits, group, first, rows, GROUPS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr,
    ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """As `attention.together`: combine the pieces of a tile in their order and write the result."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    m = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, LAYOUT))
    z = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([ROWS, DIM], gl.float32, LAYOUT)
    for begin in range(0, splits, AT_ONCE):
        totals = ()
        read = ()
        top = m
        for s in gl.static_range(AT_ONCE):
            line = ((base + begin + s) * GROUPS + group) * ROWS + r
            held = (r < rows) & (begin + s < splits)
            x = gl.load(sums + line, mask=held, other=-1e30, cache_modifier=".cg")
            place = line[:, None].to(gl.int64) * DIM + d[None, :]
            part = gl.load(parts + place, mask=held[:, None], other=0.0, cache_modifier=".cg")
            top = gl.maximum(top, x)
            totals = totals + (x,)  # type: ignore[assignment]
            read = read + (part,)  # type: ignore[assignment]
        fade = gl.exp2(m - top)
        acc *= fade[:, None]
        z *= fade
        for s in gl.static_range(AT_ONCE):
            weight = gl.exp2(totals[s] - top)
            acc += read[s] * weight[:, None]
            z += weight
        m = top
    pair = first + r
    row = (pair // SHARE).to(gl.int64) * (GROUPS * SHARE) + group * SHARE + pair % SHARE
    gl.store(
        out + row[:, None] * DIM + d[None, :], (acc / z[:, None]).to(out.dtype.element_ty), mask=(r < rows)[:, None]
    )


@gluon.jit
def give(
    m, z, acc, token, n, first, split, mine, group, arrived, out, parts, sums, v_scale, GROUPS: gl.constexpr,
    SHARE: gl.constexpr, SPLIT: gl.constexpr, LATER: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Write the result of piece `mine`, or its part, see `attention.handed_in`; LATER: for `combine_kernel`."""
    SUMS: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    DIM: gl.constexpr = acc.shape[1]
    total = gl.maximum(gl.sum(z, 1), 1e-30)
    acc *= (v_scale / total)[:, None]
    splits, base = split // 65536, mine - split % 65536
    r, d = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    query = (first + r) // SHARE
    real = (query < n)[:, None]
    if SPLIT and splits > 1:
        place = (mine * GROUPS + group) * ROWS + r
        gl.store(parts + place[:, None].to(gl.int64) * DIM + d[None, :], acc, mask=real)
        gl.store(sums + place, m + gl.log2(total))
        if not LATER:
            barrier()
            if gl.atomic_add(arrived + base * GROUPS + group, 1, sem="acq_rel") == splits - 1:
                gl.store(arrived + base * GROUPS + group, 0)
                together(parts, sums, out, base, splits, group, token * SHARE + first,
                         gl.minimum(n * SHARE - first, ROWS), GROUPS, SHARE, DIM, ROWS, AT_ONCE)  # fmt: skip
    else:
        to = (token + query).to(gl.int64) * (GROUPS * SHARE) + group * SHARE + (first + r) % SHARE
        gl.store(out + to[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=real)


@Kernel
@gluon.jit
def latent_kernel(
    q, turned, k, v, table, pieces, count, arrived, starts, out, parts, sums, slope, v_scale, columns,
    GROUPS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr, ROTATED: gl.constexpr, PAGE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, SPLIT: gl.constexpr, SEVERAL: gl.constexpr, LATER: gl.constexpr,
    LATE: gl.constexpr, RING: gl.constexpr, AT_ONCE: gl.constexpr, FIELDS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A program's pieces, several if SEVERAL; see `attention.attention_kernel` for the letters.

    LATER: `combine_kernel` combines them. LATE: the preceding kernel has written the block table. RING: buffers of
    COLUMNS tokens, of which all but one are on their way while that is multiplied.
    """
    DTYPE: gl.constexpr = q.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [ROWS // 16, WARPS * 16 // ROWS], [16, 8])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    latents = gl.allocate_shared_memory(DTYPE, [RING, COLUMNS, DIM], SHARED)
    rests = gl.allocate_shared_memory(DTYPE, [RING, COLUMNS, ROTATED], SHARED)
    weights = gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], SHARED)
    group = gl.program_id(0)
    index, stop = pieces_of(starts, count, gl.program_id(1), SEVERAL, LATE, DEPENDENT)
    cursor, early = place_cursor(pieces, table, columns, index, stop, PAGE, COLUMNS, RING, FIELDS, COPIED)
    if early:
        cursor = ask_first(cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, FIELDS)
    if not LATE:
        wait(DEPENDENT)
        release(DEPENDENT)
    if not early:
        cursor = ask_first(cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, FIELDS)
    slot = 0
    for mine in range(index, stop):
        piece = pieces + mine * FIELDS
        token, n, first, upto = gl.load(piece), gl.load(piece + 1), gl.load(piece + 2), gl.load(piece + 3)
        begin, until, split = gl.load(piece + 4), gl.load(piece + 5), gl.load(piece + 7)
        position = upto - n + (first + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))) // SHARE
        read = read_queries(q, turned, token, n, first, group, GROUPS, SHARE, DIM, ROTATED, ROWS)
        held = ()
        for j in gl.static_range(1 + DIM // PIECE):
            held = held + (gl.convert_layout(read[j], gl.DotOperandLayout(0, SUMS, 2)),)  # type: ignore[assignment]
        m = gl.full([ROWS], -1e20, gl.float32, gl.SliceLayout(1, SUMS))
        z, acc = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS), gl.zeros([ROWS, DIM], gl.float32, SUMS)
        for number in range(begin, until):
            async_copy.wait_group(RING - 2)
            barrier()
            # All have read the buffer before this one's.
            free = gl.where(slot == 0, RING - 1, slot - 1)
            cursor = ask(free, cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, FIELDS)
            m, z, acc = fold_tile(
                m, z, acc, held, weights, latents.index(slot), rests.index(slot), number, position, slope
            )
            slot = gl.where(slot == RING - 1, 0, slot + 1)
        give(m, z, acc, token, n, first, split, mine, group, arrived, out, parts, sums, v_scale,
             GROUPS, SHARE, SPLIT, LATER, AT_ONCE)  # fmt: skip
    async_copy.wait_group(0)


@kernel
def combine_kernel(
    pieces, count, parts, sums, out,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr,
    BOUND: tl.constexpr, MOST: tl.constexpr, FIELDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (span and group, row, slice): combine the pieces of a span that is one tile, SLICE numbers of a row.

    Where few spans are cut into many pieces, which all end at once, one program a tile would take longer than they did.
    BOUND: a power of two that holds the list; MOST: one that holds a span's pieces.
    """
    span, group, r = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS, tl.program_id(1)
    i, s, d = tl.arange(0, BOUND), tl.arange(0, MOST), tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    own = tl.load(pieces + i * FIELDS + 6, mask=i < tl.load(count), other=-1) == span
    base, splits = tl.min(tl.where(own, i, BOUND), 0), tl.sum(own.to(tl.int32), 0)
    token = tl.load(pieces + base * FIELDS, mask=splits > 0, other=0)
    n = tl.load(pieces + base * FIELDS + 1, mask=splits > 0, other=0)
    launch.wait(DEPENDENT)
    launch.release(DEPENDENT)
    if (splits > 1) & (r < n * SHARE):
        line = ((base + s) * GROUPS + group) * ROWS + r
        x = tl.load(sums + line, mask=s < splits, other=-1e30)
        read = tl.load(parts + line[:, None].to(tl.int64) * DIM + d[None, :], mask=(s < splits)[:, None], other=0.0)
        weight = tl.exp2(x - tl.max(x, 0))
        mean = tl.sum(read * weight[:, None], 0) / tl.sum(weight, 0)
        row = (token + r // SHARE).to(tl.int64) * (GROUPS * SHARE) + group * SHARE + r % SHARE
        tl.store(out + row * DIM + d, mean.to(out.dtype.element_ty))


def takes(q: Tensor, rotated: Tensor, kv: LayerKV, card: DeviceInfo) -> bool:
    """Whether `latent_kernel` attends to such latents with tiles of 16 rows, and `latent_parts` with 32."""
    if card.capability < LEAST or card.shared < 227 << 10 or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return kv.k.dtype is q.dtype and q.shape[2] == 512 and rotated.shape[2] == 64
