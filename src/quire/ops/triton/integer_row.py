"""Products of one row with matrices of 4 and 8 bits, of whole numbers, through a ring of tiles in shared memory.

Numbers of 4 bits become bfloat16 by so many instructions that few are left while they are read. Whole numbers cost
less: a byte becomes two of 4 bits by a shift and two masks, a byte of 8 bits is one, and the matrix units multiply
bytes. So x is taken as whole numbers of 16 bits, in units of each 128 columns: two bytes, two columns of a product.
Sums are exact up to the scale of a group. What x loses is 2^-16 of the largest of 128 numbers at most; bfloat16 loses
2^-9 of each. A row of NaN, or with infinity, becomes NaN.

A program asks for its first tiles before the wait, as many as the ring holds, and for another while it multiplies one,
over the ends of its tiles of the matrix. Copies go straight to shared memory: loads into registers are put off by the
assembler to where they are needed. Written in Gluon, see `integer_mma`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.ops.operands import Gate, IntegerKind, IntegerMatrix, Norm, UnnormedRow, num_parts
from quire.ops.triton import integer_gemm
from quire.ops.triton.gluon_language import barrier, copy, reinterpret, release, wait
from quire.ops.triton.integer_gemm import ROW, SUPERBLOCKS, ZEROS, ordered, supers_of
from quire.ops.triton.integer_mma import WHOLE, give, row_of
from quire.ops.triton.launch import HOPPER, DeviceInfo, Kernel
from quire.ops.triton.rows import GATES

HALVES = """{
.reg .b32 a;
shr.u32 a, $2, 4;
and.b32 $0, $2, 0x0f0f0f0f;
and.b32 $1, a, 0x0f0f0f0f;
}"""
"""Four bytes -> the numbers in their low and in their high halves."""

HALVES_ASM = gl.constexpr(HALVES)

LARGEST = gl.constexpr(32512.0)
"""Of whole numbers: 127 times 256, so that both bytes are signed."""

ROUND, ROUNDED = gl.constexpr(12582912.0), gl.constexpr(0x4B400000)
"""1.5 * 2^23, and its bits: more than that, a number is rounded, and whole in its last bits."""

upper, byte_of = gluon.jit(integer_gemm.upper.fn), gluon.jit(integer_gemm.byte_of.fn)


@triton.constexpr_function
def room_of(count):
    """The smallest power of two that holds so many."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def signed(number):
    """The last 32 bits of a number, as int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@triton.constexpr_function
def doubled(chunks, warps):
    """How [chunks, 32, 4, 2] bytes lie in threads as the matrix units take eight columns, two of them four times."""
    threads = [[0, 8, 0, 0], [0, 16, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0]]
    same = (warps // chunks).bit_length() - 1
    others = [[1 << bit, 0, 0, 0] for bit in range(chunks.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], threads, [[0, 0, 0, 0]] * same + others, [], [chunks, 32, 4, 2]
    )


@triton.constexpr_function
def laid(warps):
    """How [blocks, 1, 128] numbers of x lie in threads."""
    return gl.BlockedLayout([1, 1, 16], [4, 1, 8], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def columns_at(BLOCKS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr):
    """Which columns the blocks of `bring_x` have [BLOCKS, 1, 128], and whether there are such."""
    LAYOUT: gl.constexpr = laid(gl.num_warps())
    i = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    block = i // CHUNKS * 128 + j
    return i % CHUNKS * CHUNK + block, block < CHUNK


@gluon.jit
def normed(x, before, at, inside, DTYPE: gl.constexpr, COLUMNS: gl.constexpr):
    """The norm of x times a scale, added to the residual stream; the first program writes the sum. before: residual,
    where to write the sum, weights of the norm at `at`, its epsilon, and the scale."""
    residual, total, gain, eps, scale = before
    added = gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
    summed = (x * scale + added).to(DTYPE)
    gl.store(total + at, summed, mask=inside & (gl.program_id(0) == 0))
    exact = summed.to(gl.float32)
    square = gl.sum(gl.sum(gl.sum(exact * exact, 2), 1), 0)
    return (exact * gl.rsqrt(square / COLUMNS + eps) * gain).to(DTYPE).to(gl.float32)


@gluon.jit
def bring_x(
    x, before, limbs, sums, units, CHUNKS: gl.constexpr, CHUNK: gl.constexpr, SUMMED: gl.constexpr,
    PAIRED: gl.constexpr, NORMED: gl.constexpr,
):  # fmt: skip
    """x as whole numbers into shared memory, in blocks of 128 columns, first those that are multiplied first: of all
    chunks, of CHUNK columns, the first block, then the second, and so on.

    limbs [blocks, 2, 128] int8: upper and lower bytes. sums [blocks, 1, 128 / SUMMED] float32: of SUMMED columns each.
    units [blocks, 1, 1] float32. PAIRED: two blocks of a chunk have the same. before, NORMED: see `normed`.
    """
    BLOCKS: gl.constexpr = limbs.shape[0]
    LAYOUT: gl.constexpr = laid(gl.num_warps())
    at, inside = columns_at(BLOCKS, CHUNKS, CHUNK)
    given = gl.load(x + at, mask=inside, other=0.0).to(gl.float32)
    if NORMED:
        given = normed(given, before, at, inside, x.dtype.element_ty, CHUNKS * CHUNK)
    # The largest alone would leave a NaN out, such as a norm makes of an infinity beside zeros.
    most = gl.where(gl.sum(given * 0.0, 2) == 0.0, gl.max(gl.abs(given), 2), float("inf"))
    if PAIRED:
        two = gl.reshape(most, [BLOCKS // (2 * CHUNKS), 2, CHUNKS])
        two = gl.maximum(two, gl.expand_dims(gl.max(two, 1), 1))
        most = gl.convert_layout(gl.reshape(two, [BLOCKS, 1]), gl.SliceLayout(2, LAYOUT))
    unit = gl.where(most < float("inf"), most * (1.0 / LARGEST), float("nan"))
    units.store(gl.expand_dims(unit, 2))
    inverse = gl.expand_dims(gl.where(most > 0.0, LARGEST / most, 0.0), 2)
    bits = gl.fma(given, inverse + gl.zeros_like(given), gl.full_like(given, ROUND)).to(gl.int32, bitcast=True)
    both = gl.permute(gl.join(((bits + 128) >> 8).to(gl.int8), bits.to(gl.int8)), (0, 1, 3, 2))
    limbs.store(gl.reshape(both, [BLOCKS, 2, 128]))
    total = gl.sum(gl.reshape(bits, [BLOCKS, 1, 128 // SUMMED, SUMMED]), 3)
    sums.store((total - signed(SUMMED * ROUNDED)).to(gl.float32))


@gluon.jit
def columns_of(limbs, block: gl.constexpr, q: gl.constexpr, CHUNKS: gl.constexpr, SUMS: gl.constexpr):
    """Bytes of 32 columns of a block of each chunk as the matrix units take them: upper, lower, and again. limbs: of
    some blocks."""
    LAYOUT: gl.constexpr = doubled(CHUNKS, gl.num_warps())
    mine = limbs.slice(block * CHUNKS, CHUNKS, dim=0).slice(32 * q, 32, dim=2).permute((0, 2, 1))
    two = gl.expand_dims(mine.load(gl.SliceLayout(2, LAYOUT)), 2)
    none = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None] & 0
    eight = gl.reshape(two + none.to(gl.int8), [CHUNKS, 32, 8])
    return gl.convert_layout(eight, gl.DotOperandLayout(1, SUMS, 8), assert_trivial=True)


@gluon.jit
def halves(raw):
    """The numbers in the low and in the high halves of bytes."""
    return gl.inline_asm_elementwise(HALVES_ASM, "=r,=r,r", [raw], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def numbers_of(numbers, block: gl.constexpr, BITS: gl.constexpr, CHUNKS: gl.constexpr, SUMS: gl.constexpr):
    """The numbers of a block of 128 columns of each chunk, 32 columns each."""
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    first = numbers.slice(block * (BITS // 2) * CHUNKS, CHUNKS, dim=0).load(A)
    second = numbers.slice((block * (BITS // 2) + 1) * CHUNKS, CHUNKS, dim=0).load(A)
    if BITS == 4:
        a, b = halves(first)
        c, d = halves(second)
    else:
        a, b = first, second
        c = numbers.slice((block * 4 + 2) * CHUNKS, CHUNKS, dim=0).load(A)
        d = numbers.slice((block * 4 + 3) * CHUNKS, CHUNKS, dim=0).load(A)
    return a, b, c, d


@gluon.jit
def split_sums(sums):
    """Sums with upper and with lower bytes [chunks, rows of the matrix, 8] as two of [.., 4]."""
    return gl.split(gl.reshape(sums, [sums.shape[0], sums.shape[1], 4, 2]))


@gluon.jit
def about(held, block: gl.constexpr, q: gl.constexpr, CHUNKS: gl.constexpr, Y: gl.constexpr):
    """Number q that each chunk's block has of its own, to be multiplied with sums [chunks, rows of the matrix, 4]."""
    mine = held.slice(block * CHUNKS, CHUNKS, dim=0).slice(q, 1, dim=2)
    return mine.load(Y)


