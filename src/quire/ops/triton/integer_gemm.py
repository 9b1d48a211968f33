"""Products with matrices of 4- and 8-bit integers, whose groups of columns have scales: AWQ, GPTQ, GGUF and others; and
of 4-bit floats (MXFP4), which become bfloat16 as exactly.

Half a byte is read per number, so that an H200 can spend two instructions on it before they become the bottleneck. The
matrix is stored as the kernel reads it (`IntegerMatrix`): a tile is one run of memory, and a register of eight numbers
becomes four registers of bfloat16 pairs by eight instructions, since 0x4300 with q in its last bits is 128 + q; an
addition takes off 128 and the zero point, exactly. The matrix units multiply those whole numbers with x as it is, and
sums of a group are scaled in float32. So nothing is rounded between memory and the sums.

One row takes the matrix units, too: multiply-adds would cost twice the instructions. Where outputs make too few
programs, inputs are split into runs, see `gemv`, or within a program (chunks, see `integer_kernel`). For many rows the
matrix is dequantized first (`dequantize`), and for x in float32.

A thread takes two neighbours of what the matrix units multiply: of bytes two, which it has to load and to pair one by
one. In groups of 64 columns or more a matrix of 4 bits is read as words of two bytes instead (`word_step`), which come
from shared memory four registers at a time: 1.4 instructions for a number instead of 2.4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.operands import Gate, IntegerKind, IntegerMatrix, Routing, num_parts
from quire.ops.triton.gemv import GemmConfig, added_up, cut, given, handed_in, two
from quire.ops.triton.launch import HOPPER, DeviceInfo, block, fetch, kernel, release, wait
from quire.ops.triton.rows import GATES

WIDE = tl.constexpr(32)
"""Columns of a group, at least, but for those of 16; and bytes of a row that lie together."""

WORDS = tl.constexpr(16)
"""Words of two bytes of a row that lie together."""

ZEROS, SUPERBLOCKS, PAIRS, ROW, FLOATS = (tl.constexpr(int(kind)) for kind in IntegerKind)

MINUS_136, MINUS_128 = tl.constexpr(0xC308), tl.constexpr(0xC300)
"""-136 and -128 in bfloat16: what makes 128 + q a number around 8, and q itself."""

SPREAD_NIBBLES = """{
.reg .b32 a, b, c, d, e, f, g, h, one;
mov.b32 one, 0x3f803f80;
prmt.b32 a, $4, $4, 0x1100;
prmt.b32 b, $4, $4, 0x3322;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
"""
"""Four bytes -> 128 and the numbers in their low halves (a, b) and in their high halves (c, d), two in each."""

NIBBLES = f"""{SPREAD_NIBBLES}prmt.b32 e, $5, $6, 0x5410;
prmt.b32 f, $7, $8, 0x5410;
prmt.b32 g, $9, $10, 0x5410;
prmt.b32 h, $11, $12, 0x5410;
fma.rn.bf16x2 $0, a, one, e;
fma.rn.bf16x2 $1, b, one, f;
fma.rn.bf16x2 $2, c, one, g;
fma.rn.bf16x2 $3, d, one, h;
}}"""
"""Four bytes -> the numbers in their low and in their high halves, plus those in the low halves of the next operands.
Each byte by itself: with some instructions of the matrix units a thread's four bytes are of two rows. The last operand
is not used: the pipeline then loads it as early as the bytes."""

WORD_NIBBLES = """{
.reg .b32 a, b, c, d, one;
mov.b32 one, 0x3f803f80;
shr.u32 b, $4, 8;
shr.u32 c, $4, 4;
shr.u32 d, $4, 12;
lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, $5;
fma.rn.bf16x2 $1, b, one, $5;
fma.rn.bf16x2 $2, c, one, $5;
fma.rn.bf16x2 $3, d, one, $5;
}"""
"""Two words -> the numbers in the low halves of their first bytes, in those of their second bytes, and in the high
halves of both, plus two numbers of the next operand."""

BYTES = """{
.reg .b32 a, b, c, d, m;
mov.b32 m, 0xbf80bf80;
prmt.b32 a, $2, $2, 0x1100;
prmt.b32 b, $2, $2, 0x3322;
lop3.b32 c, a, 0x00800080, 0x43004300, 0xea;
lop3.b32 d, b, 0x00800080, 0x43004300, 0xea;
lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, b, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, c, m, a;
fma.rn.bf16x2 $1, d, m, b;
}"""
"""Four signed bytes: 128 + the lower seven bits, less 128, or 256 where the sign is set. As above for the last
operand."""


E2M1 = """{
.reg .b32 a, b, c, d, e, f, factor, none;
mov.b32 factor, 0x7e807e80;
mov.b32 none, 0x80008000;
prmt.b32 a, $4, $4, 0x1100;
prmt.b32 b, $4, $4, 0x3322;
shl.b32 c, a, 4;
shl.b32 d, b, 4;
shr.u32 e, a, 2;
shr.u32 f, b, 2;
lop3.b32 e, e, 0x01c001c0, 0, 0xea;
lop3.b32 f, f, 0x01c001c0, 0, 0xea;
lop3.b32 c, c, 0x80008000, e, 0xea;
lop3.b32 d, d, 0x80008000, f, 0xea;
shr.u32 e, a, 6;
shr.u32 f, b, 6;
lop3.b32 e, e, 0x01c001c0, 0, 0xea;
lop3.b32 f, f, 0x01c001c0, 0, 0xea;
lop3.b32 a, a, 0x80008000, e, 0xea;
lop3.b32 b, b, 0x80008000, f, 0xea;
fma.rn.bf16x2 $0, c, factor, none;
fma.rn.bf16x2 $1, d, factor, none;
fma.rn.bf16x2 $2, a, factor, none;
fma.rn.bf16x2 $3, b, factor, none;
}"""
"""Four bytes -> the e2m1 numbers in their low and in their high halves: exponent and mantissa become the last bits of a
bfloat16's exponent and the first of its mantissa, which is 2^126 times too small, exactly, denormal numbers too."""


