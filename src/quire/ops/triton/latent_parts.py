"""Attention of 32 rows to latents, which go from memory into a ring of buffers in shared memory as in `latent_mma`.

A latent is cut into parts, each of which has warps of its own: they multiply their part of queries and keys, add up
each other's products through shared memory, and have all weights of a tile for their part of the weighted sum. So a
warp keeps a part of the queries only, and nothing but a tile's scores goes from warp to warp. The products of one tile
are computed while the weighted sum of the one before is.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.ops.triton.gluon_language import barrier, copy, reinterpret, release, wait
from quire.ops.triton.latent_mma import lines_of, listed, next_block, pieces_of, together
from quire.ops.triton.launch import Kernel

CHAIN = gl.constexpr(64)
"""Numbers of queries and keys whose products are summed by themselves."""


@gluon.jit
def along(x, AXIS: gl.constexpr):
    """A vector as the axis of a tensor of three."""
    if AXIS == 0:
        return gl.expand_dims(gl.expand_dims(x, 1), 2)
    elif AXIS == 1:
        return gl.expand_dims(gl.expand_dims(x, 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(x, 0), 1)


@gluon.jit
def within(PARTS: gl.constexpr, WIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """[PARTS, 1, WIDE]: the places of a row's numbers."""
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    d = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return along(part * WIDE, 0) + along(d, 2)


@gluon.jit
def copy_tile(shared, source, line, block, length, LAYOUT: gl.constexpr):
    """Ask for a block's numbers [PARTS, tokens, numbers of a part]; zeros past `length`."""
    PARTS: gl.constexpr = shared.shape[0]
    COLUMNS: gl.constexpr = shared.shape[1]
    WIDE: gl.constexpr = shared.shape[2]
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    line = gl.convert_layout(line, TOKENS, assert_trivial=True)
    seen = block * COLUMNS + gl.arange(0, COLUMNS, TOKENS) < length
    copy(shared, source + (along(line * (PARTS * WIDE), 1) + within(PARTS, WIDE, LAYOUT)), mask=along(seen, 1))


@gluon.jit
def ask(
    slot, cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE: gl.constexpr, COPIED: gl.constexpr,
    RESTS: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Ask for the cursor's block, if its piece is before `stop`, and go on to the next one, whose lines are looked up.

    cursor: piece, block, end of the piece's blocks, length, first page in the table, and lines of the block's tokens.
    """
    at, block, end, length, row, line = cursor
    seen = gl.where(at < stop, length, 0)
    copy_tile(latents.index(slot), v, line, block, seen, COPIED)
    copy_tile(rests.index(slot), k, line, block, seen, RESTS)
    async_copy.commit_group()
    at, block, end, length, row = next_block(at, block, end, length, row, stop, pieces, columns, FIELDS)
    seen = gl.where(at < stop, length, 0)
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPIED))
    return at, block, end, length, row, lines_of(table + row, block, seen, PAGE, latents.shape[2], TOKENS)


@gluon.jit
def place_cursor(
    pieces, table, columns, index, stop, PAGE: gl.constexpr, COLUMNS: gl.constexpr, RING: gl.constexpr,
    SEVERAL: gl.constexpr, FIELDS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The cursor at a program's first block, and whether the first ones are all in the past."""
    # Where this program has no piece it reads what nothing was written to, and masks it.
    piece, live = pieces + index * FIELDS, index < stop
    n, length = listed(piece + 1), gl.where(live, listed(piece + 3), 0)
    block, end = gl.where(live, listed(piece + 4), 0), listed(piece + 5)
    row = listed(piece + 6).to(gl.int64) * columns
    line = lines_of(table + row, block, length, PAGE, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, COPIED)))
    # No kernel of this step writes to blocks in the past: of this piece, if another one follows.
    asked = block + RING - 1
    early = live & (gl.minimum(asked, end) * COLUMNS <= length - n) & ((not SEVERAL) | (asked <= end))
    return (index, block, end, length, row, line), early


