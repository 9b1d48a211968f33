"""Products whose rows have the same bits in any batch, in tiles chosen by the batch.

Only the order in which one output's products are added must not depend on the batch, and a tile's size is no part of
it: Hopper's matrix units add up 16 products at a time, whatever the tile's rows and columns are, and the next 16 to
their sum. What depends on the matrix alone is where its inputs are cut into runs; a run's sum begins at 0, and the
runs' sums are added in order, either by one program after the other or by the one that ends last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gemm import TORCH
from quire.ops.operands import Gate, num_parts
from quire.ops.triton.gemv import GemmConfig, added_up, given, handed_in, num_runs, part
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, fetch, kernel, release, wait
from quire.ops.triton.rows import GATES

RUN = 256
"""Inputs of which a run's length is a multiple; a block's inputs divide it."""

BUSY = 128
"""Tiles from which on a program takes all runs of its tile: about one for each multiprocessor of an H100 or H200. With
fewer, runs side by side are faster; with 128 to 256 tiles they take up to twice as long (measured)."""


WHOLE = 4096
"""Outputs from which on a matrix's inputs are one run: tiles of 64 outputs keep enough of an H100 busy when each has
most of a multiprocessor's shared memory to load into. That was faster than runs at any number of rows (measured)."""

NARROW = 8192
"""Outputs up to which tiles of 64 outputs are at most one a multiprocessor."""

AHEAD = 512
"""Inputs that their programs prefetch before the preceding kernel has ended; a matrix is never written."""


FEW = 16
"""Rows up to which each multiprocessor gets as many outputs as the others: a program reads 35 to 53 GB/s at most, so 64
programs leave half of an H200's bandwidth unused (measured)."""


WIDE = 12288
"""Gated outputs above which `gemv`'s tiles of few rows take two turns of a GPU's programs, the second nearly empty."""


def is_faster(rows: int, outputs: int, gated: bool, card: DeviceInfo) -> bool:
    """Whether these tiles are faster than `gemv`'s where any order of sums will do (measured, H200): of more than one
    row and up to FEW."""
    many = outputs > WIDE if gated else outputs >= WHOLE
    return many and 1 < rows <= FEW and card.sms > 0 and card.capability == HOPPER


