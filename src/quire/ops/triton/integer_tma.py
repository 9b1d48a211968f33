"""Products of 17 rows and more with 4-bit matrices on a Hopper GPU, fed by its copy engine.

One warp asks the copy engine for pieces of the matrix and of x, several ahead; groups of four warps turn bytes into
numbers in registers, which Hopper's matrix units multiply with x straight from shared memory. Each group waits for
nothing but its own products, so that one's are multiplied while others' bytes become numbers, and memory is read
meanwhile. All groups of a program share x, of which each program would otherwise need as many bytes as of the matrix.

Of sixteen rows that a warp multiplies at once, eight are of one half of the program's rows and eight of the other: with
a gate, of the gate and of what it gates, so that one thread has both. Written in Gluon, see `integer_mma`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.operands import Gate, IntegerKind, IntegerMatrix, num_parts
from quire.ops.triton.gemv import COUNTERS
from quire.ops.triton.gluon_language import barrier, copy_tile, release, wait
from quire.ops.triton.integer_gemm import LARGER, in_float16, ordered
from quire.ops.triton.integer_mma import give, row_of, upper
from quire.ops.triton.launch import HOPPER, DeviceInfo, Kernel
from quire.ops.triton.rows import GATES

NIBBLES = """{
.reg .b32 a, b, one;
mov.b32 one, 0x3f803f80;
prmt.b32 a, $2, $2, 0x1100;
shr.u32 b, a, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, $3;
fma.rn.bf16x2 $1, b, one, $3;
}"""
"""Two bytes of a row -> the numbers in their low and in their high halves, less zero points, see `integer_mma`."""

MIN_ROWS, MAX_ROWS = 17, 256
"""Fewer are faster by `integer_mma`, more by the library, with the matrix dequantized first."""

WAIT = 4
"""Pieces that a program could multiply in the time in which parts of tiles are exchanged."""

FROM_NIBBLES, FROM_NIBBLES_16 = gl.constexpr(NIBBLES), gl.constexpr(in_float16(NIBBLES))

BYTES_OF = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 16],
    )
)
"""Which pairs of bytes [32 rows, 16] a thread of four warps has: those of its columns, of a row of its warp's eight."""

IN_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8]],
        lane_bases=[[0, 1], [0, 2], [0, 16], [0, 32], [1, 0]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[8, 64],
    )
)
"""The same in lines of 128 bytes [8, 64], four rows each, as which the copy engine brings them."""


@gluon.jit
def halves(column):
    """Of 64 values, those of each warp's first and of its second eight rows, [32] each, as `BYTES_OF` has them."""
    first, second = gl.split(gl.permute(gl.reshape(column, [4, 2, 8]), (0, 2, 1)))
    first, second = gl.reshape(first, [32]), gl.reshape(second, [32])
    return (
        gl.convert_layout(first, gl.SliceLayout(1, BYTES_OF), assert_trivial=True),
        gl.convert_layout(second, gl.SliceLayout(1, BYTES_OF), assert_trivial=True),
    )


