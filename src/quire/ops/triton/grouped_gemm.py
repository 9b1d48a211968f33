"""Products of many rows an expert on a Hopper GPU, whose matrix units need not wait for tiles to begin and to end.

As many programs as run at once take tiles of `experts.sort_slots` by turns. One group of warps asks for pieces of the
matrix, and of x, several ahead, also those of the next tile; two groups of four warps multiply 64 of a tile's 128 rows
each, by pieces as they come. Each group waits for pieces alone, so that one multiplies while the other writes what it
has made; where an expert has 64 rows left, the second group has nothing to do. Written in Gluon.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.operands import Gate, Routing, num_parts
from quire.ops.triton.experts import SortedSlots, combine, sort_slots
from quire.ops.triton.gluon_language import barrier, copy, copy_tile, reinterpret, release, wait
from quire.ops.triton.launch import HOPPER, DeviceInfo, Kernel
from quire.ops.triton.rows import GATES, apply_gate

gated = gluon.jit(apply_gate.fn)

ROWS = 128
"""Of a tile; half of them are a group's."""

STAGES = 4
"""Pieces of 64 columns in shared memory."""

BESIDE = gl.constexpr(16)
"""Tiles of rows that are multiplied with the same rows of a matrix one after the other, so that L2 has both."""

IN_LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""How four warps copy rows of 64 numbers: eight threads a row."""


def written(*columns: int) -> gl.constexpr:
    """How sums are written: a thread has eight columns of a row, the four with its row 32, and all of them those that
    `columns` are the steps of. Threads have other columns of the same rows when they have multiplied."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, each] for each in columns)]
    threads, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(registers, threads, warps, [], [64, 2 * columns[-1]]))


WRITTEN, HALF_WRITTEN = written(32, 64, 128), written(32, 64)

ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""How four warps share a number."""


@gluon.jit
def tile_of(tiles, room, order, unit, columns, USED: gl.constexpr, BY_TOKEN: gl.constexpr):
    """Of a unit of work its tile's expert, -1 for none, where its rows begin and their count, which of the matrix's
    columns of tiles it is, and which rows of x its slots read, 64 and 64. After its last row it is that one again."""
    many = columns * BESIDE
    tile, column = unit // many * BESIDE + unit % BESIDE, unit % many // BESIDE
    expert = gl.load(tiles + tile, mask=tile < room, other=-1)
    begin = gl.load(tiles + room + tile, mask=expert >= 0, other=0)
    count = gl.load(tiles + 2 * room + tile, mask=expert >= 0, other=1)
    low = gl.arange(0, 64, gl.SliceLayout(1, IN_LINES))
    high = low + 64
    if BY_TOKEN:
        low = gl.load(order + begin + gl.minimum(low, count - 1)) // USED
        high = gl.load(order + begin + gl.minimum(high, count - 1)) // USED
    return expert, begin, count, column, low, high


@gluon.jit
def copy_rows(x, shared, row, inputs, start):
    """Ask for 64 columns of 64 rows of x, with this thread's other copies."""
    copy(
        shared, x + row.to(gl.int64)[:, None] * inputs + start + gl.arange(0, 64, gl.SliceLayout(0, IN_LINES))[None, :]
    )


@gluon.jit
def store_tile(tile, begin, about, stage):
    """Store with a tile's first piece what `stored_tile` reads."""
    tile.index(stage * 2).store(gl.full([1], begin, gl.int32, ONE))
    tile.index(stage * 2 + 1).store(gl.full([1], about, gl.int32, ONE))
    barrier()


