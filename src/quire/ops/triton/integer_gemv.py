"""Products of up to four rows with 4- and 8-bit integers: each thread loads what the matrix units take from it.

`integer_gemm` brings tiles through shared memory, which costs few rows more time than their bytes. Here a program
requests its numbers before the wait, into the registers in which it multiplies them: thread (g, t) of a warp, g of 8
and t of 4, loads 8 bytes of rows g and g + 8, and of x what these are multiplied with. So there is no pipeline, no
barrier but that of the last sum, and about 1.8 instructions for a number of 4 bits.

The matrix units multiply 16 outputs with 8 columns. Where x has fewer rows, the columns take several units of a row, 64
inputs each: column c has row c % ROWS of unit c // ROWS. A product is then right in the columns of its own unit, which
are kept; x, its sums and the scales are loaded once for 8 / ROWS units. (mma.m16n8k16: PTX ISA, "Matrix fragments".)

A number of 4 bits stays 128 + q, or 1024 + q in float16, and what is too much is subtracted as a multiple of the sums
of x, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Gate, IntegerMatrix, Routing, num_parts
from quire.ops.triton.gemv import given, highest_expert, two
from quire.ops.triton.integer_gemm import (
    FLOATS,
    PAIRS,
    ROW,
    SUPERBLOCKS,
    ZEROS,
    byte_of,
    float_of,
    in_float16,
    lower,
    ordered_slots,
    power_of,
    signed_byte_of,
    supers_of,
    upper,
)
from quire.ops.triton.launch import DeviceInfo, block, kernel, release, wait, wait_and_release
from quire.ops.triton.rows import GATES

UNIT = tl.constexpr(64)
"""Inputs that a warp multiplies with at once."""

DENSE, SLOT, TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a program multiplies: rows of x with a matrix, a slot with its expert's, or a token's slots with theirs, which
it adds up."""

NIBBLES = """{
.reg .b32 a, b, s;
mov.b64 {a, b}, $8;
lop3.b32 $0, a, 0x000f000f, 0x43004300, 0xea;
shr.u32 s, a, 8;
lop3.b32 $1, s, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
shr.u32 s, b, 8;
lop3.b32 $3, s, 0x000f000f, 0x43004300, 0xea;
shr.u32 s, a, 4;
lop3.b32 $4, s, 0x000f000f, 0x43004300, 0xea;
shr.u32 s, a, 12;
lop3.b32 $5, s, 0x000f000f, 0x43004300, 0xea;
shr.u32 s, b, 4;
lop3.b32 $6, s, 0x000f000f, 0x43004300, 0xea;
shr.u32 s, b, 12;
lop3.b32 $7, s, 0x000f000f, 0x43004300, 0xea;
}"""
"""Eight bytes -> pairs of 128 + q: columns 0 and 2, 1 and 3, 4 and 6, 5 and 7 of their low halves, then of their high
ones."""

FOUR_BYTES = """
prmt.b32 c, {word}, {word}, 0x1100;
prmt.b32 d, {word}, {word}, 0x3322;
lop3.b32 ${low}, c, 0x00800080, 0x43004300, 0xea;
lop3.b32 ${high}, d, 0x00800080, 0x43004300, 0xea;
lop3.b32 c, c, 0x007f007f, 0x43004300, 0xea;
lop3.b32 d, d, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 ${low}, ${low}, m, c;
fma.rn.bf16x2 ${high}, ${high}, m, d;"""

BYTES = (
    "{ .reg .b32 a, b, c, d, m; mov.b32 m, 0xbf80bf80; mov.b64 {a, b}, $4;"
    + FOUR_BYTES.format(word="a", low=0, high=1)
    + FOUR_BYTES.format(word="b", low=2, high=3)
    + "}"
)
"""Eight signed bytes -> pairs of neighbours: see `integer_gemm.BYTES`."""


