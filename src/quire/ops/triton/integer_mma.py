"""Products of up to 32 rows with matrices of 4 or 8 bits whose numbers go from memory into the registers of the matrix
units.

Triton brings every tile through shared memory, and its warps meet at a barrier for each. Here a thread loads the eight
bytes that `mma.sync` wants of it, some steps ahead, and puts their numbers where they are multiplied: eight bytes of a
row of `IntegerMatrix` are sixteen numbers of 4 bits, eight of each half, or eight of 8 bits, which is what a thread
holds of a factor whose runs of columns are eight long. Only x goes through shared memory, hundreds of columns at a
time, so that warps rarely wait for each other. Written in Gluon, Triton's language of explicit layouts, which its
interpreter does not run: where there is no GPU, and for what does not fit (`takes`), `integer_gemm` has the same
products.

With a gate, of the sixteen rows of the matrix that a warp multiplies at once eight are of the gate and eight of what it
gates, so that one thread has both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.ops.operands import Gate, IntegerKind, IntegerMatrix, num_parts
from quire.ops.triton import integer_gemm, rows
from quire.ops.triton.gemv import COUNTERS
from quire.ops.triton.gluon_language import LEAST, barrier, copy, release, wait
from quire.ops.triton.integer_gemm import (
    BYTES,
    LARGER,
    MINUS_128,
    MINUS_136,
    PAIRS,
    ROW,
    SPREAD_NIBBLES,
    SUPERBLOCKS,
    ZEROS,
    in_float16,
    ordered,
    supers_of,
)
from quire.ops.triton.launch import DeviceInfo, Kernel
from quire.ops.triton.rows import GATES

MAX_ROWS = 32

WHOLE = 1 << 30
"""Columns that have a scale where the whole row has one."""

NIBBLES = f"""{SPREAD_NIBBLES}fma.rn.bf16x2 $0, a, one, $5;
fma.rn.bf16x2 $1, b, one, $5;
fma.rn.bf16x2 $2, c, one, $6;
fma.rn.bf16x2 $3, d, one, $6;
}}"""
"""Four bytes of a row -> the numbers in their low and in their high halves, less zero points: 0x4300 with q in its last
bits is 128 + q, and the next operands have -128 - zero of either half twice."""

FROM_NIBBLES, FROM_NIBBLES_16 = gl.constexpr(NIBBLES), gl.constexpr(in_float16(NIBBLES))
FROM_BYTES, FROM_BYTES_16 = gl.constexpr(BYTES), gl.constexpr(in_float16(BYTES))

activate, apply_gate = gluon.jit(rows.activate.fn), gluon.jit(rows.apply_gate.fn)
upper, byte_of = gluon.jit(integer_gemm.upper.fn), gluon.jit(integer_gemm.byte_of.fn)
signed_byte_of = gluon.jit(integer_gemm.signed_byte_of.fn)


@gluon.jit
def from_nibbles(raw, zero, other, A: gl.constexpr, DTYPE: gl.constexpr):
    """The numbers in the low and in the high halves of the bytes of words, [chunks, rows, 32] each, less their zero
    points, see `zeros_of`."""
    code: gl.constexpr = FROM_NIBBLES_16 if gl.float16 == DTYPE else FROM_NIBBLES
    a, b, c, d = gl.inline_asm_elementwise(
        code, "=r,=r,=r,=r,r,r,r", [raw, zero, other], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
        pack=1)  # fmt: skip
    return pairs_of(a, b, A, DTYPE), pairs_of(c, d, A, DTYPE)


@gluon.jit
def from_bytes(raw, DTYPE: gl.constexpr):
    """The signed bytes of words as numbers: a word of the first two, and one of the last."""
    code: gl.constexpr = FROM_BYTES_16 if gl.float16 == DTYPE else FROM_BYTES
    return gl.inline_asm_elementwise(code, "=&r,=&r,r", [raw], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def pairs_of(first, second, A: gl.constexpr, DTYPE: gl.constexpr):
    """Words of two numbers each, [chunks, rows, 8], as the numbers [chunks, rows, 32]: two of the first, two of the
    second."""
    low = gl.join(first.to(gl.int16), second.to(gl.int16))
    high = gl.join((first >> 16).to(gl.int16), (second >> 16).to(gl.int16))
    both = gl.reshape(gl.join(low, high), [first.shape[0], first.shape[1], 32])
    return gl.convert_layout(both.to(DTYPE, bitcast=True), A, assert_trivial=True)


@gluon.jit
def zeros_of(word, W: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """-128 - z of words, twice, as a column of the matrix."""
    if KIND == ZEROS:
        zero = word & 0xFFFF
    else:
        zero = gl.full_like(word, MINUS_136 if KIND == PAIRS else MINUS_128)
    if gl.float16 == DTYPE:
        zero += LARGER
    return gl.expand_dims(gl.convert_layout(zero | (zero << 16), gl.SliceLayout(2, W), assert_trivial=True), 2)


@gluon.jit
def scales_of(word, about, SECOND: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr):
    """The scales of 32 columns, or of more of ZEROS, as a column of sums. SECOND: the second ones of 64."""
    if KIND == SUPERBLOCKS:
        scale = upper(about, True) * byte_of(word, 2 if SECOND else 0)
    elif KIND == PAIRS:
        scale = upper(word if SECOND else word << 16, HALF)
    else:
        scale = upper(word, HALF)
    return gl.expand_dims(scale, 2)


@gluon.jit
def added(y, numbers, x, word, about, SECOND: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr):
    """y plus the scaled products of 32 columns; of SUPERBLOCKS, less their minima times the sums of x."""
    y += scales_of(word, about, SECOND, KIND, HALF) * mma_v2(numbers, x, gl.zeros_like(y))
    if KIND == SUPERBLOCKS:
        least = upper(about << 16, True) * byte_of(word, 3 if SECOND else 1)
        y -= gl.expand_dims(least, 2) * mma_v2(gl.full_like(numbers, 1.0), x, gl.zeros_like(y))
    return y


@gluon.jit
def both_added(
    y, total, low, high, x, at: gl.constexpr, word, more, about, KIND: gl.constexpr, SCALED: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """(y plus the scaled products of 64 columns, sums that wait for their scale): of the numbers `low` with x from
    `at`, in shared memory, and `high` with the next 32 columns. SCALED: columns that have a scale."""
    B: gl.constexpr = gl.DotOperandLayout(1, y.type.layout, 8)
    if SCALED == 32:
        y = added(y, low, columns(x, at, B), word, about, False, KIND, HALF)
        y = added(y, high, columns(x, at + 32, B), more, about, True, KIND, HALF)
    else:
        total = mma_v2(low, columns(x, at, B), total)
        total = mma_v2(high, columns(x, at + 32, B), total)
    if SCALED == 64:
        y += scales_of(word, about, False, KIND, HALF) * total
        total = gl.zeros_like(y)
    return y, total


@gluon.jit
def added_bytes(
    y, raw, x, word, about, SECOND: gl.constexpr, KIND: gl.constexpr, FINE: gl.constexpr, HALF: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """y plus the products of 32 columns of bytes, scaled but for those of a scale for the row; FINE: of scales of 16
    columns, in two products with zeros in place of the other half."""
    A: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 8)
    a, b = from_bytes(raw, DTYPE)
    if KIND == ROW:
        y = mma_v2(pairs_of(a, b, A, DTYPE), x, y)
    elif FINE:
        j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, raw.type.layout)))[None, None, :]
        early, scale = gl.where(j < 4, -1, 0), upper(about, True)
        left = mma_v2(pairs_of(a & early, b & early, A, DTYPE), x, gl.zeros_like(y))
        right = mma_v2(pairs_of(a & ~early, b & ~early, A, DTYPE), x, gl.zeros_like(y))
        y += gl.expand_dims(scale * signed_byte_of(word, 2 if SECOND else 0), 2) * left
        y += gl.expand_dims(scale * signed_byte_of(word, 3 if SECOND else 1), 2) * right
    else:
        y = added(y, pairs_of(a, b, A, DTYPE), x, word, about, SECOND, KIND, HALF)
    return y


@gluon.jit
def copy_columns(
    x, shared, held, inputs, start, CHUNKS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Ask for CHUNKS times CHUNK columns of x from `start`, [CHUNKS, ROWS, CHUNK], of the rows there are."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, WARPS, 1], [2, 1, 0])
    c = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    place = gl.minimum(r, held - 1).to(gl.int64) * inputs + (start + c * CHUNK + j)
    copy(shared, x + place)
    async_copy.commit_group()


@gluon.jit
def columns(shared, start: gl.constexpr, B: gl.constexpr):
    """32 columns of x of each chunk, [chunks, 32, rows], as the matrix units take them."""
    return shared.slice(start, 32, dim=2).permute((0, 2, 1)).load(B)


@gluon.jit
def row_of(i, apart, PAIRED: gl.constexpr):
    """Which row of the matrix is number i of a tile's. PAIRED: of 16 the first 8 are rows of the tile's first half, and
    the others those `apart` from them, which with a gate are what it gates."""
    return i // 16 * 8 + i % 8 + (i // 8 % 2) * apart if PAIRED else i


@gluon.jit
def step_of(
    weight, words, supers, start, last, chunk, place, m, outputs,
    BITS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """128 columns of each chunk of a tile, whose first ones begin at `start`, or at `last` where that is past it: words
    of their numbers in blocks of 64 columns, or 32 of 8 bits, words of the scales of each 32 columns, and those that
    superblocks have besides.

    chunk: [chunks, 1], columns between chunk and first chunk. place: of words from the first chunk's first ones, m:
    rows of the matrix.
    """
    start = gl.minimum(start, last)
    block, size = (start * BITS // 256).to(gl.int64), outputs.to(gl.int64) * 8
    line = weight + block * size + place
    first = gl.load(line, eviction_policy="evict_first")
    second = gl.load(line + size, eviction_policy="evict_first")
    third, fourth = first, second
    if BITS == 8:
        third = gl.load(line + 2 * size, eviction_policy="evict_first")
        fourth = gl.load(line + 3 * size, eviction_policy="evict_first")
    start += chunk
    a = start
    if KIND != ROW:
        a = gl.load(words + start // GROUP * outputs + m)
    b, c, d, about = a, a, a, a
    if GROUP <= 64:
        c = gl.load(words + (start + 64) // GROUP * outputs + m)
        d = c
    if GROUP == 32:
        b = gl.load(words + (start + 32) // GROUP * outputs + m)
        d = gl.load(words + (start + 96) // GROUP * outputs + m)
    if KIND == SUPERBLOCKS:
        about = gl.load(supers + start // 256 * outputs + m)
    return first, second, third, fourth, a, b, c, d, about


@gluon.jit
def give(
    y, bias, out, first, apart, held, outputs, row, PAIRED: gl.constexpr, GATE: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Write what ACT makes of the sums y [rows of the matrix, rows of x]. first, apart, PAIRED: see `row_of`."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    BLOCK_N: gl.constexpr = y.shape[0]
    ROWS: gl.constexpr = y.shape[1]
    n = first + row_of(gl.arange(0, BLOCK_N, gl.SliceLayout(1, y.type.layout)), apart, PAIRED)
    if BIAS:
        y += gl.load(bias + n).to(gl.float32)[:, None]
    if GATE:
        pairs = gl.permute(gl.reshape(y, [BLOCK_N // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        y, z = gl.split(pairs)
        y = apply_gate(y.to(DTYPE).to(gl.float32), z.to(DTYPE).to(gl.float32), ACT)
        y = gl.reshape(y, [BLOCK_N // 2, ROWS])
        n = first + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, y.type.layout))
    elif ACT >= 0:
        y = activate(y.to(DTYPE).to(gl.float32), ACT)
    r = row + gl.arange(0, ROWS, gl.SliceLayout(0, y.type.layout))
    gl.store(out + r[None, :].to(gl.int64) * outputs + n[:, None], y.to(DTYPE), mask=(r < held)[None, :])


@gluon.jit
def added_up(y, parts, arrived, SPLITS: gl.constexpr):
    """Store a run's sums. Returns all runs', in the same order each time, and whether this was the last to come."""
    SIZE: gl.constexpr = y.shape[0] * y.shape[1]
    i = gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    place = i[:, None] * y.shape[1] + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))[None, :]
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    tiles = gl.num_programs(0) * gl.num_programs(1)
    mine = parts + (gl.program_id(2) * tiles + tile).to(gl.int64) * SIZE
    gl.store(mine + place, y)
    barrier()
    last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        gl.store(arrived + tile, 0)
        y = gl.zeros_like(y)
        for split in gl.static_range(SPLITS):
            theirs = parts + (split * tiles + tile).to(gl.int64) * SIZE
            y += gl.load(theirs + place, cache_modifier=".cg")
    return y, last


@gluon.jit
def places(
    first, outputs, BITS: gl.constexpr, GATE: gl.constexpr, BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr,
    CHUNK: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Where a tile's first words are [CHUNKS, BLOCK_N, 8], its rows of the matrix [1, BLOCK_N] and its chunks' first
    columns [CHUNKS, 1]."""
    W: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    whole = outputs * 2 if GATE else outputs
    n = first + row_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, W))), outputs, GATE)
    c = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, W)))
    j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    place = c[:, None, None] * (CHUNK * BITS // 256) * whole * 8 + n[None, :, None] * 8 + j[None, None, :]
    m = first + row_of(gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, SUMS))), outputs, GATE)
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS))) * CHUNK
    return place, m[None, :], chunk[:, None]