@gluon.jit
def four_of(pair, zero, DTYPE: gl.constexpr):
    """The numbers in the low and in the high halves of pairs of bytes [32, 16], less zero points [32]: words of two."""
    code: gl.constexpr = FROM_NIBBLES_16 if gl.float16 == DTYPE else FROM_NIBBLES
    return gl.inline_asm_elementwise(
        code, "=r,=r,r,r", [pair.to(gl.int32), zero[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def parted(word):
    """The two numbers of words, as a dimension more."""
    return gl.join(word.to(gl.int16), (word >> 16).to(gl.int16))


@gluon.jit
def numbers_of(first, second, zero, other, A: gl.constexpr, DTYPE: gl.constexpr):
    """64 columns of 64 rows, less their zero points, of the bytes [32, 16] of each warp's first and second rows; and
    the registers that hold them."""
    a, b = four_of(first, zero, DTYPE)
    c, d = four_of(second, other, DTYPE)
    low, high = gl.join(parted(a), parted(c)), gl.join(parted(b), parted(d))
    # [warp, row, pair, number, which eight rows, half] -> [warp, which, row, half, pair, number].
    every = gl.reshape(gl.join(low, high), [4, 8, 16, 2, 2, 2])
    every = gl.reshape(gl.permute(every, (0, 4, 1, 5, 2, 3)), [64, 64])
    return gl.convert_layout(every.to(DTYPE, bitcast=True), A, assert_trivial=True), (a, b, c, d)


@gluon.jit
def pairs_of(numbers, NUMBER: gl.constexpr):
    """A group's pairs of bytes [32, 16]."""
    pairs = gl.reshape(numbers.slice(NUMBER * 8, 8).load(IN_LINES), [32, 16])
    return gl.convert_layout(pairs, BYTES_OF, assert_trivial=True)


@gluon.jit
def zeros_of(word, DTYPE: gl.constexpr):
    """-128 - z, twice, of the first and of the second rows."""
    zero = word & 0xFFFF
    if gl.float16 == DTYPE:
        zero += LARGER
    return halves(zero | (zero << 16))


@gluon.jit
def place_of(unit, pitch, tiles, BLOCK: gl.constexpr, ROWS: gl.constexpr):
    """The first row of the matrix, of x and the first column of piece `unit`: those of a tile follow each other, and
    tiles of the same rows of the matrix."""
    tile = unit // pitch
    return tile // tiles * BLOCK, tile % tiles * ROWS, unit % pitch * 128


@gluon.jit
def ask_matrix(
    weight, numbers, full, stage, first, start, apart, whole, ROWS: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Ask for 128 columns of a tile of the matrix; x is awaited with them."""
    mbarrier.expect(full.index(stage), GROUPS * 4096 + ROWS * 256)
    for b in gl.static_range(2):
        line = (start // 64 + b) * whole + first
        for half in gl.static_range(2):
            copy_tile(
                weight, [(line + half * apart) // 4, 0], full.index(stage), numbers.index(stage * 4 + b * 2 + half)
            )


@gluon.jit
def ask_columns(x, columns, full, stage, row, start):
    """Ask for 128 columns of x."""
    for b in gl.static_range(2):
        copy_tile(x, [row, start + b * 64], full.index(stage), columns.index(stage * 2 + b))


@gluon.jit
def feed(
    asked, BLOCK: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What the warp does that asks for pieces. Those of the matrix need not wait for the preceding kernel."""
    x, weight, numbers, columns, full, empty, begin, end, pitch, tiles, apart, whole = asked
    early = gl.minimum(end - begin, STAGES)
    for s in range(early):
        first, row, start = place_of(begin + s, pitch, tiles, BLOCK, ROWS)
        ask_matrix(weight, numbers, full, s, first, start, apart, whole, ROWS, GROUPS)
    wait(DEPENDENT)
    release(DEPENDENT)
    for s in range(early):
        first, row, start = place_of(begin + s, pitch, tiles, BLOCK, ROWS)
        ask_columns(x, columns, full, s, row, start)
    stage, phase = 0, 0
    for unit in range(begin + early, end):
        first, row, start = place_of(unit, pitch, tiles, BLOCK, ROWS)
        mbarrier.wait(empty.index(stage), phase)
        ask_matrix(weight, numbers, full, stage, first, start, apart, whole, ROWS, GROUPS)
        ask_columns(x, columns, full, stage, row, start)
        phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def kept_at(rows, columns):
    """Where sums [64 rows of the matrix, rows of x] are kept: in the order in which threads have them, so that a warp
    stores and loads 256 bytes at a time."""
    return (columns // 8 * 512 + columns % 8)[None, :] + (rows // 8 % 2 * 256 + rows // 16 * 64 + rows % 8 * 8)[:, None]


@gluon.jit
def programs_of(tile, each, pitch, length):
    """The first program that has a part of a tile, and how many have."""
    head = tile * pitch // each
    return head, (tile * pitch + length - 1) // each + 1 - head


@gluon.jit
def store_part(y, parts, slot):
    """Store a group's sums of a part of a tile, [64, rows of x]."""
    SIZE: gl.constexpr = 64 * y.shape[1]
    i = gl.arange(0, 64, gl.SliceLayout(1, y.type.layout))
    j = gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    gl.store(parts + slot.to(gl.int64) * SIZE + kept_at(i, j), y)


@gluon.jit
def keep(y, parts, arrived, tile, slot, NUMBER: gl.constexpr, GROUPS: gl.constexpr):
    """Store a group's sums of a part of a tile, for all to see that wait for the tile."""
    store_part(y, parts, slot * GROUPS + NUMBER)
    barrier()
    gl.atomic_add(arrived + tile, 1, sem="acq_rel")


@gluon.jit
def add_parts(
    parts, bias, out, tile, head, count, tiles, apart, held, outputs,
    NUMBER: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, MOST: gl.constexpr,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Add up a group's share of a tile, parts of which `count` programs from `head` on have stored, in order."""
    SIZE: gl.constexpr = 64 * ROWS
    SHARES: gl.constexpr = GROUPS * (ROWS // 8)
    SHARE: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    place = kept_at(gl.arange(0, 64, gl.SliceLayout(1, SHARE)), gl.arange(0, 8, gl.SliceLayout(0, SHARE)))
    first, row = tile // tiles * BLOCK, tile % tiles * ROWS
    for share in range((gl.program_id(0) - head) * GROUPS + NUMBER, SHARES, count * GROUPS):
        group, column = share % GROUPS, share // GROUPS
        mine = parts + group * SIZE + column * 512
        # The first part is the last of what its program does.
        total = gl.load(mine + (head * 2 + 1).to(gl.int64) * (GROUPS * SIZE) + place, cache_modifier=".cg")
        for part in gl.static_range(1, MOST):
            theirs = mine + ((head + part) * 2).to(gl.int64) * (GROUPS * SIZE) + place
            total += gl.load(theirs, mask=(place >= 0) & (part < count), other=0.0, cache_modifier=".cg")
        give(total, bias, out, first + group * 32, apart, held, outputs, row + column * 8, True, GATE, ACT, BIAS)


@gluon.jit
def add_up(
    parts, arrived, bias, out, tile, each, pitch, length, tiles, apart, held, outputs,
    NUMBER: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, MOST: gl.constexpr,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A group's share of a tile that several programs have parts of: wait for all, and add them up in order.

    Those programs run at the same time, see `integer_tma`, so that waiting ends."""
    head, count = programs_of(tile, each, pitch, length)
    came = gl.atomic_add(arrived + tile, 0, sem="acquire")
    while came < count * GROUPS:
        came = gl.atomic_add(arrived + tile, 0, sem="acquire")
    add_parts(
        parts, bias, out, tile, head, count, tiles, apart, held, outputs, NUMBER, GROUPS, BLOCK, ROWS, MOST, GATE, ACT,
        BIAS)  # fmt: skip
    barrier()
    if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == 2 * count * GROUPS - 1:
        gl.store(arrived + tile, 0)


@gluon.jit
def add_piece(
    y, numbers, columns, full, empty, stage, phase, word, second, NUMBER: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """y plus the products of 128 columns. word, second: of the scales and zero points of each 64."""
    A: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 2)
    mbarrier.wait(full.index(stage), phase)
    x, more = columns.index(stage * 2).permute((1, 0)), columns.index(stage * 2 + 1).permute((1, 0))
    zero, other = zeros_of(word, DTYPE)
    pairs, under = pairs_of(numbers.index(stage * 4), NUMBER), pairs_of(numbers.index(stage * 4 + 1), NUMBER)
    a, held_a = numbers_of(pairs, under, zero, other, A, DTYPE)
    total = warpgroup_mma(a, x, gl.zeros_like(y), use_acc=False, is_async=True)
    if GROUP == 64:
        zero, other = zeros_of(second, DTYPE)
    pairs, under = pairs_of(numbers.index(stage * 4 + 2), NUMBER), pairs_of(numbers.index(stage * 4 + 3), NUMBER)
    b, held_b = numbers_of(pairs, under, zero, other, A, DTYPE)
    if GROUP == 64:
        total = warpgroup_mma_wait(0, deps=[total])
        y += upper(word, HALF)[:, None] * total
        total = warpgroup_mma(b, more, gl.zeros_like(y), use_acc=False, is_async=True)
    else:
        total = warpgroup_mma(b, more, total, is_async=True)
    # Until they are multiplied, registers with numbers are not used for others.
    c, d, e, f = held_a
    g, h, i, j = held_b
    total, c, d, e, f, g, h, i, j = warpgroup_mma_wait(0, deps=[total, c, d, e, f, g, h, i, j])
    mbarrier.arrive(empty.index(stage))
    return y + upper(second, HALF)[:, None] * total


@gluon.jit
def multiply(
    given, NUMBER: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    MOST: gl.constexpr, GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr,
    HALF: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What group NUMBER of four warps does: 64 rows of the matrix times ROWS rows of x."""
    (numbers, columns, full, empty, words, bias, out, parts, arrived, begin, end, each, pitch, length, tiles, apart,
     whole, held, outputs) = given  # fmt: skip
    DTYPE: gl.constexpr = out.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    i = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    mine = NUMBER * 32 + row_of(i, apart, True)
    wait(DEPENDENT)
    stage, phase = 0, 0
    unit = begin
    while unit < end:
        first, row, start = place_of(unit, pitch, tiles, BLOCK, ROWS)
        stop = gl.minimum(start + (end - unit) * 128, length * 128)
        y = gl.zeros([64, ROWS], gl.float32, SUMS)
        n = first + mine
        word = gl.load(words + start // GROUP * whole + n)
        second = word
        if GROUP == 64:
            second = gl.load(words + (start // 64 + 1) * whole + n)
        for at in range(start, stop, 128):
            after = gl.minimum(at + 128, stop - 128)
            next_word = gl.load(words + after // GROUP * whole + n)
            next_second = next_word
            if GROUP == 64:
                next_second = gl.load(words + (after // 64 + 1) * whole + n)
            y = add_piece(y, numbers, columns, full, empty, stage, phase, word, second, NUMBER, GROUP, HALF, DTYPE)
            word, second = next_word, next_second
            phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if stop - start == length * 128:
            give(y, bias, out, first + NUMBER * 32, apart, held, outputs, row, True, GATE, ACT, BIAS)
        elif MOST > 1:
            slot = gl.program_id(0) * 2 + gl.where(start == 0, 1, 0)
            keep(y, parts, arrived, unit // pitch, slot, NUMBER, GROUPS)
        unit += (stop - start) // 128
    if MOST > 1:
        tile = begin // pitch
        while tile <= (end - 1) // pitch:
            if (tile * pitch < begin) | (tile * pitch + length > end):
                add_up(
                    parts, arrived, bias, out, tile, each, pitch, length, tiles, apart, held, outputs, NUMBER, GROUPS,
                    BLOCK, ROWS, MOST, GATE, ACT, BIAS)  # fmt: skip
            tile = gl.maximum(tile + 1, (end - 1) // pitch)


@Kernel
@gluon.jit(do_not_specialize=["held", "each", "pitch", "length", "tiles", "total"])
def tma_kernel(
    x, weight, words, bias, out, parts, arrived, held, outputs, each, pitch, length, tiles, total,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, DEPENDENT: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """`each` of `total` pieces, 128 columns of a tile each: 64 GROUPS rows of the matrix times ROWS rows of x, of which
    there are `held`. Pieces of a tile, `length`, follow each other, and `tiles` of the same rows of the matrix.

    x and weight: descriptors, of x [held, inputs] by [ROWS, 64] and of pairs of bytes [blocks of 64 columns times rows
    / 4, 64] by [8 GROUPS, 64]: four rows a line, since the copy engine takes its time for each. GROUP: columns that
    have a word, see `IntegerKind`. MOST: programs that have parts of a tile. STAGES: pieces in shared memory.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    BLOCK: gl.constexpr = 32 * GROUPS if GATE else 64 * GROUPS
    whole = outputs * 2 if GATE else outputs
    apart = outputs if GATE else 32 * GROUPS
    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, total)
    end = gl.where(pitch > length, gl.minimum(end, begin // pitch * pitch + length), end)
    numbers = gl.allocate_shared_memory(gl.int16, [STAGES * 4, 8 * GROUPS, 64], weight.layout)
    columns = gl.allocate_shared_memory(DTYPE, [STAGES * 2, ROWS, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    given = (numbers, columns, full, empty, words, bias, out, parts, arrived, begin, end, each, pitch, length, tiles,
             apart, whole, held, outputs)  # fmt: skip
    asked = (x, weight, numbers, columns, full, empty, begin, end, pitch, tiles, apart, whole)
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (multiply, (given, 0, GROUPS, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, GROUP, HALF, DEPENDENT)),
                (multiply, (given, 1, GROUPS, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, GROUP, HALF, DEPENDENT)),
                (multiply, (given, 2, GROUPS, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, GROUP, HALF, DEPENDENT)),
                (multiply, (given, 3, GROUPS, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, GROUP, HALF, DEPENDENT)),
                (feed, (asked, BLOCK, ROWS, GROUPS, STAGES, DEPENDENT)),
            ],
            [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (given, 0, GROUPS, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, GROUP, HALF, DEPENDENT)),
                (multiply, (given, 1, GROUPS, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, GROUP, HALF, DEPENDENT)),
                (feed, (asked, BLOCK, ROWS, GROUPS, STAGES, DEPENDENT)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


class TmaConfig(NamedTuple):
    """How a product is tiled. rows: of x. groups: of four warps, 64 rows of the matrix each, those of gates counted.
    stages: of 128 columns. registers: of a thread that multiplies, of which all threads have at most 120 on average.
    each: pieces of a program, if not as `divided` has them."""

    rows: int
    groups: int = 4
    stages: int = 5
    registers: int = 112
    each: int = 0


class Division(NamedTuple):
    """each: pieces of a program. pitch: of a tile, with those left out that its last program would have besides. most:
    programs that have parts of a tile."""

    each: int
    pitch: int
    programs: int
    most: int


@cache
def divided(count: int, length: int, programs: int, each: int = 0) -> Division:
    """`count` tiles of `length` pieces among no more programs: each tile among some of its own, unless fewer pieces
    would be a program's in one sequence of all. each: so many pieces in that sequence."""
    own = triton.cdiv(length, max(1, programs // count))
    fewest = triton.cdiv(count * length, programs)
    if not each and count <= programs and own <= fewest + WAIT:
        runs = triton.cdiv(length, own)
        return Division(own, own * runs, count * runs, bounded(runs))
    each = max(each, fewest)
    if count > COUNTERS:
        each = triton.cdiv(each, length) * length
    most = max((t * length + length - 1) // each + 1 - t * length // each for t in range(min(count, each)))
    return Division(each, length, triton.cdiv(count * length, each), bounded(most))


def bounded(most: int) -> int:
    """Few different numbers, each at least so many: kernels are compiled for each."""
    return most if most == 1 else max(4, triton.next_power_of_2(most))


def takes(x: Tensor, matrix: IntegerMatrix, card: DeviceInfo) -> bool:
    """Whether `integer_tma` multiplies them."""
    # The copy engine reads 16 bytes at a time; in another order, columns are in a new tensor.
    aligned = matrix.order is not None or x.data_ptr() % 16 == 0
    fits = x.dtype in (torch.bfloat16, torch.float16) and MIN_ROWS <= len(x) <= MAX_ROWS
    return fits and aligned and takes_matrix(matrix, card)


def takes_matrix(matrix: IntegerMatrix, card: DeviceInfo) -> bool:
    """Whether there are such products with it."""
    fits = matrix.bits == 4 and matrix.kind is IntegerKind.ZEROS and matrix.group >= 64
    even = matrix.inputs % 128 == 0 and matrix.outputs % 256 == 0
    return card.capability == HOPPER and card.sms > 0 and fits and even


def config(num_rows: int) -> TmaConfig:
    """How a product is tiled, measured on an H200 with matrices of an 8B model."""
    return TmaConfig(32 if num_rows <= 32 else 64)


def integer_tma(
    x: Tensor,
    matrix: IntegerMatrix,
    bias: Tensor | None,
    card: DeviceInfo,
    arrived: Tensor,
    gate: Gate = "",
    how: TmaConfig | None = None,
) -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate of two parts. arrived: [COUNTERS]
    int32, zeros. how: other tiles than `config`'s.

    There are no more programs than run at once: those that have parts of a tile wait for each other."""
    x = ordered(x, matrix)
    num_rows, inputs = x.shape
    how = config(num_rows) if how is None else how
    outputs, block = matrix.outputs // num_parts(gate), 64 * how.groups
    tiles, length = triton.cdiv(num_rows, how.rows), inputs // 128
    count = tiles * (matrix.outputs // block)
    each, pitch, programs, most = divided(count, length, card.sms, how.each)
    out = x.new_empty(num_rows, outputs)
    parts = x.new_empty(2 * programs * block * how.rows, dtype=torch.float32) if most > 1 else x
    pairs = matrix.weight.view(torch.int16).view(-1, 64)
    tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [how.rows, 64], gl.NVMMASharedLayout(128, 16, 2)),
        TensorDescriptor.from_tensor(pairs, [block // 8, 64], gl.NVMMASharedLayout(128, 16, 2)),
        *(matrix.words, x if bias is None else bias, out, parts, arrived),
        *(num_rows, outputs, each, pitch, length, tiles, count * pitch),
        GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None, GROUP=matrix.group, HALF=matrix.half,
        ROWS=how.rows, GROUPS=how.groups, STAGES=how.stages, MOST=most, DEPENDENT=card.dependent,
        REGISTERS=how.registers, num_warps=4, **card.options,
    )  # fmt: skip
    return out