def floats(half: bool) -> str:
    """Instructions for eight bytes of e2m1 numbers -> pairs of them in the order of `NIBBLES`. half: in float16. Sign
    and magnitude are brought to their places, which makes numbers too small, exactly: see `integer_gemm.E2M1`."""
    magnitude, target = ("0x0e000e00", 11) if half else ("0x01c001c0", 8)
    lines = ["mov.b64 {a, b}, $8", f"mov.b32 f, {'0x74007400' if half else '0x7e807e80'}", "mov.b32 n, 0x80008000"]
    for i, (word, last) in enumerate((word, last) for last in (3, 7) for word in ("a", "b")):
        for number, sign in ((2 * i, last), (2 * i + 1, last + 8)):
            moved = target - sign + 1
            lines += [
                f"sh{'l' if moved > 0 else 'r'}.b32 m, {word}, {abs(moved)}".replace("shr.b32", "shr.u32"),
                f"lop3.b32 m, m, {magnitude}, 0, 0xea",
                f"shl.b32 s, {word}, {15 - sign}",
                "lop3.b32 m, s, 0x80008000, m, 0xea",
                f"fma.rn.{'f' if half else 'bf'}16x2 ${number}, m, f, n",
            ]
    return "{\n.reg .b32 a, b, f, n, m, s;\n" + ";\n".join(lines) + ";\n}"


ORDERED = "{ .reg .b32 a, b; mov.b64 {a, b}, $2; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; }"
"""Four numbers of x as pairs 0 and 2, 1 and 3."""

PLAIN = "mov.b64 {$0, $1}, $2;"
"""As pairs of neighbours."""

PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


NIBBLES_ASM, NIBBLES_16 = tl.constexpr(NIBBLES), tl.constexpr(in_float16(NIBBLES))
FLOATS_ASM, FLOATS_16 = tl.constexpr(floats(False)), tl.constexpr(floats(True))
BYTES_ASM, BYTES_16 = tl.constexpr(BYTES), tl.constexpr(in_float16(BYTES))
PRODUCT_ASM, PRODUCT_16 = tl.constexpr(PRODUCT), tl.constexpr(in_float16(PRODUCT))
ORDERED_ASM, PLAIN_ASM = tl.constexpr(ORDERED), tl.constexpr(PLAIN)


@triton.jit
def nibbles_at(word, place: tl.constexpr, FLOAT16: tl.constexpr):
    """What `NIBBLES` makes of the bits from `place` on of each half of a word."""
    return ((word >> place) & 0x000F000F) | (0x64006400 if FLOAT16 else 0x43004300)


@triton.jit
def pair_of(first, second, FLOAT16: tl.constexpr):
    """Two numbers as a pair."""
    kind: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    low = first.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (second.to(kind).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def floats_at(word, place: tl.constexpr, FLOAT16: tl.constexpr):
    """What `floats` makes of the bits from `place` on of each half of a word."""
    return pair_of(float_of((word >> place) & 15), float_of((word >> (place + 16)) & 15), FLOAT16)


@triton.jit
def bytes_at(word, place: tl.constexpr, FLOAT16: tl.constexpr):
    """Two signed bytes of a word from bit `place` on, as a pair."""
    first = (((word >> place) << 24) >> 24).to(tl.float32)
    second = (((word >> (place + 8)) << 24) >> 24).to(tl.float32)
    return pair_of(first, second, FLOAT16)


@triton.jit
def operands(first, second, BITS: tl.constexpr, KIND: tl.constexpr, FLOAT16: tl.constexpr, FAST: tl.constexpr):
    """What the matrix units take of a row's 64 numbers: eight pairs, two for each of four products. first: eight bytes,
    second: with 8 bits those of the last 32 columns."""
    if FAST:
        if BITS == 4:
            code: tl.constexpr = (
                (FLOATS_16 if FLOAT16 else FLOATS_ASM) if KIND == FLOATS else (NIBBLES_16 if FLOAT16 else NIBBLES_ASM)
            )
            return tl.inline_asm_elementwise(
                code, "=r,=r,=r,=r,=r,=r,=r,=r,l", [first],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True, pack=1)  # fmt: skip
        else:
            low = tl.inline_asm_elementwise(
                BYTES_16 if FLOAT16 else BYTES_ASM, "=&r,=&r,=&r,=&r,l", [first],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)  # fmt: skip
            high = tl.inline_asm_elementwise(
                BYTES_16 if FLOAT16 else BYTES_ASM, "=&r,=&r,=&r,=&r,l", [second],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)  # fmt: skip
            return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]
    else:
        a, b = first.to(tl.int32), (first >> 32).to(tl.int32)
        c, d = second.to(tl.int32), (second >> 32).to(tl.int32)
        if KIND == FLOATS:
            return (
                floats_at(a, 0, FLOAT16), floats_at(a, 8, FLOAT16), floats_at(b, 0, FLOAT16),
                floats_at(b, 8, FLOAT16), floats_at(a, 4, FLOAT16), floats_at(a, 12, FLOAT16),
                floats_at(b, 4, FLOAT16), floats_at(b, 12, FLOAT16),
            )  # fmt: skip
        elif BITS == 4:
            return (
                nibbles_at(a, 0, FLOAT16), nibbles_at(a, 8, FLOAT16), nibbles_at(b, 0, FLOAT16),
                nibbles_at(b, 8, FLOAT16), nibbles_at(a, 4, FLOAT16), nibbles_at(a, 12, FLOAT16),
                nibbles_at(b, 4, FLOAT16), nibbles_at(b, 12, FLOAT16),
            )  # fmt: skip
        else:
            return (
                bytes_at(a, 0, FLOAT16), bytes_at(a, 16, FLOAT16), bytes_at(b, 0, FLOAT16), bytes_at(b, 16, FLOAT16),
                bytes_at(c, 0, FLOAT16), bytes_at(c, 16, FLOAT16), bytes_at(d, 0, FLOAT16), bytes_at(d, 16, FLOAT16),
            )  # fmt: skip


