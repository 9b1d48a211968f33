"""Products of up to 16 rows with matrices of 4 and 8 bits, x staying in registers.

A program multiplies by some of the inputs for many rows of the matrix, tile after tile. Its sixteen warps have columns
of their own, of which each thread holds what the matrix units want of x, loaded once. So nothing is read from shared
memory but the matrix, through a ring that is filled far ahead: a tile is there when it is multiplied, and few
instructions are spent on it. The warps' sums of a tile are added up through shared memory, those of several programs
through memory: there are never more programs than run at once, and each adds up a share.

Numbers are not freed of what they are too large by, 128 and the zero point: that is taken off a group's sum, times the
sum of x. Written in Gluon, see `integer_mma`.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.ops.operands import Gate, IntegerKind, IntegerMatrix, num_parts
from quire.ops.triton import integer_gemm
from quire.ops.triton.gluon_language import barrier, release, wait
from quire.ops.triton.integer_gemm import SUPERBLOCKS, ZEROS, in_float16, ordered, supers_of
from quire.ops.triton.integer_mma import give
from quire.ops.triton.integer_row import allocated, ask, room_of
from quire.ops.triton.launch import HOPPER, DeviceInfo, Kernel
from quire.ops.triton.rows import GATES

NIBBLES = """{
.reg .b32 b, c, d;
shr.u32 b, $4, 8;
shr.u32 c, $4, 4;
shr.u32 d, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, d, 0x000f000f, 0x43004300, 0xea;
}"""
"""Four bytes -> 128 and the numbers in the low halves of the first and the third, of the second and the fourth, and in
their high halves."""

BLOCK = gl.constexpr(32)
"""Rows of the matrix of a tile."""

EARLY = gl.constexpr(2)
"""Turns that are asked for before x is."""

FROM_NIBBLES, FROM_NIBBLES_16 = gl.constexpr(NIBBLES), gl.constexpr(in_float16(NIBBLES))

upper, byte_of = gluon.jit(integer_gemm.upper.fn), gluon.jit(integer_gemm.byte_of.fn)


@triton.constexpr_function
def adding(chunks, block, rows, warps):
    """How threads read sums [chunks, block, rows] to add chunks up: eight neighbours of the matrix's rows by eight
    threads, each of which has the row eight further on, too, since that may be what the other one gates."""
    chunk = [[1 << bit, 0, 0] for bit in range(chunks.bit_length() - 1)]
    others = [[0, 0, 1 << bit] for bit in range(rows.bit_length() - 1)]
    inner = [[0, 1, 0], [0, 2, 0], [0, 4, 0], *others[1:3]]
    del others[1:3]
    others += [[0, 1 << bit, 0] for bit in range(4, block.bit_length() - 1)]
    bits = warps.bit_length() - 1
    others += [[0, 0, 0]] * (bits - len(others))
    return gl.DistributedLinearLayout(
        [[0, 8, 0], *others[bits:], *chunk], inner, others[:bits], [], [chunks, block, rows]
    )


@gluon.jit
def swapped(x, B: gl.constexpr):
    """x [chunks, 32, rows] with the second and the third of each four columns in each other's place, as numbers are."""
    pairs = gl.permute(gl.reshape(x, [x.shape[0], 8, 2, 2, x.shape[2]]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(pairs, [x.shape[0], 32, x.shape[2]]), B)


@gluon.jit
def loaded(
    x, held, inputs, CHUNKS: gl.constexpr, CHUNK: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """The columns of x where the matrix units take them, 32 of each chunk at a time."""
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    c = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    place = x + (gl.minimum(r, held - 1).to(gl.int64) * inputs + (c * CHUNK + k))
    pieces = ()
    for s in gl.static_range(CHUNK // 32):
        pieces = pieces + (gl.load(place + s * 32),)  # type: ignore[assignment]
    return pieces


@gluon.jit
def arranged(x, sums, SUMMED: gl.constexpr, CHUNKS: gl.constexpr, SUMS: gl.constexpr):
    """Columns of x in the order of the matrix's numbers. Into sums [groups of all chunks, 1, rows] go those of SUMMED
    columns each."""
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    COUNT: gl.constexpr = len(x)
    pieces = ()
    for s in gl.static_range(COUNT):
        pieces = pieces + (swapped(x[s], B),)  # type: ignore[assignment]
    for g in gl.static_range(COUNT * 32 // SUMMED):
        total = x[g * (SUMMED // 32)].to(gl.float32)
        for s in gl.static_range(1, SUMMED // 32):
            total += x[g * (SUMMED // 32) + s].to(gl.float32)
        sums.slice(g * CHUNKS, CHUNKS, dim=0).store(gl.expand_dims(gl.sum(total, 1), 1))
    return pieces


@gluon.jit
def from_nibbles(raw, DTYPE: gl.constexpr):
    """128 and the numbers in the low and in the high halves of bytes, 1,024 in float16, in the order of `swapped`."""
    if gl.float16 == DTYPE:
        return gl.inline_asm_elementwise(
            FROM_NIBBLES_16, "=&r,=&r,=&r,=r,r", [raw],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=4)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            FROM_NIBBLES, "=&r,=&r,=&r,=r,r", [raw],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def factors_of(
    word, about, odd: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr, EXTRA: gl.constexpr
):  # fmt: skip
    """What a group's products and its sum of x are multiplied with. odd: the second 32 columns of a word's 64. EXTRA:
    what numbers are too large by."""
    if KIND == ZEROS:
        scale = upper(word, HALF)
        more = scale * (upper(word << 16, False) + (128.0 - EXTRA))
    elif KIND == SUPERBLOCKS:
        scale = upper(about, True) * byte_of(word, 2 * odd)
        more = -upper(about << 16, True) * byte_of(word, 2 * odd + 1) - EXTRA * scale
    else:
        scale = upper(word if odd else word << 16, HALF)
        more = scale * (-8.0 - EXTRA)
    return gl.expand_dims(scale, 2), gl.expand_dims(more, 2)


@gluon.jit
def multiplied(
    y, x, turn: gl.constexpr, ring, sums, KIND: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr,
    CHUNKS: gl.constexpr, SUMMED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """y [CHUNKS, rows of the matrix, rows of x] plus the products of 128 columns of each chunk. x, sums: see
    `arranged`. ring: see `integer_row.ask`."""
    numbers, marks, abouts = ring
    numbers, marks, abouts = numbers.index(0), marks.index(0), abouts.index(0)
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    MARKS: gl.constexpr = gl.SliceLayout(2, SUMS)
    DTYPE: gl.constexpr = x[0].dtype
    EXTRA: gl.constexpr = 1024.0 if gl.float16 == DTYPE else 128.0
    none = gl.zeros_like(y)
    total = none
    first, third = from_nibbles(numbers.slice(0, CHUNKS, dim=0).load(A), DTYPE)
    second, fourth = from_nibbles(numbers.slice(CHUNKS, CHUNKS, dim=0).load(A), DTYPE)
    factors = (first, third, second, fourth)
    for q in gl.static_range(4):
        total = mma_v2(factors[q], x[turn * 4 + q], total)
        if (q + 1) * 32 % SUMMED == 0:
            word = marks.slice(q * 32 // GROUP * CHUNKS, CHUNKS, dim=0).load(MARKS)
            about = word
            if KIND == SUPERBLOCKS:
                about = abouts.load(MARKS)
            scale, more = factors_of(word, about, q % 2, KIND, HALF, EXTRA)
            y += scale * total
            y += more * sums.slice((turn * 128 + q * 32) // SUMMED * CHUNKS, CHUNKS, dim=0).load(SUMS)
            total = none
    return y


@gluon.jit
def finish(
    shared, bias, out, tile, held, outputs, ADDING: gl.constexpr, GATE: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of a tile, and write what ACT makes of them."""
    y = gl.sum(shared.load(ADDING), 0)
    first = tile * (y.shape[0] // 2 if GATE else y.shape[0])
    give(y, bias, out, first, outputs, held, outputs, 0, GATE, GATE, ACT, BIAS)


@Kernel
@gluon.jit(do_not_specialize=["tiles", "held"])
def stationary_kernel(
    x, weight, words, supers, bias, out, held, outputs, inputs, tiles,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK rows of the matrix, each `num_programs`-th of them, times ROWS rows of x, of which there are
    `held`, CHUNK inputs a warp. GROUP: columns that have a word, see `IntegerKind`.

    A tile is multiplied in turns, 128 columns of each warp, which have shared memory of their own: as soon as all have
    multiplied what is there, the next tile's is asked for.
    """
    CHUNKS: gl.constexpr = gl.num_warps()
    TURNS: gl.constexpr = CHUNK // 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[CHUNKS, 1, 1], instr_shape=[1, 16, 8])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, min(BLOCK // 8, 4), [1, 2, 0])
    ADDING: gl.constexpr = adding(CHUNKS, BLOCK, ROWS, CHUNKS)
    SUMMED: gl.constexpr = GROUP if KIND == ZEROS else 32
    ROOM: gl.constexpr = room_of(CHUNK // SUMMED)
    matrix = weight, words, supers, outputs, outputs * 2 if GATE else outputs
    rings = ()
    for _ in gl.static_range(TURNS):
        rings = rings + (allocated(4, KIND, GROUP, BLOCK, CHUNKS, 1, 1),)  # type: ignore[assignment]
    sums = gl.allocate_shared_memory(gl.float32, [CHUNKS * ROOM, 1, ROWS], PLAIN)
    shared = gl.allocate_shared_memory(gl.float32, [CHUNKS, BLOCK, ROWS], COLUMNS)
    first, programs = gl.program_id(0), gl.num_programs(0)
    zero = first * 0
    for turn in gl.static_range(TURNS - 1):
        # What is asked for before x is what x then waits for.
        if turn == min(EARLY, TURNS - 2):
            wait(DEPENDENT)
            release(DEPENDENT)
            given = loaded(x, held, inputs, CHUNKS, CHUNK, ROWS, SUMS)
        ask(rings[turn], matrix, 0, first, zero + turn, tiles, 4, KIND, GROUP, GATE, BLOCK, CHUNKS, CHUNK, 1)
    given = arranged(given, sums, SUMMED, CHUNKS, SUMS)
    for tile in range(first, tiles, programs):
        y = gl.zeros([CHUNKS, BLOCK, ROWS], gl.float32, SUMS)
        for turn in gl.static_range(TURNS):
            async_copy.wait_group(TURNS - 2)
            barrier()
            asked = tile if turn == 0 else tile + programs
            ask(
                rings[(turn + TURNS - 1) % TURNS], matrix, 0, asked, zero + (turn + TURNS - 1) % TURNS, tiles, 4, KIND,
                GROUP, GATE, BLOCK, CHUNKS, CHUNK, 1)  # fmt: skip
            if turn == 0:
                if tile != first:
                    finish(shared, bias, out, tile - programs, held, outputs, ADDING, GATE, ACT, BIAS)
            y = multiplied(y, given, turn, rings[turn], sums, KIND, GROUP, HALF, CHUNKS, SUMMED, SUMS)
        shared.store(y)
    async_copy.wait_group(0)
    barrier()
    last = first + (tiles - 1 - first) // programs * programs
    finish(shared, bias, out, last, held, outputs, ADDING, GATE, ACT, BIAS)


WARPS = 8
"""Of a program: more have too few registers for x."""

MIN_ROWS, MAX_ROWS = 2, 16

LEAST_INPUTS, MOST_INPUTS = 2048, 4096
"""Inputs that have more than one turn, and of which registers hold x."""

LEAST_BYTES = 32 << 20
"""Bytes of numbers from which on each multiprocessor has several tiles."""

KINDS = (IntegerKind.ZEROS, IntegerKind.SUPERBLOCKS, IntegerKind.PAIRS)


def takes(x: Tensor, matrix: IntegerMatrix, card: DeviceInfo) -> bool:
    """Whether `integer_stationary` multiplies them: a few rows with a large matrix of few inputs."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and MIN_ROWS <= len(x) <= MAX_ROWS
    # Columns of x are loaded 16 bytes at a time; in another order they are in a new tensor.
    aligned = matrix.order is not None or x.data_ptr() % 16 == 0
    return fits and aligned and matrix.weight.nbytes >= LEAST_BYTES and takes_matrix(matrix, card)


def takes_matrix(matrix: IntegerMatrix, card: DeviceInfo) -> bool:
    """Whether there are such products with it."""
    fits = card.capability == HOPPER and card.sms > 0 and matrix.bits == 4 and matrix.kind in KINDS
    whole = matrix.inputs % (128 * WARPS) == 0 and matrix.outputs % 64 == 0
    return fits and whole and LEAST_INPUTS <= matrix.inputs <= MOST_INPUTS and matrix.group <= 128


def integer_stationary(
    x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, card: DeviceInfo, gate: Gate = ""
) -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate of two parts."""
    x = ordered(x, matrix)
    num_rows, inputs = x.shape
    outputs, tiles = matrix.outputs // num_parts(gate), matrix.outputs // BLOCK.value
    programs = triton.cdiv(tiles, triton.cdiv(tiles, card.sms))
    out = x.new_empty(num_rows, outputs)
    stationary_kernel[(programs,)](
        *(x, matrix.weight.view(torch.int8), matrix.words, supers_of(matrix), x if bias is None else bias, out),
        *(num_rows, outputs, inputs, tiles),
        GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None, KIND=int(matrix.kind),
        GROUP=matrix.group if matrix.kind is IntegerKind.ZEROS else 64, HALF=matrix.half,
        ROWS=8 if num_rows <= 8 else 16, CHUNK=inputs // WARPS, DEPENDENT=card.dependent, num_warps=WARPS,
        **card.options,
    )  # fmt: skip
    return out
