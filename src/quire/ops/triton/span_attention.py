"""Attention of long prompts on a Hopper GPU, whose matrix units do not wait for keys, nor for softmax.

A program has 128 queries of a head. One warp asks the copy engine for blocks of keys and values, as they lie in the
pools, a few ahead; two groups of four warps have 64 queries each. While a group's matrix units multiply keys of one
block and values of the block before it, the other group computes weights (FlashAttention 3, Shah et al. 2024). Written
in Gluon.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.operands import Scores
from quire.ops.ragged import LayerKV, LongSpan, RaggedBatch
from quire.ops.triton.gluon_language import barrier, copy_tile, reinterpret, release, wait
from quire.ops.triton.launch import HOPPER, DeviceInfo, Kernel, block
from quire.ops.triton.long_spans import gather_kv

QUERIES = 128
"""Of a program; half of them are a group's."""

MOST_DIM = 256
"""The largest head whose sums fit into registers."""

RING, TURNS = 2, True
"""Blocks of keys, and of values, in shared memory; whether groups multiply by turns (measured, H200)."""

PANEL = gl.constexpr(64)
"""Numbers of a row in shared memory; those of longer rows follow after all rows."""


@gluon.jit
def ask(source, pages, numbers, full, block, stage, group, last, GROUPS: gl.constexpr, PAGE: gl.constexpr,
        KEYS: gl.constexpr, PANELS: gl.constexpr):  # fmt: skip
    """Ask for a block of keys or values. last: the last page that there is."""
    PIECE: gl.constexpr = min(PAGE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    mbarrier.expect(full.index(stage), KEYS * PANELS * PANEL * 2)
    for j in gl.static_range(PIECES):
        at = block * KEYS + j * PIECE
        page = gl.load(pages + gl.minimum(at // PAGE, last))
        line = (page * GROUPS + group) * PAGE + at % PAGE
        for p in gl.static_range(PANELS):
            box = numbers.index((stage * PANELS + p) * PIECES + j)
            copy_tile(source, [line, p * PANEL], full.index(stage), box)


@gluon.jit
def feed(
    queries, keys, values, pages, row, begin, end, last, given, GROUPS: gl.constexpr, SHARE: gl.constexpr,
    DIM: gl.constexpr, WIDE: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """What the warp does that asks for queries from `row` on, and for blocks begin to end."""
    q, k, v, q_full, k_full, k_empty, v_full, v_empty, _ = given
    PANELS: gl.constexpr = WIDE // PANEL
    head = gl.program_id(0)
    group = head // SHARE
    mbarrier.expect(q_full.index(0), 128 * WIDE * 2)
    for half in gl.static_range(2):
        for p in gl.static_range(PANELS):
            box = q.index(half * PANELS + p)
            copy_tile(queries, [row + half * 64, head * DIM + p * PANEL], q_full.index(0), box)
    stage, phase = 0, 1
    for number in range(begin, end):
        mbarrier.wait(k_empty.index(stage), phase)
        ask(keys, pages, k, k_full, number, stage, group, last, GROUPS, PAGE, KEYS, PANELS)
        mbarrier.wait(v_empty.index(stage), phase)
        ask(values, pages, v, v_full, number, stage, group, last, GROUPS, PAGE, KEYS, PANELS)
        phase = gl.where(stage == RING - 1, 1 - phase, phase)
        stage = gl.where(stage == RING - 1, 0, stage + 1)


@gluon.jit
def weigh(x, m, z, position, block, slope, window, MASKED: gl.constexpr, WINDOWED: gl.constexpr):
    """Of products x [rows, keys] the weights, and by how much what was summed before fades."""
    if MASKED:
        at = block * x.shape[1] + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        seen = at[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        x = gl.where(seen, x, -1e30)
    top = gl.maximum(m, gl.max(x, 1) * slope)
    weight = gl.exp2(x * slope - top[:, None])
    fade = gl.exp2(m - top)
    return weight, fade, top, z * fade + gl.sum(weight, 1)


@gluon.jit
def keep(boxes, stage, since, until, PANELS: gl.constexpr, PIECES: gl.constexpr):
    """Make zeros of a block's values but rows since to until: what they are times a weight of 0 may be NaN."""
    ROWS: gl.constexpr = boxes.shape[1]
    WAY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WAY))
    for j in gl.static_range(PIECES):
        for p in gl.static_range(PANELS):
            box = boxes.index((stage * PANELS + p) * PIECES + j)
            x, at = box.load(WAY), j * ROWS + row
            box.store(gl.where(((at >= since) & (at < until))[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    barrier()


@gluon.jit
def fold(
    state, begin, end, first, last, position, slope, window, given, NUMBER: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr, KEYS: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Add blocks begin to end: products with the keys of each and, meanwhile, values of the one before. first, last:
    the tile's first block, and the one after its last."""
    weight, m, z, acc = state
    q, k, v, _, k_full, k_empty, v_full, v_empty, turns = given
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    WIDE: gl.constexpr = acc.shape[1]
    DTYPE: gl.constexpr = q.dtype
    queries = reinterpret(q, DTYPE, [2, 64, WIDE], q.layout).index(NUMBER)
    keys = reinterpret(k, DTYPE, [RING, KEYS, WIDE], k.layout)
    values = reinterpret(v, DTYPE, [RING, KEYS, WIDE], v.layout)
    HELD: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for number in range(begin, end):
        held = gl.convert_layout(weight.to(DTYPE), HELD)
        stage, after = (number - first) % RING, (number - first + 1) % RING
        before, old = (number - first - 1) % RING, (number - first - 1) // RING % 2
        if TURNS:
            mbarrier.wait(turns.index(NUMBER), (number - first - 1) % 2)
        x = warpgroup_mma(
            queries, keys.index(stage).permute((1, 0)), gl.zeros([64, KEYS], gl.float32, SUMS), use_acc=False,
            is_async=True,
        )  # fmt: skip
        mbarrier.wait(v_full.index(before), old)
        acc = warpgroup_mma(held, values.index(before), acc, is_async=True)
        if TURNS:
            barrier()
            mbarrier.arrive(turns.index(1 - NUMBER))
        x = warpgroup_mma_wait(1, deps=[x])
        barrier()
        mbarrier.arrive(k_empty.index(stage))
        weight, fade, m, z = weigh(x, m, z, position, number, slope, window, MASKED, WINDOWED)
        # Waits for the next keys here: a compiler moves no weight past this branch, behind the next wait.
        mbarrier.wait(k_full.index(after), (number - first + 1) // RING % 2, pred=number + 1 < last)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(v_empty.index(before))
        acc *= gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return weight, m, z, acc


@gluon.jit
def attend(
    out, sinks, oldest, begin, lead, clear, end, position, line, rows, length, slope, unit, window, given,
    NUMBER: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr, SINKS: gl.constexpr,
    WINDOWED: gl.constexpr, KEYS: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """What group NUMBER of four warps does. position: of its first query, of which `rows` are the span's, from row
    `line` on. oldest: the first position that a query of the tile sees. Blocks lead to clear need no mask."""
    q, k, v, q_full, k_full, k_empty, v_full, _, turns = given
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    MADE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    HELD: gl.constexpr = gl.DotOperandLayout(0, MADE, 2)
    DTYPE: gl.constexpr = q.dtype
    PANELS: gl.constexpr = WIDE // PANEL
    PIECES: gl.constexpr = v.shape[0] // (RING * PANELS)
    queries = reinterpret(q, DTYPE, [2, 64, WIDE], q.layout).index(NUMBER)
    keys = reinterpret(k, DTYPE, [RING, KEYS, WIDE], k.layout)
    values = reinterpret(v, DTYPE, [RING, KEYS, WIDE], v.layout)
    at = position + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    m = gl.full([64], -1e20, gl.float32, gl.SliceLayout(1, SUMS))
    z = gl.zeros([64], gl.float32, gl.SliceLayout(1, SUMS))
    if SINKS:  # a score without a value
        m, z = m * 0 + gl.load(sinks + gl.program_id(0)).to(gl.float32) * 1.4426950408889634, z + 1
    acc = gl.zeros([64, WIDE], gl.float32, MADE)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    x = warpgroup_mma(
        queries, keys.index(0).permute((1, 0)), gl.zeros([64, KEYS], gl.float32, SUMS), use_acc=False, is_async=True
    )
    x = warpgroup_mma_wait(0, deps=[x])
    barrier()
    mbarrier.arrive(k_empty.index(0))
    if TURNS:
        mbarrier.arrive(turns.index(1 - NUMBER), pred=NUMBER == 1)
    weight, _, m, z = weigh(x, m, z, at, begin, slope, window, True, WINDOWED)
    mbarrier.wait(k_full.index(1), 0, pred=begin + 1 < end)
    if WINDOWED:
        if oldest > begin * KEYS:
            mbarrier.wait(v_full.index(0), 0)
            keep(v, 0, oldest - begin * KEYS, KEYS, PANELS, PIECES)
    state = (weight, m, z, acc)
    if WINDOWED:
        state = fold(state, begin + 1, lead, begin, end, at, slope, window, given, NUMBER, True, WINDOWED, KEYS,
                     RING, TURNS)  # fmt: skip
    state = fold(state, lead, clear, begin, end, at, slope, window, given, NUMBER, False, WINDOWED, KEYS, RING,
                 TURNS)  # fmt: skip
    state = fold(state, clear, end, begin, end, at, slope, window, given, NUMBER, True, WINDOWED, KEYS, RING,
                 TURNS)  # fmt: skip
    weight, m, z, acc = state
    held = gl.convert_layout(weight.to(DTYPE), HELD)
    stage = (end - 1 - begin) % RING
    mbarrier.wait(v_full.index(stage), (end - 1 - begin) // RING % 2)
    if end * KEYS > length:
        keep(v, stage, 0, length - (end - 1) * KEYS, PANELS, PIECES)
    acc = warpgroup_mma(held, values.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    share = gl.convert_layout(unit / gl.maximum(z, 1e-30), gl.SliceLayout(1, MADE), assert_trivial=True)
    i, d = gl.arange(0, 64, gl.SliceLayout(1, MADE)), gl.arange(0, WIDE, gl.SliceLayout(0, MADE))
    place = (line + i).to(gl.int64) * (HEADS * DIM) + gl.program_id(0) * DIM
    gl.store(
        out + place[:, None] + d[None, :], (acc * share[:, None]).to(DTYPE),
        mask=(i < rows)[:, None] & (d < DIM)[None, :],
    )  # fmt: skip


@Kernel
@gluon.jit(do_not_specialize=["first", "count", "past", "window"], do_not_specialize_on_alignment=["pages"])
def span_kernel(
    queries, keys, values, pages, sinks, out, first, count, past, slope, unit, window,
    GROUPS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr, PAGE: gl.constexpr,
    SINKS: gl.constexpr, WINDOWED: gl.constexpr, KEYS: gl.constexpr, RING: gl.constexpr, TURNS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Program (head, i): the i-th tile from the last, of `count` queries that are rows of queries and out [T, H, D]
    from `first` on, after `past` tokens whose blocks are `pages`.

    queries: a descriptor of [T, H D] by [64, 64]; keys, values: of pools as [N G B, D] by [B, 64].
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    PANELS: gl.constexpr = WIDE // PANEL
    PIECE: gl.constexpr = min(PAGE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    length, low = past + count, past + tile * 128
    end = (gl.minimum(low + 128, length) + KEYS - 1) // KEYS
    oldest = gl.maximum(low - window + 1, 0) if WINDOWED else low * 0
    begin = oldest // KEYS
    lead = begin + 1
    if WINDOWED:
        lead = gl.minimum(gl.maximum((gl.maximum(low + 128 - window, 0) + KEYS - 1) // KEYS, lead), end)
    clear = gl.minimum(gl.maximum((low + 1) // KEYS, lead), end)
    q = gl.allocate_shared_memory(DTYPE, [2 * PANELS, 64, PANEL], queries.layout)
    k = gl.allocate_shared_memory(DTYPE, [RING * PANELS * PIECES, PIECE, PANEL], keys.layout)
    v = gl.allocate_shared_memory(DTYPE, [RING * PANELS * PIECES, PIECE, PANEL], keys.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for s in gl.static_range(RING):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(turns.index(s), count=1)
    wait(DEPENDENT)
    release(DEPENDENT)
    given = (q, k, v, q_full, k_full, k_empty, v_full, v_empty, turns)
    line, rows = first + tile * 128, count - tile * 128
    gl.warp_specialize(
        [
            (attend, (out, sinks, oldest, begin, lead, clear, end, low, line, rows, length, slope, unit, window, given,
                      0, GROUPS * SHARE, DIM, WIDE, SINKS, WINDOWED, KEYS, RING, TURNS)),
            (attend, (out, sinks, oldest, begin, lead, clear, end, low + 64, line + 64, rows - 64, length, slope, unit,
                      window, given, 1, GROUPS * SHARE, DIM, WIDE, SINKS, WINDOWED, KEYS, RING, TURNS)),
            (feed, (queries, keys, values, pages, line, begin, end, (length - 1) // PAGE, given, GROUPS, SHARE, DIM,
                    WIDE, PAGE, KEYS, RING)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def takes(q: Tensor, kv: LayerKV, batch: RaggedBatch, how: Scores, card: DeviceInfo) -> bool:
    """Whether long spans of such queries [T, H, D] are attended to by `attend_span`: of the sizes, dtype and scores
    with which that has been measured. It computes others, too: any heads of up to MOST_DIM numbers, blocks of a power
    of two from 8 tokens on, float16, windows, sinks and K/V of eight bits."""
    hopper = card.capability == HOPPER and card.sms > 0 and card.shared >= 227 << 10
    alike = q.dtype is torch.bfloat16 and kv.k.dtype is q.dtype and kv.k.shape[2:] == (64, 128)
    aligned = all(x.data_ptr() % 16 == 0 for x in (q, kv.k, kv.v))
    plain = how.is_causal(batch) and not how.soft_cap and how.sinks is None
    return hopper and alike and aligned and plain and min(how.window, how.chunk) >= batch.max_kv


def attend_span(
    out: Tensor, q: Tensor, kv: LayerKV, batch: RaggedBatch, span: LongSpan, how: Scores, card: DeviceInfo,
    keys: int = 0, ring: int = RING, turns: bool = TURNS,
) -> None:  # fmt: skip
    """Write a span's rows of out [T, H, D], whose queries are those rows of q [T, H, D]. keys, ring: of a block, and
    blocks in shared memory. turns: groups multiply by turns."""
    _, heads, dim = q.shape
    _, groups, page, _ = kv.k.shape
    length, pages, units = span.past + span.queries, batch.page_table[span.span], (kv.k_scale, kv.v_scale)
    pools: tuple[Tensor, Tensor] = (kv.k, kv.v)
    if kv.k.dtype is not q.dtype:
        pools, units = gather_kv(kv, pages, length, length, q.dtype, card, by_page=True), (1.0, 1.0)
        pages = torch.arange(-(-length // page), dtype=torch.int32, device=q.device)
    wide = max(PANEL.value, block(dim))
    keys = keys or min(128, 16384 // wide)
    layout, box = gl.NVMMASharedLayout(128, 16, 2), [min(page, keys), PANEL.value]
    span_kernel[(heads, triton.cdiv(span.queries, QUERIES))](
        TensorDescriptor.from_tensor(q.flatten(1), [64, PANEL.value], layout),
        *(TensorDescriptor.from_tensor(x.view(-1, dim), box, layout) for x in pools),
        *(pages, q if how.sinks is None else how.sinks, out, span.first, span.queries, span.past),
        *(how.scale * units[0] * 1.4426950408889634, units[1], how.window),
        GROUPS=groups, SHARE=heads // groups, DIM=dim, WIDE=wide, PAGE=page, SINKS=how.sinks is not None,
        WINDOWED=how.window < batch.max_kv, KEYS=keys, RING=ring, TURNS=turns, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
