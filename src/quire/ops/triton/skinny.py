"""Matrices times a few rows: bound by reading the matrix once, at whatever bandwidth there is.

A library's kernels leave a third to three quarters of it unused at one row (measured, H200). Three things close the
gap: small programs, many at once; the matrix asked for before the kernel ahead has ended, which dependent launch
allows since nobody writes weights; and the gate behind the product done with it. (The norm before it was tried, too:
it gave 1 % at 1B and took 4 % at 8B.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.base import Gate
from quire.ops.triton.launch import HOPPER, Card, block, kernel, release, wait
from quire.ops.triton.rows import activate
from quire.ops.triton.split import COUNTERS, added_up, handed_in


@triton.jit
def given(y, z, bias, out, place, n, outputs, inside, GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr):
    """y, the outputs n, and under GATE z, what y gates, to out + place."""
    if BIAS:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATE:
            z += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if GATE:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), GELU) * z.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@kernel
def vector_kernel(
    x, weight, scale, bias, out, outputs, inputs,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of each row by plain multiply-adds, in float32.

    The program's whole part of the matrix is in registers, asked for before the wait: what it waits for is short.
    EVEN: BLOCK_K is all there is of the inputs, and there is no output over. SCALED: a matrix in eight bits, which are
    widened when they are multiplied.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    line = weight + n[:, None].to(tl.int64) * inputs + k[None, :]
    far = outputs.to(tl.int64) * inputs
    held = (n < outputs)[:, None] & (k < inputs)[None, :]
    if EVEN:
        tile = tl.load(line, eviction_policy="evict_first")
    else:
        tile = tl.load(line, mask=held, other=0.0, eviction_policy="evict_first")
    gated = tile
    if GATE:
        if EVEN:
            gated = tl.load(line + far, eviction_policy="evict_first")
        else:
            gated = tl.load(line + far, mask=held, other=0.0, eviction_policy="evict_first")
    wait(DEPENDENT)
    release(DEPENDENT)
    for r in tl.static_range(ROWS):
        value = tl.load(x + r * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(tile.to(tl.float32) * value, 1)
        z = y
        if GATE:
            z = tl.sum(gated.to(tl.float32) * value, 1)
        if SCALED:
            y *= tl.load(scale + n, mask=n < outputs, other=0.0)
            if GATE:
                z *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)
        given(y, z, bias, out, r * outputs + n, n, outputs, n < outputs, GATE, GELU, BIAS)


@kernel
def matrix_kernel(
    x, weight, scale, bias, out, parts, arrived, rows, outputs, inputs, length,
    GATE: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, SETTLED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs on the matrix units, whose narrow side takes the rows. EVEN: BLOCK_K divides the inputs.

    AHEAD inputs of the matrix are asked for before the wait and multiplied last: the loop's loads begin behind it.
    SCALED: a matrix in eight bits, a scale a row, see `usable`. Programs of the same outputs follow each other.
    SPLITS: the inputs are cut into so many runs of `length`, see `split`. SETTLED: see `settled`.
    """
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(2) * length
    end = tl.minimum(begin + length, inputs)
    held = (r < rows)[:, None]
    line = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    far = outputs.to(tl.int64) * inputs
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
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, GELU, BIAS)
    elif handed_in(y, z, parts, arrived, GATE, SPLITS, BLOCK_N, ROWS):
        y, z = added_up(y, z, parts, GATE, SPLITS, BLOCK_N, ROWS)
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, GELU, BIAS)


@triton.jit
def part(line, at, inputs, EVEN: tl.constexpr):
    """Of rows of the matrix, which are read once."""
    if EVEN:
        return tl.load(line + at, eviction_policy="evict_first")
    else:
        return tl.load(line + at, mask=at < inputs, other=0.0)


@triton.jit
def settled(x, SETTLED: tl.constexpr):
    """x, which a product on Hopper's asynchronous units is making, when it is made.

    With one factor in registers, as numbers just made of eight bits are, products left under way at the loop's end
    have their registers overwritten at its start: the assembler then lets each wait for the one before, and eight
    take the time of eight (seen in the machine code). Something that reads x here ends them together.
    """
    if SETTLED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def usable(x, SCALED: tl.constexpr):
    """What x is multiplied as. By eight bits of floating point in half precision, which holds every one of them and is
    made of them four times as cheaply as bfloat16: a sixteenth of x, which so may reach 1,048,000, and what is below
    0.001 is off by 5e-7 at most."""
    if SCALED:
        return (x.to(tl.float32) * 0.0625).to(tl.float16)
    else:
        return x