SCALED_E2M1 = E2M1.replace(
    "mov.b32 factor, 0x7e807e80;\n",
    "prmt.b32 p, $5, $6, 0x5410;\nprmt.b32 q, $7, $8, 0x5410;\n"
    "prmt.b32 r, $9, $10, 0x5410;\nprmt.b32 s, $11, $12, 0x5410;\n",
).replace("factor, none;", "p, q, r, s, none;", 1)
for old, new in (("c, factor", "c, p"), ("d, factor", "d, q"), ("a, factor", "a, r"), ("b, factor", "b, s")):
    SCALED_E2M1 = SCALED_E2M1.replace(old, new)
"""As above, times numbers in the low halves of the next operands, see `factor_of`."""


def e2m1_in_float16(code: str) -> str:
    """The same for float16, whose exponent has 5 bits: 2^14 times too small."""
    for old, new in (
        *(("0x7e807e80", "0x74007400"), ("0x01c001c0", "0x0e000e00"), ("bf16", "f16")),
        *((f"shr.u32 {to}, {of}, 2", f"shl.b32 {to}, {of}, 1") for to, of in ("ea", "fb")),
        *((f"shr.u32 {to}, {of}, 6", f"shr.u32 {to}, {of}, 3") for to, of in ("ea", "fb")),
    ):
        code = code.replace(old, new)
    return code


def in_float16(code: str) -> str:
    """The same with 1024 + q, 0x6400 with q in its last bits."""
    for old, new in (("0x4300", "0x6400"), ("4300,", "6400,"), ("3f80", "3c00"), ("bf80", "bc00"), ("bf16", "f16")):
        code = code.replace(old, new)
    return code


FROM_NIBBLES, FROM_NIBBLES_16 = tl.constexpr(NIBBLES), tl.constexpr(in_float16(NIBBLES))
FROM_WORDS, FROM_WORDS_16 = tl.constexpr(WORD_NIBBLES), tl.constexpr(in_float16(WORD_NIBBLES))
FROM_BYTES, FROM_BYTES_16 = tl.constexpr(BYTES), tl.constexpr(in_float16(BYTES))

FROM_E2M1, FROM_E2M1_16 = tl.constexpr(E2M1), tl.constexpr(e2m1_in_float16(E2M1))
FROM_SCALED_E2M1 = tl.constexpr(SCALED_E2M1)

LARGER = tl.constexpr(0xE400 - 0xC300)
"""What the bits of -128 - z in bfloat16 become those of -1024 - z in float16 by."""

ONES = tl.constexpr("{ mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80; }")
ONES_16 = tl.constexpr("{ mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00; }")
"""1 for each of four bytes: made of them, so that it lies in registers as their numbers do."""


