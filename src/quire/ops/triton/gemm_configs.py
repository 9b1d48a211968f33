"""How products of a few rows are cut: what was fastest of many, by rows and by the matrix's shape (docs/benchmarks)."""

from __future__ import annotations

from typing import NamedTuple

from quire.ops.triton.launch import DeviceInfo, block


class GemmConfig(NamedTuple):
    """How a product is cut. rows: the most at once, a power of two. stages 0: by multiply-adds, all inputs by the same
    program, `inputs` at a time. splits: the runs that the inputs are cut into, see `split`."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 0
    ahead: int = 0
    splits: int = 1

    def fitted(self, card: DeviceInfo, matrix: int, row: int) -> GemmConfig:
        """With as many stages as the card's shared memory has room for. matrix, row: bytes a number of them takes."""
        stage = (self.outputs * matrix + self.rows * row) * self.inputs
        return self._replace(stages=min(self.stages, max(2, card.shared // stage))) if self.stages else self


MOST, GATED_MOST = 16, 64
"""Rows above which a library's kernels are as good; with a gate behind the product."""


def gemm_config(rows: int, outputs: int, inputs: int, gated: bool = False) -> GemmConfig | None:
    """What was fastest of many, H200 (docs/benchmarks); None where a library's kernels were. outputs: of the result.

    One row, or few of a small matrix: by multiply-adds. More: on the matrix units; long rows of the matrix are cut into
    few outputs, small matrices' inputs into runs, so that there are programs enough.
    """
    if rows > (GATED_MOST if gated and outputs >= 8192 else MOST):
        return None
    if rows <= vectors(outputs * (2 if gated else 1), inputs):
        return padded_rows(rows, inputs)
    some, small = block(rows, 8), min(outputs, inputs) <= 1024
    if rows > MOST:
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
    return GemmConfig(some, 64, 128, 4, 4 if outputs > 8192 else 6, splits=runs(4096 // outputs, inputs))


def padded_rows(rows: int, inputs: int) -> GemmConfig:
    """By multiply-adds. Inputs that are a power of two, or nearly and many, are taken whole, about 8,192 numbers of the
    matrix a program; others in blocks that none is left over of, of 512 numbers, which eight warps read best, and four
    that have several rows to sum up."""
    whole, run = block(inputs), min(inputs & -inputs, 256 if inputs <= 4096 and rows == 1 else 512)
    near = inputs > 8192 and whole <= min(16384, 6 * inputs // 5)
    if inputs == whole or near or inputs > 64 * run:
        return GemmConfig(rows, max(1, min(8, 8192 // whole)), whole, 4 if whole <= 2048 else 8)
    return GemmConfig(rows, two(min(512 // run, 24576 // (inputs * rows))), run, 8 if rows == 1 else 4)


def two(number: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << max(1, number).bit_length() - 1


def vectors(outputs: int, inputs: int) -> int:
    """Rows up to which multiply-adds win. outputs: of the matrix, those that gate included."""
    if inputs > 8192 or outputs * inputs >= 1 << 24:
        return 1 if inputs <= 32768 else 0
    return 4 if outputs <= 2048 and inputs <= 4096 else 2


def runs(wanted: int, inputs: int) -> int:
    """The runs to cut inputs into, a power of two: at most 8, each of at least 512."""
    return two(min(8, wanted, inputs // 512))


def scaled_gemm_config(rows: int, outputs: int, inputs: int, gated: bool = False) -> GemmConfig | None:
    """As `recipe`, for a matrix in eight bits of floating point with a scale a row.

    On the matrix units inputs are cut into runs until about 16,384 outputs are being made; not those of gated products,
    whose matrices are large.
    """
    if rows > MOST or inputs % 256:
        return None
    if rows == 1 and inputs <= 32768:
        return scaled_padded_rows(inputs, gated)
    if rows > 8:
        how = GemmConfig(16, 32, 256, 1, 3 if gated else 4)
    elif gated:
        how = GemmConfig(8, 64, 128, 4, 4) if outputs >= 8192 else GemmConfig(8, 32, 256, 2, 4)
    else:
        how = GemmConfig(8, 16, 512, 1, 4) if inputs > 8192 else GemmConfig(8, 32, 256, 2, 4)
    return how if gated else how._replace(splits=runs((12288 if rows <= 8 else 16384) // outputs, inputs))


def scaled_padded_rows(inputs: int, gated: bool) -> GemmConfig:
    """As `multiplied`, one row: whole, 32,768 numbers a program, a quarter with a gate; or in blocks."""
    whole = block(inputs)
    if inputs == whole:
        return GemmConfig(1, max(1, min(8, (8192 if gated else 32768) // whole)), whole, 4 if whole <= 4096 else 8)
    if inputs <= 8192:
        return GemmConfig(1, 4 if gated else 2, 256, 4)
    run = inputs & -inputs
    return GemmConfig(1, 1, min(run, 4096), 4) if whole <= 16384 else GemmConfig(1, 2, min(run, 512), 4)