@gluon.jit
def added_block(
    y, numbers, marks, limbs, sums, units, block: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, HALF: gl.constexpr, CHUNKS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """y plus the products of a block of 128 columns of each chunk. numbers, marks: of some blocks, see `ask`."""
    Y: gl.constexpr = y.type.layout
    MARKS: gl.constexpr = gl.SliceLayout(2, Y)
    SCALED: gl.constexpr = min(GROUP, 128) if KIND == ZEROS else 128 if KIND == ROW else 32
    unit = about(units, block, 0, CHUNKS, Y)
    none = gl.zeros([y.shape[0], y.shape[1], 8], gl.int32, SUMS)
    total, factors = none, numbers_of(numbers, block, BITS, CHUNKS, SUMS)
    for q in gl.static_range(4):
        total = mma_v2(factors[q], columns_of(limbs, block, q, CHUNKS, SUMS), total)
        if (q + 1) * 32 % SCALED == 0:
            high, low = split_sums(total)
            made = (high * 256 + low).to(gl.float32)
            if KIND == ROW:
                y += unit * made
            else:
                word = marks.slice((block * 128 + q * 32) // GROUP * CHUNKS, CHUNKS, dim=0).load(MARKS)
                if KIND == ZEROS:
                    more = about(sums, block, q * 32 // SCALED, CHUNKS, Y)
                    made += gl.expand_dims(upper(word << 16, False) + 128.0, 2) * more
                    scale = upper(word, HALF)
                else:
                    if BITS == 4:
                        made -= 8.0 * about(sums, block, q, CHUNKS, Y)
                    scale = upper(word if q % 2 == 1 else word << 16, HALF)
                y += (gl.expand_dims(scale, 2) * unit) * made
            total = none
    return y


@gluon.jit
def scales_of(word, place: gl.constexpr, SUMS: gl.constexpr):
    """A byte of words, as a column of whole sums."""
    scale = gl.convert_layout((word >> place) & 255, gl.SliceLayout(2, SUMS), assert_trivial=True)
    return gl.expand_dims(scale, 2)


@gluon.jit
def added_superblock(y, numbers, marks, abouts, limbs, sums, units, CHUNKS: gl.constexpr, SUMS: gl.constexpr):
    """y plus the products of a superblock of each chunk, whose scales and minima are whole numbers of 6 bits."""
    Y: gl.constexpr = y.type.layout
    MARKS: gl.constexpr = gl.SliceLayout(2, Y)
    none = gl.zeros([y.shape[0], y.shape[1], 8], gl.int32, SUMS)
    total, least = none, gl.zeros_like(y)
    for q in gl.static_range(4):
        first, second = halves(numbers.slice(q * CHUNKS, CHUNKS, dim=0).load(gl.DotOperandLayout(0, SUMS, 8)))
        word = marks.slice(q * CHUNKS, CHUNKS, dim=0).load(MARKS)
        early = columns_of(limbs, q // 2, q % 2 * 2, CHUNKS, SUMS)
        late = columns_of(limbs, q // 2, q % 2 * 2 + 1, CHUNKS, SUMS)
        total += scales_of(word, 0, SUMS) * mma_v2(first, early, none)
        total += scales_of(word, 16, SUMS) * mma_v2(second, late, none)
        least += gl.expand_dims(byte_of(word, 1), 2) * about(sums, q // 2, q % 2 * 2, CHUNKS, Y)
        least += gl.expand_dims(byte_of(word, 3), 2) * about(sums, q // 2, q % 2 * 2 + 1, CHUNKS, Y)
    high, low = split_sums(total)
    scales = abouts.load(MARKS)
    unit = about(units, 0, 0, CHUNKS, Y)
    y += (gl.expand_dims(upper(scales, True), 2) * unit) * (high.to(gl.float32) * 256.0 + low.to(gl.float32))
    return y - (gl.expand_dims(upper(scales << 16, True), 2) * unit) * least


@gluon.jit
def ask(
    ring, matrix, slot, tile, turn, tiles, BITS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Ask for what is multiplied in a turn of a tile, if there is such a tile: of each chunk STEPS blocks of 128
    columns. ring: see `allocated`, of which `slot` is filled."""
    numbers, marks, abouts = ring
    weight, words, supers, outputs, whole = matrix
    SIZE: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 16, 2], [CHUNKS, gl.num_warps() // CHUNKS, 1], [2, 1, 0])
    MARKS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    MANY: gl.constexpr = numbers.shape[1]
    start = turn * (128 * STEPS)
    i = gl.arange(0, MANY, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    n = row_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), outputs, GATE)[None, :, None]
    j = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    line = weight + (start * BITS // 256).to(gl.int64) * (whole.to(gl.int64) * 32) + tile * (SIZE * 32)
    place = (i // CHUNKS + i % CHUNKS * (CHUNK * BITS // 256)) * (whole * 32) + (n * 32 + j)
    there = gl.full([MANY, BLOCK_N, 32], tile < tiles, gl.int1, LAYOUT)
    copy(numbers.index(slot), line + place, mask=there, eviction_policy="evict_first")
    m = tile * SIZE + row_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, MARKS)), outputs, GATE)[None, :]
    if KIND != ROW:
        copy_marks(marks.index(slot), words, start, m, tile < tiles, whole, GROUP, CHUNKS, CHUNK)
    if KIND == SUPERBLOCKS:
        copy_marks(abouts.index(slot), supers, start, m, tile < tiles, whole, 256, CHUNKS, CHUNK)
    async_copy.commit_group()


@gluon.jit
def copy_marks(
    marks, words, start, m, there, whole, GROUP: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr
):  # fmt: skip
    """Ask for words that rows m of the matrix have for each GROUP columns, of each chunk from `start` on."""
    LAYOUT: gl.constexpr = m.type.layout
    i = gl.arange(0, marks.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    at = ((start + i % CHUNKS * CHUNK) // GROUP + i // CHUNKS) * whole + m
    copy(marks, words + at, mask=gl.full([marks.shape[0], marks.shape[1]], there, gl.int1, LAYOUT))


@gluon.jit
def allocated(
    BITS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr,
    STEPS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """The ring: bytes of numbers [RING, blocks of bytes of all chunks, rows of the matrix, 32], words of scales [RING,
    groups of all chunks, rows of the matrix], and of superblocks."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    MANY: gl.constexpr = 1 if KIND == ROW else STEPS * 128 // GROUP
    numbers = gl.allocate_shared_memory(gl.int8, [RING, STEPS * BITS // 2 * CHUNKS, BLOCK_N, 32], PLAIN)
    marks = gl.allocate_shared_memory(gl.int32, [RING, MANY * CHUNKS, BLOCK_N], FLAT)
    abouts = marks
    if KIND == SUPERBLOCKS:
        abouts = gl.allocate_shared_memory(gl.int32, [RING, max(STEPS // 2, 1) * CHUNKS, BLOCK_N], FLAT)
    return numbers, marks, abouts


@gluon.jit
def added_turn(
    y, ring, held, slot, turn, BITS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr,
    CHUNKS: gl.constexpr, STEPS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """y plus the products of a turn. held: x, see `bring_x`, in turns."""
    numbers, marks, abouts = ring
    limbs, sums, units = held
    numbers, marks, abouts = numbers.index(slot), marks.index(slot), abouts.index(slot)
    limbs, sums, units = limbs.index(turn), sums.index(turn), units.index(turn)
    if KIND == SUPERBLOCKS:
        y = added_superblock(y, numbers, marks, abouts, limbs, sums, units, CHUNKS, SUMS)
    else:
        for block in gl.static_range(STEPS):
            y = added_block(
                y, numbers, marks, limbs, sums, units, block, BITS, KIND, GROUP, HALF, CHUNKS, SUMS)  # fmt: skip
    return y


@Kernel
@gluon.jit(do_not_specialize=["tiles"])
def ring_kernel(
    x, residual, total, gain, weight, words, supers, bias, out, outputs, tiles, eps, scale,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
    STEPS: gl.constexpr, RING: gl.constexpr, NORMED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_N rows of the matrix, each `num_programs`-th of them, times x [CHUNKS CHUNK].

    GROUP: columns that have a word, see `IntegerKind`. CHUNKS: of CHUNK inputs, with warps of their own. STEPS: blocks
    of 128 columns of each chunk that are multiplied in a turn; superblocks are two. RING: turns in shared memory.
    NORMED: x is added to the residual stream and normed first, see `normed`.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[CHUNKS, gl.num_warps() // CHUNKS, 1], instr_shape=[1, 16, 8]
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LIMBS: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 4, [2, 1, 0])
    TURNS: gl.constexpr = CHUNK // (128 * STEPS)
    BLOCKS: gl.constexpr = STEPS * CHUNKS
    ROOM: gl.constexpr = room_of(TURNS)
    SUMMED: gl.constexpr = min(GROUP, 128) if KIND == ZEROS else 32
    matrix = weight, words, supers, outputs, outputs * 2 if GATE else outputs
    ring = allocated(BITS, KIND, GROUP, BLOCK_N, CHUNKS, STEPS, RING)
    limbs = gl.allocate_shared_memory(gl.int8, [ROOM * BLOCKS, 2, 128], LIMBS)
    sums = gl.allocate_shared_memory(gl.float32, [ROOM * BLOCKS, 1, 128 // SUMMED], PLAIN)
    units = gl.allocate_shared_memory(gl.float32, [ROOM * BLOCKS, 1, 1], PLAIN)
    asked, turned = gl.program_id(0), gl.program_id(0) * 0
    for s in gl.static_range(RING - 1):
        ask(ring, matrix, s, asked, turned, tiles, BITS, KIND, GROUP, GATE, BLOCK_N, CHUNKS, CHUNK, STEPS)
        asked, turned = next_turn(asked, turned, TURNS)
    weights = gain
    if NORMED:
        at, inside = columns_at(ROOM * BLOCKS, CHUNKS, CHUNK)
        weights = gl.load(gain + at, mask=inside, other=0.0).to(gl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    before = residual, total, weights, eps, scale
    bring_x(x, before, limbs, sums, units, CHUNKS, CHUNK, SUMMED, KIND == SUPERBLOCKS, NORMED)
    held = (
        reinterpret(limbs, gl.int8, [ROOM, BLOCKS, 2, 128], LIMBS),
        reinterpret(sums, gl.float32, [ROOM, BLOCKS, 1, 128 // SUMMED], PLAIN),
        reinterpret(units, gl.float32, [ROOM, BLOCKS, 1, 1], PLAIN),
    )
    none, _ = split_sums(gl.zeros([CHUNKS, BLOCK_N, 8], gl.int32, SUMS))
    slot = asked * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        y = none.to(gl.float32)
        for turn in range(TURNS):
            async_copy.wait_group(RING - 2)
            barrier()
            free = gl.where(slot == 0, RING - 1, slot - 1)
            ask(ring, matrix, free, asked, turned, tiles, BITS, KIND, GROUP, GATE, BLOCK_N, CHUNKS, CHUNK, STEPS)
            asked, turned = next_turn(asked, turned, TURNS)
            y = added_turn(y, ring, held, slot, turn, BITS, KIND, GROUP, HALF, CHUNKS, STEPS, SUMS)
            slot = gl.where(slot == RING - 1, 0, slot + 1)
        finish(y, words, bias, out, tile, outputs, KIND, GATE, ACT, BIAS)


@gluon.jit
def next_turn(tile, turn, TURNS: gl.constexpr):
    """(tile, turn) of a program after these."""
    ends = turn == TURNS - 1
    return tile + gl.where(ends, gl.num_programs(0), 0), gl.where(ends, 0, turn + 1)


@gluon.jit
def finish(
    y, words, bias, out, tile, outputs, KIND: gl.constexpr, GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    """Add up the chunks' sums [chunks, rows of the matrix, 4], which are four times the same, and write them."""
    first = tile * (y.shape[1] // 2 if GATE else y.shape[1])
    if KIND == ROW:
        n = row_of(gl.arange(0, y.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, y.type.layout))), outputs, GATE)
        y *= gl.expand_dims(gl.load(words + (first + n))[None, :].to(gl.float32, bitcast=True), 2)
    total = gl.reshape(y, [y.shape[1], 4]) if y.shape[0] == 1 else gl.sum(y, 0)
    give(total, bias, out, first, outputs, 1, outputs, 0, GATE, GATE, ACT, BIAS)


class RingConfig(NamedTuple):
    """How a product is tiled. outputs: rows of the matrix of a tile, those of gates counted. chunks: of inputs. steps,
    ring: see `ring_kernel`. a_card: programs of each multiprocessor at most."""

    outputs: int
    chunks: int
    steps: int
    ring: int
    warps: int
    a_card: int


MAX_INPUTS = 1 << 14
"""Inputs up to which threads can hold all of x."""

LEAST_BYTES = 13 << 20
"""Bytes of numbers from which on these kernels are faster: `integer_gemv` asks for all of a smaller matrix before the
wait, and takes x as it is (measured in a whole model)."""

FASTER = frozenset({(4, IntegerKind.ZEROS, 128), (4, IntegerKind.SUPERBLOCKS, 32), (8, IntegerKind.PAIRS, 32)})
"""Bits, kind and group of what has been measured: AWQ and GPTQ, Q4_K, Q8_0. The kernel knows int8 with a scale for a
row, Q4_0 and smaller groups, too."""


def config(matrix: IntegerMatrix) -> RingConfig:
    """The fastest of some tiles, measured on an H200 with matrices of an 8B model in AWQ, Q4_K and Q8_0."""
    return RingConfig(32, 4, 2, 3 if matrix.bits == 8 else 5, 8, 2)


def takes(x: Tensor, matrix: IntegerMatrix, card: DeviceInfo) -> bool:
    """Whether `integer_row` multiplies them: large matrices of what is `FASTER`."""
    how, kind = config(matrix), (matrix.bits, matrix.kind, matrix.group)
    fits = len(x) == 1 and x.dtype in (torch.bfloat16, torch.float16)
    fits = fits and card.capability == HOPPER and card.sms > 0 and kind in FASTER
    whole = matrix.inputs % (128 * how.chunks * how.steps) == 0 and matrix.outputs % (2 * how.outputs) == 0
    return fits and whole and matrix.inputs <= MAX_INPUTS and matrix.weight.nbytes >= LEAST_BYTES


def norms(x: Tensor, norm: Norm, matrix: IntegerMatrix, card: DeviceInfo) -> bool:
    """Whether `integer_row` norms x, too."""
    return takes(x, matrix, card) and matrix.order is None and not norm.centred and norm.bias is None


def integer_row(
    x: Tensor | UnnormedRow, matrix: IntegerMatrix, bias: Tensor | None, card: DeviceInfo, gate: Gate = "",
    how: RingConfig | None = None,
) -> Tensor:  # fmt: skip
    """x [1, in] times the matrix [out, in] -> [1, out], or [1, out / 2] with a gate of two parts. how: other tiles than
    `config`'s."""
    if pending := isinstance(x, UnnormedRow):
        row, before = x.row, (x.residual, x.total, x.norm.weight)
        eps, scale = x.norm.eps, x.scale
    else:
        row, eps, scale = ordered(x, matrix), 0.0, 0.0
        before = row, row, row
    gated, how = num_parts(gate) == 2, config(matrix) if how is None else how
    outputs, tiles = matrix.outputs // num_parts(gate), matrix.outputs // how.outputs
    width = {IntegerKind.ZEROS: matrix.group, IntegerKind.ROWS: WHOLE}.get(matrix.kind, 64)
    out = row.new_empty(1, outputs)
    ring_kernel[(min(tiles, how.a_card * card.sms),)](
        *(row, *before, matrix.weight.view(torch.int8), matrix.words, supers_of(matrix), row if bias is None else bias),
        *(out, outputs, tiles, eps, scale),
        GATE=gated, ACT=GATES[gate], BIAS=bias is not None, BITS=matrix.bits, KIND=int(matrix.kind), GROUP=width,
        HALF=matrix.half, BLOCK_N=how.outputs, CHUNKS=how.chunks, CHUNK=matrix.inputs // how.chunks, STEPS=how.steps,
        RING=how.ring, NORMED=pending, DEPENDENT=card.dependent, num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out