@triton.jit
def bytes_of(weight, n, at, outputs, BYTES: tl.constexpr):
    """BYTES of rows n from block `at` on."""
    j = tl.arange(0, BYTES)
    line = weight + at.to(tl.int64) * outputs * WIDE
    place = n[:, None] * WIDE + (j % WIDE)[None, :] + (j // WIDE)[None, :] * (outputs * WIDE)
    return tl.load(line + place, eviction_policy="evict_first")


@triton.jit
def from_nibbles(raw, low, high, word, FAST: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers in the low and in the high halves of bytes, less zero points. low, high: words whose last 16 bits are
    what is added to 128 + q, as bfloat16."""
    if FAST and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            FROM_NIBBLES_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [raw, low + LARGER, high + LARGER, word],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4)  # fmt: skip
    elif FAST:
        return tl.inline_asm_elementwise(
            FROM_NIBBLES, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [raw, low, high, word],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)  # fmt: skip
    else:
        first = (raw & 15).to(tl.float32) + 128.0 + (low << 16).to(tl.float32, bitcast=True)
        second = (raw >> 4).to(tl.float32) + 128.0 + (high << 16).to(tl.float32, bitcast=True)
        return first.to(DTYPE), second.to(DTYPE)


@triton.jit
def from_words(raw, word, FAST: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers in the low halves of the first and of the second bytes of words, and in their high halves, less zero
    points; in the last 16 bits of `word` is what is added to 128 + q, as bfloat16."""
    if FAST and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            FROM_WORDS_16, "=r,=r,=r,=r,r,r", [raw, (word + LARGER).to(tl.int16).to(tl.float16, bitcast=True)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)  # fmt: skip
    elif FAST:
        return tl.inline_asm_elementwise(
            FROM_WORDS, "=r,=r,=r,=r,r,r", [raw, word.to(tl.int16).to(tl.bfloat16, bitcast=True)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)  # fmt: skip
    else:
        less = 128.0 + (word << 16).to(tl.float32, bitcast=True)
        return (
            ((raw & 15).to(tl.float32) + less).to(DTYPE), (((raw >> 8) & 15).to(tl.float32) + less).to(DTYPE),
            (((raw >> 4) & 15).to(tl.float32) + less).to(DTYPE), (((raw >> 12) & 15).to(tl.float32) + less).to(DTYPE),
        )  # fmt: skip


@triton.jit
def beside(first, second):
    """Two tiles as one, in each row one after the other."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def from_floats(raw, word, FAST: tl.constexpr, DTYPE: tl.constexpr):
    """The e2m1 numbers in the low and in the high halves of bytes."""
    if FAST and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            FROM_E2M1_16, "=r,=r,=r,=r,r,r,r,r,r", [raw, word],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4)  # fmt: skip
    elif FAST:
        return tl.inline_asm_elementwise(
            FROM_E2M1, "=r,=r,=r,=r,r,r,r,r,r", [raw, word],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)  # fmt: skip
    else:
        return float_of(raw & 15).to(DTYPE), float_of(raw >> 4).to(DTYPE)


@triton.jit
def from_scaled_floats(raw, low, high, word, FAST: tl.constexpr, DTYPE: tl.constexpr):
    """As `from_floats`, times the scales that `factor_of` made `low` and `high` of."""
    if FAST:
        return tl.inline_asm_elementwise(
            FROM_SCALED_E2M1, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [raw, low, high, word],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)  # fmt: skip
    else:
        first = float_of(raw & 15) * ((low << 16).to(tl.float32, bitcast=True) * 1.1754943508222875e-38)
        second = float_of(raw >> 4) * ((high << 16).to(tl.float32, bitcast=True) * 1.1754943508222875e-38)
        return first.to(DTYPE), second.to(DTYPE)


@triton.jit
def factor_of(word, shift):
    """2^(e - 1) in bfloat16, e the byte of words from bit `shift` on, at most 128: the scale 2^(e - 127), and what the
    bits of `E2M1` are too small by."""
    return (((word >> shift) & 255) + 126) << 7


@triton.jit
def float_of(code):
    """Codes of e2m1 as float32."""
    bits = ((code & 7).to(tl.int32) << 22) | ((code & 8).to(tl.int32) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def power_of(word, shift):
    """2^(e - 127), e the byte of words from bit `shift` on."""
    exponent = (word >> shift) & 255
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_bytes(raw, word, FAST: tl.constexpr, DTYPE: tl.constexpr):
    """Signed bytes."""
    if FAST and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            FROM_BYTES_16, "=r,=r,r,r,r,r,r", [raw, word], dtype=tl.float16, is_pure=True, pack=4)  # fmt: skip
    elif FAST:
        return tl.inline_asm_elementwise(
            FROM_BYTES, "=r,=r,r,r,r,r,r", [raw, word], dtype=tl.bfloat16, is_pure=True, pack=4)  # fmt: skip
    else:
        return raw.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)


@triton.jit
def ones_like(raw, FAST: tl.constexpr, DTYPE: tl.constexpr):
    """1 for each byte: multiplied with x it adds up x."""
    if FAST and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(ONES_16, "=r,=r,r", [raw], dtype=tl.float16, is_pure=True, pack=4)
    elif FAST:
        return tl.inline_asm_elementwise(ONES, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.full(raw.shape, 1.0, DTYPE)


@triton.jit
def upper(word, HALF: tl.constexpr):
    """The number in the first 16 bits of a word. HALF: it is float16, otherwise bfloat16."""
    if HALF:
        return ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def lower(word, HALF: tl.constexpr):
    """The number in the last 16 bits of a word."""
    return upper(word << 16, HALF)


@triton.jit
def words_of(words, n, at, outputs, EVEN_N: tl.constexpr):
    """Row `at` of the words, at outputs n."""
    line = words + at.to(tl.int64) * outputs
    if EVEN_N:
        return tl.load(line + n)
    else:
        return tl.load(line + n, mask=n < outputs, other=0)


@triton.jit
def row_scales(words, n, outputs):
    """The scales of whole rows n, float32."""
    return tl.load(words + n, mask=n < outputs, other=0).to(tl.float32, bitcast=True)


@triton.jit
def byte_of(word, i):
    """Byte i of words, from the lowest, as float32."""
    return ((word >> (8 * i)) & 255).to(tl.float32)


@triton.jit
def signed_byte_of(word, i):
    """As `byte_of`, signed."""
    return ((word << (24 - 8 * i)) >> 24).to(tl.float32)


@triton.jit
def scales_of(
    words, supers, n, start, outputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Of 64 columns from `start`: scales of their halves; what is subtracted from either after scaling, of superblocks
    and of zero points of 8 bits, or in groups of 16 the scales of the halves' second halves; and words that all of
    these are read with."""
    if KIND == PAIRS:
        word = words_of(words, n, start // 64, outputs, EVEN_N)
        return lower(word, HALF), upper(word, HALF), lower(word, HALF), upper(word, HALF), word
    elif KIND == FLOATS:
        word = words_of(words, n, start // 128, outputs, EVEN_N)
        scale, other = power_of(word, start % 128 // 4), power_of(word, start % 128 // 4 + 8)
        return scale, other, scale, other, word
    elif KIND == SUPERBLOCKS:
        word = words_of(words, n, start // 64, outputs, EVEN_N)
        about = words_of(supers, n, start // 256, outputs, EVEN_N)
        scale, minimum = upper(about, True), lower(about, True)
        if GROUP == 16:
            return (
                scale * signed_byte_of(word, 0), scale * signed_byte_of(word, 2),
                scale * signed_byte_of(word, 1), scale * signed_byte_of(word, 3), word ^ about,
            )  # fmt: skip
        else:
            return (
                scale * byte_of(word, 0), scale * byte_of(word, 2),
                minimum * byte_of(word, 1), minimum * byte_of(word, 3), word ^ about,
            )  # fmt: skip
    else:
        word = words_of(words, n, start // GROUP, outputs, EVEN_N)
        other, read = word, word
        if GROUP == WIDE:
            other = words_of(words, n, start // WIDE + 1, outputs, EVEN_N)
            read = word ^ other
        scale, second = upper(word, HALF), upper(other, HALF)
        return scale, second, scale * lower(word, False), second * lower(other, False), read


@triton.jit
def nibble_step(
    weight, words, supers, low, high, y, n, m, start, outputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, EVEN_N: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y plus STEP inputs of outputs n times x, whose columns are `low` and `high` in the halves of bytes. m: n with
    outputs that there are."""
    DTYPE: tl.constexpr = low.dtype
    raw = bytes_of(weight, m, start // 64, outputs, STEP // 2)
    if KIND == FLOATS and not HALF and tl.float16 != DTYPE:
        # bfloat16 holds scaled numbers, too: nothing is left to be done with sums.
        word, at = words_of(words, n, start // 128, outputs, EVEN_N), start % 128 // 4
        scale, other = factor_of(word, at), factor_of(word, at + 8)
        first, second = from_scaled_floats(raw, scale[:, None], other[:, None], word[:, None], FAST, DTYPE)
        total = tl.dot(first, low, y, input_precision=PRECISION)
        y = tl.dot(second, high, total, input_precision=PRECISION)
    elif KIND == ZEROS:
        word = words_of(words, n, start // GROUP, outputs, EVEN_N)
        if GROUP > WIDE:
            first, second = from_nibbles(raw, word[:, None], word[:, None], word[:, None], FAST, DTYPE)
            total = tl.dot(first, low, input_precision=PRECISION)
            y += upper(word, HALF)[:, None] * tl.dot(second, high, total, input_precision=PRECISION)
        else:
            other = words_of(words, n, start // WIDE + 1, outputs, EVEN_N)
            first, second = from_nibbles(raw, word[:, None], other[:, None], word[:, None], FAST, DTYPE)
            y += upper(word, HALF)[:, None] * tl.dot(first, low, input_precision=PRECISION)
            y += upper(other, HALF)[:, None] * tl.dot(second, high, input_precision=PRECISION)
    else:
        scale, other, least, less, read = scales_of(words, supers, n, start, outputs, KIND, GROUP, HALF, EVEN_N)
        if KIND == FLOATS:
            first, second = from_floats(raw, read[:, None], FAST, DTYPE)
        else:
            zero = tl.full([1, 1], MINUS_136 if KIND == PAIRS else MINUS_128, tl.int32)
            first, second = from_nibbles(raw, zero, zero, read[:, None], FAST, DTYPE)
        if KIND == SUPERBLOCKS:
            ones = ones_like(raw, FAST, DTYPE)
            y -= least[:, None] * tl.dot(ones, low, input_precision=PRECISION)
            y -= less[:, None] * tl.dot(ones, high, input_precision=PRECISION)
        y += scale[:, None] * tl.dot(first, low, input_precision=PRECISION)
        y += other[:, None] * tl.dot(second, high, input_precision=PRECISION)
    return y


@triton.jit
def byte_step(
    weight, words, supers, low, high, more_low, more_high, y, n, m, start, outputs,
    KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, EVEN_N: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `nibble_step`, two blocks of 8 bits. Scales of whole rows are left out. In groups of 16, low and high have the
    first 16 of each half's columns and zeros, and more_low and more_high the others."""
    DTYPE: tl.constexpr = low.dtype
    left = bytes_of(weight, m, start // WIDE, outputs, WIDE)
    right = bytes_of(weight, m, start // WIDE + 1, outputs, WIDE)
    if KIND == ROW:
        zero = tl.full([1, 1], 0, tl.int32)
        total = tl.dot(from_bytes(left, zero, FAST, DTYPE), low, input_precision=PRECISION)
        y += tl.dot(from_bytes(right, zero, FAST, DTYPE), high, total, input_precision=PRECISION)
    else:
        scale, other, least, less, read = scales_of(words, supers, n, start, outputs, KIND, GROUP, HALF, EVEN_N)
        first = from_bytes(left, read[:, None], FAST, DTYPE)
        second = from_bytes(right, read[:, None], FAST, DTYPE)
        if GROUP == 16:
            y += least[:, None] * tl.dot(first, more_low, input_precision=PRECISION)
            y += less[:, None] * tl.dot(second, more_high, input_precision=PRECISION)
        elif KIND != PAIRS:
            ones = ones_like(left, FAST, DTYPE)
            y -= least[:, None] * tl.dot(ones, low, input_precision=PRECISION)
            y -= less[:, None] * tl.dot(ones, high, input_precision=PRECISION)
        y += scale[:, None] * tl.dot(first, low, input_precision=PRECISION)
        y += other[:, None] * tl.dot(second, high, input_precision=PRECISION)
    return y


@triton.jit
def step_of(
    weight, words, supers, low, high, more_low, more_high, y, n, m, start, outputs,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    EVEN_N: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`nibble_step` or `byte_step`."""
    if BITS == 4:
        return nibble_step(
            weight, words, supers, low, high, y, n, m, start, outputs, KIND, GROUP, HALF, STEP, EVEN_N, FAST,
            PRECISION)  # fmt: skip
    else:
        return byte_step(
            weight, words, supers, low, high, more_low, more_high, y, n, m, start, outputs, KIND, GROUP, HALF, EVEN_N,
            FAST, PRECISION)  # fmt: skip


@triton.jit
def word_step(
    weight, words, x, y, n, m, start, outputs,
    GROUP: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, EVEN_N: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `nibble_step`, where all of STEP inputs have one scale and a zero point. x: see `columns_of_words`."""
    j = tl.arange(0, STEP // 4)
    line = weight.to(tl.pointer_type(tl.int16), bitcast=True) + (start // 64).to(tl.int64) * outputs * WORDS
    place = m[:, None] * WORDS + (j % WORDS)[None, :] + (j // WORDS)[None, :] * (outputs * WORDS)
    raw = tl.load(line + place, eviction_policy="evict_first")
    word = words_of(words, n, start // GROUP, outputs, EVEN_N)
    a, b, c, d = from_words(raw, word[:, None], FAST, x.dtype)
    total = tl.dot(beside(beside(a, b), beside(c, d)), x, input_precision=PRECISION)
    return y + upper(word, HALF)[:, None] * total


@triton.jit
def columns_of_words(line, held, start, inputs, STEP: tl.constexpr, EVEN: tl.constexpr):
    """x at `line` + STEP inputs, [STEP, rows], in the order of `from_words`: of the low halves of each 64 columns those
    of first bytes, then those of second ones, and of their high halves. held: rows there are."""
    at = start + tl.arange(0, STEP)
    mask = held[:, None]
    if not EVEN:
        mask = mask & (at < inputs)[None, :]
    x = tl.load(line[:, None] + at[None, :], mask=mask, other=0.0)
    x = tl.permute(tl.reshape(x, [x.shape[0], STEP // 64, 2, WORDS, 2]), (0, 2, 4, 1, 3))
    return tl.trans(tl.reshape(x, [x.shape[0], STEP]))


@triton.jit
def columns_of(line, held, start, inputs, STEP: tl.constexpr, EVEN: tl.constexpr, PART: tl.constexpr):
    """x at `line` + STEP inputs, as the halves of bytes have them: two tiles [STEP / 2, rows]. held: rows there are.
    PART 0 or 1: of each 32 columns the first or the last 16 alone, zeros otherwise; inputs are even then."""
    j = tl.arange(0, STEP // 2)
    at = start + (j // WIDE) * 64 + j % WIDE
    place = line[:, None] + at[None, :]
    if PART >= 0:
        mask = held[:, None] & (j % WIDE // 16 == PART)[None, :]
        low = tl.load(place, mask=mask, other=0.0)
        high = tl.load(place + WIDE, mask=mask, other=0.0)
    elif EVEN:
        low = tl.load(place, mask=held[:, None], other=0.0)
        high = tl.load(place + WIDE, mask=held[:, None], other=0.0)
    else:
        low = tl.load(place, mask=held[:, None] & (at < inputs)[None, :], other=0.0)
        high = tl.load(place + WIDE, mask=held[:, None] & (at + WIDE < inputs)[None, :], other=0.0)
    return tl.trans(low), tl.trans(high)


@triton.jit
def halves_of(line, held, start, inputs, STEP: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr):
    """As `columns_of`, and what `byte_step` wants more of in groups of 16."""
    if GROUP == 16:
        low, high = columns_of(line, held, start, inputs, STEP, EVEN, 0)
        more_low, more_high = columns_of(line, held, start, inputs, STEP, EVEN, 1)
        return low, high, more_low, more_high
    else:
        low, high = columns_of(line, held, start, inputs, STEP, EVEN, -1)
        return low, high, low, high


@triton.jit
def both_steps(
    weight, words, supers, line, held, y, z, n, m, start, inputs, outputs,
    GATE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr, EVEN_N: tl.constexpr, IN_WORDS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y plus STEP inputs of outputs n, and with GATE z plus those of what is gated, which follows all outputs.
    IN_WORDS: bytes of ZEROS become numbers two at a time, by fewer instructions and with more registers."""
    whole = outputs * 2 if GATE else outputs
    if IN_WORDS and BITS == 4 and KIND == ZEROS and GROUP > WIDE:
        x = columns_of_words(line, held, start, inputs, STEP, EVEN)
        y = word_step(weight, words, x, y, n, m, start, whole, GROUP, HALF, STEP, EVEN_N, FAST, PRECISION)
        if GATE:
            n, m = n + outputs, m + outputs
            z = word_step(weight, words, x, z, n, m, start, whole, GROUP, HALF, STEP, EVEN_N, FAST, PRECISION)
    else:
        low, high, more_low, more_high = halves_of(line, held, start, inputs, STEP, EVEN, GROUP)
        y = step_of(
            weight, words, supers, low, high, more_low, more_high, y, n, m, start, whole, BITS, KIND, GROUP, HALF, STEP,
            EVEN_N, FAST, PRECISION)  # fmt: skip
        if GATE:
            z = step_of(
                weight, words, supers, low, high, more_low, more_high, z, n + outputs, m + outputs, start, whole, BITS,
                KIND, GROUP, HALF, STEP, EVEN_N, FAST, PRECISION)  # fmt: skip
    return y, z


@triton.jit
def ask_for(
    weight, n, begin, each, outputs, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, CHUNKS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Fetch the first AHEAD inputs of every chunk of the matrix into L2: a tile of a block is a run of memory. each:
    rows of blocks that a chunk has."""
    if AHEAD > 0:
        lines: tl.constexpr = BLOCK_N * WIDE // 128
        blocks: tl.constexpr = AHEAD * BITS // 256
        i = tl.arange(0, lines * blocks * CHUNKS)
        row = (i // lines % blocks) * outputs + i // (lines * blocks) * each
        at = row.to(tl.int64) * WIDE + (i % lines) * 128
        line = weight + (begin * BITS // 256).to(tl.int64) * outputs * WIDE + n * WIDE
        fetch(line, at)
        if GATE:
            fetch(line + (outputs // 2) * WIDE, at)


@triton.jit
def gathered(y, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS * BLOCK_N, ROWS], columns chunk by chunk -> [BLOCK_N, ROWS / CHUNKS]: each chunk of the matrix times that
    of x, added up."""
    if CHUNKS > 1:
        y = tl.reshape(y, [CHUNKS, BLOCK_N, CHUNKS, ROWS // CHUNKS])
        first = tl.arange(0, CHUNKS)[:, None, None, None]
        second = tl.arange(0, CHUNKS)[None, None, :, None]
        y = tl.sum(tl.sum(tl.where(first == second, y, 0.0), 2), 0)
    return y


@kernel(do_not_specialize=["rows"])
def integer_kernel(
    x, weight, words, supers, bias, out, parts, arrived, rows, outputs, inputs, length,
    GATE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STEP: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr, EVEN_N: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of ROWS / CHUNKS rows on the matrix units. Programs of the same outputs are neighbours, so that
    the matrix is read from memory once. SPLITS: inputs are split into so many runs of `length`; the last one adds them
    up, always in the same order. TIMES: steps of an iteration. AHEAD: inputs asked for before the wait.

    CHUNKS: a run is cut once more, within the program. The matrix units take ROWS columns at least, and where x has
    fewer rows, they are given its chunks; of the products only those of equal chunks are wanted. Warps then have chunks
    of their own, and no sums go through memory.
    """
    whole = outputs * 2 if GATE else outputs
    v, c = tl.arange(0, CHUNKS * BLOCK_N), tl.arange(0, ROWS)
    chunk = length // CHUNKS
    n = tl.program_id(1) * BLOCK_N + v % BLOCK_N
    m = n
    if not EVEN_N:
        m = tl.minimum(n, outputs - 1)
    r = tl.program_id(0) * (ROWS // CHUNKS) + c % (ROWS // CHUNKS)
    begin = tl.program_id(2) * length
    each = chunk * BITS // 256 * whole
    ask_for(weight, tl.program_id(1) * BLOCK_N, begin, each, whole, BITS, BLOCK_N, AHEAD, CHUNKS, GATE)
    wait(DEPENDENT)
    release(DEPENDENT)
    line = x + r.to(tl.int64) * inputs + c // (ROWS // CHUNKS) * chunk
    m += v // BLOCK_N * each
    if KIND == SUPERBLOCKS and CHUNKS > 1:
        supers += v // BLOCK_N * (chunk // 256 - chunk // 64) * whole
    if KIND == ZEROS:
        n += v // BLOCK_N * (chunk // GROUP) * whole
    elif KIND != ROW:
        n += v // BLOCK_N * (chunk // (128 if KIND == FLOATS else 64)) * whole
    y = tl.zeros([CHUNKS * BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([CHUNKS * BLOCK_N, ROWS], tl.float32)
    stop = begin + chunk if CHUNKS > 1 else tl.minimum(begin + length, inputs)
    for first in tl.range(begin, stop, STEP * TIMES, num_stages=STAGES):
        for u in tl.static_range(TIMES):
            start = first + u * STEP
            y, z = both_steps(
                weight, words, supers, line, r < rows, y, z, n, m, start, inputs, outputs, GATE, BITS, KIND, GROUP,
                HALF, STEP, EVEN, EVEN_N, True, FAST, PRECISION)  # fmt: skip
    y, z = gathered(y, BLOCK_N, ROWS, CHUNKS), gathered(z, BLOCK_N, ROWS, CHUNKS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND == ROW:
        y *= row_scales(words, n, outputs)[:, None]
        if GATE:
            z *= row_scales(words + outputs, n, outputs)[:, None]
    r = tl.program_id(0) * (ROWS // CHUNKS) + tl.arange(0, ROWS // CHUNKS)
    place = r[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (r < rows)[None, :] & (n < outputs)[:, None]
    if SPLITS == 1:
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)
    elif handed_in(y, z, parts, arrived, GATE, SPLITS, BLOCK_N, ROWS // CHUNKS):
        y, z = added_up(y, z, parts, GATE, SPLITS, BLOCK_N, ROWS // CHUNKS)
        given(y, z, bias, out, place, n[:, None], outputs, inside, GATE, ACT, BIAS)


def step_inputs(matrix: IntegerMatrix, inputs: int) -> int:
    """Inputs of a step: two blocks of 8 bits or one of 4, or two where as many inputs have one scale and an iteration
    takes as many."""
    if matrix.bits == 8:
        return 64
    return max(64, min(matrix.group, inputs, 128)) if matrix.kind is IntegerKind.ZEROS else 64


def fitted(how: GemmConfig, matrix: IntegerMatrix, card: DeviceInfo, row: int, gated: bool) -> GemmConfig:
    """With iterations that the columns are a multiple of, and as many stages as fit into shared memory. row: bytes of a
    number of x. Not in chunks, where the inputs or outputs have a remainder."""
    outputs = matrix.outputs // (2 if gated else 1)
    parted = how.inputs % {IntegerKind.SUPERBLOCKS: 256, IntegerKind.FLOATS: 128}.get(matrix.kind, 1)
    if matrix.inputs % (how.inputs * how.chunks * how.splits) or outputs % how.outputs or parted:
        how = how._replace(chunks=1)
    while matrix.padded % how.inputs:
        how = how._replace(inputs=how.inputs // 2)
    numbers = how.outputs * how.chunks * (2 if gated else 1) * how.inputs
    columns = how.rows * row * how.inputs * (2 if matrix.group == 16 else 1)
    stage = numbers * matrix.bits // 8 + 4 * numbers // 32 + columns
    return how._replace(stages=min(how.stages, max(2, card.shared // stage)))


MAX_FUSED_ROWS = 64
"""Rows up to which numbers are dequantized on the way."""

ANY_BATCH = GemmConfig(16, 64, 128, 2, 6)
"""The tile of products that do not depend on the batch."""


def integer_gemm_config(
    rows: int, matrix: IntegerMatrix, card: DeviceInfo, *, gated: bool = False
) -> GemmConfig | None:
    """How a product is tiled; None where the matrix is dequantized first. Measured on an H200 with matrices of an 8B
    model, of 4 bits in groups of 128, Q4_K and Q8_0. wanted: programs that each multiprocessor gets, by splitting
    inputs, if outputs make fewer."""
    if rows > MAX_FUSED_ROWS:
        return None
    outputs, double = matrix.outputs // (2 if gated else 1), has_two_products(matrix)
    hopper = card.capability[0] == HOPPER[0]
    if rows <= 8 and (double or matrix.bits == 8):
        how, wanted = GemmConfig(8, 64, 128, 2, 4), 4
    elif rows <= 16 and (double or matrix.bits == 8):
        how, wanted = GemmConfig(16, 64, 128, 2, 6) if double else GemmConfig(16, 32, 128, 2, 4), 4
    elif rows > 8 and is_read_in_words(matrix):
        how, wanted = word_config(rows, outputs, gated, hopper)
    elif rows <= 8:
        large = outputs > 4096 and not gated
        how, wanted = (GemmConfig(8, 64, 128, 2, 6), 4) if large else (GemmConfig(8, 64, 256, 2, 4), 8)
    elif rows <= 16:
        how, wanted = GemmConfig(16, 64, 128, 2, 6) if gated else GemmConfig(16, 64, 256, 2, 4), 4
    elif rows > 32 and double and hopper:
        how, wanted = GemmConfig(64, 64, 64 if gated else 128, 4, 4), 2
    elif gated and (double or matrix.group == 32):
        # Larger tiles spill.
        how, wanted = GemmConfig(32, 32, 64 if double else 1024 // matrix.bits, 2, 4), 2
    elif rows > 32 and double:
        # 64 rows spill on other cards, and for compute capability 10 Triton 3.9 makes an empty kernel of them.
        how, wanted = GemmConfig(32, 64, 128, 4, 3), 2
    elif rows <= 32:
        how, wanted = (GemmConfig(32, 64, 256, 4, 3), 1) if gated else (GemmConfig(32, 64, 128, 4, 3), 4)
    else:
        how, wanted = (GemmConfig(64, 128, 128, 8, 3), 1) if gated else (GemmConfig(64, 128, 128, 4, 4), 2)
    tiles = triton.cdiv(rows, how.rows) * triton.cdiv(outputs, how.outputs)
    return how._replace(splits=two(min(16, wanted * card.sms // tiles, matrix.padded // (2 * how.inputs))))


def is_read_in_words(matrix: IntegerMatrix) -> bool:
    """Whether `word_step` multiplies it."""
    return matrix.bits == 4 and matrix.kind is IntegerKind.ZEROS and matrix.group > WIDE.value


def word_config(rows: int, outputs: int, gated: bool, hopper: bool) -> tuple[GemmConfig, int]:
    """Its tile for 9 to 64 rows, and the programs wanted."""
    if rows <= 16:
        if gated:
            return GemmConfig(16, 128, 128, 4, 3), 2
        return (GemmConfig(16, 64, 128, 4, 4) if outputs > 4096 else GemmConfig(16, 64, 256, 2, 4)), 3
    if rows <= 32:
        return GemmConfig(32, 128, 128, 8 if gated else 4, 4), 2
    # With four warps, these spill on other cards.
    return (GemmConfig(64, 64, 128, 4, 4), 1) if gated else (GemmConfig(64, 128, 128, 4 if hopper else 8, 4), 2)


def has_two_products(matrix: IntegerMatrix) -> bool:
    """Whether each tile is multiplied twice: for minima, zero points of bytes, or the halves of 32 columns."""
    return matrix.kind is IntegerKind.SUPERBLOCKS or (matrix.kind is IntegerKind.ZEROS and matrix.bits == 8)


def ordered(x: Tensor, matrix: IntegerMatrix) -> Tensor:
    """x [T, in] with its columns in the order of the matrix."""
    return x.contiguous() if matrix.order is None else x.index_select(1, matrix.order)


@kernel
def slots_kernel(
    x, order, experts, out, inputs, USED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """BLOCK columns of a slot's row of x, in the order [E, inputs] of its expert; zeros where it has none."""
    slot, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(DEPENDENT)
    release(DEPENDENT)
    expert = tl.load(experts + slot).to(tl.int64)
    inside = k < tl.where(expert >= 0, inputs, 0)
    column = tl.load(order + expert * inputs + k, mask=inside, other=0)
    value = tl.load(x + slot // USED * inputs + column, mask=inside, other=0.0)
    tl.store(out + slot * inputs + k, value, mask=k < inputs)


def ordered_slots(x: Tensor, routing: Routing, matrices: IntegerMatrix, card: DeviceInfo) -> tuple[Tensor, Routing]:
    """x [T, in] with its columns in the order of the experts' matrices, and what its rows use: where experts have
    columns moved, each in its own way, every slot (a token and one of its experts) has a row."""
    if matrices.order is None:
        return x, routing
    slots, used = routing.experts.numel(), routing.experts.shape[1]
    out, size = x.new_empty(slots, matrices.inputs), block(min(matrices.inputs, 1024))
    slots_kernel[(slots, triton.cdiv(matrices.inputs, size))](
        *(x, matrices.order, routing.experts, out, matrices.inputs),
        USED=used, BLOCK=size, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    return out, Routing(routing.experts.view(-1, 1), routing.weights.view(-1, 1), early=True)


def integer_linear(
    x: Tensor,
    matrix: IntegerMatrix,
    bias: Tensor | None,
    how: GemmConfig,
    card: DeviceInfo,
    arrived: Tensor,
    gate: Gate = "",
) -> Tensor:
    """x [T, in] times the matrix [out, in] -> [T, out], or [T, out / 2] with a gate. arrived: [COUNTERS] int32,
    zeros."""
    x = ordered(x, matrix)
    rows, inputs = x.shape
    outputs = matrix.outputs // num_parts(gate)
    out = x.new_empty(rows, outputs)
    how = fitted(how, matrix, card, x.element_size(), num_parts(gate) == 2)
    step = step_inputs(matrix, how.inputs)
    tiles, columns = triton.cdiv(rows, how.rows // how.chunks), triton.cdiv(outputs, how.outputs)
    length, runs, ahead = cut(how._replace(inputs=how.inputs * how.chunks), matrix.padded, tiles * columns)
    size = runs * tiles * columns * 2 * how.rows * how.outputs
    parts = x.new_empty(size, dtype=torch.float32) if runs > 1 else x
    even = outputs % how.outputs == 0
    ahead = ahead if even and ahead * how.chunks <= length and any(card.capability) else 0
    fast = x.dtype in (torch.bfloat16, torch.float16) and any(card.capability)
    integer_kernel[(tiles, columns, runs)](
        *(x, matrix.weight, matrix.words, supers_of(matrix), x if bias is None else bias, out, parts, arrived),
        *(rows, outputs, inputs, length),
        GATE=num_parts(gate) == 2, ACT=GATES[gate], BIAS=bias is not None, BITS=matrix.bits, KIND=int(matrix.kind),
        GROUP=matrix.group, HALF=matrix.half, ROWS=how.rows, BLOCK_N=how.outputs, CHUNKS=how.chunks, STEP=step,
        TIMES=how.inputs // step, STAGES=how.stages, SPLITS=runs, AHEAD=ahead, EVEN=inputs % how.inputs == 0,
        EVEN_N=even, FAST=fast, PRECISION=card.precision, DEPENDENT=card.dependent,
        num_warps=how.warps, **card.options,
    )  # fmt: skip
    return out


def supers_of(matrix: IntegerMatrix) -> Tensor:
    """What a kernel gets as `supers`: any tensor where there are none."""
    return matrix.words if matrix.supers is None else matrix.supers


@kernel
def expand_kernel(
    weight, words, supers, chosen, out, outputs, inputs, first, stop,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Numbers of BLOCK_N rows, 64 BLOCKS columns of each, into out, whose rows are `first` to `stop` of the matrix,
    or those that CHOSEN numbers name."""
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = (i < stop - first)[:, None]
    wait(DEPENDENT)
    release(DEPENDENT)
    n = first + i
    if CHOSEN:
        n = tl.load(chosen + i, mask=i < stop - first, other=0).to(tl.int32)
    m = tl.minimum(n, outputs - 1)
    for b in tl.static_range(BLOCKS):
        start = (tl.program_id(0) * BLOCKS + b) * 64
        if start < inputs:
            low, high = expanded(weight, words, supers, m, start, outputs, BITS, KIND, GROUP, HALF)
            at = start + tl.arange(0, WIDE)[None, :]
            line = out + i[:, None].to(tl.int64) * inputs + at
            tl.store(line, low.to(out.dtype.element_ty), mask=held & (at < inputs))
            tl.store(line + WIDE, high.to(out.dtype.element_ty), mask=held & (at + WIDE < inputs))


@triton.jit
def expanded(
    weight, words, supers, m, start, outputs,
    BITS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """64 columns of rows m from `start` on, float32, as two tiles [rows, 32]."""
    word = tl.full([1, 1], 0, tl.int32)
    if BITS == 8:
        low = from_bytes(bytes_of(weight, m, start // WIDE, outputs, WIDE), word, False, tl.float32)
        high = from_bytes(bytes_of(weight, m, start // WIDE + 1, outputs, WIDE), word, False, tl.float32)
    else:
        raw = bytes_of(weight, m, start // 64, outputs, WIDE)
        first = tl.full([1, 1], MINUS_136 if KIND == PAIRS else MINUS_128, tl.int32)
        second = first
        if KIND == ZEROS:
            first = words_of(words, m, start // GROUP, outputs, True)[:, None]
            second = words_of(words, m, (start + WIDE) // GROUP, outputs, True)[:, None]
        if KIND == FLOATS:
            low, high = from_floats(raw, word, False, tl.float32)
        else:
            low, high = from_nibbles(raw, first, second, word, False, tl.float32)
    if KIND == ROW:
        scale = row_scales(words, m, outputs)[:, None]
        return low * scale, high * scale
    else:
        scale, other, least, less, word = scales_of(words, supers, m, start, outputs, KIND, GROUP, HALF, True)
        if GROUP == 16:
            early = (tl.arange(0, WIDE) < 16)[None, :]
            return (
                low * tl.where(early, scale[:, None], least[:, None]),
                high * tl.where(early, other[:, None], less[:, None]),
            )  # fmt: skip
        elif KIND == SUPERBLOCKS or (KIND == ZEROS and BITS == 8):
            return low * scale[:, None] - least[:, None], high * other[:, None] - less[:, None]
        else:
            return low * scale[:, None], high * other[:, None]


def dequantize(
    matrix: IntegerMatrix,
    dtype: torch.dtype,
    card: DeviceInfo,
    rows: slice = slice(None),
    chosen: Tensor | None = None,
) -> Tensor:
    """Some rows of the matrix [out, in], one after the other, in dtype, columns in the order of `matrix.order`. chosen:
    [T] numbers of the rows instead."""
    start, stop, _ = rows.indices(matrix.outputs if chosen is None else len(chosen))
    out = torch.empty(stop - start, matrix.inputs, dtype=dtype, device=matrix.weight.device)
    grid = (triton.cdiv(matrix.inputs, 256), triton.cdiv(stop - start, 16))
    expand_kernel[grid](
        *(matrix.weight, matrix.words, supers_of(matrix), matrix.words if chosen is None else chosen, out),
        *(matrix.outputs, matrix.inputs, start, stop),
        BITS=matrix.bits, KIND=int(matrix.kind), GROUP=matrix.group, HALF=matrix.half, CHOSEN=chosen is not None,
        BLOCK_N=16, BLOCKS=4, DEPENDENT=card.dependent, num_warps=4, **card.options,
    )  # fmt: skip
    return out
