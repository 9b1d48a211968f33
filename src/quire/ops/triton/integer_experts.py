"""Mixtures of experts of 4- and 8-bit integers: the sorted tiles of `experts`, multiplied as `integer_gemm` does.

An expert's matrix is an `IntegerMatrix` of its own, a run of memory, and those of all experts lie one after the other.
As many rows as matrix units take at least are fewer than the tokens of most experts in a step of 64 sequences; so tiles
begin at 8 rows. Steps of a few tokens are not sorted: there, few experts are used by several, and each slot (a token
and one of its experts) is a tile of one row. Prompts take the same kernel with larger tiles, since whole matrices
dequantized would be written and read again for every step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import NO_BIASES, ExpertBiases, Gate, IntegerKind, IntegerMatrix, Routing, num_parts
from quire.ops.triton.experts import SortedSlots, combine, sort_slots
from quire.ops.triton.gemv import GemmConfig
from quire.ops.triton.integer_gemm import (
    ask_for,
    both_steps,
    fitted,
    has_two_products,
    ordered_slots,
    row_scales,
    step_inputs,
    supers_of,
)
from quire.ops.triton.launch import DeviceInfo, kernel, release, wait
from quire.ops.triton.rows import GATES, apply_gate

ROW = tl.constexpr(int(IntegerKind.ROWS))


@triton.jit
def tile_of(tiles, room, SORTED: tl.constexpr):
    """This program's expert, where its rows begin, and their count."""
    tile = tl.program_id(1)
    if SORTED:
        return tl.load(tiles + tile), tl.load(tiles + room + tile), tl.load(tiles + 2 * room + tile)
    else:
        return tl.load(tiles + tile), tile, tile * 0 + 1