@gluon.jit
def multiplied(
    y, step, x, at: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, FINE: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """y plus the products of a step's 128 columns with those of x from `at`, x in shared memory."""
    SUMS: gl.constexpr = y.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    W: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    SCALED: gl.constexpr = 32 if KIND != ZEROS else min(GROUP, 128)
    first, second, third, fourth, one, two, three, four, about = step
    if BITS == 8:
        y = added_bytes(y, first, columns(x, at, B), one, about, False, KIND, FINE, HALF, DTYPE)
        y = added_bytes(y, second, columns(x, at + 32, B), two, about, True, KIND, FINE, HALF, DTYPE)
        y = added_bytes(y, third, columns(x, at + 64, B), three, about, False, KIND, FINE, HALF, DTYPE)
        y = added_bytes(y, fourth, columns(x, at + 96, B), four, about, True, KIND, FINE, HALF, DTYPE)
    else:
        low, high = from_nibbles(first, zeros_of(one, W, KIND, DTYPE), zeros_of(two, W, KIND, DTYPE), A, DTYPE)
        y, total = both_added(
            y, gl.zeros_like(y), low, high, x, at, one, two, about, KIND, SCALED, HALF)  # fmt: skip
        low, high = from_nibbles(second, zeros_of(three, W, KIND, DTYPE), zeros_of(four, W, KIND, DTYPE), A, DTYPE)
        y, total = both_added(
            y, total, low, high, x, at + 64, three, four, about, KIND, SCALED, HALF)  # fmt: skip
        if SCALED == 128:
            y += scales_of(three, about, False, KIND, HALF) * total
    return y


@Kernel
@gluon.jit(do_not_specialize=["held"])
def mma_kernel(
    x, weight, words, supers, bias, out, parts, arrived, held, outputs, inputs, length,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr,
    FINE: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNKS: gl.constexpr, CHUNK: gl.constexpr, AHEAD: gl.constexpr, SPLITS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the matrix times ROWS rows of x, of which there are `held`, over `length` inputs.

    GROUP: columns that have a word, see `IntegerKind`; FINE: the word has scales of 16 columns. SPLITS: runs of inputs;
    the last program to come adds them up. CHUNKS: of each piece of a run, warps of their own for each; CHUNK: columns
    of one. x is in shared memory a piece at a time, and the next one. AHEAD: steps of 128 columns of each chunk that
    are asked for before they are multiplied.
    """
    DTYPE: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[CHUNKS, WARPS // CHUNKS, 1], instr_shape=[1, 16, 8]
    )
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    PIECE: gl.constexpr = CHUNKS * CHUNK
    whole = outputs * 2 if GATE else outputs
    first = gl.program_id(1) * (BLOCK_N // 2 if GATE else BLOCK_N)
    row = gl.program_id(0) * ROWS
    begin = gl.program_id(2) * length
    end = gl.minimum(begin + length, inputs)
    last = end - PIECE + CHUNK - 128

    place, m, chunk = places(first, outputs, BITS, GATE, BLOCK_N, CHUNKS, CHUNK, SUMS)
    steps = ()
    for s in gl.static_range(AHEAD):
        start = begin + s // (CHUNK // 128) * PIECE + s % (CHUNK // 128) * 128
        step = step_of(weight, words, supers, start, last, chunk, place, m, whole, BITS, KIND, GROUP)
        steps = steps + (step,)  # type: ignore[assignment]
    shared = gl.allocate_shared_memory(DTYPE, [2, CHUNKS, ROWS, CHUNK], SHARED)
    wait(DEPENDENT)
    release(DEPENDENT)
    x += row.to(gl.int64) * inputs
    copy_columns(x, shared.index(0), held - row, inputs, begin, CHUNKS, ROWS, CHUNK, WARPS)
    y = gl.zeros([CHUNKS, BLOCK_N, ROWS], gl.float32, SUMS)
    number = 0
    for start in range(begin, end, PIECE):
        async_copy.wait_group(0)
        barrier()
        # All have read the other buffer; after the last piece its columns are copied again, and not read.
        copy_columns(
            x, shared.index(1 - number), held - row, inputs, gl.minimum(start + PIECE, end - PIECE), CHUNKS, ROWS,
            CHUNK, WARPS)  # fmt: skip
        mine = shared.index(number)
        number = 1 - number
        for s in gl.static_range(CHUNK // 128):
            at = (s + AHEAD) // (CHUNK // 128) * PIECE + (s + AHEAD) % (CHUNK // 128) * 128
            later = step_of(weight, words, supers, start + at, last, chunk, place, m, whole, BITS, KIND, GROUP)
            y = multiplied(y, steps[0], mine, s * 128, BITS, KIND, FINE, GROUP, HALF, DTYPE)  # type: ignore[misc]
            steps = steps[1:] + (later,)  # type: ignore[assignment]
    async_copy.wait_group(0)
    if KIND == ROW:
        y *= gl.expand_dims(gl.load(words + m).to(gl.float32, bitcast=True), 2)
    y = gl.reshape(y, [BLOCK_N, ROWS]) if CHUNKS == 1 else gl.sum(y, 0)
    is_last = True
    if SPLITS > 1:
        y, is_last = added_up(y, parts, arrived, SPLITS)
    if is_last:
        give(y, bias, out, first, outputs, held, outputs, row, GATE, GATE, ACT, BIAS)


class MmaConfig(NamedTuple):
    """How a product is tiled. rows: of x. outputs: rows of the matrix, those of gates counted. chunks, chunk: of
    columns of x, in shared memory twice. wanted: programs that each multiprocessor gets, by splitting inputs."""

    rows: int
    outputs: int
    chunks: int
    chunk: int
    warps: int
    ahead: int
    wanted: int


def config(num_rows: int, matrix: IntegerMatrix, gated: bool) -> MmaConfig:
    """How a product is tiled: the fastest of some, measured with matrices of an 8B model, AWQ in groups of 128 and Q4_K
    on an H100, Q8_0 and Q6_K on an H200. Scales of 32 columns each take the time in which more could be asked for."""
    if matrix.bits == 8:
        return byte_config(num_rows, matrix, gated)
    many = matrix.kind is not IntegerKind.ZEROS or matrix.group == 32
    if num_rows > 16:
        return MmaConfig(32, 64, 1, 256, 4, 1, 4)
    if num_rows > 8:
        return MmaConfig(16, 64, 1, 256, 4, 1 if many else 3, 4)
    if many:
        return MmaConfig(8, 32, 2, 256, 4, 2, 4)
    if gated:
        return MmaConfig(8, 32, 1, 512, 2, 4, 4)
    if matrix.outputs * matrix.inputs <= 1 << 24:
        return MmaConfig(8, 64, 1, 512, 4, 2, 6)
    return MmaConfig(8, 32, 2, 256, 4, 2, 6)


def byte_config(num_rows: int, matrix: IntegerMatrix, gated: bool) -> MmaConfig:
    """The same of 8 bits."""
    fine = matrix.group == 16
    if num_rows <= 8:
        return MmaConfig(8, 32, 2, 256, 4, 2, 4) if fine else MmaConfig(8, 64, 1, 256, 4, 2, 4)
    if num_rows <= 16:
        small = matrix.outputs * matrix.inputs < 1 << 25 and not gated and not fine
        return MmaConfig(16, 32, 1, 256, 2, 2, 6) if small else MmaConfig(16, 64, 1, 256, 4, 1, 4)
    return MmaConfig(32, 32, 2, 128, 4, 2, 4) if gated else MmaConfig(32, 64, 1, 256, 4, 2, 2)


BYTE_KINDS = (IntegerKind.PAIRS, IntegerKind.ROWS, IntegerKind.SUPERBLOCKS)
"""Kinds of 8 bits that are multiplied here: all but zero points of bytes."""


def takes(x: Tensor, matrix: IntegerMatrix, gate: Gate, card: DeviceInfo) -> bool:
    """Whether `integer_mma` multiplies them."""
    if x.dtype not in (torch.bfloat16, torch.float16) or card.capability < LEAST or not card.sms:
        return False
    # Columns are copied 16 bytes at a time; in another order they are, in a new tensor.
    aligned = matrix.order is not None or x.data_ptr() % 16 == 0
    kinds = (IntegerKind.ZEROS, IntegerKind.PAIRS, IntegerKind.SUPERBLOCKS) if matrix.bits == 4 else BYTE_KINDS
    fits = matrix.kind in kinds
    even = matrix.inputs % 512 == 0 and matrix.outputs % (64 * num_parts(gate)) == 0
    return fits and even and aligned and len(x) <= MAX_ROWS


def integer_mma(
    x: Tensor,
    matrix: IntegerMatrix,
    bias: Tensor | None,
    card: DeviceInfo,
    arrived: Tensor,
    gate: Gate = "",
    how: MmaConfig | None = None,
) -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate of two parts. arrived: [COUNTERS]
    int32, zeros. how: other tiles than `config`'s."""
    x = ordered(x, matrix)
    num_rows, inputs = x.shape
    gated = num_parts(gate) == 2
    how = config(num_rows, matrix, gated) if how is None else how
    outputs = matrix.outputs // num_parts(gate)
    tiles, columns = triton.cdiv(num_rows, how.rows), matrix.outputs // how.outputs
    piece = how.chunks * how.chunk
    width = {IntegerKind.ZEROS: matrix.group, IntegerKind.ROWS: WHOLE}.get(matrix.kind, 64)
    pieces = inputs // piece
    splits = max(1, min(how.wanted * card.sms // (tiles * columns), pieces, 16)) if tiles * columns <= COUNTERS else 1
    each = triton.cdiv(pieces, splits)
    runs = triton.cdiv(pieces, each)
    out = x.new_empty(num_rows, outputs)
    parts = x.new_empty(runs * tiles * columns * how.outputs * how.rows, dtype=torch.float32) if runs > 1 else x
    mma_kernel[(tiles, columns, runs)](
        *(x, matrix.weight.view(torch.int32), matrix.words, supers_of(matrix), x if bias is None else bias, out),
        *(parts, arrived),
        *(num_rows, outputs, inputs, each * piece),
        GATE=gated, ACT=GATES[gate], BIAS=bias is not None, BITS=matrix.bits, KIND=int(matrix.kind),
        FINE=matrix.group == 16, GROUP=width, HALF=matrix.half, ROWS=how.rows,
        BLOCK_N=how.outputs, CHUNKS=how.chunks, CHUNK=how.chunk, AHEAD=how.ahead, SPLITS=runs, DEPENDENT=card.dependent,
        num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out
