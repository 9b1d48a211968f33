"""Products of 33 to 64 rows with GGUF's blocks (Q8_0, Q4_K) on a Hopper GPU, fed by its copy engine.

As `integer_tma`, for scales of 32 columns: one warp asks for pieces of the matrix and of x, several ahead, and groups
of four warps turn bytes into numbers in registers, which the matrix units multiply with x from shared memory, 32
columns at a time. Their sums are scaled; while a group does that, others' are multiplied. Minima of Q4_K are multiplied
with sums of x, which the matrix units add up, too. Written in Gluon, see `integer_mma`.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.operands import Gate, IntegerKind, IntegerMatrix, num_parts
from quire.ops.triton import integer_gemm
from quire.ops.triton.gluon_language import barrier, copy_tile, release, wait
from quire.ops.triton.integer_gemm import LARGER, MINUS_128, in_float16, ordered, supers_of
from quire.ops.triton.integer_mma import give, row_of
from quire.ops.triton.integer_tma import (
    BYTES_OF,
    add_parts,
    divided,
    four_of,
    pairs_of,
    parted,
    place_of,
    programs_of,
    store_part,
)
from quire.ops.triton.launch import HOPPER, DeviceInfo, Kernel
from quire.ops.triton.rows import GATES

BYTES = """{
.reg .b32 a, c, m;
mov.b32 m, 0xbf80bf80;
prmt.b32 a, $1, $1, 0x1100;
lop3.b32 c, a, 0x00800080, 0x43004300, 0xea;
lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, c, m, a;
}"""
"""Two signed bytes -> their numbers: 128 + the lower seven bits, less 128, or 256 where the sign is set."""

FROM_BYTES, FROM_BYTES_16 = gl.constexpr(BYTES), gl.constexpr(in_float16(BYTES))

MIN_ROWS, MAX_ROWS = 33, 64
"""Fewer are faster by `integer_mma`; of more the matrix is dequantized first."""

TURN = gl.constexpr(1024)
"""What programs of a sum add to a counter, one each and the first the rest, when each has stored its part: so none
has to set it back, and after one's own addition it is a multiple when all have come. They run at the same time."""

GROUPS = gl.constexpr(4)
"""Of four warps, 64 rows of the matrix each, those of gates counted."""

KNOWN = frozenset({(8, IntegerKind.PAIRS, 32), (4, IntegerKind.SUPERBLOCKS, 32)})
"""Bits, kinds and groups of matrices that are multiplied."""

upper, byte_of = gluon.jit(integer_gemm.upper.fn), gluon.jit(integer_gemm.byte_of.fn)


