"""Long sums cut into runs, one program each, where there would be too few programs to keep a card busy.

Each run leaves its sums in memory and counts itself in. Whichever is last adds all of them up, always in the same
order, so that who ends when changes nothing. Counters are 0 between kernels; under dependent launch, too, since a
kernel touches them behind its `wait` only, when the kernel ahead has ended. See `launch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

COUNTERS = 1 << 14
"""Tiles that can be cut into runs, one counter each, all 0 between kernels."""


@triton.jit
def place_of(parts, split, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Where the sums of one run of this program's tile are left; those of the gate behind them."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    at = split * tl.num_programs(0) * tl.num_programs(1) + tile
    number = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    return parts + at.to(tl.int64) * (2 * BLOCK_N * ROWS) + number


@triton.jit
def handed_in(
    y, z, parts, arrived, GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Leave a run's sums where the others' are. Whether this was the last one of its tile."""
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
    """All runs' sums, always in the same order. Other multiprocessors wrote them: this one's cache is passed by."""
    y, z = tl.zeros_like(y), tl.zeros_like(z)
    for split in tl.static_range(SPLITS):
        theirs = place_of(parts, split + tl.program_id(2) * 0, BLOCK_N, ROWS)
        y += tl.load(theirs, cache_modifier=".cg")
        if GATE:
            z += tl.load(theirs + BLOCK_N * ROWS, cache_modifier=".cg")
    return y, z