class Recipe(NamedTuple):
    """How a product is cut. rows: the most at once, a power of two. stages 0: by multiply-adds, the inputs whole.
    splits: the runs that the inputs are cut into, see `split`."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 0
    ahead: int = 0
    splits: int = 1

    def fitted(self, card: Card, matrix: int, row: int) -> Recipe:
        """With as many stages as the card's shared memory has room for. matrix, row: bytes a number of them takes."""
        stage = (self.outputs * matrix + self.rows * row) * self.inputs
        return self._replace(stages=min(self.stages, max(2, card.shared // stage))) if self.stages else self


MOST, GATED_MOST = 16, 64
"""Rows above which a library's kernels are as good; with a gate behind the product."""


def recipe(rows: int, outputs: int, inputs: int, gated: bool = False) -> Recipe | None:
    """What was fastest of many, H200 (docs/benchmarks); None where a library's kernels were. outputs: of the result.

    One row, or few of a small matrix: by multiply-adds, about 8,192 numbers of the matrix a program. More: on the
    matrix units; long rows of the matrix are cut into few outputs, small matrices' inputs into runs, so that there are
    programs enough.
    """
    if rows > (GATED_MOST if gated and outputs >= 8192 else MOST):
        return None
    if rows <= vectors(outputs * (2 if gated else 1), inputs):
        whole = block(inputs)
        return Recipe(rows, max(1, min(8, 8192 // whole)), whole, 4 if whole <= 2048 else 8)
    some, small = block(rows, 8), min(outputs, inputs) <= 1024
    if rows > MOST:
        return Recipe(some, 64, 128, 4, 4)
    if gated:
        return Recipe(some, 64, 128, 4, 4) if small or rows > 8 else Recipe(8, 32, 128, 2, 6 if outputs <= 4096 else 3)
    if outputs <= 2048 and inputs >= 8192:
        return Recipe(some, 64, 128, 4, 6, splits=8)
    if (outputs <= 4096 or inputs >= 8192) and inputs % 256 == 0 and not small:
        return Recipe(some, 16, 256, 2, 6, 512)
    return Recipe(some, 64, 128, 4, 4 if outputs > 8192 else 6, splits=runs(4096 // outputs, inputs))


def vectors(outputs: int, inputs: int) -> int:
    """Rows up to which multiply-adds win. outputs: of the matrix, those that gate included."""
    if inputs > 8192 or outputs * inputs >= 1 << 24:
        return 1 if inputs <= 16384 else 0
    return 4 if outputs <= 2048 and inputs <= 4096 else 2


def runs(wanted: int, inputs: int) -> int:
    """The runs to cut inputs into, a power of two: at most 8, each of at least 512."""
    return 1 << max(1, min(8, wanted, inputs // 512)).bit_length() - 1


def scaled_recipe(rows: int, outputs: int, inputs: int, gated: bool = False) -> Recipe | None:
    """As `recipe`, for a matrix in eight bits of floating point with a scale a row.

    By multiply-adds 32,768 numbers of it a program, a quarter with a gate. On the matrix units inputs are cut into runs
    until about 16,384 outputs are being made; not those of gated products, whose matrices are large.
    """
    if rows > MOST or inputs % 256:
        return None
    if rows == 1 and inputs <= 8192:
        whole = block(inputs)
        return Recipe(1, min(8, (8192 if gated else 32768) // whole), whole, 4 if whole <= 4096 else 8)
    if rows > 8:
        how = Recipe(16, 32, 256, 1, 3 if gated else 4)
    elif gated:
        how = Recipe(8, 64, 128, 4, 4) if outputs >= 8192 else Recipe(8, 32, 256, 2, 4)
    else:
        how = Recipe(8, 16, 512, 1, 4) if inputs > 8192 else Recipe(8, 32, 256, 2, 4)
    return how if gated else how._replace(splits=runs((12288 if rows <= 8 else 16384) // outputs, inputs))


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: Recipe,
    card: Card,
    gate: Gate = "",
    scale: Tensor | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], or [T, out / 2] gated. scale [out, 1]: what one stored unit of a row of
    a float8 matrix stands for. arrived: [COUNTERS] int32, zeros; without, inputs are not cut into runs."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = x.new_empty(rows, outputs)
    shift = x if bias is None else bias
    same = {"GATE": gate != "", "GELU": gate == "gelu", "BIAS": bias is not None, "BLOCK_N": how.outputs,
            "BLOCK_K": how.inputs, "SCALED": scale is not None, "DEPENDENT": card.dependent, "num_warps": how.warps,
            **card.options}  # fmt: skip
    columns, factor = triton.cdiv(outputs, how.outputs), x if scale is None else scale
    how = how.fitted(card, weight.element_size() * (2 if gate else 1), x.element_size())
    if not how.stages:
        even = inputs == how.inputs and outputs % how.outputs == 0
        vector_kernel[(columns,)](x, weight, factor, shift, out, outputs, inputs, EVEN=even, ROWS=rows, **same)
        return out
    tiles = triton.cdiv(rows, how.rows)
    length, runs, ahead = cut(how, inputs, tiles * columns if arrived is not None else COUNTERS + 1)
    size = runs * tiles * columns * 2 * how.rows * how.outputs
    parts = x.new_empty(size, dtype=torch.float32) if runs > 1 else x
    sums = (parts, x if arrived is None else arrived)
    matrix_kernel[(tiles, columns, runs)](
        *(x, weight, factor, shift, out, *sums, rows, outputs, inputs, length),
        EVEN=inputs % how.inputs == 0, ROWS=how.rows, AHEAD=ahead, STAGES=how.stages, SPLITS=runs,
        SETTLED=scale is not None and settles(how, card), PRECISION=card.precision, **same,
    )  # fmt: skip
    return out


def settles(how: Recipe, card: Card) -> bool:
    """Whether products are made by units that need `settled`: Hopper's, which take 64 outputs by four warps."""
    return card.capability[0] == HOPPER[0] and how.outputs >= 64 and how.warps >= 4


def cut(how: Recipe, inputs: int, tiles: int) -> tuple[int, int, int]:
    """(length, count) of the runs that inputs are cut into, one where there are more tiles than counters, and what each
    of them asks for ahead."""
    blocks = triton.cdiv(inputs, how.inputs)
    each = triton.cdiv(blocks, how.splits if tiles <= COUNTERS else 1)
    length, runs = each * how.inputs, triton.cdiv(blocks, each)
    return length, runs, how.ahead if how.ahead <= inputs - (runs - 1) * length else 0
