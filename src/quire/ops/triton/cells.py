"""Attention in cells, whose sums have one order however a context is divided among programs.

A cell is a run of blocks of K/V between positions that depend on nothing else: multiples of FINE up to COARSE, and of
COARSE from there on. Softmax begins anew with each, and a query's cells are added up in order, by the program that has
computed them all or by the one that ends last. docs/benchmarks/deterministic-h200-2026-11-27.md has what sizes cost.
"""

from __future__ import annotations

import triton
import triton.language as tl

FINE, COARSE = 256, 1024
"""Positions of a cell, and from COARSE on."""


def num_cells(blocks: int, fine: int, coarse: int) -> int:
    """The cells of so many blocks. fine, coarse: blocks of a cell, and from `coarse` on."""
    return -(-min(blocks, coarse) // fine) + max(0, -(-blocks // coarse) - 1)


@triton.jit
def cell_of(b, FINE: tl.constexpr, COARSE: tl.constexpr):
    """The cell of block b. FINE, COARSE: blocks of a cell."""
    return tl.where(b < COARSE, b // FINE, COARSE // FINE - 1 + b // COARSE)


@triton.jit
def first_block(cell, FINE: tl.constexpr, COARSE: tl.constexpr):
    """The first block of a cell."""
    MANY: tl.constexpr = COARSE // FINE
    return tl.where(cell < MANY, cell * FINE, (cell - MANY + 1) * COARSE)


@triton.jit
def joined(m, z, acc, next_m, next_z, next_acc):
    """Maximum, sum and weighted sum of each row over some cells and the next one."""
    top = tl.maximum(m, next_m)
    fade, weight = tl.exp2(m - top), tl.exp2(next_m - top)
    return top, z * fade + next_z * weight, acc * fade[:, None] + next_acc * weight[:, None]


@triton.jit
def part_of(parts, sums, line, here, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A cell as it was handed in; where it is not `here`, one that adds nothing. Other multiprocessors wrote it: this
    one's L1 cache is bypassed."""
    d = tl.arange(0, BLOCK_D)
    acc = tl.load(
        parts + line[:, None].to(tl.int64) * DIM + d[None, :], mask=here[:, None] & (d < DIM)[None, :], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    m = tl.load(sums + 2 * line, mask=here, other=-1e20, cache_modifier=".cg")
    return m, tl.load(sums + 2 * line + 1, mask=here, other=0.0, cache_modifier=".cg"), acc


@triton.jit
def all_joined(
    m, z, parts, sums, base, splits, group, rows,
    GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, REAL: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The cells base to base + splits of the list, in order, after m and z of each row, whose weighted sum is 0. Some
    are read at once, since latency is the cost."""
    acc = tl.zeros([REAL, BLOCK_D], tl.float32)
    here = tl.arange(0, REAL) < rows
    for begin in range(0, splits, AT_ONCE):
        line = ((base + begin) * GROUPS + group) * REAL + tl.arange(0, REAL)
        held = (part_of(parts, sums, line, here, DIM, BLOCK_D),)
        for i in tl.static_range(1, AT_ONCE):
            own = here & (begin + i < splits)
            held += (part_of(parts, sums, line + i * GROUPS * REAL, own, DIM, BLOCK_D),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            m, z, acc = joined(m, z, acc, held[i][0], held[i][1], held[i][2])
    return m, z, acc