@kernel(do_not_specialize=["room"])
def integer_experts_kernel(
    x, weight, words, supers, bias, out, order, tiles, room, outputs, inputs, numbers, scales, extra,
    USED: tl.constexpr, BY_TOKEN: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, SORTED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr, EVEN_N: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a tile of rows that use the same expert. x, out, order and tiles are as in `experts_kernel`;
    without SORTED, tiles are the experts of slots, each a tile. numbers, scales, extra: how far the next expert's
    `weight`, `words` and `supers` are. AHEAD: inputs asked for before the wait, as the expert is known by then.
    """
    if BY_TOKEN:
        wait(DEPENDENT)
    expert, begin, count = tile_of(tiles, room, SORTED)
    first = tl.program_id(0) * BLOCK_N
    whole = outputs * 2 if GATE else outputs
    weight += expert.to(tl.int64) * numbers
    if not BY_TOKEN:
        if AHEAD > 0:
            if expert >= 0:
                ask_for(weight, first, expert * 0, 0, whole, BITS, BLOCK_N, AHEAD, 1, False)
        wait(DEPENDENT)
    release(DEPENDENT)
    if expert < 0:
        return
    words += expert.to(tl.int64) * scales
    supers += expert.to(tl.int64) * extra
    n, r = first + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    m = n
    if not EVEN_N:
        m = tl.minimum(n, outputs - 1)
    held = r < count
    slot = begin + r
    if SORTED:
        slot = tl.load(order + begin + r, mask=held, other=0)
    row = slot // USED if BY_TOKEN else begin + r
    line = x + row.to(tl.int64) * inputs
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for run in tl.range(0, inputs, STEP * TIMES, num_stages=STAGES):
        for u in tl.static_range(TIMES):
            start = run + u * STEP
            y, z = both_steps(
                weight, words, supers, line, held, y, z, n, m, start, inputs, outputs, GATE, BITS, KIND, GROUP, HALF,
                STEP, EVEN, EVEN_N, ROWS <= 32, FAST, PRECISION)  # fmt: skip
    if KIND == ROW:
        y *= row_scales(words, n, whole)[:, None]
        if GATE:
            z *= row_scales(words + outputs, n, outputs)[:, None]
    if BIAS:
        line = bias + expert.to(tl.int64) * whole + m
        y += tl.load(line).to(tl.float32)[:, None]
        if GATE:
            z += tl.load(line + outputs).to(tl.float32)[:, None]
    if BY_TOKEN:
        y = apply_gate(y, z, ACT)
    place = (begin + r if BY_TOKEN else slot).to(tl.int64) * outputs
    tl.store(out + place[None, :] + n[:, None], y.to(out.dtype.element_ty), mask=held[None, :] & (n < outputs)[:, None])


class IntegerExpertConfig(NamedTuple):
    """The tiles of gate and up, and of down, with the same rows. sorted: slots are, by expert; otherwise each is a
    tile."""

    gate_up: GemmConfig
    down: GemmConfig
    sorted: bool = True


FEW_TOKENS = 4
"""Tokens up to which slots are not sorted."""

FEW = IntegerExpertConfig(GemmConfig(8, 32, 256, 2, 4), GemmConfig(8, 64, 256, 2, 3, 256), False)
EIGHT = IntegerExpertConfig(GemmConfig(8, 128, 128, 4, 4), GemmConfig(8, 128, 128, 4, 4))
SIXTEEN = IntegerExpertConfig(GemmConfig(16, 64, 128, 2, 6), GemmConfig(16, 64, 256, 2, 4))
THIRTY_TWO = IntegerExpertConfig(GemmConfig(32, 64, 128, 4, 4), GemmConfig(32, 128, 128, 4, 3))
SIXTY_FOUR = IntegerExpertConfig(GemmConfig(64, 128, 128, 8, 3), GemmConfig(64, 128, 128, 4, 4))
MANY = IntegerExpertConfig(GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 128, 64, 8, 3))
MANY_FLOATS = IntegerExpertConfig(GemmConfig(128, 64, 64, 4, 4), GemmConfig(128, 128, 64, 8, 3))

FEW_DOUBLE = IntegerExpertConfig(GemmConfig(8, 32, 128, 2, 4), GemmConfig(8, 64, 128, 2, 4, 128), False)
EIGHT_DOUBLE = IntegerExpertConfig(GemmConfig(8, 64, 128, 2, 4), GemmConfig(8, 64, 128, 2, 4))
SIXTEEN_DOUBLE = IntegerExpertConfig(GemmConfig(16, 64, 128, 4, 4), GemmConfig(16, 64, 128, 4, 4))
MANY_DOUBLE = IntegerExpertConfig(GemmConfig(32, 32, 64, 2, 4), GemmConfig(32, 64, 128, 4, 3))
"""Where each tile is multiplied twice, numbers have 8 bits, or groups 32 columns: larger tiles spill."""

FIXED = SIXTEEN_DOUBLE
"""Of any number of tokens, where that must not matter."""

SMALL = IntegerExpertConfig(GemmConfig(16, 32, 64, 4, 3), GemmConfig(16, 32, 64, 4, 3))
"""Of float32, which takes more registers."""


def integer_expert_config(tokens: int, used: int, gate_up: IntegerMatrix, down: IntegerMatrix) -> IntegerExpertConfig:
    """As `expert_config`, with experts of Qwen3-30B-A3B in int4, of gpt-oss-20b in MXFP4; not those that are
    multiplied twice."""
    slots = tokens * used / len(down.weight)
    if any(each.bits == 8 or scales_sums(each) or has_two_products(each) for each in (gate_up, down)):
        if tokens <= FEW_TOKENS:
            return FEW_DOUBLE
        return EIGHT_DOUBLE if slots <= 4 else SIXTEEN_DOUBLE if slots <= 10 else MANY_DOUBLE
    if tokens <= FEW_TOKENS:
        return FEW
    if slots <= 10:
        return EIGHT if slots <= 4 else SIXTEEN
    if slots <= 96:
        return THIRTY_TWO if slots <= 24 else SIXTY_FOUR
    return MANY_FLOATS if down.kind is IntegerKind.FLOATS else MANY


def scales_sums(matrix: IntegerMatrix) -> bool:
    """Whether sums of 32 columns are scaled, in registers of their own."""
    return matrix.half if matrix.kind is IntegerKind.FLOATS else matrix.group < 64


def multiply_integer_tiles(
    x: Tensor,
    matrix: IntegerMatrix,
    slots: SortedSlots | Tensor,
    used: int,
    how: GemmConfig,
    card: DeviceInfo,
    gate: Gate = "",
    bias: Tensor | None = None,
) -> Tensor:
    """As `multiply_tiles`, with matrices of all experts. slots: int32 [T, K], the experts of slots that are not
    sorted."""
    outputs, inputs = matrix.outputs // num_parts(gate), matrix.inputs
    how = fitted(how, matrix, card, x.element_size(), num_parts(gate) == 2)
    step = step_inputs(matrix, how.inputs)
    order, tiles = (slots.order, slots.tiles) if isinstance(slots, SortedSlots) else (slots, slots)
    count, room = order.numel(), tiles.shape[1] if isinstance(slots, SortedSlots) else order.numel()
    out, supers = x.new_empty(count, outputs), supers_of(matrix)
    even = outputs % how.outputs == 0
    integer_experts_kernel[(triton.cdiv(outputs, how.outputs), room)](
        *(x, matrix.weight, matrix.words, supers, x if bias is None else bias, out, order, tiles, room),
        *(outputs, inputs, matrix.weight.stride(0), matrix.words.stride(0), supers.stride(0)),
        USED=used, BY_TOKEN=gate != "", GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None,
        BITS=matrix.bits, KIND=int(matrix.kind),
        GROUP=matrix.group, HALF=matrix.half, SORTED=isinstance(slots, SortedSlots), ROWS=how.rows, BLOCK_N=how.outputs,
        STEP=step, TIMES=how.inputs // step, STAGES=how.stages,
        AHEAD=min(how.ahead, how.inputs) if even and any(card.capability) else 0, EVEN=inputs % how.inputs == 0,
        EVEN_N=even, FAST=x.dtype in (torch.bfloat16, torch.float16) and any(card.capability),
        PRECISION=card.precision, DEPENDENT=card.dependent, num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out


def integer_experts(
    x: Tensor,
    routing: Routing,
    gate_up: IntegerMatrix,
    down: IntegerMatrix,
    gate: Gate,
    how: IntegerExpertConfig,
    card: DeviceInfo,
    biases: ExpertBiases = NO_BIASES,
) -> Tensor:
    """See `Ops.quantized_experts`: of integers; down's columns are in the order of the inner numbers."""
    x, used, slots = x.contiguous(), routing.experts.shape[1], routing.experts
    made = sort_slots(slots, len(gate_up.weight), how.gate_up.rows, card) if how.sorted else slots
    x, each = ordered_slots(x, routing, gate_up, card)
    inner = multiply_integer_tiles(x, gate_up, made, each.experts.shape[1], how.gate_up, card, gate, biases.gate_up)
    del x  # perhaps as large as the result: see `working_bytes`
    out = multiply_integer_tiles(inner, down, made, used, how.down, card, bias=biases.down)
    return combine(out, routing.weights, card)