@triton.jit
def pairs_of(four, BITS: tl.constexpr, FAST: tl.constexpr):
    """Four numbers of x, in the order in which `operands` has their columns."""
    if FAST:
        return tl.inline_asm_elementwise(
            ORDERED_ASM if BITS == 4 else PLAIN_ASM, "=r,=r,l", [four], dtype=(tl.int32, tl.int32), is_pure=True,
            pack=1)  # fmt: skip
    else:
        a, b = four.to(tl.int32), (four >> 32).to(tl.int32)
        if BITS == 4:
            return (a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536)
        else:
            return a, b


@triton.jit
def product(a0, a1, a2, a3, b, c, FLOAT16: tl.constexpr):
    """c plus a product of 16 outputs, 16 inputs and 8 columns, of which thread (g, t) has, as pairs: a0, a2: of row g
    inputs 2t and 2t + 8; a1, a3: of row g + 8; b: of column g. c: outputs g, g, g + 8, g + 8 of columns 2t, 2t + 1."""
    return tl.inline_asm_elementwise(
        PRODUCT_16 if FLOAT16 else PRODUCT_ASM, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1)  # fmt: skip


@triton.jit
def collected_pairs(a, b, c, d, e, f, g, h, FLOAT16: tl.constexpr):
    """The numbers of a thread's eight pairs, [threads, 4, 2, 2]: of the first and the last four."""
    first, last = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    pairs = tl.reshape(tl.join(first, last), [a.shape[0], 4, 2])
    if FLOAT16:
        both = tl.join(pairs & 0xFFFF, pairs >> 16)
        return both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.join(pairs << 16, pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def plain_product(v, x, FLOAT16: tl.constexpr):
    """Products of 8 outputs and 8 columns as `product` has them, of the first and of the last 32 inputs, where there
    are no matrix units: columns 2t and 2t + 1 of one, then of the other."""
    WARPS: tl.constexpr = v[0].shape[0] // 32
    a = collected_pairs(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], FLOAT16)
    b = collected_pairs(x[0][0], x[0][1], x[1][0], x[1][1], x[2][0], x[2][1], x[3][0], x[3][1], FLOAT16)
    y = tl.reshape(a, [WARPS, 8, 1, 16, 2, 2]) * tl.reshape(b, [WARPS, 1, 8, 16, 2, 2])
    y = tl.reshape(tl.sum(tl.sum(y, 5), 3), [WARPS * 32, 2, 2])
    first, last = tl.split(y)
    return tl.split(first) + tl.split(last)