@gluon.jit
def ask(
    x, weight, numbers, columns, full, stage, first, row, start, apart, whole, MATRIX: gl.constexpr, X: gl.constexpr,
    BITS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Ask for 128 columns of a tile of the MATRIX, of X, or of both, which are awaited together."""
    BLOCKS: gl.constexpr = BITS // 2
    if MATRIX:
        mbarrier.expect(full.index(stage), GROUPS * 1024 * BITS + ROWS * 256)
        for b in gl.static_range(BLOCKS):
            line = (start * BITS // 256 + b) * whole + first
            for half in gl.static_range(2):
                place = numbers.index((stage * BLOCKS + b) * 2 + half)
                copy_tile(weight, [(line + half * apart) // 4, 0], full.index(stage), place)
    if X:
        for b in gl.static_range(4):
            copy_tile(x, [row, start + b * 32], full.index(stage), columns.index(stage * 4 + b))


@gluon.jit
def feed(
    asked, BITS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr
):  # fmt: skip
    """What the warp does that asks for pieces. Those of the matrix need not wait for the preceding kernel."""
    x, weight, numbers, columns, full, empty, begin, end, pitch, tiles, apart, whole = asked
    early = gl.minimum(end - begin, STAGES)
    for s in range(early):
        first, row, start = place_of(begin + s, pitch, tiles, BLOCK, ROWS)
        ask(x, weight, numbers, columns, full, s, first, row, start, apart, whole, True, False, BITS, ROWS)
    wait(DEPENDENT)
    release(DEPENDENT)
    for s in range(early):
        first, row, start = place_of(begin + s, pitch, tiles, BLOCK, ROWS)
        ask(x, weight, numbers, columns, full, s, first, row, start, apart, whole, False, True, BITS, ROWS)
    stage, phase = 0, 0
    for unit in range(begin + early, end):
        first, row, start = place_of(unit, pitch, tiles, BLOCK, ROWS)
        mbarrier.wait(empty.index(stage), phase)
        ask(x, weight, numbers, columns, full, stage, first, row, start, apart, whole, True, True, BITS, ROWS)
        phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def joined(first, second, A: gl.constexpr, DTYPE: gl.constexpr):
    """32 columns of 64 rows, of words of two numbers [32, 16] of each warp's first and of its second eight rows."""
    # [warp, row, pair, number, which eight rows] -> [warp, which, row, pair, number].
    every = gl.reshape(gl.join(parted(first), parted(second)), [4, 8, 16, 2, 2])
    every = gl.reshape(gl.permute(every, (0, 4, 1, 2, 3)), [64, 32])
    return gl.convert_layout(every.to(DTYPE, bitcast=True), A, assert_trivial=True)


@gluon.jit
def bytes_of(pair, DTYPE: gl.constexpr):
    """Words of two numbers, of pairs of signed bytes."""
    code: gl.constexpr = FROM_BYTES_16 if gl.float16 == DTYPE else FROM_BYTES
    return gl.inline_asm_elementwise(code, "=r,r", [pair.to(gl.int32)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def product(first, second, x, y, DTYPE: gl.constexpr):
    """The products of 32 columns, of words of two numbers as in `joined`, with x [32, rows]."""
    A: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 2)
    total = warpgroup_mma(joined(first, second, A, DTYPE), x, gl.zeros_like(y), use_acc=False, is_async=True)
    # Until they are multiplied, registers with numbers are not used for others.
    total, first, second = warpgroup_mma_wait(0, deps=[total, first, second])
    return total


@gluon.jit
def sums_of(x, y, DTYPE: gl.constexpr):
    """The sums of 32 columns of x [32, rows], for each row of the matrix the same."""
    A: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 2)
    ones = gl.full([64, 32], 1.0, DTYPE, A)
    total = warpgroup_mma(ones, x, gl.zeros_like(y), use_acc=False, is_async=True)
    total, ones = warpgroup_mma_wait(0, deps=[total, ones])
    return total


@gluon.jit
def add_piece(
    y, numbers, columns, full, empty, stage, phase, word, second, about, NUMBER: gl.constexpr, BITS: gl.constexpr,
    HALF: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """y plus the products of 128 columns. word, second: of the scales of each 64. about: see `IntegerKind`."""
    mbarrier.wait(full.index(stage), phase)
    if BITS == 8:
        for q in gl.static_range(4):
            pairs = pairs_of(numbers.index(stage * 8 + q * 2), NUMBER)
            under = pairs_of(numbers.index(stage * 8 + q * 2 + 1), NUMBER)
            x = columns.index(stage * 4 + q).permute((1, 0))
            total = product(bytes_of(pairs, DTYPE), bytes_of(under, DTYPE), x, y, DTYPE)
            mark = word if q < 2 else second
            y += upper(mark if q % 2 == 1 else mark << 16, HALF)[:, None] * total
    else:
        large, least = upper(about, True), upper(about << 16, True)
        bits: gl.constexpr = MINUS_128 + LARGER if gl.float16 == DTYPE else MINUS_128
        zero = gl.full([32], bits | (bits << 16), gl.int32, gl.SliceLayout(1, BYTES_OF))
        for b in gl.static_range(2):
            pairs = pairs_of(numbers.index(stage * 4 + b * 2), NUMBER)
            under = pairs_of(numbers.index(stage * 4 + b * 2 + 1), NUMBER)
            low, high = four_of(pairs, zero, DTYPE)
            other_low, other_high = four_of(under, zero, DTYPE)
            mark = word if b == 0 else second
            x = columns.index(stage * 4 + b * 2).permute((1, 0))
            y -= (least * byte_of(mark, 1))[:, None] * sums_of(x, y, DTYPE)
            y += (large * byte_of(mark, 0))[:, None] * product(low, other_low, x, y, DTYPE)
            x = columns.index(stage * 4 + b * 2 + 1).permute((1, 0))
            y -= (least * byte_of(mark, 3))[:, None] * sums_of(x, y, DTYPE)
            y += (large * byte_of(mark, 2))[:, None] * product(high, other_high, x, y, DTYPE)
    barrier()
    mbarrier.arrive(empty.index(stage))
    return y


@gluon.jit
def keep(y, parts, turns, tile, slot, each, pitch, length, NUMBER: gl.constexpr):
    """Store a group's sums of a part of a tile, for all to see that wait for the tile. turns: see `TURN`."""
    store_part(y, parts, slot * GROUPS + NUMBER)
    head, count = programs_of(tile, each, pitch, length)
    barrier()
    first = (gl.program_id(0) == head) & (NUMBER == 0)
    gl.atomic_add(turns + tile, gl.where(first, TURN + 1 - count * GROUPS, 1), sem="acq_rel")


@gluon.jit
def add_up(
    parts, turns, bias, out, tile, each, pitch, length, tiles, apart, held, outputs,
    NUMBER: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, MOST: gl.constexpr, GATE: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A group's share of a tile that several programs have parts of: wait for all, and add them up in order.

    Those programs run at the same time, see `block_tma`, so that waiting ends."""
    head, count = programs_of(tile, each, pitch, length)
    came = gl.atomic_add(turns + tile, 0, sem="acquire")
    while came & (TURN - 1) != 0:
        came = gl.atomic_add(turns + tile, 0, sem="acquire")
    add_parts(
        parts, bias, out, tile, head, count, tiles, apart, held, outputs, NUMBER, GROUPS, BLOCK, ROWS, MOST, GATE, ACT,
        BIAS)  # fmt: skip


@gluon.jit
def multiply(
    given, NUMBER: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, BITS: gl.constexpr, HALF: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What group NUMBER of four warps does: 64 rows of the matrix times ROWS rows of x."""
    (numbers, columns, full, empty, words, supers, bias, out, parts, turns, begin, end, each, pitch, length, tiles,
     apart, whole, held, outputs) = given  # fmt: skip
    DTYPE: gl.constexpr = out.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    mine = NUMBER * 32 + row_of(gl.arange(0, 64, gl.SliceLayout(1, SUMS)), apart, True)
    wait(DEPENDENT)
    stage, phase = 0, 0
    unit = begin
    while unit < end:
        first, row, start = place_of(unit, pitch, tiles, BLOCK, ROWS)
        stop = gl.minimum(start + (end - unit) * 128, length * 128)
        y = gl.zeros([64, ROWS], gl.float32, SUMS)
        n = first + mine
        word = gl.load(words + start // 64 * whole + n)
        second = gl.load(words + (start // 64 + 1) * whole + n)
        about = word
        if BITS == 4:
            about = gl.load(supers + start // 256 * whole + n)
        for at in range(start, stop, 128):
            after = gl.minimum(at + 128, stop - 128)
            next_word = gl.load(words + after // 64 * whole + n)
            next_second = gl.load(words + (after // 64 + 1) * whole + n)
            next_about = next_word
            if BITS == 4:
                next_about = gl.load(supers + after // 256 * whole + n)
            y = add_piece(
                y, numbers, columns, full, empty, stage, phase, word, second, about, NUMBER, BITS, HALF, DTYPE
            )  # fmt: skip
            word, second, about = next_word, next_second, next_about
            phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if stop - start == length * 128:
            give(y, bias, out, first + NUMBER * 32, apart, held, outputs, row, True, GATE, ACT, BIAS)
        elif MOST > 1:
            slot = gl.program_id(0) * 2 + gl.where(start == 0, 1, 0)
            keep(y, parts, turns, unit // pitch, slot, each, pitch, length, NUMBER)
        unit += (stop - start) // 128
    if MOST > 1:
        tile = begin // pitch
        while tile <= (end - 1) // pitch:
            if (tile * pitch < begin) | (tile * pitch + length > end):
                add_up(
                    parts, turns, bias, out, tile, each, pitch, length, tiles, apart, held, outputs, NUMBER, BLOCK,
                    ROWS, MOST, GATE, ACT, BIAS)  # fmt: skip
            tile = gl.maximum(tile + 1, (end - 1) // pitch)


@Kernel
@gluon.jit(do_not_specialize=["held", "each", "pitch", "length", "tiles", "total"])
def block_kernel(
    x, weight, words, supers, bias, out, parts, turns, held, outputs, each, pitch, length, tiles, total,
    GATE: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, BITS: gl.constexpr, HALF: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, DEPENDENT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`each` of `total` pieces, as `integer_tma.tma_kernel`. x: a descriptor of [held, inputs] by [ROWS, 32]. BITS: 8,
    Q8_0, or 4, Q4_K."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    BLOCK: gl.constexpr = 32 * GROUPS if GATE else 64 * GROUPS
    whole = outputs * 2 if GATE else outputs
    apart = outputs if GATE else 32 * GROUPS
    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, total)
    end = gl.where(pitch > length, gl.minimum(end, begin // pitch * pitch + length), end)
    numbers = gl.allocate_shared_memory(gl.int16, [STAGES * BITS, 8 * GROUPS, 64], weight.layout)
    columns = gl.allocate_shared_memory(DTYPE, [STAGES * 4, ROWS, 32], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPS)
    given = (numbers, columns, full, empty, words, supers, bias, out, parts, turns, begin, end, each, pitch, length,
             tiles, apart, whole, held, outputs)  # fmt: skip
    asked = (x, weight, numbers, columns, full, empty, begin, end, pitch, tiles, apart, whole)
    gl.warp_specialize(
        [
            (multiply, (given, 0, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, BITS, HALF, DEPENDENT)),
            (multiply, (given, 1, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, BITS, HALF, DEPENDENT)),
            (multiply, (given, 2, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, BITS, HALF, DEPENDENT)),
            (multiply, (given, 3, BLOCK, ROWS, STAGES, MOST, GATE, ACT, BIAS, BITS, HALF, DEPENDENT)),
            (feed, (asked, BITS, BLOCK, ROWS, STAGES, DEPENDENT)),
        ],
        [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24],
    )  # fmt: skip


MOST_STAGES, THREAD = 6, 112
"""Pieces in shared memory at most, and registers of a thread that multiplies."""


def takes(x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, gate: Gate, card: DeviceInfo) -> bool:
    """Whether `block_tma` multiplies them: what has run on a card. The kernel knows float16, biases and other gates."""
    aligned, plain = x.data_ptr() % 16 == 0, matrix.order is None and bias is None and gate in ("", "silu")
    fits = plain and x.dtype is torch.bfloat16 and MIN_ROWS <= len(x) <= MAX_ROWS
    even = matrix.inputs % (256 if matrix.bits == 4 else 128) == 0 and matrix.outputs % (64 * GROUPS.value) == 0
    known = (matrix.bits, matrix.kind, matrix.group) in KNOWN
    return card.capability == HOPPER and card.sms > 0 and fits and aligned and even and known


def block_tma(
    x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, card: DeviceInfo, turns: Tensor, gate: Gate = ""
) -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate of two parts: see `takes`. turns:
    [COUNTERS] int32, zeros at first, see `TURN`.

    There are no more programs than run at once: those that have parts of a tile wait for each other."""
    x = ordered(x, matrix)
    (num_rows, inputs), groups, bits, rows = x.shape, GROUPS.value, matrix.bits, MAX_ROWS
    outputs, tiles, length = matrix.outputs // num_parts(gate), triton.cdiv(num_rows, rows), inputs // 128
    count = tiles * (matrix.outputs // (64 * groups))
    each, pitch, programs, most = divided(count, length, card.sms)
    stages = min(MOST_STAGES, (card.shared - 4096) // (groups * 1024 * bits + rows * 256))
    out = x.new_empty(num_rows, outputs)
    parts = x.new_empty(2 * programs * 64 * groups * rows, dtype=torch.float32) if most > 1 else x
    pairs = matrix.weight.view(torch.int16).view(-1, 64)
    block_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [rows, 32], gl.NVMMASharedLayout(64, 16, 2)),
        TensorDescriptor.from_tensor(pairs, [8 * groups, 64], gl.NVMMASharedLayout(128, 16, 2)),
        *(matrix.words, supers_of(matrix), x if bias is None else bias, out, parts, turns),
        *(num_rows, outputs, each, pitch, length, tiles, count * pitch),
        GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None, BITS=bits, HALF=matrix.half, ROWS=rows,
        STAGES=stages, MOST=most, DEPENDENT=card.dependent, REGISTERS=THREAD, num_warps=4, **card.options,
    )  # fmt: skip
    return out