def even(outputs: int, programs: int) -> int:
    """Outputs of a program where they are dealt out to so many evenly, or to several times as many: 32 to 64, in
    eighths of what the matrix units take."""
    turns = -(-outputs // (64 * programs))
    each = -(-outputs // (turns * programs))
    return max(32, -(-each // 8) * 8)


def tile_of(rows: int, outputs: int, gated: bool) -> GemmConfig:
    """The tile for so many rows; the matrix units take 64 outputs by any number of rows."""
    if rows <= FEW and outputs >= WHOLE and gated:
        return GemmConfig(16, even(outputs, 2 * BUSY), 128, 4, 3)
    if rows <= FEW and WHOLE <= outputs <= NARROW and not gated:
        return GemmConfig(16, even(outputs, BUSY), 128, 4, 8, AHEAD)
    if rows <= FEW and outputs > NARROW:
        return GemmConfig(16, even(outputs, 2 * BUSY), 128, 4, 4)
    if not gated and WHOLE <= outputs <= NARROW and rows <= 256:
        if rows <= 64:
            return GemmConfig(block(rows, 16), 64, 128, 4, 8 if rows <= 32 else 6, AHEAD)
        return GemmConfig(64, 64, 128, 4, 6) if rows <= 128 and outputs <= WHOLE else GemmConfig(128, 64, 64, 8, 8)
    if rows <= 64:
        # Gated, two programs a multiprocessor have room, so that one reads while the other begins or ends.
        return GemmConfig(block(rows, 16), 64, 128, 4, 3 if gated and rows <= 16 else 4)
    if rows <= 256 or outputs < 2048:
        return GemmConfig(128, 64, 64, 4, 4)
    return GemmConfig(128, 64, 64, 8, 4) if gated else GemmConfig(128, 128, 64, 8, 4)


@kernel
def invariant_kernel(
    x, weight, bias, out, parts, arrived, rows, outputs, inputs, length,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    EACH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, RUNS: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (rows, outputs, run): a tile of x [T, in] times weight [out, in]. EVEN: BLOCK_K divides inputs. SPLIT:
    one of RUNS runs of `length` inputs, which the last program adds up; else all of them, one after the other. AHEAD:
    so many inputs of a matrix of one run are prefetched before the wait. EACH: outputs of a tile, of whose BLOCK_N the
    rest is not read."""
    n, k = tl.program_id(1) * EACH + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    mine = tl.arange(0, BLOCK_N) < EACH
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = (r < rows)[:, None]
    last = tl.minimum(tl.program_id(1) * EACH + EACH, outputs) - 1
    line = weight + tl.minimum(n, last)[:, None].to(tl.int64) * inputs
    far = tl.cast(outputs, tl.int64) * inputs
    source = x + r[:, None].to(tl.int64) * inputs
    if AHEAD > 0:
        fetch(line, tl.minimum(tl.arange(0, AHEAD // 64)[None, :] * 64, inputs - 1))
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for turn in range(1 if SPLIT else RUNS):
        begin = (tl.program_id(2) if SPLIT else turn) * length
        end = tl.minimum(begin + length, inputs)
        y = tl.zeros([BLOCK_N, ROWS], tl.float32)
        z = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            at = start + k[None, :]
            value = tl.trans(tl.load(source + at, mask=held if EVEN else held & (at < inputs), other=0.0))
            y = tl.dot(some(line, at, mine, inputs, EVEN, EACH), value, y, input_precision=PRECISION)
            if GATE:
                z = tl.dot(some(line + far, at, mine, inputs, EVEN, EACH), value, z, input_precision=PRECISION)
        total += y
        if GATE:
            total_gate += z
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (r < rows)[None, :] & ((n < outputs) & mine)[:, None]
    if not SPLIT:
        given(total, total_gate, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)
    elif handed_in(total, total_gate, parts, arrived, GATE, RUNS, BLOCK_N, ROWS):
        total, total_gate = added_up(total, total_gate, parts, GATE, RUNS, BLOCK_N, ROWS)
        given(total, total_gate, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)


@triton.jit
def some(line, at, mine, inputs, EVEN: tl.constexpr, EACH: tl.constexpr):
    """As `part`, of those rows of the matrix that are `mine`, which are EACH."""
    if mine.shape[0] == EACH:
        return part(line, at, inputs, EVEN)
    else:
        held = mine[:, None] if EVEN else mine[:, None] & (at < inputs)
        return tl.load(line + at, mask=held, other=0.0, eviction_policy="evict_first")


def runs_of(outputs: int, inputs: int, gated: bool) -> tuple[int, int]:
    """(length, count) of the runs of a matrix: about as many as keep a GPU busy with a few rows."""
    wanted = 1 if gated or outputs >= WHOLE else num_runs(2 * 8192 // outputs, inputs)
    length = triton.cdiv(triton.cdiv(inputs, wanted), RUN) * RUN
    return length, triton.cdiv(inputs, length)


class OneRun:
    """A `gemm.GemmAlgorithm`: `invariant_linear` for matrices whose inputs are one run."""

    name = TORCH

    def __init__(self, card: DeviceInfo, arrived: Tensor) -> None:
        self.card, self.arrived = card, arrived

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See `gemm.GemmAlgorithm`."""
        multiply(x, weight, bias, out, (x.shape[-1], 1), self.card, self.arrived, "")


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, card: DeviceInfo, arrived: Tensor, gate: Gate = ""
) -> Tensor:
    """x [T, in], weight [out, in] of 16 bits -> [T, out], or [T, out / 2] with a gate. arrived: [COUNTERS] int32,
    zeros."""
    outputs = weight.shape[0] // num_parts(gate)
    out = x.new_empty(len(x), outputs)
    runs = runs_of(outputs, x.shape[-1], num_parts(gate) == 2)
    multiply(x, weight, bias, out, runs, card, arrived, gate)
    return out


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cut: tuple[int, int],
    card: DeviceInfo,
    arrived: Tensor,
    gate: Gate,
) -> None:
    """`invariant_linear` into `out`. cut: the length and the number of runs."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs, gated = weight.shape[0] // num_parts(gate), num_parts(gate) == 2
    how = tile_of(rows, outputs, gated)
    wide = block(how.outputs, 64)
    fits = how._replace(outputs=wide).fitted(card, weight.element_size() * num_parts(gate), x.element_size())
    length, runs = cut
    across, columns = triton.cdiv(rows, how.rows), triton.cdiv(outputs, how.outputs)
    split = runs > 1 and across * columns < BUSY
    size = runs * across * columns * 2 * how.rows * wide
    parts = x.new_empty(size, dtype=torch.float32) if split else x
    invariant_kernel[(across, columns, runs if split else 1)](
        *(x, weight, x if bias is None else bias, out, parts, arrived, rows, outputs, inputs, length),
        GATE=gated, ACT=GATES[gate], BIAS=bias is not None, EVEN=inputs % RUN == 0, ROWS=how.rows,
        EACH=how.outputs, BLOCK_N=wide, BLOCK_K=how.inputs, STAGES=fits.stages, RUNS=runs, SPLIT=split,
        AHEAD=how.ahead if card.dependent else 0, PRECISION=card.precision, DEPENDENT=card.dependent,
        num_warps=how.warps, **card.options,
    )  # fmt: skip