@triton.jit
def read(start, at, inside, EVEN: tl.constexpr):
    """Numbers of the matrix, which are read once; zeros where not inside, unless EVEN says that there is none."""
    if EVEN:
        return tl.load(start + at, eviction_policy="evict_first")
    else:
        return tl.load(start + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def marked(words, supers, unit, n, whole, inside, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr):
    """The two words that `scaled` takes the scales of a unit and a row from."""
    if KIND == ROW:
        word = read(words, n, inside, EVEN)
        return word, word
    elif KIND == ZEROS:
        word = read(words, (unit * 64 // GROUP) * whole + n, inside, EVEN)
        if GROUP == 32:
            return word, read(words, (unit * 2 + 1) * whole + n, inside, EVEN)
        else:
            return word, word
    elif KIND == FLOATS:
        word = read(words, (unit // 2) * whole + n, inside, EVEN) >> (unit % 2 * 16)
        return word, word
    else:
        word = read(words, unit * whole + n, inside, EVEN)
        if KIND == SUPERBLOCKS:
            return word, read(supers, (unit // 4) * whole + n, inside, EVEN)
        else:
            return word, word


@triton.jit
def scaled(
    a, sums, k, word, other,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """Products of a unit and a row, times their scales. a, sums: of each run of columns with one scale four numbers, as
    of `product`, the k-th of which are meant. sums: of x."""
    MORE: tl.constexpr = (1024.0 if FLOAT16 else 128.0) if BITS == 4 else 0.0
    if KIND == ROW:
        return word.to(tl.float32, bitcast=True) * a[k]
    elif KIND == ZEROS:
        FIX: tl.constexpr = 128.0 - MORE if BITS == 4 else 0.0
        SIGN: tl.constexpr = 1.0 if BITS == 4 else -1.0
        y = upper(word, HALF) * (a[k] + (SIGN * lower(word, False) + FIX) * sums[k])
        if GROUP == 32:
            y += upper(other, HALF) * (a[4 + k] + (SIGN * lower(other, False) + FIX) * sums[4 + k])
        return y
    elif KIND == PAIRS:
        LESS: tl.constexpr = MORE + 8.0 if BITS == 4 else 0.0
        return lower(word, HALF) * (a[k] - LESS * sums[k]) + upper(word, HALF) * (a[4 + k] - LESS * sums[4 + k])
    elif KIND == FLOATS:
        return power_of(word, 0) * a[k] + power_of(word, 8) * a[4 + k]
    elif GROUP == 32:
        y = byte_of(word, 0) * (a[k] - MORE * sums[k]) + byte_of(word, 2) * (a[4 + k] - MORE * sums[4 + k])
        least = byte_of(word, 1) * sums[k] + byte_of(word, 3) * sums[4 + k]
        return upper(other, True) * y - lower(other, True) * least
    else:
        y = signed_byte_of(word, 0) * (a[k] - MORE * sums[k])
        y += signed_byte_of(word, 1) * (a[4 + k] - MORE * sums[4 + k])
        y += signed_byte_of(word, 2) * (a[8 + k] - MORE * sums[8 + k])
        y += signed_byte_of(word, 3) * (a[12 + k] - MORE * sums[12 + k])
        return upper(other, True) * y


@triton.jit
def unit_product(v, w, x, t, nil, RUNS: tl.constexpr, FLOAT16: tl.constexpr, FAST: tl.constexpr):
    """Of operands v and w, of rows g and g + 8: for each of RUNS runs of columns with one scale what `product` says. x:
    pairs for four products."""
    none = (nil, nil, nil, nil)
    if RUNS == 4:
        early, late = (), ()
        for i in tl.static_range(4):
            early += ((tl.where(t < 2, x[i][0], 0), tl.where(t < 2, x[i][1], 0)),)  # type: ignore[assignment]
            late += ((tl.where(t < 2, 0, x[i][0]), tl.where(t < 2, 0, x[i][1])),)  # type: ignore[assignment]
        a = unit_product(v, w, early, t, nil, 2, FLOAT16, FAST)
        b = unit_product(v, w, late, t, nil, 2, FLOAT16, FAST)
        return (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], a[4], a[5], a[6], a[7], b[4], b[5], b[6], b[7])
    elif not FAST:
        c, d = plain_product(v, x, FLOAT16), plain_product(w, x, FLOAT16)
        if RUNS == 1:
            return c[0] + c[2], c[1] + c[3], d[0] + d[2], d[1] + d[3]
        else:
            return c[0], c[1], d[0], d[1], c[2], c[3], d[2], d[3]
    else:
        a = product(v[0], w[0], v[1], w[1], x[0], none, FLOAT16)
        a = product(v[2], w[2], v[3], w[3], x[1], a, FLOAT16)
        b = product(v[4], w[4], v[5], w[5], x[2], a if RUNS == 1 else none, FLOAT16)
        b = product(v[6], w[6], v[7], w[7], x[3], b, FLOAT16)
        if RUNS == 1:
            return b
        else:
            return a + b


@triton.jit
def kept(a, c, u: tl.constexpr, t, ROWS: tl.constexpr):
    """a with c's numbers in the columns of unit u."""
    new = ()
    for k in tl.static_range(len(a)):
        if ROWS == 1:
            if k % 2 == u % 2:
                new += (tl.where(t == u // 2, c[k], a[k]),)  # type: ignore[assignment]
            else:
                new += (a[k],)  # type: ignore[assignment]
        else:
            new += (tl.where(2 * t // ROWS == u, c[k], a[k]),)  # type: ignore[assignment]
    return new


@triton.jit
def row_of(g, p: tl.constexpr, h: tl.constexpr, outputs, EVEN_N: tl.constexpr):
    """The matrix's row that is number g of part p (0, or 1: what is gated) and half h of this program's 16."""
    row = tl.program_id(0) * 16 + 8 * h + g
    if not EVEN_N:
        row = tl.minimum(row, outputs - 1)
    return row + p * outputs


@triton.jit
def expert_of(experts, unit, UNITS: tl.constexpr, ALL: tl.constexpr):
    """The expert of the slot that a unit is of; any of a slot without one, whose x and weight are 0."""
    return tl.maximum(tl.load(experts + unit // UNITS, mask=unit < ALL, other=0), 0).to(tl.int64)


@triton.jit
def requested(
    matrix, experts, batch: tl.constexpr, outputs, thread,
    MODE: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Numbers of a batch of units, without those that no warp has: for each unit and part what `operands` takes of row
    g, then of row g + 8."""
    weight, size = matrix[0], matrix[3]
    warp, g, t = thread
    whole = outputs * PARTS
    held = ()
    for u in tl.static_range(8 // ROWS):
        if (batch * (8 // ROWS) + u) * WARPS < ALL:
            unit = (batch * (8 // ROWS) + u) * WARPS + warp
            inside, own, start = unit < ALL, unit, weight
            if MODE == TOKEN:
                own, start = unit % UNITS, weight + expert_of(experts, unit, UNITS, ALL) * size
            for p in tl.static_range(PARTS):
                for h in tl.static_range(2):
                    at = (own * (BITS // 4) * whole + row_of(g, p, h, outputs, EVEN_N)) * 4 + t
                    one = read(start, at, inside, ALL % WARPS == 0)
                    other = one if BITS == 4 else read(start, at + whole * 4, inside, ALL % WARPS == 0)
                    held += (one, other)  # type: ignore[assignment]
    return held


@triton.jit
def requested_marks(
    matrix, experts, weights, batch: tl.constexpr, outputs, thread,
    MODE: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """What `marked` reads for the units of columns 2t and 2t + 1, for each part and rows g and g + 8; then the weights
    of their slots, if they have any."""
    words, supers, scales, extra = matrix[1], matrix[2], matrix[4], matrix[5]
    warp, g, t = thread
    held, shares = (), ()
    for c in tl.static_range(2):
        unit = (batch * (8 // ROWS) + (2 * t + c) // ROWS) * WARPS + warp
        inside, own, word, about = unit < ALL, unit, words, supers
        if MODE == TOKEN:
            expert = expert_of(experts, unit, UNITS, ALL)
            own, word, about = unit % UNITS, words + expert * scales, supers + expert * extra
            shares += (tl.load(weights + unit // UNITS, mask=inside, other=0.0),)  # type: ignore[assignment]
        for p in tl.static_range(PARTS):
            for h in tl.static_range(2):
                if c == 0 or ROWS == 1:
                    row = row_of(g, p, h, outputs, EVEN_N)
                    held += marked(word, about, own, row, outputs * PARTS, inside, KIND, GROUP, EVEN)
                else:
                    # Both columns are of the same unit.
                    held += (held[4 * p + 2 * h], held[4 * p + 2 * h + 1])  # type: ignore[assignment]
    return held, shares


@triton.jit
def taken(
    x, batch: tl.constexpr, rows, inputs, thread,
    MODE: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
    BITS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """x of a batch, as `operands` has the columns of the matrix: thread (g, t) has column g, row g % ROWS of a unit."""
    warp, g, t = thread
    unit = (batch * (8 // ROWS) + g // ROWS) * WARPS + warp
    own, row = unit, tl.minimum(g % ROWS, rows - 1)
    if MODE == TOKEN:
        own, row = unit % UNITS, unit // UNITS
    pairs = ()
    for i in tl.static_range(4):
        at = own * 16 + 2 * t + (i % 2 + i // 2 * 8)
        inside = (unit < ALL) & (at < inputs // 4)
        pairs += (pairs_of(tl.load(x + row * (inputs // 4) + at, mask=inside, other=0), BITS, FAST),)  # type: ignore[assignment]
    return pairs


@triton.jit
def batch_sums(
    numbers, marks, shares, x, t, batch: tl.constexpr,
    MODE: tl.constexpr, ALL: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, FLOAT16: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """What a batch adds to each thread's four sums of each part."""
    EACH: tl.constexpr = 8 // ROWS
    RUNS: tl.constexpr = 4 if GROUP == 16 else 1 if KIND == ROW or (KIND == ZEROS and GROUP > 32) else 2
    nil = tl.zeros(t.shape, tl.float32)
    one = tl.full(t.shape, 0x3C003C00 if FLOAT16 else 0x3F803F80, tl.int32)
    ones = (one, one, one, one, one, one, one, one)
    sums = unit_product(ones, ones, x, t, nil, RUNS, FLOAT16, FAST)
    made = ()
    for p in tl.static_range(PARTS):
        a = sums
        for u in tl.static_range(EACH):
            if (batch * EACH + u) * WARPS < ALL:
                v = operands(numbers[(u * PARTS + p) * 4], numbers[(u * PARTS + p) * 4 + 1], BITS, KIND, FLOAT16, FAST)
                w = operands(
                    numbers[(u * PARTS + p) * 4 + 2], numbers[(u * PARTS + p) * 4 + 3], BITS, KIND, FLOAT16, FAST
                )
                a = kept(a, unit_product(v, w, x, t, nil, RUNS, FLOAT16, FAST), u, t, ROWS)
        for k in tl.static_range(4):
            # Column k % 2, row k // 2.
            word, other = marks[(k % 2 * PARTS + p) * 4 + k // 2 * 2], marks[(k % 2 * PARTS + p) * 4 + k // 2 * 2 + 1]
            y = scaled(a, sums, k, word, other, BITS, KIND, GROUP, HALF, FLOAT16)
            made += (y * shares[k % 2] if MODE == TOKEN else y,)  # type: ignore[assignment]
    return made


@triton.jit
def write_zeros(out, row, outputs, DEPENDENT: tl.constexpr):
    """This program's outputs of a token without experts, or of a slot without one."""
    wait(DEPENDENT)
    release(DEPENDENT)
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(out + row.to(tl.int64) * outputs + n, tl.zeros([16], out.dtype.element_ty), mask=n < outputs)


@kernel(do_not_specialize=["rows"])
def integer_gemv_kernel(
    x, weight, words, supers, bias, out, experts, weights, rows, outputs, inputs, size, scales, extra,
    MODE: tl.constexpr, USED: tl.constexpr, UNITS: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr, BATCHES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_N: tl.constexpr, FLOAT16: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """16 outputs of all rows; with GATE as many gates, and what they gate.

    x and weight are int64: four numbers of x, eight bytes. The warps take units by turns, 8 / ROWS of each in a batch;
    DEPTH batches are requested before the wait, the others as many batches ahead. MODE: see `DENSE`. EARLY: of a slot,
    too, for which expert it has is known before. experts, weights: of the slots; size, scales, extra: how far the next
    expert's weight, words and supers are.
    """
    i = tl.arange(0, 32 * WARPS)
    thread = i // 32, i % 32 // 4, i % 4
    PARTS: tl.constexpr = 2 if GATE else 1
    ALL: tl.constexpr = UNITS * USED if MODE == TOKEN else UNITS
    number = tl.program_id(1)
    if MODE == SLOT:
        wait(DEPENDENT and not EARLY)
        expert = tl.load(experts + number).to(tl.int64)
        release(DEPENDENT and not EARLY)
        if expert < 0:
            write_zeros(out, number, outputs, DEPENDENT and EARLY)
            return
        weight, words, supers = weight + expert * size, words + expert * scales, supers + expert * extra
        if BIAS:
            bias += expert * (outputs * PARTS)
        x += (number // USED).to(tl.int64) * (inputs // 4)
    elif MODE == TOKEN:
        experts, weights = experts + number * USED, weights + number * USED
        if highest_expert(experts, USED) < 0:
            write_zeros(out, number, outputs, DEPENDENT)
            return
        x += number.to(tl.int64) * USED * (inputs // 4)
    matrix = weight, words, supers, size, scales, extra
    held = ()
    for b in tl.static_range(min(DEPTH, BATCHES)):
        held += (  # type: ignore[assignment]
            (requested(matrix, experts, b, outputs, thread, MODE, UNITS, ALL, BITS, ROWS, PARTS, WARPS, EVEN_N),
             requested_marks(matrix, experts, weights, b, outputs, thread, MODE, UNITS, ALL, KIND, GROUP, ROWS, PARTS,
                             WARPS, EVEN, EVEN_N)),
        )  # fmt: skip
    wait_and_release(DEPENDENT and (MODE != SLOT or EARLY))
    columns = ()
    for b in tl.static_range(BATCHES):
        columns += (taken(x, b, rows, inputs, thread, MODE, UNITS, ALL, ROWS, WARPS, BITS, FAST),)  # type: ignore[assignment]
    ys = ()
    for b in tl.static_range(BATCHES):
        if b + DEPTH < BATCHES:
            held += (  # type: ignore[assignment]
                (requested(matrix, experts, b + DEPTH, outputs, thread, MODE, UNITS, ALL, BITS, ROWS, PARTS, WARPS,
                           EVEN_N),
                 requested_marks(matrix, experts, weights, b + DEPTH, outputs, thread, MODE, UNITS, ALL, KIND, GROUP,
                                 ROWS, PARTS, WARPS, EVEN, EVEN_N)),
            )  # fmt: skip
        made = batch_sums(
            held[b][0], held[b][1][0], held[b][1][1], columns[b], thread[2], b, MODE, ALL, BITS, KIND, GROUP, HALF,
            ROWS, PARTS, WARPS, FLOAT16, FAST)  # fmt: skip
        ys = added(ys, made)
    write_sums(ys, bias, out, experts, weights, rows, outputs, MODE, USED, GATE, ACT, BIAS, ROWS, WARPS)


@triton.jit
def write_sums(
    ys, bias, out, experts, weights, rows, outputs,
    MODE: tl.constexpr, USED: tl.constexpr, GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Add up this program's sums over warps and units, and write them."""
    e = tl.arange(0, 16 * ROWS)
    r, n = e // 2 % ROWS, tl.program_id(0) * 16 + e // (2 * ROWS) + 8 * (e % 2)
    y, z = collected(ys, 0, WARPS, ROWS), collected(ys, 1 if GATE else 0, WARPS, ROWS)
    inside, place = (r < rows) & (n < outputs), (tl.program_id(1) + r).to(tl.int64) * outputs + n
    if BIAS and MODE == TOKEN:
        y += biases_of(bias, experts, weights, n, outputs, USED)
    given(y, z, bias, out, place, n, outputs, inside, GATE, ACT, BIAS and MODE != TOKEN)


@triton.jit
def biases_of(bias, experts, weights, n, outputs, USED: tl.constexpr):
    """The biases of a token's experts, times their weights, added up."""
    y = tl.zeros(n.shape, tl.float32)
    for s in tl.static_range(USED):
        line = bias + tl.maximum(tl.load(experts + s), 0).to(tl.int64) * outputs
        y += tl.load(weights + s) * tl.load(line + n, mask=n < outputs, other=0.0).to(tl.float32)
    return y


@triton.jit
def added(ys, more):
    """ys + more, each; more where there is nothing yet."""
    new = ()
    for k in tl.static_range(len(more)):
        new += (ys[k] + more[k] if len(ys) else more[k],)
    return new


@triton.jit
def collected(ys, p: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """A part's sums over all warps and units, [16 ROWS]: outputs g and g + 8 of each row, for each g."""
    y = tl.join(tl.join(ys[4 * p], ys[4 * p + 1]), tl.join(ys[4 * p + 2], ys[4 * p + 3]))
    y = tl.reshape(y, [WARPS, 8, 8 // ROWS, ROWS, 2])
    return tl.reshape(tl.sum(tl.sum(y, 2), 0), [16 * ROWS])


AMPERE = (8, 0)
"""The first compute capability with such products of bfloat16."""

MAX_ROWS = 4
"""Rows up to which these kernels are faster than `integer_gemm`'s."""

LEAST_WARPS, SLOT_WARPS, MOST_WARPS, REGISTERS = 4, 8, 16, 128
"""Warps of a program, at least, of one for slots, and at most; and of a thread's registers those that hold requested
numbers: a quarter with the most warps, which have half as many."""

UNROLLED = 32
"""Units of 4-bit numbers that a warp multiplies, written out one by one: twice as many take four times as long to
compile."""


def takes(x: Tensor, card: DeviceInfo, *matrices: IntegerMatrix) -> bool:
    """Whether these kernels are for x: few rows of 16-bit numbers, at multiples of 8 bytes, as those of all that is
    multiplied with the matrices, on a card with such matrix units, where kernels may depend on the batch."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and x.data_ptr() % 8 == 0 and len(x) <= MAX_ROWS
    fits = fits and card.capability >= AMPERE and card.sms > 0
    return fits and all(each.inputs % 4 == 0 for each in matrices)


def integer_gemv(x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, card: DeviceInfo, gate: Gate = "") -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate; T up to MAX_ROWS, see `takes`."""
    out = x.new_empty(len(x), matrix.outputs // num_parts(gate))
    launch(x, matrix, bias, out, None, DENSE, 1, gate, card)
    return out


def multiply_slots(
    x: Tensor, routing: Routing, matrix: IntegerMatrix, gate: Gate, card: DeviceInfo, bias: Tensor | None = None
) -> Tensor:
    """x [T, in] times the matrices of its tokens' experts [E, 2 out, in], plus bias [E, 2 out] -> gated [T K, out]; [E,
    out, in] and [E, out] with a gate of one part."""
    x, routing = ordered_slots(x, routing, matrix, card)
    out = x.new_empty(routing.experts.numel(), matrix.outputs // num_parts(gate))
    launch(x, matrix, bias, out, routing, SLOT, len(out), gate, card)
    return out


def add_slots(
    x: Tensor, routing: Routing, matrix: IntegerMatrix, card: DeviceInfo, bias: Tensor | None = None
) -> Tensor:
    """x [T K, in] times the matrices of its slots' experts [E, out, in], plus bias [E, out], times their weights, added
    up -> [T, out]. The kernel that is launched before must not be the one that made `routing`."""
    tokens = len(routing.experts)
    out = x.new_empty(tokens, matrix.outputs)
    launch(x, matrix, bias, out, routing, TOKEN, tokens, "", card)
    return out


def num_warps(units: int, rows: int, bits: int, gate: Gate, *, slots: bool) -> int:
    """Warps that share units: so many that what is written out of each stays short, and none without a whole batch; of
    slots, which wait for their expert before they request anything, with half a batch of each part of a gate."""
    written = units * (bits // 4) * num_parts(gate)
    wanted = min(MOST_WARPS, max(SLOT_WARPS if slots else LEAST_WARPS, block(triton.cdiv(written, UNROLLED))))
    return min(wanted, two(triton.cdiv(units * rows * (num_parts(gate) if slots else 1), 8)))


def launch(
    x: Tensor,
    matrix: IntegerMatrix,
    bias: Tensor | None,
    out: Tensor,
    routing: Routing | None,
    mode: tl.constexpr,
    count: int,
    gate: Gate,
    card: DeviceInfo,
) -> None:
    """count: programs of the same outputs."""
    rows = len(x) if routing is None else 1
    experts, weights = (x, x) if routing is None else routing[:2]
    used = 1 if routing is None else routing.experts.shape[1]
    outputs, supers = out.shape[-1], supers_of(matrix)
    strides = (0, 0, 0) if routing is None else (matrix.weight.stride(0) // 8, matrix.words.stride(0), supers.stride(0))
    padded, own = 1 if rows == 1 else MAX_ROWS, triton.cdiv(matrix.inputs, UNIT.value)
    units = own * used if mode.value == TOKEN.value else own
    warps = num_warps(units, padded, matrix.bits, gate, slots=routing is not None)
    batches = triton.cdiv(units * padded, 8 * warps)
    registers = 8 // padded * matrix.bits * num_parts(gate) * (4 if warps == MOST_WARPS else 1)
    integer_gemv_kernel[(triton.cdiv(outputs, 16), count)](
        *(x.view(torch.int64), matrix.weight.view(torch.int64), matrix.words, supers, x if bias is None else bias, out),
        *(experts, weights, rows, outputs, matrix.inputs, *strides),
        MODE=mode.value, USED=used, UNITS=own, GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None,
        BITS=matrix.bits, KIND=int(matrix.kind), GROUP=matrix.group, HALF=matrix.half, ROWS=padded, WARPS=warps,
        BATCHES=batches, DEPTH=max(1, REGISTERS // registers), EVEN=units * padded == 8 * warps * batches,
        EVEN_N=outputs % 16 == 0, FLOAT16=x.dtype is torch.float16, FAST=any(card.capability),
        EARLY=routing is not None and routing.early, DEPENDENT=card.dependent, num_warps=warps, **card.options,
    )  # fmt: skip
