"""Products with quantized matrices: numbers are dequantized between memory and the multiplier, never in memory.

One byte or half a byte is read per number, so what is bound by reading gains two or four times if the conversion keeps
up: an H200 can spend five instructions per number before that becomes the bottleneck. Activations stay as they are. See
`Ops.quantized_linear`, and `gemv` for how few rows are multiplied. For many rows it is cheaper to dequantize the matrix
first (`dequantize`), or, for e4m3, to round activations, too (`rounded_gemm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Gate, QuantizedMatrix, num_parts
from quire.ops.triton.gemv import COUNTERS, GemmConfig, added_up, given, handed_in, settled, settles, two
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, kernel, release, wait
from quire.ops.triton.rows import GATES


@triton.jit
def restored(
    weight, scale, zero, groups, n, k, outputs, inputs, count, width, offset,
    HALVED: tl.constexpr, SCALES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Numbers [n, k] of the matrix, float32; when SCALES is 0 without their row's scale. k: BLOCK_K in a run.

    SCALES: scales of a row in such a run: 0, one for the whole row; 1; 2, any number. Only where it is 2 are they
    applied here: otherwise sums are multiplied, which are fewer.
    """
    inside = (n < outputs)[:, None]
    row = n[:, None].to(tl.int64)
    if HALVED:
        pair = tl.min(k, 0) // 2 + tl.arange(0, BLOCK_K // 2)
        here = inside & (pair < inputs // 2)[None, :]
        both = tl.load(weight + row * (inputs // 2) + pair[None, :], mask=here, other=0)
        numbers = tl.interleave((both & 15).to(tl.float32), (both >> 4).to(tl.float32))
        group = tl.load(groups + k, mask=k < inputs, other=0)[None, :]
    else:
        held = inside & (k < inputs)[None, :]
        numbers = tl.load(weight + row * inputs + k[None, :], mask=held, other=0.0).to(tl.float32)
        group = ((k + offset) // width)[None, :]
    if SCALES == 2:
        held = inside & (k < inputs)[None, :]
        place = row * count + group
        if HALVED:
            numbers -= tl.load(zero + place, mask=held, other=0.0).to(tl.float32)
        numbers *= tl.load(scale + place, mask=held, other=0.0)
    return numbers


@kernel
def few_kernel(
    x, weight, scale, zero, groups, bias, out, outputs, inputs, count, width, offset,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, HALVED: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of each row by multiply-adds; the matrix is requested before the wait."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    whole = outputs * 2 if GATE else outputs
    tile = restored(
        weight, scale, zero, groups, n, k, whole, inputs, count, width, offset, HALVED, SCALES, BLOCK_K)  # fmt: skip
    gated = tile
    if GATE:
        gated = restored(
            weight, scale, zero, groups, n + outputs, k, whole, inputs, count, width, offset, HALVED, SCALES,
            BLOCK_K)  # fmt: skip
    wait(DEPENDENT)
    release(DEPENDENT)
    for r in tl.static_range(ROWS):
        value = tl.load(x + r * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(tile * value, 1)
        z = y
        if GATE:
            z = tl.sum(gated * value, 1)
        if SCALES == 0:
            y *= tl.load(scale + n, mask=n < outputs, other=0.0)
            if GATE:
                z *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)
        given(y, z, bias, out, r * outputs + n, n, outputs, n < outputs, GATE, ACT, BIAS)


FOUR_AT_ONCE = tl.constexpr("""{
.reg .b32 a, b, c, d, m;
mov.b32 m, 0x7b807b80;
prmt.b32 a, 0, $2, 0x5040;
prmt.b32 b, 0, $2, 0x7060;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 c, a, 0x80008000, c, 0xea;
lop3.b32 d, b, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, c, m;
mul.rn.bf16x2 $1, d, m;
}""")
"""Four e4m3 numbers to bfloat16: exponent and fraction fit into its bits as they are, but for a factor of 2**120."""


@triton.jit
def tile_of(
    weight, scale, zero, groups, n, k, outputs, inputs, count, width, offset,
    HALVED: tl.constexpr, SCALES: tl.constexpr, BLOCK_K: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """As `restored`, in DTYPE. FAST: bytes of e4m3, to bfloat16; only for a card. EVEN: BLOCK_K divides the inputs."""
    if FAST:
        line = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs + k[None, :]
        if EVEN:
            raw = tl.load(line)
        else:
            raw = tl.load(line, mask=(k < inputs)[None, :], other=0)
        return tl.inline_asm_elementwise(FOUR_AT_ONCE, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return restored(
            weight, scale, zero, groups, n, k, outputs, inputs, count, width, offset, HALVED, SCALES, BLOCK_K
        ).to(DTYPE)


@kernel
def many_kernel(
    x, weight, scale, zero, groups, bias, out, parts, arrived, rows, outputs, inputs, count, width, offset, length,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, HALVED: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    FAST: tl.constexpr, EVEN: tl.constexpr, SETTLED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of ROWS rows on the matrix units, in the dtype of x. Programs of the same outputs are neighbours,
    so that the matrix is read from memory once. SPLITS: the inputs are split into so many runs of `length`, so that
    there are programs enough; the last one adds them up, always in the same order."""
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    whole = outputs * 2 if GATE else outputs
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin = tl.program_id(2) * length
    wait(DEPENDENT)
    release(DEPENDENT)
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + length, inputs), BLOCK_K, num_stages=STAGES):
        at, one = start + k, (start + offset) // width
        held = (r < rows)[:, None]
        if not EVEN:
            held = held & (at < inputs)[None, :]
        value = tl.trans(tl.load(x + r[:, None].to(tl.int64) * inputs + at[None, :], mask=held, other=0.0))
        tile = tile_of(
            weight, scale, zero, groups, n, at, whole, inputs, count, width, offset, HALVED, SCALES, BLOCK_K, FAST,
            EVEN, DTYPE)  # fmt: skip
        if SCALES == 1:
            factor = tl.load(scale + n * count + one, mask=n < outputs, other=0.0)[:, None]
            y += factor * tl.dot(tile, value, input_precision=PRECISION)
        else:
            y = settled(tl.dot(tile, value, y, input_precision=PRECISION), SETTLED)
        if GATE:
            gated = tile_of(
                weight, scale, zero, groups, n + outputs, at, whole, inputs, count, width, offset, HALVED, SCALES,
                BLOCK_K, FAST, EVEN, DTYPE)  # fmt: skip
            if SCALES == 1:
                factor = tl.load(scale + (n + outputs) * count + one, mask=n < outputs, other=0.0)[:, None]
                z += factor * tl.dot(gated, value, input_precision=PRECISION)
            else:
                z = settled(tl.dot(gated, value, z, input_precision=PRECISION), SETTLED)
    if SCALES == 0:
        y *= tl.load(scale + n, mask=n < outputs, other=0.0)[:, None]
        if GATE:
            z *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)[:, None]
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (r < rows)[None, :] & (n < outputs)[:, None]
    if SPLITS == 1:
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)
    elif handed_in(y, z, parts, arrived, GATE, SPLITS, BLOCK_N, ROWS):
        y, z = added_up(y, z, parts, GATE, SPLITS, BLOCK_N, ROWS)
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)


MAX_FUSED_ROWS = 256
"""Rows up to which the matrix is dequantized on the way. Above, `dequantize` once for all of them is cheaper."""


def zero_and_groups(matrix: QuantizedMatrix) -> tuple[Tensor, Tensor]:
    """Zero points and groups, or any tensor for a kernel that reads neither."""
    return (
        matrix.scale if matrix.zero is None else matrix.zero,
        matrix.scale if matrix.groups is None else matrix.groups,
    )


RUN = 128
"""Inputs that are multiplied at a time where four numbers are restored at once."""


def uses_fast_conversion(x: Tensor, matrix: QuantizedMatrix, card: DeviceInfo) -> bool:
    """Whether four numbers are converted at once: at few rows, for wider tiles read the matrix in another layout."""
    one = x.dtype is torch.bfloat16 and matrix.weight.dtype is torch.float8_e4m3fn and card.capability >= HOPPER
    return one and len(x) <= 16 and scales(matrix, RUN) < 2


def quantized_gemm_config(
    rows: int, outputs: int, inputs: int, *, fast: bool = False, halved: bool = False
) -> GemmConfig | None:
    """The fastest of many, measured on an H200 (docs/benchmarks); None where the matrix is dequantized first. outputs:
    of the matrix.

    fast: see `uses_fast_conversion`.
    """
    if rows > MAX_FUSED_ROWS:
        return None
    if fast:
        return GemmConfig(16, 32, RUN, 2, 5)
    if rows <= 2 and inputs <= 16384:
        whole = block(inputs)
        return GemmConfig(rows, max(1, min(8, 16384 // whole)), whole, 8)
    if halved or rows <= 16:
        small = outputs <= 2048
        return GemmConfig(block(min(rows, 64), 16), 16 if small else 32 if halved else 64, 256 if small else 128, 4, 4)
    return GemmConfig(block(rows, 32), 128, RUN, 8, 4) if rows <= 64 else GemmConfig(128, 64, RUN, 4, 3)


def gated_config(how: GemmConfig) -> GemmConfig:
    """The config for two matrices at once, which share the registers."""
    return how if how.rows <= 16 else GemmConfig(min(how.rows, 64), 64, 64, 4, 3)


def num_splits(how: GemmConfig, programs: int, inputs: int, card: DeviceInfo) -> int:
    """Runs that the inputs are split into: as many as give each multiprocessor 12 warps, each with work to do."""
    wanted = max(1, 12 * card.sms // (how.warps * programs))
    return two(min(8, wanted, inputs // (4 * how.inputs)))


def scales(matrix: QuantizedMatrix, run: int) -> int:
    """What `restored` calls SCALES, for runs of so many columns."""
    if not matrix.is_int4 and matrix.scale.shape[1] == 1:
        return 0
    return 1 if not matrix.is_int4 and matrix.width % run == 0 and matrix.offset % run == 0 else 2


def quantized_linear(
    x: Tensor,
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    how: GemmConfig,
    card: DeviceInfo,
    arrived: Tensor,
    gate: Gate = "",
) -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate. arrived: [COUNTERS] int32,
    zeros."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = len(matrix.weight) // num_parts(gate)
    out = x.new_empty(rows, outputs)
    weight, scale = matrix.weight, matrix.scale
    halved, (zero, groups) = matrix.is_int4, zero_and_groups(matrix)
    fast, kind = uses_fast_conversion(x, matrix, card) and how.inputs == RUN, scales(matrix, how.inputs)
    # What waits in shared memory for a number of the matrix, its scale and zero point included, and for one of x.
    how = how.fitted(card, num_parts(gate) * (1 + 4 * (kind == 2) + 8 * halved), x.element_size())
    same = {"GATE": num_parts(gate) == 2, "ACT": GATES[gate], "BIAS": bias is not None, "HALVED": halved,
            "SCALES": kind, "ROWS": how.rows, "BLOCK_N": how.outputs, "BLOCK_K": how.inputs,
            "DEPENDENT": card.dependent, "num_warps": how.warps, **card.options}  # fmt: skip
    sizes = (outputs, inputs, scale.shape[1], matrix.width, matrix.offset)
    columns = triton.cdiv(outputs, how.outputs)
    given = (zero, groups, x if bias is None else bias, out)
    if not how.stages:
        few_kernel[(columns,)](x, weight, scale, *given, *sizes, **same)
        return out
    tiles = triton.cdiv(rows, how.rows)
    runs = (
        num_splits(how, tiles * columns * num_parts(gate), inputs, card)
        if tiles * columns <= COUNTERS and not halved
        else 1
    )
    parts = x.new_empty(runs * tiles * columns * 2 * how.rows * how.outputs if runs > 1 else 1, dtype=torch.float32)
    length = triton.cdiv(triton.cdiv(inputs, how.inputs), runs) * how.inputs
    many_kernel[(tiles, columns, runs)](
        *(x, weight.view(torch.uint8) if fast else weight, scale, *given, parts, arrived, rows, *sizes, length),
        SPLITS=runs, FAST=fast, EVEN=inputs % how.inputs == 0, SETTLED=settles(how, card),
        STAGES=how.stages, PRECISION=card.precision, **same,
    )  # fmt: skip
    return out


@kernel
def dequantize_kernel(
    weight, scale, zero, groups, out, outputs, inputs, count, width, offset,
    HALVED: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_K] of out [outputs, inputs]."""
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = restored(
        weight, scale, zero, groups, n, k, outputs, inputs, count, width, offset, HALVED, SCALES, BLOCK_K)  # fmt: skip
    if SCALES == 0:
        tile *= tl.load(scale + n, mask=n < outputs, other=0.0)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    inside = (n < outputs)[:, None] & (k < inputs)[None, :]
    tl.store(out + n[:, None].to(tl.int64) * inputs + k[None, :], tile.to(out.dtype.element_ty), mask=inside)


def dequantize(matrix: QuantizedMatrix, inputs: int, dtype: torch.dtype, card: DeviceInfo) -> Tensor:
    """The matrix [out, in] in dtype."""
    outputs = len(matrix.weight)
    out = matrix.scale.new_empty(outputs, inputs, dtype=dtype)
    zero, groups = zero_and_groups(matrix)
    grid = (triton.cdiv(inputs, 512), triton.cdiv(outputs, 8))
    dequantize_kernel[grid](
        *(matrix.weight, matrix.scale, zero, groups, out, outputs, inputs),
        *(matrix.scale.shape[1], matrix.width, matrix.offset), HALVED=matrix.is_int4,
        SCALES=2 * (scales(matrix, 1) > 0), BLOCK_N=8, BLOCK_K=512, DEPENDENT=card.dependent, num_warps=4,
        **card.options,
    )  # fmt: skip
    return out