@gluon.jit
def ask_first(
    cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE: gl.constexpr, COPIED: gl.constexpr,
    RESTS: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Ask for as many blocks as are on their way at once."""
    for s in gl.static_range(latents.shape[0] - 1):
        cursor = ask(s, cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, RESTS, FIELDS)
    return cursor


@gluon.jit
def rows_of(
    x, token, n, first, group, GROUPS: gl.constexpr, SHARE: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr,
    ROWS: gl.constexpr, EACH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile's rows of x [tokens, heads, PARTS * WIDE], as pieces [PARTS, rows, EACH] of parts."""
    r = first + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    row = (token + r // SHARE).to(gl.int64) * (GROUPS * SHARE) + group * SHARE + r % SHARE
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    d = gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = along(row * (PARTS * WIDE), 1) + (along(part * WIDE, 0) + along(d, 2))
    read = ()
    for j in gl.static_range(WIDE // EACH):
        one = gl.load(x + (place + j * EACH), mask=along(r // SHARE < n, 1), other=0.0)
        read = read + (one,)  # type: ignore[assignment]
    return read


@gluon.jit
def as_operands(read, LAYOUT: gl.constexpr):
    """Each of a tuple as what a product's first factor is."""
    held = ()
    for j in gl.static_range(len(read)):
        held = held + (gl.convert_layout(read[j], LAYOUT),)  # type: ignore[assignment]
    return held


@gluon.jit
def read_queries(
    q, turned, token, n, first, group, GROUPS: gl.constexpr, SHARE: gl.constexpr, WIDE: gl.constexpr,
    TURNED: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """A tile's queries as first factors: what is rotated of them, and pieces of the rest."""
    PARTS: gl.constexpr = SUMS.warps_per_cta[0]
    READ: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [PARTS, gl.num_warps() // PARTS, 1], [2, 1, 0])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    given = rows_of(turned, token, n, first, group, GROUPS, SHARE, PARTS, TURNED, ROWS, TURNED, READ)
    read = rows_of(q, token, n, first, group, GROUPS, SHARE, PARTS, WIDE, ROWS, CHAIN, READ)
    return as_operands(given, FIRST), as_operands(read, FIRST)


@gluon.jit
def products(rotated, queries, keys, rest, SUMS: gl.constexpr):
    """Of queries and a tile's keys [PARTS, rows, tokens], in shared memory: of each part by itself."""
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    PARTS: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = rotated[0].shape[1]
    COLUMNS: gl.constexpr = keys.shape[1]
    none = gl.zeros([PARTS, ROWS, COLUMNS], gl.float32, SUMS)
    x = mma_v2(rotated[0], rest.permute((0, 2, 1)).load(B), none)
    for j in gl.static_range(len(queries)):
        # Sums of their own: products wait for each other.
        x += mma_v2(queries[j], keys.slice(j * CHAIN, CHAIN, dim=2).permute((0, 2, 1)).load(B), none)
    # Eight numbers of each of four rows are in different banks.
    EACH: gl.constexpr = max(1, 32 // COLUMNS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, EACH, 4 // EACH, [2, 1, 0])
    return gl.allocate_shared_memory(gl.float32, [PARTS, ROWS, COLUMNS], SHARED, x)


@gluon.jit
def weigh(m, z, shared, number, position, slope, SUMS: gl.constexpr, DTYPE: gl.constexpr):
    """Add the scores of tile `number` of a sequence to running maximum m and sums z of each column; position: of the
    query of each row. Also what becomes of the weighted sum so far, and weights as a product's first factor, of which
    every warp has all."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ALL: gl.constexpr = gl.SliceLayout(0, OPERAND)
    PARTS: gl.constexpr = shared.shape[0]
    ROWS: gl.constexpr = shared.shape[1]
    COLUMNS: gl.constexpr = shared.shape[2]
    # The same memory, of which an index is a matrix.
    EACH: gl.constexpr = max(1, 32 // COLUMNS)
    each = reinterpret(shared, gl.float32, [PARTS, ROWS, COLUMNS], gl.SwizzledSharedLayout(8, EACH, 4 // EACH, [1, 0]))
    x = each.index(0).load(ALL)
    for j in gl.static_range(1, PARTS):
        x += each.index(j).load(ALL)
    at = number * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, ALL))
    x = gl.where(at[None, :] <= position[:, None], x, -1e30)
    top = gl.maximum(m, gl.max(x, 1) * slope)
    weight = gl.exp2(x * slope - top[:, None])
    fade = gl.exp2(m - top)
    z = z * fade[:, None] + weight
    chosen, _ = gl.broadcast(gl.expand_dims(weight.to(DTYPE), 0), gl.zeros([PARTS, ROWS, COLUMNS], DTYPE, OPERAND))
    return top, z, gl.convert_layout(fade, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)), assert_trivial=True), chosen


@gluon.jit
def give(
    m, z, acc, token, n, first, split, mine, group, arrived, out, parts, sums, v_scale, GROUPS: gl.constexpr,
    SHARE: gl.constexpr, SPLIT: gl.constexpr, LATER: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Write the result of piece `mine`, or its part, see `attention.handed_in`; LATER: for `combine_kernel`."""
    SUMS: gl.constexpr = acc.type.layout
    PARTS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    DIM: gl.constexpr = PARTS * acc.shape[2]
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUMS))
    total = gl.convert_layout(gl.maximum(gl.sum(z, 1), 1e-30), ROW, assert_trivial=True)
    m = gl.convert_layout(m, ROW, assert_trivial=True)
    acc *= gl.expand_dims((v_scale / total)[:, None], 0)
    splits, base = split // 65536, mine - split % 65536
    r = gl.arange(0, ROWS, ROW)
    query = (first + r) // SHARE
    real = gl.expand_dims((query < n)[:, None], 0)
    if SPLIT and splits > 1:
        line = (mine * GROUPS + group) * ROWS + r
        place = gl.expand_dims((line.to(gl.int64) * DIM)[:, None], 0) + within(PARTS, acc.shape[2], SUMS)
        gl.store(parts + place, acc, mask=real)
        gl.store(sums + line, m + gl.log2(total))
        if not LATER:
            barrier()
            if gl.atomic_add(arrived + base * GROUPS + group, 1, sem="acq_rel") == splits - 1:
                gl.store(arrived + base * GROUPS + group, 0)
                together(parts, sums, out, base, splits, group, token * SHARE + first,
                         gl.minimum(n * SHARE - first, ROWS), GROUPS, SHARE, DIM, ROWS, AT_ONCE)  # fmt: skip
    else:
        row = (token + query).to(gl.int64) * (GROUPS * SHARE) + group * SHARE + (first + r) % SHARE
        place = gl.expand_dims((row * DIM)[:, None], 0) + within(PARTS, acc.shape[2], SUMS)
        gl.store(out + place, acc.to(out.dtype.element_ty), mask=real)


@Kernel
@gluon.jit
def latent_kernel(
    q, turned, k, v, table, pieces, count, arrived, starts, out, parts, sums, slope, v_scale, columns,
    GROUPS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr, ROTATED: gl.constexpr, PAGE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr, SEVERAL: gl.constexpr,
    LATER: gl.constexpr, LATE: gl.constexpr, RING: gl.constexpr, AT_ONCE: gl.constexpr, FIELDS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A program's pieces, several if SEVERAL; see `attention.attention_kernel` for the letters.

    RING: buffers of COLUMNS tokens: of one the weighted sum is computed, of the next the scores, and the others are on
    their way. PARTS: of a latent, and of what is rotated.
    """
    DTYPE: gl.constexpr = q.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = DIM // PARTS
    TURNED: gl.constexpr = ROTATED // PARTS
    ACROSS: gl.constexpr = WARPS * 16 // ROWS // PARTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, ROWS // 16, ACROSS], [1, 16, 8])
    ALL: gl.constexpr = gl.SliceLayout(0, gl.DotOperandLayout(0, SUMS, 2))
    COPIED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, WARPS, 1], [2, 1, 0])
    RESTS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 2, 2], [1, WARPS, 1], [2, 0, 1])
    WHOLE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    BESIDE: gl.constexpr = gl.SwizzledSharedLayout(8, PARTS, 8 // PARTS, [2, 1, 0])
    latents = gl.allocate_shared_memory(DTYPE, [RING, PARTS, COLUMNS, WIDE], WHOLE)
    rests = gl.allocate_shared_memory(DTYPE, [RING, PARTS, COLUMNS, TURNED], BESIDE)
    group = gl.program_id(0)
    index, stop = pieces_of(starts, count, gl.program_id(1), SEVERAL, LATE, DEPENDENT)
    cursor, early = place_cursor(pieces, table, columns, index, stop, PAGE, COLUMNS, RING, SEVERAL, FIELDS, COPIED)
    if early:
        cursor = ask_first(cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, RESTS, FIELDS)
    if not LATE:
        wait(DEPENDENT)
        release(DEPENDENT)
    if not early:
        cursor = ask_first(cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, RESTS, FIELDS)
    slot = 0
    for mine in range(index, stop):
        piece = pieces + mine * FIELDS
        token, n, first, upto = gl.load(piece), gl.load(piece + 1), gl.load(piece + 2), gl.load(piece + 3)
        begin, until, split = gl.load(piece + 4), gl.load(piece + 5), gl.load(piece + 7)
        position = upto - n + (first + gl.arange(0, ROWS, gl.SliceLayout(1, ALL))) // SHARE
        rotated, queries = read_queries(q, turned, token, n, first, group, GROUPS, SHARE, WIDE, TURNED, ROWS, SUMS)
        m = gl.full([ROWS], -1e20, gl.float32, gl.SliceLayout(1, ALL))
        z, acc = gl.zeros([ROWS, COLUMNS], gl.float32, ALL), gl.zeros([PARTS, ROWS, WIDE], gl.float32, SUMS)
        async_copy.wait_group(RING - 2)
        barrier()
        shared = products(rotated, queries, latents.index(slot), rests.index(slot), SUMS)
        m, z, fade, chosen = weigh(m, z, shared, begin, position, slope, SUMS, DTYPE)
        for number in range(begin, until):
            async_copy.wait_group(RING - 3)
            barrier()
            free = gl.where(slot == 0, RING - 1, slot - 1)  # which all have read
            cursor = ask(free, cursor, stop, k, v, table, pieces, columns, latents, rests, PAGE, COPIED, RESTS, FIELDS)
            coming = gl.where(slot == RING - 1, 0, slot + 1)
            shared = products(rotated, queries, latents.index(coming), rests.index(coming), SUMS)
            acc *= gl.expand_dims(fade[:, None], 0)
            acc = mma_v2(chosen, latents.index(slot).load(gl.DotOperandLayout(1, SUMS, 2)), acc)
            seen = gl.where(number + 1 < until, position, -1)  # nothing of what is behind the piece
            m, z, fade, chosen = weigh(m, z, shared, number + 1, seen, slope, SUMS, DTYPE)
            slot = coming
        give(m, z, acc, token, n, first, split, mine, group, arrived, out, parts, sums, v_scale,
             GROUPS, SHARE, SPLIT, LATER, AT_ONCE)  # fmt: skip
    async_copy.wait_group(0)
