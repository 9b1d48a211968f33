"""Mixtures of experts: the router, and the MLPs of the experts that tokens use. Launches depend on shapes alone.

Few tokens, a launch each for router, gate and up, and down: every pair of a token and one of its experts (a slot) is a
product of its own by multiply-adds, which reads that expert's rows only; a token's experts are added up in the same
program. More tokens: slots are sorted by expert (`sort_kernel`), an expert's slots are cut into tiles of `rows`, and
each tile is multiplied on the matrix units, so that an expert's matrix is read from memory once; `combine_kernel` adds
up each token's experts. There are no atomic sums: every sum has one order, which depends on the configuration alone.

The tiles of expert e are numbered from before // rows + e, where `before` counts the slots of the experts below e:
enough numbers for any split of slots among experts, and known to e's program without the other experts' tiles. Tiles
that stay unused have expert -1.

Rows that only fill up a captured step have expert -1 in place of each of theirs: no tile, and no matrix is read.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.operands import (
    NO_BIASES,
    ExpertBiases,
    ExpertMatrices,
    Gate,
    IntegerMatrix,
    QuantizedMatrix,
    RouterWeights,
    Routing,
    num_parts,
)
from quire.ops.quantized import E4M3
from quire.ops.ragged import RaggedBatch
from quire.ops.triton.gemv import (
    BY_BLOCK,
    BY_ROW,
    UNSCALED,
    GemmConfig,
    highest_expert,
    lines,
    numbers,
    partial_sums,
    row_scales,
    row_sums,
    two,
)
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, kernel, release, wait, wait_and_release
from quire.ops.triton.quantized_gemm import FOUR_AT_ONCE
from quire.ops.triton.rounded_gemm import alike, multiplies_float8, round_rows, run_of
from quire.ops.triton.rows import GATES, add_scaled, apply_gate, normalize, warps

LEAST = tl.constexpr(-(1 << 63))
"""Below every key of `choose`."""

PLAIN, E4M3_NUMBERS, BYTES, INTEGERS = (tl.constexpr(form) for form in range(4))
"""How numbers of matrices are stored: see `expert_tile`."""


@triton.jit
def finite_only(logits):
    """NaN and infinity as the largest number."""
    return tl.where(logits < float("inf"), logits, 3.4e38)


@triton.jit
def score_of(logits, top, SIGMOID: tl.constexpr):
    """Scores, see `TopK`; those of a softmax are not divided by their sum yet, and `top` is the largest logit."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-tl.maximum(logits, -80.0)))
    else:
        return tl.exp(tl.minimum(logits - top, 0.0))


