"""Products of a matrix with a few rows, which are bound by reading the matrix once.

A library's kernels leave a third to three quarters of the bandwidth unused at one row (measured, H200). Three things
close the gap: small programs, many at once; the matrix is requested before the preceding kernel has ended, which
dependent launch allows since weights are never written; and the gate after the product is computed with it. (Computing
the norm before it, too, gained 1 % at 1B and lost 4 % at 8B.)

Where there would be too few programs, sums are split into runs, one program each (split-k). Each run stores its sums
and increments a counter. The last one adds all of them up, always in the same order, so that timing changes nothing.
Counters are 0 between kernels, under dependent launch too, since a kernel touches them only after its `wait`, when the
preceding kernel has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Gate, num_parts
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import GATES, apply_gate

COUNTERS = 1 << 14
"""Tiles that can be cut into runs, one counter each, all 0 between kernels."""

UNSCALED, BY_ROW, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What shares a scale of a matrix: nothing, a row, or each run of a row's columns."""


@triton.jit
def place_of(parts, split, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Where the sums of one run of this program's tile are stored; those of the gate follow."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    at = split * tl.num_programs(0) * tl.num_programs(1) + tile
    number = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    return parts + at.to(tl.int64) * (2 * BLOCK_N * ROWS) + number


@triton.jit
def handed_in(
    y, z, parts, arrived, GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Store a run's sums. Returns whether this was the last run of its tile."""
    mine = place_of(parts, tl.program_id(2), BLOCK_N, ROWS)
    tl.store(mine, y)
    if GATE:
        tl.store(mine + BLOCK_N * ROWS, z)
    tl.debug_barrier()
    counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def added_up(y, z, parts, GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """The sums of all runs, in the same order each time. Other multiprocessors wrote them: this one's L1 cache is
    bypassed."""
    y, z = tl.zeros_like(y), tl.zeros_like(z)
    for split in tl.static_range(SPLITS):
        theirs = place_of(parts, split + tl.program_id(2) * 0, BLOCK_N, ROWS)
        y += tl.load(theirs, cache_modifier=".cg")
        if GATE:
            z += tl.load(theirs + BLOCK_N * ROWS, cache_modifier=".cg")
    return y, z


class GemmConfig(NamedTuple):
    """How a product is tiled. rows: the most at once, a power of two. stages 0: multiply-adds without matrix units, all
    inputs by the same program, `inputs` at a time. splits: runs that the inputs are split into. chunks: of a run, which
    a program has side by side, see `integer_kernel`; then it has rows / chunks rows at most."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 0
    ahead: int = 0
    splits: int = 1
    chunks: int = 1

    def fitted(self, card: DeviceInfo, matrix: int, row: int) -> GemmConfig:
        """With as many stages as fit into the GPU's shared memory. matrix, row: bytes of a number of each."""
        stage = (self.outputs * matrix + self.rows * row) * self.inputs
        return self._replace(stages=min(self.stages, max(2, card.shared // stage))) if self.stages else self


MAX_GEMV_ROWS, MAX_GATED_GEMV_ROWS = 16, 64
"""Rows above which a library's kernels are as good; with a gate behind the product."""


def gemm_config(rows: int, outputs: int, inputs: int, gated: bool = False) -> GemmConfig | None:
    """The fastest of many, measured on an H200 (docs/benchmarks); None where a library's kernels were. outputs: of the
    result.

    One row, or few of a small matrix: multiply-adds. More: matrix units; long rows of the matrix are cut into few
    outputs, small matrices' inputs into runs, so that there are programs enough.
    """
    if rows > (MAX_GATED_GEMV_ROWS if gated and outputs >= 8192 else MAX_GEMV_ROWS):
        return None
    if rows <= vectors(outputs * (2 if gated else 1), inputs):
        return padded_rows(rows, inputs)
    some, small = block(rows, 8), min(outputs, inputs) <= 1024
    if rows > MAX_GEMV_ROWS:
        return GemmConfig(some, 64, 128, 4, 4)
    if gated:
        return (
            GemmConfig(some, 64, 128, 4, 4)
            if small or rows > 8
            else GemmConfig(8, 32, 128, 2, 6 if outputs <= 4096 else 3)
        )
    if outputs <= 2048 and inputs >= 8192:
        return GemmConfig(some, 64, 128, 4, 6, splits=8)
    if (outputs <= 4096 or inputs >= 8192) and inputs % 256 == 0 and not small:
        return GemmConfig(some, 16, 256, 2, 6, 512)
    return GemmConfig(some, 64, 128, 4, 4 if outputs > 8192 else 6, splits=num_runs(4096 // outputs, inputs))


def padded_rows(rows: int, inputs: int) -> GemmConfig:
    """Multiply-adds. Inputs that are a power of two, or many and nearly one, are taken whole, about 8,192 numbers of
    the matrix per program; others in blocks without remainder, of 512 numbers, which eight warps read best, and four
    warps that have several rows to sum."""
    whole, run = block(inputs), min(inputs & -inputs, 256 if inputs <= 4096 and rows == 1 else 512)
    near = inputs > 8192 and whole <= min(16384, 6 * inputs // 5)
    if inputs == whole or near or inputs > 64 * run:
        return GemmConfig(rows, max(1, min(8, 8192 // whole)), whole, 4 if whole <= 2048 else 8)
    return GemmConfig(rows, two(min(512 // run, 24576 // (inputs * rows))), run, 8 if rows == 1 else 4)


def two(number: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << max(1, number).bit_length() - 1


def vectors(outputs: int, inputs: int) -> int:
    """Rows up to which multiply-adds are faster. outputs: of the matrix, gates included."""
    if inputs > 8192 or outputs * inputs >= 1 << 24:
        return 1 if inputs <= 32768 else 0
    return 4 if outputs <= 2048 and inputs <= 4096 else 2


def num_runs(wanted: int, inputs: int) -> int:
    """Runs that the inputs are split into, a power of two: at most 8, of at least 512 each."""
    return two(min(8, wanted, inputs // 512))


def scaled_gemm_config(rows: int, outputs: int, inputs: int, gated: bool = False, run: int = 0) -> GemmConfig | None:
    """As `gemm_config`, for an e4m3 matrix with a scale per row, or, of one row of x, per `run` of its columns.

    On the matrix units inputs are split into runs until about 16,384 outputs are computed; not those of gated products,
    whose matrices are large.
    """
    if rows > MAX_GEMV_ROWS or inputs % 256:
        return None
    if rows == 1 and inputs <= 32768:
        how = scaled_padded_rows(inputs, gated)
        if run and not gated and how.inputs < 512 and inputs % 512 == 0:
            how = GemmConfig(1, 4, 512, 4)
        return how if run == 0 or how.inputs % run == 0 else None
    if run:
        return None
    if rows > 8:
        how = GemmConfig(16, 32, 256, 1, 3 if gated else 4)
    elif gated:
        how = GemmConfig(8, 64, 128, 4, 4) if outputs >= 8192 else GemmConfig(8, 32, 256, 2, 4)
    else:
        how = GemmConfig(8, 16, 512, 1, 4) if inputs > 8192 else GemmConfig(8, 32, 256, 2, 4)
    return how if gated else how._replace(splits=num_runs((12288 if rows <= 8 else 16384) // outputs, inputs))


def scaled_padded_rows(inputs: int, gated: bool) -> GemmConfig:
    """As `padded_rows`, one row: whole, 32,768 numbers per program, a quarter with a gate; or in blocks."""
    whole = block(inputs)
    if inputs == whole:
        return GemmConfig(1, max(1, min(8, (8192 if gated else 32768) // whole)), whole, 4 if whole <= 4096 else 8)
    if inputs <= 8192:
        return GemmConfig(1, 4 if gated else 2, 256, 4)
    run = inputs & -inputs
    return GemmConfig(1, 1, min(run, 4096), 4) if whole <= 16384 else GemmConfig(1, 2, min(run, 512), 4)


@triton.jit
def given(y, z, bias, out, place, n, outputs, inside, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr):
    """Write what ACT makes of y, the outputs n, and with GATE of z, to out + place. A negative ACT leaves y alone."""
    if BIAS:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATE:
            z += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if ACT >= 0:
        y = apply_gate(y.to(out.dtype.element_ty).to(tl.float32), z.to(out.dtype.element_ty).to(tl.float32), ACT)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_scales(
    scale, row, inside, scales, BLOCK_K: tl.constexpr, TIMES: tl.constexpr, RUN: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """The scales of rows of a matrix: [rows] of BY_ROW; of BY_BLOCK for each of TIMES * BLOCK_K columns, [rows, runs],
    where `inside`."""
    if SCALED == BY_ROW:
        return (tl.load(scale + row, mask=inside, other=0.0),)
    elif SCALED == BY_BLOCK:
        made = ()
        for i in tl.static_range(TIMES):
            g = i * (BLOCK_K // RUN) + tl.arange(0, BLOCK_K // RUN)[None, :]
            held = inside[:, None] & (g < scales)
            made += (tl.load(scale + row[:, None] * scales + g, mask=held, other=0.0),)  # type: ignore[assignment]
        return made
    else:
        return ()


@triton.jit
def partial_sums(y, factors, i: tl.constexpr, RUN: tl.constexpr, SCALED: tl.constexpr):
    """Products y [rows, columns] as far as they are to be added up one by one: of BY_BLOCK, sums of runs, scaled."""
    if SCALED == BY_BLOCK:
        return tl.sum(tl.reshape(y, [y.shape[0], y.shape[1] // RUN, RUN]), 2) * factors[i]
    else:
        return y


@triton.jit
def row_sums(y, factors, SCALED: tl.constexpr):
    """The rest of `partial_sums`: [rows]."""
    y = tl.sum(y, 1)
    if SCALED == BY_ROW:
        y *= factors[0]
    return y


@kernel
def vector_kernel(
    x, weight, scale, bias, out, outputs, inputs, scales,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TIMES: tl.constexpr,
    APART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of each row by multiply-adds in float32; there are TIMES * BLOCK_K inputs.

    The program's whole part of the matrix is in registers, requested before the wait: what it waits for is short. EVEN:
    no remainder of inputs or outputs. SCALED: an 8-bit matrix, which is converted while multiplying, with a scale a
    row, or `scales` a row, each of RUN columns. APART: see `numbers`.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    line = weight + n[:, None].to(tl.int64) * inputs + k[None, :]
    far = tl.cast(outputs, tl.int64) * inputs
    tiles = (lines(line, n, k, 0, outputs, inputs, EVEN),)
    gated = (lines(line + far, n, k, 0, outputs, inputs, EVEN),) if GATE else tiles
    for i in tl.static_range(1, TIMES):
        tiles += (lines(line, n, k, i * BLOCK_K, outputs, inputs, EVEN),)  # type: ignore[assignment]
        if GATE:
            gated += (lines(line + far, n, k, i * BLOCK_K, outputs, inputs, EVEN),)  # type: ignore[assignment]
    factors = row_scales(scale, n, n < outputs, scales, BLOCK_K, TIMES, RUN, SCALED)
    others = row_scales(scale, outputs + n, n < outputs, scales, BLOCK_K, TIMES, RUN, SCALED) if GATE else factors
    wait(DEPENDENT)
    release(DEPENDENT)
    for r in tl.static_range(ROWS):
        value = numbers(x + r * inputs, n, k, 0, inputs, APART)
        y = partial_sums(tiles[0].to(tl.float32) * value, factors, 0, RUN, SCALED)
        z = partial_sums(gated[0].to(tl.float32) * value, others, 0, RUN, SCALED) if GATE else y
        for i in tl.static_range(1, TIMES):
            value = numbers(x + r * inputs, n, k, i * BLOCK_K, inputs, APART)
            y += partial_sums(tiles[i].to(tl.float32) * value, factors, i, RUN, SCALED)
            if GATE:
                z += partial_sums(gated[i].to(tl.float32) * value, others, i, RUN, SCALED)
        y, z = row_sums(y, factors, SCALED), row_sums(z, others, SCALED)
        given(y, z, bias, out, r * outputs + n, n, outputs, n < outputs, GATE, ACT, BIAS)


@triton.jit
def highest_expert(experts, USED: tl.constexpr):
    """The largest number of an expert of a token's USED slots: -1 where none has one."""
    most = tl.load(experts)
    for u in tl.static_range(1, USED):
        most = tl.maximum(most, tl.load(experts + u))
    return most


@triton.jit
def lines(line, n, k, since, outputs, inputs, EVEN: tl.constexpr):
    """Inputs since + k of outputs n, which are read once."""
    if EVEN:
        return tl.load(line + since, eviction_policy="evict_first")
    else:
        held = (n < outputs)[:, None] & (since + k < inputs)[None, :]
        return tl.load(line + since, mask=held, other=0.0, eviction_policy="evict_first")


@triton.jit
def numbers(x, n, k, since, inputs, APART: tl.constexpr):
    """Inputs since + k of a row, for all of n; APART: a thread has one of n, and loads its own. Always with a mask:
    without, ptxas converts the matrix, which may not have arrived, before it requests x and lets the next kernel
    start."""
    if APART:
        at = since + k[None, :] + 0 * n[:, None]
        return tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
    else:
        return tl.load(x + since + k, mask=since + k < inputs, other=0.0).to(tl.float32)[None, :]


@kernel
def matrix_kernel(
    x, weight, scale, bias, out, parts, arrived, rows, outputs, inputs, length,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, SETTLED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs on the matrix units, whose narrow side takes the rows. EVEN: BLOCK_K divides the inputs.

    AHEAD inputs of the matrix are requested before the wait and multiplied last: the loop's loads begin after them.
    SCALED: an 8-bit matrix with a scale per row, see `usable`. Programs of the same outputs are neighbours. SPLITS: the
    inputs are split into so many runs of `length`. SETTLED: see `settled`.
    """
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(2) * length
    end = tl.minimum(begin + length, inputs)
    held = (r < rows)[:, None]
    line = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    far = tl.cast(outputs, tl.int64) * inputs
    source = x + r[:, None].to(tl.int64) * inputs
    early = begin + tl.arange(0, max(AHEAD, 1))[None, :]
    head, gated_head, first = early, early, early
    if AHEAD > 0:
        head = tl.load(line + early, eviction_policy="evict_first")
        if GATE:
            gated_head = tl.load(line + far + early, eviction_policy="evict_first")
    wait(DEPENDENT)
    release(DEPENDENT)
    if AHEAD > 0:
        first = usable(tl.load(source + early, mask=held, other=0.0), SCALED)
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(begin + AHEAD, end, BLOCK_K, num_stages=STAGES):
        at = start + k[None, :]
        tile = part(line, at, inputs, EVEN)
        value = usable(tl.load(source + at, mask=held if EVEN else held & (at < inputs), other=0.0), SCALED)
        y = tl.dot(tile.to(value.dtype), tl.trans(value), y, input_precision=PRECISION)
        if GATE:
            gated = part(line + far, at, inputs, EVEN)
            z = tl.dot(gated.to(value.dtype), tl.trans(value), z, input_precision=PRECISION)
            z = settled(z, SETTLED)
        y = settled(y, SETTLED)
    if AHEAD > 0:
        y = tl.dot(head.to(first.dtype), tl.trans(first), y, input_precision=PRECISION)
        if GATE:
            z = tl.dot(gated_head.to(first.dtype), tl.trans(first), z, input_precision=PRECISION)
    if SCALED:
        y *= 16.0 * tl.load(scale + n, mask=n < outputs, other=0.0)[:, None]
        if GATE:
            z *= 16.0 * tl.load(scale + outputs + n, mask=n < outputs, other=0.0)[:, None]
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (r < rows)[None, :] & (n < outputs)[:, None]
    if SPLITS == 1:
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)
    elif handed_in(y, z, parts, arrived, GATE, SPLITS, BLOCK_N, ROWS):
        y, z = added_up(y, z, parts, GATE, SPLITS, BLOCK_N, ROWS)
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)


@triton.jit
def part(line, at, inputs, EVEN: tl.constexpr):
    """A tile of rows of the matrix, which are read once."""
    if EVEN:
        return tl.load(line + at, eviction_policy="evict_first")
    else:
        return tl.load(line + at, mask=at < inputs, other=0.0)


@triton.jit
def settled(x, SETTLED: tl.constexpr):
    """x, the accumulator of a product on Hopper's asynchronous units, when it is complete.

    With one factor in registers, as converted 8-bit numbers are, products in flight at the loop's end have their
    registers overwritten at its start: the assembler then makes each wait for the one before, and eight take the time
    of eight (seen in the machine code). An instruction that reads x here completes them together.
    """
    if SETTLED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def usable(x, SCALED: tl.constexpr):
    """x in the dtype of the product. An e4m3 matrix is multiplied in half precision, which holds all its values and
    converts four times as cheaply as bfloat16: x / 16 may so reach 1,048,000, and below 0.001 it is off by at most
    5e-7."""
    if SCALED:
        return (x.to(tl.float32) * 0.0625).to(tl.float16)
    else:
        return x


def gemv_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: GemmConfig,
    card: DeviceInfo,
    gate: Gate = "",
    scale: Tensor | None = None,
    arrived: Tensor | None = None,
    run: int = 0,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], or [T, out / 2] with a gate. scale: of a float8 matrix, [out, 1], or of
    each `run` of its columns, see `scaled_gemm_config`. arrived: [COUNTERS] int32, zeros; without it, inputs are not
    split."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0] // num_parts(gate)
    out = x.new_empty(rows, outputs)
    shift = x if bias is None else bias
    same = {"GATE": num_parts(gate) == 2, "ACT": GATES[gate], "BIAS": bias is not None, "BLOCK_N": how.outputs,
            "BLOCK_K": how.inputs, "DEPENDENT": card.dependent, "num_warps": how.warps, **card.options}  # fmt: skip
    columns, factor = triton.cdiv(outputs, how.outputs), x if scale is None else scale
    how = how.fitted(card, weight.element_size() * num_parts(gate), x.element_size())
    if not how.stages:
        even, times = inputs % how.inputs == 0 and outputs % how.outputs == 0, triton.cdiv(inputs, how.inputs)
        apart = how.outputs == 1 or how.outputs * how.inputs * weight.element_size() <= 16 * 32 * how.warps
        scaled = UNSCALED if scale is None else BY_BLOCK if run else BY_ROW
        vector_kernel[(columns,)](
            *(x, weight, factor, shift, out, outputs, inputs, factor.shape[-1]),
            SCALED=scaled.value, RUN=run or how.inputs, EVEN=even, ROWS=rows, TIMES=times, APART=apart, **same,
        )  # fmt: skip
        return out
    tiles = triton.cdiv(rows, how.rows)
    length, runs, ahead = cut(how, inputs, tiles * columns if arrived is not None else COUNTERS + 1)
    size = runs * tiles * columns * 2 * how.rows * how.outputs
    parts = x.new_empty(size, dtype=torch.float32) if runs > 1 else x
    sums = (parts, x if arrived is None else arrived)
    matrix_kernel[(tiles, columns, runs)](
        *(x, weight, factor, shift, out, *sums, rows, outputs, inputs, length),
        EVEN=inputs % how.inputs == 0, SCALED=scale is not None, ROWS=how.rows, AHEAD=ahead, STAGES=how.stages,
        SPLITS=runs, SETTLED=scale is not None and settles(how, card), PRECISION=card.precision, **same,
    )  # fmt: skip
    return out


def settles(how: GemmConfig, card: DeviceInfo) -> bool:
    """Whether products use units that need `settled`: Hopper's, which take 64 outputs by four warps."""
    return card.capability[0] == HOPPER[0] and how.outputs >= 64 and how.warps >= 4


def cut(how: GemmConfig, inputs: int, tiles: int) -> tuple[int, int, int]:
    """(length, count) of the runs that inputs are split into, one if there are more tiles than counters, and the inputs
    that each requests ahead."""
    blocks = triton.cdiv(inputs, how.inputs)
    each = triton.cdiv(blocks, how.splits if tiles <= COUNTERS else 1)
    length, runs = each * how.inputs, triton.cdiv(blocks, each)
    return length, runs, how.ahead if how.ahead <= inputs - (runs - 1) * length else 0
