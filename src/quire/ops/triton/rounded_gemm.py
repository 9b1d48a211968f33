"""Products of activations in eight bits with weights in eight bits: int8 (W8A8), or float8 e4m3 on cards that have it.

x is rounded by its own largest numbers: each token's, or, where the matrix has a scale for each run of columns, those
of each such run of a token. Products are added up on the matrix units, those of integers exactly, and so the same in
any batch and any tiling, and are scaled once a run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType

from quire.ops.operands import Gate, Norm, QuantizedMatrix, RoundedRows, num_parts
from quire.ops.quantized import E4M3, E4M3_MAX, INT8_MAX, LEAST_FLOAT8
from quire.ops.triton.gemv import COUNTERS, GemmConfig, added_up, given, handed_in, two
from quire.ops.triton.launch import ADA, HOPPER, DeviceInfo, block, fetch, kernel, release, wait
from quire.ops.triton.rows import GATES, add_scaled, apply_gate, warps

TO_EVEN = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small number and taken off again it leaves the nearest whole one, halves to even."""


@triton.jit
def rounded_to_e4m3(x):
    """x, up to 448, as the nearest number of e4m3: four bits, and below 2**-6 steps of 2**-9, halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, usual)


@kernel(do_not_specialize=["count", "rows"])
def round_kernel(
    x, out, steps, count, rows, inputs, stride,
    GATE: tl.constexpr, ACT: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS of the `count` rows of x [T, stride] in eight bits, of which MOST is the largest number, and what one step
    of each run of WIDTH numbers is, float32: steps [runs, rows]; NaN where a number is none, or infinite. ACT: see
    `given`; GATE: its other half follows after `inputs` numbers. FAST: on a card; the interpreter does not carry what
    it rounds up."""
    row, g = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS * BLOCK // WIDTH)
    line, there = row, g * WIDTH < inputs
    if ROWS > 1:
        row, g = row * ROWS + g // (BLOCK // WIDTH), g % (BLOCK // WIDTH)
        line, there = row[:, None], (g * WIDTH < inputs) & (row < count)
    k = g[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (k < inputs) & there[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    x += line * stride
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if ACT >= 0:
        other = tl.load(x + k + inputs, mask=inside, other=0.0).to(tl.float32) if GATE else value
        value = apply_gate(value, other, ACT).to(x.dtype.element_ty).to(tl.float32)
    write_rounded(value, out + (line * inputs + k), steps + g * rows + row, inside, there, MOST, LEAST, FAST)


@triton.jit
def write_rounded(value, out, steps, inside, first, MOST: tl.constexpr, LEAST: tl.constexpr, FAST: tl.constexpr):
    """Runs of numbers `value` [runs, WIDTH] to `out`, where `inside`, and what their steps are to `steps`, where
    `first`: see `round_kernel`."""
    finite = tl.abs(value) < float("inf")
    largest = tl.maximum(tl.max(tl.where(finite, tl.abs(value), 0.0), 1), LEAST)
    step = tl.div_rn(largest, MOST) + tl.sum(tl.where(finite, 0.0, float("nan")), 1)
    if out.dtype.element_ty == tl.int8:
        value = (tl.div_rn(value, step[:, None] + 0.0 * value) + TO_EVEN) - TO_EVEN
        value = tl.minimum(tl.maximum(value, -MOST), MOST)
    else:
        value *= tl.div_rn(MOST + 0.0 * largest, largest)[:, None]
        if not FAST:
            value = rounded_to_e4m3(value)
    tl.store(out, value.to(out.dtype.element_ty), mask=inside)
    tl.store(steps, step, mask=first)


@kernel(do_not_specialize=["rows"])
def norm_round_kernel(
    x, residual, weight, out, steps, rows, inputs, factor, eps,
    MOST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `round_kernel`, of the RMS norm of residual + factor * x, rounded; the sum becomes `residual`."""
    row, g = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK // WIDTH)
    k = g[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = k < inputs
    gain = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    value = tl.load(x + row * inputs + k, mask=inside, other=0.0)
    added = tl.load(residual + row * inputs + k, mask=inside, other=0.0).to(tl.float32)
    value = add_scaled(value, added, factor, residual, False)
    tl.store(residual + row * inputs + k, value, mask=inside)
    exact = value.to(tl.float32)
    root = tl.rsqrt(tl.sum(tl.sum(exact * exact, 1), 0) / inputs + eps)
    made = (exact * root * gain).to(value.dtype).to(tl.float32)
    first = g * WIDTH < inputs
    write_rounded(made, out + row * inputs + k, steps + g * rows + row, inside, first, MOST, LEAST, FAST)


@triton.jit
def eight_bit_tile(line, at, inputs, EVEN: tl.constexpr):
    """A tile of rows of the matrix."""
    if EVEN:
        return tl.load(line + at)
    else:
        return tl.load(line + at, mask=at < inputs, other=0.0)


@triton.jit
def factors_of(steps, scale, r, n, first, group, rows, room, outputs, count, GATE: tl.constexpr, ALIKE: tl.constexpr):
    """What products are multiplied by of a run of columns: the steps of rows r, the scales of outputs n, and of those
    that these are the gates of. ALIKE: they all have the scale of the first."""
    step = tl.load(steps + group * room + r, mask=r < rows, other=0.0)[None, :]
    if ALIKE:
        own = tl.load(scale + first * count + group)
        return step, own, tl.load(scale + (first + outputs) * count + group) if GATE else own
    else:
        factor = tl.load(scale + n * count + group, mask=n < outputs, other=0.0)[:, None]
        other = factor
        if GATE:
            other = tl.load(scale + (n + outputs) * count + group, mask=n < outputs, other=0.0)[:, None]
        return step, factor, other


@kernel(do_not_specialize=["rows"])
def rounded_kernel(
    x, steps, weight, scale, bias, out, parts, arrived, rows, outputs, inputs, room, count, length,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr,
    ALIKE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of ROWS rows. Programs of the same outputs are neighbours, so that the matrix is read from memory
    once. room: rows that each run of x has steps for. WIDTH: columns with one scale, a multiple of BLOCK_K, 0 for all.
    ALIKE: so have all BLOCK_N outputs. SPLITS: the inputs are split into so many runs of `length`. AHEAD: inputs of the
    matrix that are brought to L2 before the wait."""
    first = tl.program_id(1) * BLOCK_N
    n, k = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    far = tl.cast(outputs, tl.int64) * inputs
    begin = tl.program_id(2) * length
    if AHEAD > 0:
        early = begin + tl.arange(0, AHEAD // 128)[None, :] * 128
        fetch(line, early)
        if GATE:
            fetch(line + far, early)
    wait(DEPENDENT)
    release(DEPENDENT)
    source, held = x + r[:, None].to(tl.int64) * inputs, (r < rows)[:, None]
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    y, z = tl.zeros([BLOCK_N, ROWS], KIND), tl.zeros([BLOCK_N, ROWS], KIND)
    step, factor, other = 1.0, 1.0, 1.0
    if WIDTH:
        step, factor, other = factors_of(
            steps, scale, r, n, first, begin // WIDTH, rows, room, outputs, count, GATE, ALIKE)  # fmt: skip
    # A number of stages here would make each thread's factors wait in shared memory, one by one.
    for start in tl.range(begin, tl.minimum(begin + length, inputs), BLOCK_K, num_stages=None if WIDTH else STAGES):
        at = start + k
        value = tl.trans(tl.load(source + at, mask=held if EVEN else held & (at < inputs), other=0.0))
        tile = eight_bit_tile(line, at, inputs, EVEN)
        if WIDTH:
            part = tl.dot(tile, value)
            gated = tl.dot(eight_bit_tile(line + far, at, inputs, EVEN), value) if GATE else part
            y += part * (step * factor)
            if GATE:
                z += gated * (step * other)
            following = tl.minimum((start + BLOCK_K) // WIDTH, count - 1)
            step, factor, other = factors_of(
                steps, scale, r, n, first, following, rows, room, outputs, count, GATE, ALIKE)  # fmt: skip
        else:
            y = tl.dot(tile, value, y, out_dtype=KIND)
            if GATE:
                z = tl.dot(eight_bit_tile(line + far, at, inputs, EVEN), value, z, out_dtype=KIND)
    last = SPLITS == 1
    if SPLITS > 1:
        last = handed_in(y, z, parts, arrived, GATE, SPLITS, BLOCK_N, ROWS)
        if last:
            y, z = added_up(y, z, parts, GATE, SPLITS, BLOCK_N, ROWS)
    if last:
        one, two = y.to(tl.float32), z.to(tl.float32)
        if not WIDTH:
            unit, row, gate = factors_of(steps, scale, r, n, first, 0, rows, room, outputs, 1, GATE, False)
            one = one * unit * row
            if GATE:
                two = two * unit * gate
        place = r[None, :].to(tl.int64) * outputs + n[:, None]
        inside = (r < rows)[None, :] & (n < outputs)[:, None]
        given(one, two, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)


def rounded_config(rows: int, outputs: int, inputs: int, *, gated: bool, runs: bool = False) -> GemmConfig:
    """How a product is tiled: the fastest of many, measured on an H200 with the shapes of Qwen3-8B, and with scales of
    runs with those of Qwen3-Next. outputs: of the result."""
    if runs and rows <= MOST_RUN_ROWS:
        wide = 64 if outputs > 1024 else 32
        splits = two(max(1, min(128 // triton.cdiv(outputs, wide), inputs // 512)))
        return GemmConfig(block(rows, 32), wide, 128, 4, 4, splits=splits)
    if rows <= 16:
        return GemmConfig(block(rows, 8), 32, 256, 4, 4)
    some, long = block(min(rows, 128), 32), 2 if inputs > 8192 else 1
    if gated:
        return GemmConfig(some, 64, 128, 4, 4) if rows <= 64 else GemmConfig(some, 128, 128, 8, 4, ahead=512)
    if 32 < rows <= 64 and outputs <= 4096:
        return GemmConfig(some, 64, 256, 4, 4, splits=2)
    if rows <= 256:
        return GemmConfig(some, 64, 128, 4, 6, ahead=512, splits=long if rows <= 128 else 1)
    return GemmConfig(128, 128, 128, 8, 3)


AT_ONCE = 2048
"""Numbers of short rows that a program rounds together: of 512 it takes a third of the time (H200)."""


def round_rows(x: Tensor, card: DeviceInfo, dtype: torch.dtype, width: int = 0, gate: Gate = "") -> RoundedRows:
    """x [T, in], with a gate what it makes of that. width: numbers of a run; 0: all of a row.

    See `quantized.quantize_tokens`, `quantized.float8_tokens`."""
    rows, stride = most_rows(len(x), width), x.shape[1]
    inputs = stride // num_parts(gate)
    size = block(inputs)
    width = width or size
    out = x.new_empty(rows, inputs, dtype=dtype)
    steps = x.new_empty(triton.cdiv(inputs, width), rows, dtype=torch.float32)
    largest, least = (INT8_MAX, torch.finfo(torch.float32).tiny) if dtype is torch.int8 else (E4M3_MAX, LEAST_FLOAT8)
    size = max(size, width)
    some = max(1, AT_ONCE // size)
    round_kernel[(triton.cdiv(len(x), some),)](
        x, out, steps, len(x), rows, inputs, stride, GATE=num_parts(gate) == 2, ACT=GATES[gate], MOST=largest,
        LEAST=least, WIDTH=width, BLOCK=size, ROWS=some, FAST=any(card.capability), DEPENDENT=card.dependent,
        num_warps=warps(some * size), **card.options,
    )  # fmt: skip
    return RoundedRows(out, steps, len(x), x.dtype)


def norm_rounded(
    x: Tensor, residual: Tensor, norm: Norm, scale: float, matrix: QuantizedMatrix, card: DeviceInfo
) -> RoundedRows:
    """The norm of residual + scale * x, both [T, in], rounded for e4m3 `matrix`; the sum is stored in `residual`."""
    x, (count, inputs), width = x.contiguous(), x.shape, run_of(matrix)
    rows, size = most_rows(count, width), block(inputs)
    out = x.new_empty(rows, inputs, dtype=E4M3)
    steps = x.new_empty(triton.cdiv(inputs, width or size), rows, dtype=torch.float32)
    norm_round_kernel[(count,)](
        x, residual, norm.weight, out, steps, rows, inputs, scale, norm.eps, MOST=E4M3_MAX, LEAST=LEAST_FLOAT8,
        WIDTH=width or size, BLOCK=max(size, width), FAST=any(card.capability), DEPENDENT=card.dependent,
        num_warps=warps(size), **card.options,
    )  # fmt: skip
    return RoundedRows(out, steps, count, x.dtype)


def most_rows(count: int, width: int) -> int:
    """Rows of steps for `count` rows: the library wants a multiple where runs of `width` numbers have steps."""
    return -(-count // ALIGNED) * ALIGNED if width else count


def rounded_linear(
    x: RoundedRows, matrix: QuantizedMatrix, bias: Tensor | None, how: GemmConfig, card: DeviceInfo, arrived: Tensor,
    gate: Gate = "",
) -> Tensor:  # fmt: skip
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate. arrived: [COUNTERS] int32, zeros.
    The matrix has a scale a row, or what `run_of` accepts; x was rounded for it."""
    weight, scale, width = matrix.weight, matrix.scale, run_of(matrix)
    how = how._replace(inputs=min(how.inputs, width or how.inputs))
    rounded, steps, rows, dtype = x
    inputs, outputs = rounded.shape[1], len(weight) // num_parts(gate)
    out = rounded.new_empty(rows, outputs, dtype=dtype)
    how = how.fitted(card, num_parts(gate), 1)
    tiles, columns = triton.cdiv(rows, how.rows), triton.cdiv(outputs, how.outputs)
    blocks = triton.cdiv(inputs, how.inputs)
    each = triton.cdiv(blocks, how.splits if tiles * columns <= COUNTERS else 1)
    runs = triton.cdiv(blocks, each)
    size = runs * tiles * columns * 2 * how.rows * how.outputs if runs > 1 else 1
    parts = rounded.new_empty(size, dtype=torch.int32 if weight.dtype is torch.int8 else torch.float32)
    ahead = how.ahead if how.ahead <= inputs - (runs - 1) * each * how.inputs and card.dependent else 0
    rounded_kernel[(tiles, columns, runs)](
        *(rounded, steps, weight, scale, out if bias is None else bias, out, parts, arrived, rows, outputs, inputs),
        *(steps.shape[1], scale.shape[1], each * how.inputs),
        GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None, EVEN=inputs % how.inputs == 0, WIDTH=width,
        ALIKE=alike(matrix, outputs, how.outputs), ROWS=how.rows, BLOCK_N=how.outputs, BLOCK_K=how.inputs,
        STAGES=how.stages, SPLITS=runs, AHEAD=ahead, DEPENDENT=card.dependent, num_warps=how.warps,
        num_stages=how.stages, **card.options,
    )  # fmt: skip
    return out


LEAST_RUN = 32
"""Columns that are multiplied at once, at least."""


def alike(matrix: QuantizedMatrix, outputs: int, tile: int) -> bool:
    """Whether the rows of each tile have the same scales. outputs: rows, or those of each half."""
    return run_of(matrix) > 0 and matrix.height % tile == 0 and outputs % tile == 0


def run_of(matrix: QuantizedMatrix) -> int:
    """Columns that share a scale; 0 where a row does."""
    return 0 if matrix.scale.shape[1] == 1 else matrix.width


def multiplies_float8(matrix: QuantizedMatrix, card: DeviceInfo) -> bool:
    """Whether e4m3 is multiplied with the matrix: on cards with such units."""
    units = card.capability >= ADA or not any(card.capability)
    return matrix.weight.dtype is E4M3 and aligned_runs(matrix) and units


def aligned_runs(matrix: QuantizedMatrix) -> bool:
    """Whether columns that share a scale are rows, or runs that begin with the matrix and are powers of two."""
    run = run_of(matrix)
    return run == 0 or (run >= LEAST_RUN and run & (run - 1) == 0 and matrix.offset == 0)


LEAST_LIBRARY_ROWS, LEAST_NARROW_ROWS, NARROW, MOST_RUN_ROWS = 129, 257, 4096, 64
"""Rows from which on the library's products are faster, of wide matrices and of those of NARROW outputs at most; where
runs have scales, rows up to which they are not."""


def prefers_library(rows: int, matrix: QuantizedMatrix, card: DeviceInfo) -> bool:
    """Whether cuBLASLt is to multiply: many rows of e4m3 with a scale a row, or on Hopper with runs of 128."""
    if matrix.weight.dtype is not E4M3 or not any(card.capability) or any(size % 16 for size in matrix.weight.shape):
        return False
    run, narrow = run_of(matrix), len(matrix.weight) <= NARROW
    if run == 0:
        return rows >= (LEAST_NARROW_ROWS if narrow else LEAST_LIBRARY_ROWS)
    known = run == RUN and matrix.weight.shape[1] % RUN == 0 and card.capability[0] == HOPPER[0]
    return known and rows > MOST_RUN_ROWS


RUN = 128
"""Columns with one scale that the library knows."""

BLOCK_TILES = 128
"""Tiles of 128 x 128 results from which on scales of blocks are faster than those of rows' runs: about one for each
multiprocessor. With half of them they are not (measured, H100)."""

ALIGNED = 16
"""What the library wants rows of steps to be a multiple of."""


def has_blocks(rows: int, matrix: QuantizedMatrix) -> bool:
    """Whether the library gets a scale for each block of 128 x 128 rather than for each run of a row: of many results,
    or a wide matrix, and where it knows how they lie."""
    much = rows * len(matrix.weight) >= BLOCK_TILES * RUN * RUN or len(matrix.weight) > NARROW
    return much and matrix.height % RUN == 0 and matrix.weight.shape[1] % (4 * RUN) == 0


def library_linear(x: RoundedRows, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """As `rounded_linear` of e4m3, by cuBLASLt."""
    (rounded, steps, count, dtype), width = x, run_of(matrix)
    if not width:
        kind = recipe = ScalingType.RowWise
        own, theirs = steps.view(-1, 1), matrix.scale.t()
    elif bias is None and has_blocks(count, matrix):
        kind, recipe = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        own, theirs = steps.t(), matrix.scale[::RUN].contiguous().t()
    else:
        kind = recipe = ScalingType.BlockWise1x128
        # The library wants scales of the same run one after the other.
        own, theirs = steps.t(), matrix.scale.t().contiguous().t()
    made = F.scaled_mm(
        rounded, matrix.weight.t(), own, kind, theirs, recipe, bias=bias, output_dtype=dtype, use_fast_accum=not width
    )
    return made[:count]