@triton.jit
def in_best_groups(
    scores, e, count, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    """scores [rows, ALL], very small for experts outside the best groups, see `TopK`. Of equal groups the first."""
    own = e // (count // GROUPS)
    rank = tl.full(scores.shape, -3.4e38, tl.float32)
    for g in tl.static_range(GROUPS):
        here = tl.where(own == g, scores, -1e30)
        best = tl.max(here, 1)
        if GROUP_BEST == 2:
            first = tl.min(tl.where(here == best[:, None], e, ALL), 1)
            best += tl.max(tl.where(e == first[:, None], -1e30, here), 1)
        rank = tl.where(own == g, best[:, None], rank)
    kept = tl.zeros(scores.shape, tl.int1)
    for _ in tl.static_range(USED_GROUPS):
        left = tl.where(kept | (e >= count), -3.4e38, rank)
        first = tl.min(tl.where(left == tl.max(left, 1)[:, None], e, ALL), 1)
        kept |= own == first[:, None] // (count // GROUPS)
    return tl.where(kept, scores, -1e30)


@triton.jit
def logits_at(row, place, mask, apart, SPLITS: tl.constexpr):
    """What is at some places of a row, of SPLITS runs of inputs `apart` from each other in one sum."""
    value = tl.load(row + place, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        value += tl.load(row + split * apart + place, mask=mask, other=0.0, cache_modifier=".cg")
    return value


@triton.jit
def choose(
    logits, bias, correction, gains, experts, weights, places, null, r, inside, apart, count, logit_scale, scale, floor,
    USED: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, CORRECTED: tl.constexpr,
    GAINED: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, ALL: tl.constexpr, MARGIN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """`select_experts` of rows of logits, see `logits_at`, ties by the lower number. PADDED: rows whose place is below
    `null` get expert -1 and weight 0.

    A score's key is an integer that is ordered as the scores are; without CORRECTED, logits are in that order, too. NaN
    and infinity are the largest, so that every choice is an expert's number, and make all weights NaN.
    """
    e = tl.arange(0, ALL)[None, :]
    held = inside[:, None] & (e < count)
    row = logits + r.to(tl.int64) * count
    value = logits_at(row[:, None], e, held, apart, SPLITS)
    if BIAS:
        value += tl.load(bias + e, mask=e < count, other=0.0).to(tl.float32)
    value *= logit_scale
    broken = tl.sum(tl.where(value < float("inf"), 0.0, float("nan")), 1)
    value = finite_only(value)
    top = tl.max(tl.where(e < count, value, -3.4e38), 1)
    total = tl.full([inside.shape[0]], 1.0, tl.float32)
    if not SIGMOID and MARGIN == 0:
        total = tl.sum(tl.where(e < count, score_of(value, top[:, None], SIGMOID), 0.0), 1)
    if CORRECTED:
        value = score_of(value, top[:, None], SIGMOID) / total[:, None]
        value += tl.load(correction + e, mask=e < count, other=0.0)
        if GROUPS > 1:
            value = in_best_groups(value, e, count, GROUPS, USED_GROUPS, GROUP_BEST, ALL)
    bits = value.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (ALL - 1 - e)
    key = tl.where(e < count, key, LEAST)
    shares = ()
    real = inside
    if PADDED:
        real = tl.load(places + r, mask=inside, other=0) >= null
    least = total * floor
    for u in tl.static_range(USED):
        best = tl.max(key, 1)
        chosen = ALL - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        tl.store(experts + r * USED + u, tl.where(real, chosen, -1), mask=inside)
        high = (best >> 32).to(tl.int32)
        logit = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if CORRECTED:
            logit = logits_at(row, chosen, inside, apart, SPLITS)
            if BIAS:
                logit += tl.load(bias + chosen).to(tl.float32)
            logit = finite_only(logit * logit_scale)
        share = score_of(logit, top, SIGMOID)
        if MARGIN > 0:
            lead = logit[:, None]
            near = (key > LEAST) & (lead - value <= MARGIN * tl.maximum(tl.abs(value), lead))
            share = 1.0 / tl.sum(tl.where(near, tl.exp(tl.minimum(value - lead, 0.0)), 0.0), 1)
        if NORMALIZE:
            total = share if u == 0 else total + share
        if GAINED:
            share *= tl.load(gains + chosen)
        shares += (share,)  # type: ignore[assignment]
        key = tl.where(key == best[:, None], LEAST, key)
    total = tl.maximum(total, least) / scale
    for u in tl.static_range(USED):
        tl.store(weights + r * USED + u, tl.where(real, shares[u] / total + broken, 0.0), mask=inside)


@triton.jit
def sum_and_norm(x, residual, gain, normed, sums, k, hidden, factor, eps):
    """The norm of residual + factor * x, float32 as it was rounded: of the row that program_id(0) is. The first of its
    programs writes it, and the sum: not to `residual`, which the others may still have to read."""
    place = tl.program_id(0).to(tl.int64) * hidden + k
    inside = k < hidden
    value = tl.load(x + k, mask=inside, other=0.0)
    added = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    value = add_scaled(value, added, factor, residual, False)
    made = normalize(value.to(tl.float32), gain, 0.0, inside, hidden, eps, False).to(value.dtype)
    if tl.program_id(1) == 0:
        tl.store(sums + place, value, mask=inside)
        tl.store(normed + place, made, mask=inside)
    return made.to(tl.float32)


@kernel(do_not_specialize=["rows"])
def route_kernel(
    x, weight, bias, correction, gains, logits, experts, weights, places, arrived, residual, norm_weight, normed, sums,
    null, rows, count, hidden, logit_scale, scale, floor, factor, eps,
    USED: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, CORRECTED: tl.constexpr,
    GAINED: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, NORMED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, TIMES: tl.constexpr, APART: tl.constexpr,
    ALL: tl.constexpr, MARGIN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """float32 logits of BLOCK_E experts for ROWS rows, without their bias: of one of SPLITS runs of inputs.

    STAGES 0: one row by multiply-adds, TIMES * BLOCK_K inputs, with the router's weight requested before the wait; its
    last program then chooses the row's experts. Else `choice_kernel` does.
    NORMED, only then and with TIMES 1: rows are norms of residual + factor * x, computed by each program, of which the
    first writes them, `normed`, and the sums. WHOLE: BLOCK_E divides the experts. APART: see `numbers`.
    """
    n, k = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    if STAGES == 0:
        line = weight + n[:, None] * hidden + k[None, :]
        tiles = (lines(line, n, k, 0, count, hidden, EVEN and WHOLE),)
        for i in tl.static_range(1, TIMES):
            tiles += (lines(line, n, k, i * BLOCK_K, count, hidden, EVEN and WHOLE),)  # type: ignore[assignment]
        gain = tl.load(norm_weight + k, mask=k < hidden, other=0.0).to(tl.float32) if NORMED else k
        wait(DEPENDENT)
        release(DEPENDENT)
        row = x + tl.program_id(0).to(tl.int64) * hidden
        if NORMED:
            value = sum_and_norm(row, residual, gain, normed, sums, k, hidden, factor, eps)
            y = tiles[0].to(tl.float32) * value[None, :]
        else:
            y = tiles[0].to(tl.float32) * numbers(row, n, k, 0, hidden, APART)
        for i in tl.static_range(1, TIMES):
            y += tiles[i].to(tl.float32) * numbers(row, n, k, i * BLOCK_K, hidden, APART)
        place = tl.program_id(0).to(tl.int64) * count + n
        tl.store(logits + place, tl.sum(y, 1), mask=n < count)
    else:
        wait(DEPENDENT)
        release(DEPENDENT)
        line = weight + tl.minimum(n, count - 1)[:, None] * hidden
        source = x + r[:, None].to(tl.int64) * hidden
        total = tl.zeros([BLOCK_E, ROWS], tl.float32)
        run = tl.cdiv(hidden, BLOCK_K * SPLITS) * BLOCK_K
        first = tl.program_id(2) * run
        for start in tl.range(first, tl.minimum(first + run, hidden), BLOCK_K, num_stages=STAGES):
            at = start + k[None, :]
            tile = tl.load(line + at) if EVEN else tl.load(line + at, mask=at < hidden, other=0.0)
            value = tl.load(source + at, mask=inside[:, None] if EVEN else inside[:, None] & (at < hidden), other=0.0)
            total = tl.dot(tile, tl.trans(value), total, input_precision=PRECISION)
        place = (tl.program_id(2) * rows + r)[None, :].to(tl.int64) * count + n[:, None]
        tl.store(logits + place, total, mask=inside[None, :] & (n < count)[:, None])
    if STAGES == 0:
        tl.debug_barrier()
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            tl.store(counter, 0)
            choose(
                logits, bias, correction, gains, experts, weights, places, null, r, inside, 0, count, logit_scale,
                scale, floor, USED, NORMALIZE, SIGMOID, BIAS, CORRECTED, GAINED, GROUPS, USED_GROUPS, GROUP_BEST,
                PADDED, ALL, MARGIN, SPLITS,
            )  # fmt: skip


@kernel
def choice_kernel(
    logits, bias, correction, gains, experts, weights, places, null, count, logit_scale, scale, floor,
    USED: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, CORRECTED: tl.constexpr,
    GAINED: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    PADDED: tl.constexpr, ALL: tl.constexpr, MARGIN: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: see `choose`. A warp has all of it, so that its largest logits are found without waiting for others."""
    wait(DEPENDENT)
    release(DEPENDENT)
    r, apart = tl.program_id(0) + tl.arange(0, 1), tl.num_programs(0).to(tl.int64) * count
    choose(
        logits, bias, correction, gains, experts, weights, places, null, r, r >= 0, apart, count, logit_scale, scale,
        floor, USED, NORMALIZE, SIGMOID, BIAS, CORRECTED, GAINED, GROUPS, USED_GROUPS, GROUP_BEST, PADDED, ALL, MARGIN,
        SPLITS,
    )  # fmt: skip


@kernel(do_not_specialize=["slots"])
def count_kernel(
    experts, counts, slots, experts_held, BLOCK: tl.constexpr, ALL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """How many of a run of BLOCK slots each expert has: counts [runs, experts_held]."""
    at, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ALL)
    wait(DEPENDENT)
    release(DEPENDENT)
    owner = tl.load(experts + at, mask=at < slots, other=-1)
    count = tl.histogram(tl.maximum(owner, 0), ALL, mask=owner >= 0)
    tl.store(counts + tl.program_id(0) * experts_held + e, count, mask=e < experts_held)


@kernel(do_not_specialize=["runs"])
def earlier_kernel(counts, totals, runs, experts_held, SOME: tl.constexpr, ALL: tl.constexpr, DEPENDENT: tl.constexpr):
    """ALL experts: counts [runs, experts_held] become those of all runs before each, and totals [experts_held] those of
    all."""
    e, some = tl.program_id(0) * ALL + tl.arange(0, ALL)[None, :], tl.arange(0, SOME)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.zeros([ALL], tl.int32)
    for first in range(0, runs, SOME):
        place, held = counts + (first + some) * experts_held + e, (first + some < runs) & (e < experts_held)
        each = tl.load(place, mask=held, other=0)
        tl.store(place, total[None, :] + tl.cumsum(each, 0) - each, mask=held)
        total += tl.sum(each, 0)
    tl.store(totals + e, total[None, :], mask=e < experts_held)


@kernel(do_not_specialize=["slots", "room", "runs"])
def place_kernel(
    experts, counts, totals, order, tiles, slots, room, runs, experts_held,
    ROWS: tl.constexpr, RUN: tl.constexpr, SOME: tl.constexpr, ALL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `sort_kernel`, of runs of RUN slots: see `earlier_kernel`. The first programs place a run each, whose
    slots are compared with SOME others at a time; those after them make the tiles of an expert each."""
    number, e = tl.program_id(0), tl.arange(0, ALL)
    wait(DEPENDENT)
    release(DEPENDENT)
    mine = tl.load(totals + e, mask=e < experts_held, other=0)
    before = tl.cumsum(mine, 0) - mine
    if number < runs:
        done = before + tl.load(counts + number * experts_held + e, mask=e < experts_held, other=0)
        i = tl.arange(0, RUN)
        at = number * RUN + i
        owner = tl.load(experts + at, mask=at < slots, other=-1)
        place = tl.gather(done, tl.maximum(owner, 0), 0)
        for start in range(0, RUN, SOME):
            j = start + tl.arange(0, SOME)[None, :]
            other = tl.load(experts + number * RUN + j, mask=number * RUN + j < slots, other=-1)
            place += tl.sum(((owner[:, None] == other) & (j < i[:, None])).to(tl.int32), 1)
        tl.store(order + place, at, mask=owner >= 0)
    else:
        here = number - runs
        write_tiles(
            tiles, here, tl.sum(tl.where(e == here, before, 0), 0), tl.sum(tl.where(e == here, mine, 0), 0), room,
            experts_held, ROWS, 128)  # fmt: skip


@triton.jit
def write_tiles(tiles, e, before, mine, room, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of expert e of `count`, which has `mine` slots after `before` of lower ones: see `sort_kernel`."""
    first, following = before // ROWS + e, (before + mine) // ROWS + e + 1
    following = tl.where(e == count - 1, room, following)
    for start in range(0, following - first, BLOCK):
        number = start + tl.arange(0, BLOCK)
        used = number * ROWS < mine
        own = tiles + first + number
        tl.store(own, tl.where(used, e, -1), mask=first + number < following)
        tl.store(own + room, before + number * ROWS, mask=used)
        tl.store(own + 2 * room, tl.minimum(mine - number * ROWS, ROWS), mask=used)


@kernel(do_not_specialize=["slots", "room"])
def sort_kernel(
    experts, order, tiles, slots, room,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One expert's part of the order, a stable one, and its tiles.

    experts: [slots], -1 for none -> order: slots by expert. tiles: [3, room]: expert, where its rows begin in `order`,
    and their count.
    """
    e, at = tl.program_id(0), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    below, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        owner = tl.load(experts + start + at, mask=start + at < slots, other=-1)
        below += ((owner >= 0) & (owner < e)).to(tl.int32)
        equal += (owner == e).to(tl.int32)
    before, mine = tl.sum(below, 0), tl.sum(equal, 0)
    write_tiles(tiles, e, before, mine, room, tl.num_programs(0), ROWS, BLOCK)
    done = before
    for start in range(0, slots, BLOCK):
        owner = tl.load(experts + start + at, mask=start + at < slots, other=-1)
        here = (owner == e).to(tl.int32)
        tl.store(order + done + tl.cumsum(here, 0) - here, start + at, mask=owner == e)
        done += tl.sum(here, 0)


@triton.jit
def expert_tile(
    weight, expert, first, start, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, DESCRIBED: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows from `first` and columns from `start` of an expert's matrix, one of [E, outputs, inputs], as DTYPE. ONCE:
    no other program reads them soon. DESCRIBED: see `ExpertTile`. Rows after the expert's last may be any numbers.
    FORMAT: PLAIN, E4M3_NUMBERS, or the BYTES of e4m3, which become bfloat16 four at once; only for a card. INTEGERS: of
    8 bits, as rows of x are, whose products are added up exactly.
    """
    tile = stored_tile(weight, expert, first, start, outputs, inputs, BLOCK_N, BLOCK_K, EVEN, ONCE, DESCRIBED)
    if FORMAT == BYTES:
        return tl.inline_asm_elementwise(FOUR_AT_ONCE, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif FORMAT == E4M3_NUMBERS:
        return tile.to(tl.float32).to(DTYPE)
    else:
        return tile


@triton.jit
def stored_tile(
    weight, expert, first, start, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """As `expert_tile`, as it is stored."""
    if DESCRIBED:
        return weight.load([expert * outputs + first, start])
    else:
        n, at = first + tl.arange(0, BLOCK_N), start + tl.arange(0, BLOCK_K)
        line = weight + (expert.to(tl.int64) * outputs + tl.minimum(n, outputs - 1)[:, None]) * inputs + at[None, :]
        if EVEN:
            return tl.load(line, eviction_policy="evict_first" if ONCE else "")
        else:
            return tl.load(line, mask=(at < inputs)[None, :], other=0.0)


@triton.jit
def scale_of(
    scale, expert, first, number, outputs, count, BLOCK_N: tl.constexpr, ROWS_FIRST: tl.constexpr, ALIKE: tl.constexpr
):  # fmt: skip
    """Scale, or bias, `number` of BLOCK_N rows of an expert's matrix from `first`, of `count` per row, as a factor of
    `multiplied`'s result. ALIKE: one for all of them."""
    if ALIKE:
        return tl.load(scale + (expert.to(tl.int64) * outputs + first) * count + number)
    else:
        n = tl.minimum(first + tl.arange(0, BLOCK_N), outputs - 1)
        factor = tl.load(scale + (expert.to(tl.int64) * outputs + n) * count + number)
        if ROWS_FIRST:
            return factor[None, :]
        else:
            return factor[:, None]


@triton.jit
def step_of(steps, row, held, ROUNDED: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """What rows of x in eight bits are multiplied by, as a factor of `multiplied`'s result; 1 of others."""
    if ROUNDED:
        step = tl.load(steps + row, mask=held, other=0.0)
        if ROWS_FIRST:
            return step[:, None]
        else:
            return step[None, :]
    else:
        return 1.0


@kernel(do_not_specialize=["room", "rows"])
def experts_kernel(
    x, steps, weight, scale, bias, out, order, tiles, room, rows, outputs, inputs, scales, width, offset,
    USED: tl.constexpr, BY_TOKEN: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, DESCRIBED: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    ALIKE: tl.constexpr, ROUNDED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one of the PARTS, of ROWS each, of a tile of rows that use the same expert.

    BY_TOKEN: x has a row per token, and out [slots, outputs] is in the order of `order`: what ACT makes of x times the
    matrix, or, if GATE, of the halves of its 2 * outputs rows. Else x is in that order, and out [slots, outputs] in
    that of slots; tiles are from two kernels before, and may be read before the wait. HALVES, DESCRIBED: see
    `ExpertTile`. FORMAT: see `expert_tile`.
    SCALED: each row of a matrix has a factor (BY_ROW), or one for each `width` of its columns (BY_BLOCK), as in
    `QuantizedMatrix`; BLOCK_K divides their width and offset. ROUNDED: x is in eight bits, too, its factors in `steps`,
    [1, rows] or [runs of `width`, rows]. ALIKE: of BY_BLOCK, all BLOCK_N rows of a matrix have the same factors.
    """
    tile, before = tiles + tl.program_id(1) // PARTS, tl.program_id(1) % PARTS * ROWS
    if BY_TOKEN:
        wait(DEPENDENT)
    expert, begin, count = tl.load(tile), tl.load(tile + room) + before, tl.load(tile + 2 * room) - before
    if not BY_TOKEN:
        wait(DEPENDENT)
    release(DEPENDENT)
    if (expert < 0) | (count <= 0):
        return
    if HALVES:
        if count <= ROWS // 2:
            tile_product(
                x, steps, weight, scale, bias, out, order, expert, begin, count, rows, outputs, inputs, scales, width,
                offset, USED, BY_TOKEN, GATE, ACT, BIAS, EVEN, ROWS_FIRST, ROWS // 2, BLOCK_N, BLOCK_K, STAGES, HALVES,
                DESCRIBED, FORMAT, SCALED, ALIKE, ROUNDED, PRECISION,
            )  # fmt: skip
            return
    tile_product(
        x, steps, weight, scale, bias, out, order, expert, begin, count, rows, outputs, inputs, scales, width, offset,
        USED, BY_TOKEN, GATE, ACT, BIAS, EVEN, ROWS_FIRST, ROWS, BLOCK_N, BLOCK_K, STAGES, HALVES, DESCRIBED, FORMAT,
        SCALED, ALIKE, ROUNDED, PRECISION,
    )  # fmt: skip


@triton.jit
def tile_product(
    x, steps, weight, scale, bias, out, order, expert, begin, count, rows, outputs, inputs, scales, width, offset,
    USED: tl.constexpr, BY_TOKEN: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, DESCRIBED: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    ALIKE: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of `count` rows from `begin` in the order: see `experts_kernel`. ROWS_FIRST: which factor is first on the matrix
    units: the first has at least 64 rows on Hopper, so few rows come second."""
    first = tl.program_id(0) * BLOCK_N
    k, r = tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    held = r < count
    slot = tl.load(order + begin + r, mask=held, other=0)
    row = (slot // USED if BY_TOKEN else begin + r).to(tl.int64)
    whole = outputs * 2 if GATE else outputs
    KIND: tl.constexpr = tl.int32 if FORMAT == INTEGERS else tl.float32
    y = tl.zeros([ROWS, BLOCK_N] if ROWS_FIRST else [BLOCK_N, ROWS], KIND)
    z = y
    step, factor, other_factor = 1.0, 1.0, 1.0
    if SCALED == BY_BLOCK:
        step = step_of(steps + offset // width * rows, row, held, ROUNDED, ROWS_FIRST)
        factor = scale_of(scale, expert, first, offset // width, whole, scales, BLOCK_N, ROWS_FIRST, ALIKE)
        if GATE:
            other_factor = scale_of(
                scale, expert, first + outputs, offset // width, whole, scales, BLOCK_N, ROWS_FIRST, ALIKE)  # fmt: skip
    # A number of stages here would make each thread's factors wait in shared memory, one by one.
    for start in tl.range(0, inputs, BLOCK_K, num_stages=None if SCALED == BY_BLOCK else STAGES):
        at = start + k
        if DESCRIBED and not BY_TOKEN and not HALVES:
            value = x.load([begin, start])
        else:
            mask = held[:, None] if EVEN else held[:, None] & (at < inputs)[None, :]
            value = tl.load(x + row[:, None] * inputs + at[None, :], mask=mask, other=0.0)
        matrix = expert_tile(
            weight, expert, first, start, whole, inputs, BLOCK_N, BLOCK_K, EVEN, ROWS <= 32, DESCRIBED, FORMAT,
            value.dtype,
        )  # fmt: skip
        if SCALED == BY_BLOCK:
            y += multiplied(value, matrix, tl.zeros_like(y), ROWS_FIRST, PRECISION) * (step * factor)
        else:
            y = multiplied(value, matrix, y, ROWS_FIRST, PRECISION)
        if GATE:
            other = expert_tile(
                weight, expert, first + outputs, start, whole, inputs, BLOCK_N, BLOCK_K, EVEN, ROWS <= 32, DESCRIBED,
                FORMAT, value.dtype,
            )  # fmt: skip
            if SCALED == BY_BLOCK:
                z += multiplied(value, other, tl.zeros_like(z), ROWS_FIRST, PRECISION) * (step * other_factor)
            else:
                z = multiplied(value, other, z, ROWS_FIRST, PRECISION)
        if SCALED == BY_BLOCK:
            number = tl.minimum((start + BLOCK_K + offset) // width, scales - 1)
            step = step_of(steps + number * rows, row, held, ROUNDED, ROWS_FIRST)
            factor = scale_of(scale, expert, first, number, whole, scales, BLOCK_N, ROWS_FIRST, ALIKE)
            if GATE:
                other_factor = scale_of(
                    scale, expert, first + outputs, number, whole, scales, BLOCK_N, ROWS_FIRST, ALIKE
                )
    place = (begin + r if BY_TOKEN else slot).to(tl.int64) * outputs
    write_tile(
        y, z, steps, scale, bias, out, expert, first, row, held, place, outputs, whole, scales,
        BY_TOKEN, GATE, ACT, BIAS, ROWS_FIRST, BLOCK_N, SCALED, ALIKE, ROUNDED)  # fmt: skip


@triton.jit
def write_tile(
    y, z, steps, scale, bias, out, expert, first, row, held, place, outputs, whole, scales,
    BY_TOKEN: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, ROWS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr, ALIKE: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Write the sums y, with a gate those of z, to `place` [ROWS], scaled by rows and with their biases."""
    if SCALED == BY_ROW:
        step = step_of(steps, row, held, ROUNDED, ROWS_FIRST)
        y = y.to(tl.float32) * (step * scale_of(scale, expert, first, 0, whole, scales, BLOCK_N, ROWS_FIRST, ALIKE))
        if GATE:
            factor = scale_of(scale, expert, first + outputs, 0, whole, scales, BLOCK_N, ROWS_FIRST, ALIKE)
            z = z.to(tl.float32) * (step * factor)
    if BIAS:
        y += scale_of(bias, expert, first, 0, whole, 1, BLOCK_N, ROWS_FIRST, False).to(tl.float32)
        if GATE:
            z += scale_of(bias, expert, first + outputs, 0, whole, 1, BLOCK_N, ROWS_FIRST, False).to(tl.float32)
    if BY_TOKEN:
        y = apply_gate(y, z, ACT)
    n = first + tl.arange(0, BLOCK_N)
    if ROWS_FIRST:
        inside = held[:, None] & (n < outputs)[None, :]
        tl.store(out + place[:, None] + n[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        inside = held[None, :] & (n < outputs)[:, None]
        tl.store(out + place[None, :] + n[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiplied(value, tile, total, ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """total + value [rows, inputs] times tile [outputs, inputs], its rows first or last."""
    if ROWS_FIRST:
        return tl.dot(value, tl.trans(tile), total, input_precision=PRECISION, out_dtype=total.dtype)
    else:
        return tl.dot(tile, tl.trans(value), total, input_precision=PRECISION, out_dtype=total.dtype)


@kernel
def combine_kernel(
    y, weights, out, columns, USED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token: the sum of its USED rows of y times their weights, one after the other. A row whose
    weight is 0, as those of no expert are, is not read."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.zeros([BLOCK], tl.float32)
    for u in tl.static_range(USED):
        row = token * USED + u
        share = tl.load(weights + row)
        end = tl.where(share == 0.0, 0, columns)
        total += share * tl.load(y + row * columns + at, mask=at < end, other=0.0).to(tl.float32)
    tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask=at < columns)


@kernel
def few_gate_up_kernel(
    x, weight, scale, bias, experts, out, width, hidden, scales,
    USED: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TIMES: tl.constexpr, APART: tl.constexpr, SCALED: tl.constexpr,
    RUN: tl.constexpr, EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N of a slot's outputs, out [slots, width], by multiply-adds: see BY_TOKEN in `experts_kernel`. There are
    TIMES * BLOCK_K inputs. SCALED: see `experts_kernel`; there are `scales` a row, each of RUN columns. EARLY: which
    expert it is, is known before the preceding kernel has ended, so that its matrix is requested before the wait."""
    slot = tl.program_id(0).to(tl.int64)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    wait_and_release(DEPENDENT and not EARLY)
    expert = tl.load(experts + slot).to(tl.int64)
    if expert < 0:
        wait_and_release(DEPENDENT and EARLY)
        tl.store(out + slot * width + n, tl.zeros([BLOCK_N], out.dtype.element_ty), mask=n < width)
        return
    whole = expert * width * 2 if GATE else expert * width
    line = weight + (whole + n[:, None]) * hidden + k[None, :]
    far = width.to(tl.int64) * hidden
    tiles = (lines(line, n, k, 0, width, hidden, EVEN),)
    ups = (lines(line + far, n, k, 0, width, hidden, EVEN),) if GATE else tiles
    for i in tl.static_range(1, TIMES):
        tiles += (lines(line, n, k, i * BLOCK_K, width, hidden, EVEN),)  # type: ignore[assignment]
        if GATE:
            ups += (lines(line + far, n, k, i * BLOCK_K, width, hidden, EVEN),)  # type: ignore[assignment]
    factors = row_scales(scale, whole + n, n < width, scales, BLOCK_K, TIMES, RUN, SCALED)
    others = factors
    if GATE:
        others = row_scales(scale, whole + width + n, n < width, scales, BLOCK_K, TIMES, RUN, SCALED)
    wait_and_release(DEPENDENT and EARLY)
    row = x + slot // USED * hidden
    value = numbers(row, n, k, 0, hidden, APART)
    y = partial_sums(tiles[0].to(tl.float32) * value, factors, 0, RUN, SCALED)
    z = partial_sums(ups[0].to(tl.float32) * value, others, 0, RUN, SCALED) if GATE else y
    for i in tl.static_range(1, TIMES):
        value = numbers(row, n, k, i * BLOCK_K, hidden, APART)
        y += partial_sums(tiles[i].to(tl.float32) * value, factors, i, RUN, SCALED)
        if GATE:
            z += partial_sums(ups[i].to(tl.float32) * value, others, i, RUN, SCALED)
    y, z = row_sums(y, factors, SCALED), row_sums(z, others, SCALED)
    if BIAS:
        y += tl.load(bias + whole + n, mask=n < width, other=0.0).to(tl.float32)
        if GATE:
            z += tl.load(bias + whole + width + n, mask=n < width, other=0.0).to(tl.float32)
    made = apply_gate(y, z, ACT)
    tl.store(out + slot * width + n, made.to(out.dtype.element_ty), mask=n < width)


@kernel
def few_down_kernel(
    x, weight, scale, bias, experts, weights, out, hidden, width, scales,
    USED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TIMES: tl.constexpr, APART: tl.constexpr, SCALED: tl.constexpr, RUN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a token: x [slots, width] of its USED experts times their matrices, times their weights.

    Which experts these are was computed two kernels before, so that all numbers of their matrices are requested before
    the wait. A token without experts gets zeros; of slots without one, x is zeros, too.
    SCALED, RUN: see `few_gate_up_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if highest_expert(experts + token * USED, USED) < 0:
        wait(DEPENDENT)
        release(DEPENDENT)
        tl.store(out + token * hidden + n, tl.zeros([BLOCK_N], out.dtype.element_ty), mask=n < hidden)
        return
    tiles, factors = (), ()
    for u in tl.static_range(USED):
        expert = tl.maximum(tl.load(experts + token * USED + u), 0).to(tl.int64)
        line = weight + (expert * hidden + n[:, None]) * width + k[None, :]
        for i in tl.static_range(TIMES):
            tiles += (lines(line, n, k, i * BLOCK_K, hidden, width, EVEN),)  # type: ignore[assignment]
        factors += (  # type: ignore[assignment]
            row_scales(scale, expert * hidden + n, n < hidden, scales, BLOCK_K, TIMES, RUN, SCALED),
        )  # fmt: skip
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.zeros([BLOCK_N, BLOCK_K // RUN if SCALED == BY_BLOCK else BLOCK_K], tl.float32)
    for u in tl.static_range(USED):
        row = x + (token * USED + u) * width
        share = tl.load(weights + token * USED + u)
        y = tl.zeros_like(total)
        for i in tl.static_range(TIMES):
            made = tiles[u * TIMES + i].to(tl.float32) * numbers(row, n, k, i * BLOCK_K, width, APART)
            y += partial_sums(made, factors[u], i, RUN, SCALED)
        if SCALED == BY_ROW:
            y *= factors[u][0][:, None]
        total += share * y
    made = tl.sum(total, 1)
    if BIAS:
        for u in tl.static_range(USED):
            line = bias + tl.maximum(tl.load(experts + token * USED + u), 0).to(tl.int64) * hidden
            made += tl.load(weights + token * USED + u) * tl.load(line + n, mask=n < hidden, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + n, made.to(out.dtype.element_ty), mask=n < hidden)


class ExpertTile(NamedTuple):
    """How one product of the experts is tiled. rows: slots of an expert at once, a power of two. stages 0: a slot at a
    time, by multiply-adds. rows_first: see `tile_product`. halves: a tile that is at most half full is multiplied as
    one of half the rows. described: whole tiles of the matrix are read through a descriptor, by the memory accelerator
    of Hopper, and rows of x where they are in order and tiles are not halved."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 0
    rows_first: bool = False
    halves: bool = False
    described: bool = False

    def fitted(self, card: DeviceInfo, matrix: int, row: int) -> ExpertTile:
        """With as many stages as fit into the GPU's shared memory. matrix, row: bytes of a number of each."""
        stage = (self.outputs * matrix + self.rows * row) * self.inputs
        return self._replace(stages=min(self.stages, max(2, card.shared // stage)))

    def descriptor(self, matrix: Tensor, rows: int) -> TensorDescriptor | Tensor:
        """What a kernel reads tiles of so many rows of `matrix` [..., inputs] from."""
        return TensorDescriptor.from_tensor(matrix.flatten(0, -2), [rows, self.inputs]) if self.described else matrix


class ExpertConfig(NamedTuple):
    """The tiles of gate and up, and of down, whose rows divide those of the first; both by multiply-adds or neither."""

    gate_up: ExpertTile
    down: ExpertTile


FEW_TOKENS, FEW_SLOTS = 4, 5 / 16
"""Tokens up to which slots are multiplied one by one, and slots per expert up to which those of e4m3 are: there, few
experts are used by several."""

MOST_NUMBERS = 192 * 32
"""Numbers of a matrix that a warp keeps in registers while it waits for x."""


def few_tiles(used: int, hidden: int, width: int, size: int = 2) -> ExpertConfig | None:
    """Multiply-adds; None where what a program reads does not fit its registers. size: bytes of a number."""
    whole, run, more = block(hidden), two(min(hidden & -hidden, 512)), 2 // size
    if hidden == whole and whole <= 4096:
        gate_up = ExpertTile(1, max(1, 2048 * more // whole), whole, 2 if whole <= 2048 else 4)
    else:
        gate_up = ExpertTile(1, two(max(1, 8192 * more // hidden)), max(run, 32), 4 if hidden <= 8192 else 8)
    outputs = 2 * more
    while outputs > 1 and outputs * used * width > 4 * MOST_NUMBERS:
        outputs //= 2
    count = 4 if outputs * used * width <= 4 * MOST_NUMBERS else 8
    run = max(32, min(width & -width, 256 * more * count // outputs))
    down = ExpertTile(1, outputs, run, count)
    fits = outputs * used * -(-width // run) * run <= count * MOST_NUMBERS
    most = gate_up.warps * MOST_NUMBERS * more
    fits = fits and 2 * gate_up.outputs * -(-hidden // gate_up.inputs) * gate_up.inputs <= most
    return ExpertConfig(gate_up, down) if fits else None


SMALL = ExpertConfig(ExpertTile(16, 32, 64, 4, 3), ExpertTile(16, 32, 64, 4, 3))
"""Of float32, which takes more registers."""

FIXED = ExpertConfig(ExpertTile(64, 64, 64, 4, 3), ExpertTile(64, 64, 128, 4, 3))
"""Of any number of tokens, where that must not matter."""

SIXTEEN = ExpertConfig(ExpertTile(16, 64, 128, 4, 3), ExpertTile(16, 128, 128, 8, 3))
THIRTY_TWO = ExpertConfig(ExpertTile(32, 64, 64, 4, 5), ExpertTile(32, 128, 64, 4, 5))
SIXTY_FOUR = ExpertConfig(ExpertTile(64, 64, 64, 4, 4), ExpertTile(64, 128, 64, 4, 4, True))
MANY = ExpertConfig(ExpertTile(128, 128, 64, 8, 3, True), ExpertTile(128, 256, 64, 8, 3, True))


SIXTEEN_E4M3 = ExpertConfig(ExpertTile(16, 32, 128, 2, 5), ExpertTile(16, 64, 128, 2, 4))
THIRTY_TWO_E4M3 = ExpertConfig(ExpertTile(32, 64, 128, 4, 3), ExpertTile(32, 128, 128, 8, 4))
SIXTY_FOUR_E4M3 = ExpertConfig(ExpertTile(64, 64, 128, 4, 3), ExpertTile(64, 128, 128, 8, 3))
MANY_E4M3 = ExpertConfig(ExpertTile(128, 64, 128, 8, 3, True), ExpertTile(128, 128, 128, 8, 3))
"""Of matrices of e4m3 and rows of 16 bits."""

SIXTEEN_ROUNDED = ExpertConfig(ExpertTile(16, 64, 128, 4, 5), ExpertTile(16, 64, 128, 4, 4))
THIRTY_TWO_ROUNDED = ExpertConfig(ExpertTile(32, 64, 128, 4, 5), ExpertTile(32, 128, 128, 8, 3))
SIXTY_FOUR_ROUNDED = ExpertConfig(ExpertTile(64, 64, 128, 4, 3), ExpertTile(64, 128, 128, 4, 3))
MANY_ROUNDED = ExpertConfig(
    ExpertTile(128, 128, 128, 8, 3, True, described=True), ExpertTile(128, 256, 128, 8, 3, True, described=True)
)
"""Of rows rounded to e4m3, too, and matrices with a scale a row."""

SIXTEEN_RUNS = ExpertConfig(ExpertTile(16, 64, 128, 4, 4), ExpertTile(16, 128, 128, 4, 3))
THIRTY_TWO_RUNS = ExpertConfig(ExpertTile(32, 64, 128, 4, 4), ExpertTile(32, 64, 128, 4, 4))
SIXTY_FOUR_RUNS = ExpertConfig(ExpertTile(64, 128, 128, 8, 3, True), ExpertTile(64, 128, 128, 8, 3, True))
MANY_RUNS = ExpertConfig(
    ExpertTile(128, 64, 128, 8, 3, True, halves=True, described=True),
    ExpertTile(64, 128, 128, 4, 3, True, described=True),
)
"""The same with a scale for each run of columns."""


def expert_config(tokens: int, used: int, experts: int, hidden: int, width: int) -> ExpertConfig:
    """The fastest of many, measured on an H200 with the shapes of Qwen3-30B-A3B: by tokens, and by slots per expert on
    average. Of more than 2,048 tokens at most one number may separate two configurations: kernels for larger steps are
    compiled for the largest alone."""
    few = few_tiles(used, hidden, width) if tokens <= FEW_TOKENS else None
    if few is not None:
        return few
    slots = tokens * used / experts
    return SIXTEEN if slots <= 8 else THIRTY_TWO if slots <= 20 else SIXTY_FOUR if slots <= 48 else MANY


def quantized_expert_config(
    tokens: int, used: int, gate_up: QuantizedMatrix, down: QuantizedMatrix, *, rounded: bool
) -> ExpertConfig:
    """As `expert_config`, of matrices of 8 bits. rounded: see `quantized_experts`."""
    hidden, width, whole = gate_up.weight.shape[1], down.weight.shape[1], down.is_int8_rows
    slots, rounded = tokens * used / (len(down.weight) // hidden), rounded or whole
    one_by_one = not whole and (tokens <= FEW_TOKENS or (slots <= FEW_SLOTS and not rounded))
    few = few_tiles(used, hidden, width, 1) if one_by_one else None
    if few is not None and has_whole_runs(few.gate_up, gate_up) and has_whole_runs(few.down, down):
        return few
    step = 0 if slots <= 8 else 1 if slots <= 20 else 2 if slots <= 48 else 3
    if rounded and run_of(gate_up):
        return (SIXTEEN_RUNS, THIRTY_TWO_RUNS, SIXTY_FOUR_RUNS, MANY_RUNS)[step]
    if rounded:
        return (SIXTEEN_ROUNDED, THIRTY_TWO_ROUNDED, SIXTY_FOUR_ROUNDED, MANY_ROUNDED)[step]
    return (SIXTEEN_E4M3, THIRTY_TWO_E4M3, SIXTY_FOUR_E4M3, MANY_E4M3)[step]


def has_whole_runs(how: ExpertTile, matrix: QuantizedMatrix) -> bool:
    """Whether a tile of multiply-adds has whole runs of columns with one scale."""
    run = run_of(matrix)
    return run == 0 or (how.inputs % run == 0 and matrix.offset == 0)


FEW_ROUTED = 16
"""Tokens up to which a router is multiplied by multiply-adds."""


def router_config(tokens: int, hidden: int) -> GemmConfig:
    """As `expert_config`."""
    if tokens <= FEW_ROUTED and hidden <= 8192:
        whole = block(hidden)
        if whole <= 4096 or whole == hidden:
            return GemmConfig(1, max(1, 8192 // whole), whole, 4)
        return GemmConfig(1, 1, max(32, two(min(hidden & -hidden, 512))), 4)
    if tokens <= 1024:
        return GemmConfig(16, 32, 128, 4, 4, splits=8 if tokens <= 64 else 4 if tokens <= 256 else 1)
    return GemmConfig(32, 128, 64, 4, 4)


FIXED_ROUTER = GemmConfig(16, 32, 128, 4, 3)
"""As `FIXED`."""


class Addition(NamedTuple):
    """What a router's kernel norms. residual, normed, sums: [T, hidden], the last two to be written: the norm of
    residual + factor * x, and that sum. weight: of the norm."""

    residual: Tensor
    weight: Tensor
    normed: Tensor
    sums: Tensor
    factor: float
    eps: float


def norms_rows(how: GemmConfig, tokens: int, hidden: int) -> bool:
    """Whether the router's kernel is to norm its rows: each program can have a whole one, and for few it pays."""
    return tokens <= FEW_TOKENS and how.stages == 0 and how.inputs >= hidden


def route(
    x: Tensor,
    router: RouterWeights,
    how: GemmConfig,
    card: DeviceInfo,
    arrived: Tensor,
    batch: RaggedBatch | None = None,
    addition: Addition | None = None,
) -> Routing:
    """See `Ops.route`. arrived: [COUNTERS] int32, zeros, one for each `how.rows` rows. addition: x is to be normed, see
    `norms_rows`."""
    weight, choice, correction, bias, gains = router
    x = x.contiguous()
    into = addition or Addition(x, x, x, x, 1.0, 0.0)
    (tokens, hidden), count = x.shape, len(weight)
    logits = x.new_empty(how.splits * tokens, count, dtype=torch.float32)
    experts, weights = x.new_empty(tokens, choice.used, dtype=torch.int32), logits.new_empty(tokens, choice.used)
    if correction is None and choice.groups > 1:
        correction = logits.new_zeros(count)
    how = how.fitted(card, weight.element_size(), x.element_size())
    times = triton.cdiv(hidden, how.inputs)
    read = x if bias is None else bias, weight if correction is None else correction, logits if gains is None else gains
    places, null = (experts, 0) if batch is None else (batch.slots, batch.page_size)
    choosing = {
        "USED": choice.used, "NORMALIZE": choice.normalize, "SIGMOID": choice.sigmoid, "BIAS": bias is not None,
        "CORRECTED": correction is not None, "GAINED": gains is not None, "GROUPS": choice.groups,
        "USED_GROUPS": choice.used_groups, "GROUP_BEST": choice.group_best, "PADDED": batch is not None,
        "ALL": block(count), "MARGIN": choice.margin, "SPLITS": how.splits, "DEPENDENT": card.dependent, **card.options,
    }  # fmt: skip
    route_kernel[(triton.cdiv(tokens, how.rows), triton.cdiv(count, how.outputs), how.splits)](
        *(x, weight, *read, logits, experts, weights, places, arrived, *into[:4]),
        *(null, tokens, count, hidden, choice.logit_scale, choice.scale, choice.floor, into.factor, into.eps),
        NORMED=addition is not None, EVEN=hidden % how.inputs == 0, WHOLE=count % how.outputs == 0, ROWS=how.rows,
        BLOCK_E=how.outputs, BLOCK_K=how.inputs, TIMES=1 if how.stages else times, APART=apart(how), STAGES=how.stages,
        PRECISION=card.precision, num_warps=how.warps, **choosing,
    )  # fmt: skip
    if how.stages:
        choice_kernel[(tokens,)](
            *(logits, *read, experts, weights, places, null, count, choice.logit_scale, choice.scale, choice.floor),
            num_warps=max(1, block(count) // 512), **choosing,
        )  # fmt: skip
    return Routing(experts, weights)


def apart(how: GemmConfig | ExpertTile, size: int = 2) -> bool:
    """See `numbers`: whether a thread has numbers of one output. size: bytes of a number."""
    return how.outputs == 1 or how.outputs * how.inputs * size <= 16 * 32 * how.warps


class SortedSlots(NamedTuple):
    """See `sort_kernel`."""

    order: Tensor
    tiles: Tensor


SCANNED, RUN = 4096, 256
"""Slots up to which every expert's program reads all of them; the length of a run of more."""


def sort_slots(experts: Tensor, count: int, rows: int, card: DeviceInfo) -> SortedSlots:
    """experts [T, K] of `count`, -1 for none -> slots by expert, and tiles of up to `rows` of them."""
    slots, every = experts.numel(), block(count)
    sizes = SortedSlots(experts.new_empty(slots), experts.new_empty(3, slots // rows + count))
    room = sizes.tiles.shape[1]
    if slots <= SCANNED:
        size = block(slots, 128)
        sort_kernel[(count,)](
            *(experts, sizes.order, sizes.tiles, slots, room),
            ROWS=rows, BLOCK=size, DEPENDENT=card.dependent, num_warps=4 if size <= 2048 else 8, **card.options,
        )  # fmt: skip
        return sizes
    runs = triton.cdiv(slots, RUN)
    counts = experts.new_empty(runs, count)
    count_kernel[(runs,)](
        *(experts, counts, slots, count),
        BLOCK=RUN, ALL=every, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    totals = experts.new_empty(count)
    earlier_kernel[(triton.cdiv(count, 32),)](
        counts, totals, runs, count, SOME=64, ALL=32, DEPENDENT=card.dependent, num_warps=4, **card.options
    )
    place_kernel[(runs + count,)](
        *(experts, counts, totals, sizes.order, sizes.tiles, slots, room, runs, count),
        ROWS=rows, RUN=RUN, SOME=32, ALL=every, DEPENDENT=card.dependent, num_warps=8, **card.options,
    )  # fmt: skip
    return sizes


def multiply_tiles(
    x: Tensor,
    matrices: Tensor | QuantizedMatrix,
    slots: SortedSlots,
    used: int,
    how: ExpertTile,
    card: DeviceInfo,
    gate: Gate = "",
    *,
    count: int = 1,
    bias: Tensor | None = None,
    rounded: bool = False,
    parts: int = 1,
) -> Tensor:
    """x times the matrices of its rows' experts: [E, out, in], or those of `count` experts, one below the other.

    With a gate, x is [T, in] and the result [slots, out / num_parts(gate)], in the order of `slots.order`; without, x
    is [slots, in] in that order and the result [slots, out] in that of slots. bias: [E, out]. rounded: x is rounded to
    8 bits first, as the matrices are. parts: of `how.rows` in each tile of `slots`.
    """
    weight, scale, sizes, form, scaled, run = opened(matrices, count, x, card, rounded=rounded)
    outputs, inputs = weight.shape[1] // num_parts(gate), weight.shape[2]
    out, steps = x.new_empty(len(slots.order), outputs), scale
    if rounded:
        x, steps, *_ = round_rows(x, card, weight.dtype, run)
    how = how.fitted(card, weight.element_size() * num_parts(gate), x.element_size())
    how = how._replace(described=how.described and can_describe(card, weight, x))
    room = slots.tiles.shape[1]
    experts_kernel[(triton.cdiv(outputs, how.outputs), room * parts)](
        *(how.descriptor(x, how.rows) if gate == "" and not how.halves else x, steps),
        *(how.descriptor(weight, how.outputs), scale, scale if bias is None else bias, out, slots.order, slots.tiles),
        *(room, len(x), outputs, inputs, *sizes),
        USED=used, BY_TOKEN=gate != "", GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None,
        EVEN=inputs % how.inputs == 0, ROWS_FIRST=how.rows_first, ROWS=how.rows, BLOCK_N=how.outputs,
        BLOCK_K=how.inputs, STAGES=how.stages, HALVES=how.halves, DESCRIBED=how.described, FORMAT=form, SCALED=scaled,
        ALIKE=isinstance(matrices, QuantizedMatrix) and alike(matrices, outputs, how.outputs), ROUNDED=rounded,
        PARTS=parts, PRECISION=card.precision, DEPENDENT=card.dependent, num_warps=how.warps, num_stages=how.stages,
        **card.options,
    )  # fmt: skip
    return out


class OpenedMatrices(NamedTuple):
    """What kernels get of the experts' matrices. weight: [E, out, in]. sizes: scales per row, their width and offset.
    form: FORMAT, scaled: SCALED. run: columns with one scale, 0 for all."""

    weight: Tensor
    scale: Tensor
    sizes: tuple[int, int, int]
    form: int
    scaled: int
    run: int


def opened(
    matrices: Tensor | QuantizedMatrix, count: int, x: Tensor, card: DeviceInfo, *, rounded: bool = False
) -> OpenedMatrices:
    """count: of experts whose quantized matrices are one below the other. rounded: see `multiply_tiles`."""
    if not isinstance(matrices, QuantizedMatrix):
        return OpenedMatrices(matrices, matrices, (1, 1, 0), PLAIN.value, UNSCALED.value, 0)
    scale, run = matrices.scale, run_of(matrices)
    quick = x.dtype is torch.bfloat16 and card.capability >= HOPPER and not rounded
    weight = matrices.weight.view(torch.uint8) if quick else matrices.weight
    form = (INTEGERS if matrices.is_int8_rows else PLAIN) if rounded else BYTES if quick else E4M3_NUMBERS
    scaled = BY_BLOCK if run else BY_ROW
    sizes = scale.shape[1], matrices.width, matrices.offset
    return OpenedMatrices(weight.unflatten(0, (count, -1)), scale, sizes, form.value, scaled.value, run)


def can_describe(card: DeviceInfo, *matrices: Tensor) -> bool:
    """Whether tiles of these can be read through descriptors: on Hopper and later (the interpreter can), where rows are
    multiples of 16 bytes."""
    return (card.capability >= HOPPER or not any(card.capability)) and all(
        (each.shape[-1] * each.element_size()) % 16 == 0 and each.data_ptr() % 16 == 0 for each in matrices
    )


def combine(y: Tensor, weights: Tensor, card: DeviceInfo) -> Tensor:
    """y [T K, n], weights [T, K] -> [T, n]: see `Ops.combine_experts`."""
    tokens, used = weights.shape
    columns = y.shape[-1]
    out, size = y.new_empty(tokens, columns), block(min(columns, 512 if tokens <= 64 else 2048))
    combine_kernel[(tokens, triton.cdiv(columns, size))](
        *(y, weights, out, columns),
        USED=used, BLOCK=size, DEPENDENT=card.dependent, num_warps=warps(size), **card.options,
    )  # fmt: skip
    return out


def multiply_gate_up(
    x: Tensor,
    matrices: Tensor | QuantizedMatrix,
    routing: Routing,
    how: ExpertTile,
    card: DeviceInfo,
    gate: Gate,
    bias: Tensor | None = None,
    *,
    count: int = 1,
) -> Tensor:
    """x [T, hidden], matrices [E, 2F, hidden] or of `count` experts, bias [E, 2F] -> [T K, F]: outputs of each slot, by
    multiply-adds. With a gate of one part, matrices are [E, F, hidden], bias [E, F]."""
    weight, scale, (scales, *_), _, scaled, run = opened(matrices, count, x, card, rounded=True)
    width, hidden, used = weight.shape[1] // num_parts(gate), weight.shape[2], routing.experts.shape[1]
    slots = routing.experts.numel()
    out = x.new_empty(slots, width)
    few_gate_up_kernel[(slots, triton.cdiv(width, how.outputs))](
        *(x, weight, scale, x if bias is None else bias, routing.experts, out, width, hidden, scales),
        USED=used, GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None,
        EVEN=hidden % how.inputs == 0 and width % how.outputs == 0,
        BLOCK_N=how.outputs, BLOCK_K=how.inputs, TIMES=triton.cdiv(hidden, how.inputs),
        APART=apart(how, weight.element_size()), SCALED=scaled, RUN=run or how.inputs,
        EARLY=routing.early, DEPENDENT=card.dependent, num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out


def multiply_down(
    x: Tensor,
    matrices: Tensor | QuantizedMatrix,
    routing: Routing,
    how: ExpertTile,
    card: DeviceInfo,
    bias: Tensor | None = None,
    *,
    count: int = 1,
) -> Tensor:
    """x [T K, F], matrices [E, hidden, F] or of `count` experts, bias [E, hidden] -> [T, hidden]: each token's slots
    added up, by multiply-adds. The kernel that is launched before must not be the one that made `routing`."""
    tokens, used = routing.experts.shape
    weight, scale, (scales, *_), _, scaled, run = opened(matrices, count, x, card, rounded=True)
    _, hidden, width = weight.shape
    out = x.new_empty(tokens, hidden)
    few_down_kernel[(tokens, triton.cdiv(hidden, how.outputs))](
        *(x, weight, scale, x if bias is None else bias, routing.experts, routing.weights, out, hidden, width, scales),
        USED=used, BIAS=bias is not None, EVEN=width % how.inputs == 0 and hidden % how.outputs == 0,
        BLOCK_N=how.outputs, BLOCK_K=how.inputs, TIMES=triton.cdiv(width, how.inputs),
        APART=apart(how, weight.element_size()), SCALED=scaled, RUN=run or how.inputs,
        DEPENDENT=card.dependent, num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out


def quantized_experts(
    x: Tensor,
    routing: Routing,
    gate_up: QuantizedMatrix,
    down: QuantizedMatrix,
    gate: Gate,
    how: ExpertConfig,
    card: DeviceInfo,
    biases: ExpertBiases = NO_BIASES,
    *,
    rounded: bool = False,
) -> Tensor:
    """See `Ops.quantized_experts`: of int8, or of e4m3 with scales that `divided` accepts. rounded: so are the
    activations of the latter, where `multiplies_float8` says that they may be."""
    x, used, count = x.contiguous(), routing.experts.shape[1], len(down.weight) // x.shape[1]
    if not how.gate_up.stages:
        inner = multiply_gate_up(x, gate_up, routing, how.gate_up, card, gate, biases.gate_up, count=count)
        return multiply_down(inner, down, routing, how.down, card, biases.down, count=count)
    first, last = (each.is_int8_rows or (rounded and multiplies_float8(each, card)) for each in (gate_up, down))
    how = ExpertConfig(divided(how.gate_up, gate_up), divided(how.down, down))
    slots = sort_slots(routing.experts, count, how.gate_up.rows, card)
    inner = multiply_tiles(
        x, gate_up, slots, used, how.gate_up, card, gate, count=count, bias=biases.gate_up, rounded=first
    )
    parts = how.gate_up.rows // how.down.rows
    made = multiply_tiles(
        inner, down, slots, used, how.down, card, count=count, bias=biases.down, rounded=last, parts=parts
    )
    return combine(made, routing.weights, card)


LEAST_RUN = 32
"""Inputs of a tile of quantized matrices, at least."""


def common_run(matrix: QuantizedMatrix) -> int:
    """The largest power of two that divides every run of columns with one scale; 0 where a row has one."""
    both = matrix.width | matrix.offset
    return 0 if matrix.scale.shape[1] == 1 else both & -both


def divided(how: ExpertTile, matrix: QuantizedMatrix) -> ExpertTile:
    """With as many inputs at a time as have one scale."""
    return how._replace(inputs=min(how.inputs, common_run(matrix) or how.inputs))


def is_supported(matrix: ExpertMatrices, card: DeviceInfo) -> TypeGuard[QuantizedMatrix]:
    """Whether `quantized_experts` takes such matrices."""
    if isinstance(matrix, IntegerMatrix):
        return False
    runs = matrix.scale.shape[1] == 1 or common_run(matrix) >= LEAST_RUN
    return matrix.is_int8_rows or (matrix.weight.dtype is E4M3 and card.float8 and runs)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    how: ExpertConfig,
    card: DeviceInfo,
    biases: ExpertBiases = NO_BIASES,
) -> Tensor:
    """See `Ops.experts`."""
    x = x.contiguous()
    if not how.gate_up.stages:
        inner = multiply_gate_up(x, gate_up, routing, how.gate_up, card, gate, biases.gate_up)
        return multiply_down(inner, down, routing, how.down, card, biases.down)
    used = routing.experts.shape[1]
    slots = sort_slots(routing.experts, len(gate_up), how.gate_up.rows, card)
    inner = multiply_tiles(x, gate_up, slots, used, how.gate_up, card, gate, bias=biases.gate_up)
    made = multiply_tiles(inner, down, slots, used, how.down, card, bias=biases.down)
    return combine(made, routing.weights, card)