@gluon.jit
def feed(
    x, weight, tiles, taken, room, columns, total, given, USED: gl.constexpr, BY_TOKEN: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What the warps do that ask for pieces: of a program's first tile, and of those that no other has begun."""
    _, order, numbers, rows, tile, full, empty, outputs, inputs = given
    whole = outputs * 2 if BY_TOKEN else outputs
    apart = outputs if BY_TOKEN else 128
    wide: gl.constexpr = 128 if BY_TOKEN else 256
    wait(DEPENDENT)
    release(DEPENDENT)
    stage, phase, unit = 0, 1, gl.program_id(0)
    expert, begin, count, column, low, high = tile_of(tiles, room, order, unit, columns, USED, BY_TOKEN)
    while unit < total:
        after, other, next_begin, next_count, next_column, next_low, next_high = (
            unit, expert, begin, count, column, low, high
        )  # fmt: skip
        if expert < 0:
            after = gl.atomic_add(taken, 1, sem="relaxed") + gl.num_programs(0)
            other, next_begin, next_count, next_column, next_low, next_high = tile_of(
                tiles, room, order, gl.minimum(after, total - 1), columns, USED, BY_TOKEN
            )
        else:
            line = expert * whole + column * wide
            for start in range(0, inputs, 64):
                mbarrier.wait(empty.index(stage), phase)
                if start == 0:
                    store_tile(tile, begin, count + column * 256, stage)
                mbarrier.expect(full.index(stage), 32768 if BY_TOKEN else 49152)
                copy_tile(weight, [line, start], full.index(stage), numbers.index(stage * 2))
                copy_tile(weight, [line + apart, start], full.index(stage), numbers.index(stage * 2 + 1))
                if BY_TOKEN:
                    copy_rows(x, rows.index(stage * 2), low, inputs, start)
                    if count > 64:
                        copy_rows(x, rows.index(stage * 2 + 1), high, inputs, start)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                else:
                    copy_tile(x, [begin, start], full.index(stage), rows.index(stage * 2))
                    copy_tile(x, [begin + 64, start], full.index(stage), rows.index(stage * 2 + 1))
                phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
                # What comes next is asked for while there are pieces to be multiplied.
                if start == 0:
                    after = gl.atomic_add(taken, 1, sem="relaxed") + gl.num_programs(0)
                if start == inputs // 128 * 64:
                    other, next_begin, next_count, next_column, next_low, next_high = tile_of(
                        tiles, room, order, gl.minimum(after, total - 1), columns, USED, BY_TOKEN
                    )
        unit, expert, begin, count, column, low, high = (
            after, other, next_begin, next_count, next_column, next_low, next_high
        )  # fmt: skip
    if unit - gl.num_programs(0) == total - 1:  # the last of all
        gl.store(taken, 0)
    mbarrier.wait(empty.index(stage), phase)
    store_tile(tile, 0, 0, stage)
    mbarrier.arrive(full.index(stage))
    if BY_TOKEN:
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def write(y, out, place, held, first, outputs, BY_TOKEN: gl.constexpr, ACT: gl.constexpr):
    """Write sums y [64, 256] to rows `place` [64] of out, with a gate what it makes of both halves."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    if BY_TOKEN:
        y, z = gl.split(gl.permute(gl.reshape(y, [64, 2, 128]), (0, 2, 1)))
        y = gated(y, z, ACT)
    WAY: gl.constexpr = HALF_WRITTEN if BY_TOKEN else WRITTEN
    y = gl.convert_layout(y.to(DTYPE), WAY)
    n = first + gl.arange(0, y.shape[1], gl.SliceLayout(0, WAY))
    line = gl.convert_layout(place.to(gl.int64) * outputs, gl.SliceLayout(1, WAY), assert_trivial=True)
    mask = gl.convert_layout(held, gl.SliceLayout(1, WAY), assert_trivial=True)
    gl.store(out + line[:, None] + n[None, :], y, mask=mask[:, None])


@gluon.jit
def stored_tile(tile, stage):
    """Where a tile's rows begin, their count, 0 where there is no tile, and which of the columns of tiles it is."""
    begin, about = gl.max(tile.index(stage * 2).load(ONE), 0), gl.max(tile.index(stage * 2 + 1).load(ONE), 0)
    return begin, about % 256, about // 256


@gluon.jit
def multiply(
    given, NUMBER: gl.constexpr, BY_TOKEN: gl.constexpr, ACT: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What group NUMBER of four warps does."""
    out, order, numbers, rows, tile, full, empty, outputs, inputs = given
    DTYPE: gl.constexpr = out.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    whole = reinterpret(numbers, DTYPE, [STAGES, 256, 64], numbers.layout)
    wide: gl.constexpr = 128 if BY_TOKEN else 256
    r = NUMBER * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    wait(DEPENDENT)
    stage, phase = 0, 0
    mbarrier.wait(full.index(0), 0)
    begin, count, column = stored_tile(tile, 0)
    while count > 0:
        if count > NUMBER * 64:
            place = begin + gl.minimum(r, count - 1)
            if not BY_TOKEN:
                place = gl.load(order + place)
            y = gl.zeros([64, 256], gl.float32, SUMS)
            for start in range(0, inputs, 64):
                mbarrier.wait(full.index(stage), phase)
                if BY_TOKEN:
                    fence_async_shared()
                y = warpgroup_mma(
                    rows.index(stage * 2 + NUMBER), whole.index(stage).permute((1, 0)), y, use_acc=start > 0,
                    is_async=True,
                )  # fmt: skip
                y = warpgroup_mma_wait(1, deps=[y])
                barrier()
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=start > 0)
                phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            y = warpgroup_mma_wait(0, deps=[y])
            barrier()
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
            write(y, out, place, r < count, column * wide, outputs, BY_TOKEN, ACT)
        else:
            for _ in range(0, inputs, 64):
                mbarrier.wait(full.index(stage), phase)
                barrier()
                mbarrier.arrive(empty.index(stage))
                phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        mbarrier.wait(full.index(stage), phase)
        begin, count, column = stored_tile(tile, stage)


@Kernel
@gluon.jit(do_not_specialize=["room", "columns", "total"])
def grouped_kernel(
    x, weight, out, order, tiles, taken, room, outputs, inputs, columns, total,
    USED: gl.constexpr, BY_TOKEN: gl.constexpr, ACT: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """`total` tiles of 128 rows that use the same expert by 256 rows of its matrix, `columns` of them side by side.

    weight: a descriptor of [E outputs, inputs] by [128, 64]. order, tiles, room: see `sort_kernel`. BY_TOKEN: x has a
    row a token, the matrix [E 2 outputs, inputs] a gate and what it gates, and out [slots, outputs] is in the order of
    `order`. Else x is a descriptor of [slots, inputs] by [64, 64] in that order, and out in that of slots. taken: a
    counter, zero.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    numbers = gl.allocate_shared_memory(DTYPE, [STAGES * 2, 128, 64], weight.layout)
    rows = gl.allocate_shared_memory(DTYPE, [STAGES * 2, 64, 64], weight.layout)
    tile = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129 if BY_TOKEN else 1)
        mbarrier.init(empty.index(s), count=2)
    given = (out, order, numbers, rows, tile, full, empty, outputs, inputs)
    gl.warp_specialize(
        [
            (multiply, (given, 0, BY_TOKEN, ACT, STAGES, DEPENDENT)),
            (multiply, (given, 1, BY_TOKEN, ACT, STAGES, DEPENDENT)),
            (feed, (x, weight, tiles, taken, room, columns, total, given, USED, BY_TOKEN, STAGES, DEPENDENT)),
        ],
        [4, 4], [216, 64],
    )  # fmt: skip


def takes(x: Tensor, gate_up: Tensor, down: Tensor, gate: Gate, rows: int, card: DeviceInfo) -> bool:
    """Whether `grouped_experts` computes a mixture whose tiles have so many rows."""
    alike = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == gate_up.dtype == down.dtype
    even = x.shape[1] % 256 == 0 and down.shape[2] % 128 == 0 and num_parts(gate) == 2
    aligned = all(each.data_ptr() % 16 == 0 for each in (x, gate_up, down))
    return card.capability == HOPPER and card.sms > 0 and rows == ROWS and alike and even and aligned


def grouped_product(
    x: Tensor, matrix: Tensor, slots: SortedSlots, used: int, card: DeviceInfo, taken: Tensor, gate: Gate = ""
) -> Tensor:
    """As `multiply_tiles`, with tiles of 128 rows: see `takes`. taken: int32, of which the first is 0, and stays so."""
    outputs, inputs = matrix.shape[1] // num_parts(gate), matrix.shape[2]
    columns, room, layout = outputs // (128 if gate else 256), slots.tiles.shape[1], gl.NVMMASharedLayout(128, 16, 2)
    total = triton.cdiv(room, BESIDE.value) * BESIDE.value * columns
    out = x.new_empty(len(slots.order), outputs)
    grouped_kernel[(min(card.sms, total),)](
        x if gate else TensorDescriptor.from_tensor(x, [64, 64], layout),
        TensorDescriptor.from_tensor(matrix.flatten(0, 1), [128, 64], layout),
        *(out, slots.order, slots.tiles, taken, room, outputs, inputs, columns, total),
        USED=used, BY_TOKEN=gate != "", ACT=GATES[gate], STAGES=STAGES, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
    return out


def grouped_experts(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, gate: Gate, card: DeviceInfo, taken: Tensor
) -> Tensor:
    """See `Ops.experts`. taken: see `grouped_product`."""
    used = routing.experts.shape[1]
    slots = sort_slots(routing.experts, len(gate_up), ROWS, card)
    inner = grouped_product(x, gate_up, slots, used, card, taken, gate)
    return combine(grouped_product(inner, down, slots, used, card, taken), routing.weights, card)
