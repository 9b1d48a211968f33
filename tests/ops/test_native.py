"""The CPU's kernels against plain torch: every kind of matrix, gate, dtype and number of rows, at every instruction set
of this processor."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.assembly import engine
from quire.errors import InvalidConfig
from quire.ops import panels
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.gguf_blocks import BLOCKS, PACKED
from quire.ops.integer import dequantize_integers, integers_of, pack_floats, pack_integers, pack_rows, pack_superblocks
from quire.ops.native import library
from quire.ops.native import pack as packing
from quire.ops.native.library import LEVELS, best_level
from quire.ops.native.ops import InvariantNativeOps, NativeOps
from quire.ops.native.pack import BLOCK_TYPES, TILED_BLOCK_TYPES, empty_blocks, in_panels, int8_panels, write_blocks
from quire.ops.operands import Angles, Gate, IntegerMatrix, MixedMatrix, Norm, Norms, QuantizedMatrix, Scores
from quire.ops.panels import UNIT, PanelMatrix
from quire.ops.quantized import dequantize
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from quire.types import UNLIMITED
from quire.weights.gguf import KINDS
from tests.ops.batches import Pages, poisoned

REFERENCE = ReferenceOps()
BEST = best_level()
SOURCES = (
    "kernels.h",
    "kernels.c",
    "integers.h",
    "rounded.h",
    "float8.h",
    "tiled_attention.h",
    "blocks.c",
    "library.c",
    "build.sh",
)
HERE = [level for level, number in LEVELS.items() if BEST is not None and number <= LEVELS[BEST]]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


@pytest.fixture(params=HERE)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    """The operations at each level, with two threads; the best one is chosen again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)  # a sum of one output may cancel, whose relative error has no bound
    with torch.inference_mode():
        yield NativeOps(request.param)
    torch.set_num_threads(before)
    assert BEST is not None
    NativeOps(BEST)


def halves(scale: Tensor, half: bool) -> Tensor:
    return (scale.half() if half else scale.bfloat16()).float()


def integers(out: int, columns: int) -> dict[str, IntegerMatrix]:
    """One matrix of every layout."""
    draw = torch.Generator().manual_seed(out * columns)
    eight = torch.randint(-127, 128, (out, columns), dtype=torch.int8, generator=draw)
    four = torch.randint(0, 16, (out, columns), dtype=torch.uint8, generator=draw)
    fine = torch.rand(out, -(-columns // 32), generator=draw) + 0.1
    coarse, zero = fine[:, :: 128 // 32], torch.randint(0, 16, (out, -(-columns // 128)), generator=draw).float()
    made = {"rows": pack_rows(eight, fine[:, :1])}
    for half in (True, False):
        made |= {
            f"8 bits, {half}": pack_integers(eight, 32, halves(fine, half), half=half),
            f"4 bits, {half}": pack_integers(four, 32, halves(fine, half), half=half),
            f"8 bits with zeros, {half}": pack_integers(eight, 128, halves(coarse, half), zero=zero - 4, half=half),
            f"4 bits with zeros, {half}": pack_integers(four, 128, halves(coarse, half), zero=zero, half=half),
        }
    made["floats"] = pack_floats(four, torch.randint(118, 130, fine.shape, dtype=torch.uint8, generator=draw))
    if columns % 256 == 0:
        scales = torch.randint(0, 63, (out, columns // 16), dtype=torch.uint8, generator=draw)
        supers = torch.rand(out, columns // 256, 2, generator=draw).half()
        made["superblocks of 4 bits"] = pack_superblocks(four, 32, scales, supers)
        made["superblocks of 8 bits"] = pack_superblocks(eight.abs() % 32, 32, scales, supers)
        made["superblocks of 16"] = pack_superblocks(
            eight % 32, 16, scales.view(torch.int8).sub(30).view(torch.uint8), supers
        )
    return made


def plain(out: int, columns: int, dtype: torch.dtype) -> PanelMatrix:
    made = PanelMatrix.empty(out, columns, dtype)
    weight = torch.randn(out, columns).to(dtype)
    made.write(0, weight[: out // 32 * 16])
    made.write(out // 32 * 16, weight[out // 32 * 16 :])
    assert torch.equal(made.values_of(), weight.float())
    return made


def agree(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-6)) < tolerance


def products(ops: NativeOps, matrix: PanelMatrix, dtype: torch.dtype, rows: int) -> None:
    """Products of so many rows with and without a bias and each gate."""
    dense = matrix.values_of()
    x, bias = torch.randn(rows, matrix.inputs).to(dtype), torch.randn(matrix.outputs).to(dtype)
    exact = x.float() @ dense.t()
    # Integers are multiplied by rows of int8, see the test of what that adds.
    tolerance = DTYPES[dtype] * (2 if matrix.scale is not None and dtype is torch.bfloat16 else 1)
    agree(ops.quantized_linear(x, matrix), exact, tolerance)
    agree(ops.quantized_linear(x[:, :], matrix, bias), exact + bias.float(), tolerance)
    gates: tuple[Gate, ...] = ("silu", "gelu")
    for gate in gates if matrix.outputs % 2 == 0 else ():
        agree(ops.quantized_linear(x, matrix, bias, gate), REFERENCE.apply_gate(exact + bias, gate), 2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 256), (100, 384), (33, 512)], ids=str)
def test_every_layout_multiplies_as_its_numbers_do(ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for name, stored in integers(*shape).items():
        matrix = ops.arranged(stored)
        assert isinstance(matrix, PanelMatrix), name
        torch.testing.assert_close(matrix.values_of(), dequantize_integers(stored), msg=name)
        for rows in (1, 3, 8, 21):
            products(ops, matrix, dtype, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 256), (130, 72), (1, 40), (17, 1)], ids=str)
def test_plain_matrices_of_any_size_multiply(ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = plain(*shape, dtype)
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 70):
        if rows:
            products(ops, matrix, dtype, rows)
        assert ops.panel_linear(torch.zeros(rows, shape[1], dtype=dtype), matrix).shape == (rows, shape[0])


def test_a_row_has_the_same_bits_in_any_batch(ops: NativeOps) -> None:
    matrix, x = plain(96, 320, torch.bfloat16), torch.randn(70, 320).bfloat16()
    whole = ops.panel_linear(x, matrix)
    for first, count in ((0, 1), (3, 2), (5, 4), (1, 8), (9, 17), (20, 33)):
        assert torch.equal(ops.panel_linear(x[first : first + count], matrix), whole[first : first + count])


def test_a_row_in_bfloat16_by_integers_has_the_same_bits_among_up_to_64_rows(ops: NativeOps) -> None:
    """Integer sums are exact, and scaled sums are added up in one order, by every way that rows are multiplied. 64: see
    MANY in `native/kernels.c`."""
    x = torch.randn(64, 256).bfloat16()
    for name, stored in integers(96, 256).items():
        matrix = ops.arranged(stored)
        whole = ops.quantized_linear(x, matrix)
        for first, count in ((0, 1), (3, 2), (5, 4), (1, 8), (9, 17), (20, 33)):
            assert torch.equal(ops.quantized_linear(x[first : first + count], matrix), whole[first : first + count]), (
                name
            )


def test_every_row_has_the_same_bits_where_batches_must_not_matter(
    ops: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "invariant", True)
    x = torch.randn(150, 256).bfloat16()
    for name, stored in integers(96, 256).items():
        matrix = ops.arranged(stored)
        whole = ops.quantized_linear(x, matrix)
        for first, count in ((0, 1), (64, 66), (30, 120)):
            assert torch.equal(ops.quantized_linear(x[first : first + count], matrix), whole[first : first + count]), (
                name
            )


def test_numbers_that_are_not_finite_stay_seen_in_integers(ops: NativeOps) -> None:
    for stored in integers(96, 256).values():
        for bad in (float("nan"), float("inf")):
            x = torch.randn(3, 256).bfloat16()
            x[1, 70] = bad
            made = ops.quantized_linear(x, ops.arranged(stored))
            assert bool(made[[0, 2]].isfinite().all())
            assert not bool(made[1].isfinite().any())


def test_integers_by_rows_in_bfloat16_err_less_than_the_format(ops: NativeOps) -> None:
    """Rows become int8 in blocks of 32, as Q8_0 is: what that adds is below what rounding weights to 8 bits loses."""
    weight, x = torch.randn(96, 512), torch.randn(20, 512).bfloat16()
    scale = (weight.view(96, -1, 32).abs().amax(-1) / 127).half().float()
    eight = (weight.view(96, -1, 32) / scale[..., None]).round().clamp(-127, 127).to(torch.int8).view(96, 512)
    stored = pack_integers(eight, 32, scale)
    rounded, exact = dequantize_integers(stored), x.float() @ weight.t()
    lost = float((x.float() @ rounded.t() - exact).square().mean().sqrt())
    for rows in (1, 8, 20):
        made = ops.quantized_linear(x[:rows], ops.arranged(stored)).float()
        added = float((made - x[:rows].float() @ rounded.t()).square().mean().sqrt())
        assert added < 1.5 * lost + 2**-8 * float(exact.abs().mean())


def test_rows_may_lie_apart_and_columns_be_reordered(ops: NativeOps) -> None:
    stored = integers(48, 256)["8 bits, True"]
    x = torch.randn(5, 600).bfloat16()
    agree(ops.quantized_linear(x[:, 40:296], ops.arranged(stored)), x[:, 40:296].float() @ dequantize(stored).t(), 0.02)
    agree(ops.quantized_linear(x[:, ::2][:, :256], ops.arranged(stored)),
          x[:, ::2][:, :256].float() @ dequantize(stored).t(), 0.02)  # fmt: skip
    moved = stored._replace(order=torch.randperm(256))
    agree(ops.quantized_linear(x[:, :256], ops.arranged(moved)), x[:, :256].float() @ dequantize(moved).t(), 0.02)


def raw_blocks(kind: str, rows: int, columns: int) -> Tensor:
    """Random bytes of a type, with finite factors."""
    stored = next(each for each in KINDS.values() if each.name == kind)
    raw = torch.randint(0, 256, (rows, columns // stored.block, stored.size), dtype=torch.uint8)
    for at in {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0,)):
        raw[..., at + 1] = 0x2C  # float16 of about 0.06
    if kind == "MXFP4":
        raw[..., 0] = torch.randint(118, 130, raw.shape[:2], dtype=torch.uint8)
    return raw.flatten(1)


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_of_a_gguf_file_become_panels_of_the_same_numbers(ops: NativeOps, kind: str) -> None:
    stored, rows, columns = next(each for each in KINDS.values() if each.name == kind), 40, 512
    for narrow in (columns, columns - 32) if stored.block == 32 else (columns,):
        raw = raw_blocks(kind, rows, narrow)
        panels = ops.empty_blocks(kind, rows, narrow)
        assert panels is not None
        for first in (32, 0):  # tiles may arrive in any order
            panels.write(first, raw[first : first + 32])
        matrix = panels.matrix
        assert matrix.padded == narrow or ops.level == "amx"
        wanted = BLOCKS[kind](raw.view(-1, stored.size)).values().view(rows, narrow)
        assert torch.equal(matrix.values_of(), wanted)
        for dtype in DTYPES:
            products(ops, matrix, dtype, 3)
            products(ops, matrix, dtype, 21)


def test_numbers_of_six_bits_lie_as_eight_where_tiles_multiply_them(ops: NativeOps) -> None:
    raw, size = raw_blocks("Q6_K", 40, 512), (40, 512)
    made = []
    for types in (BLOCK_TYPES, TILED_BLOCK_TYPES):
        matrix = empty_blocks(types["Q6_K"], *size, torch.zeros, UNIT)
        write_blocks(ops.library, matrix, types["Q6_K"], 0, raw)
        made.append(matrix)
    assert [matrix.weight.nbytes * 8 // (48 * 512) for matrix in made] == [6, 8]
    assert torch.equal(made[0].values_of(), made[1].values_of())
    if ops.level != "amx":
        for dtype in DTYPES:
            for rows in (1, 2, 9):
                x = torch.randn(rows, 512).to(dtype)
                assert torch.equal(ops.panel_linear(x, made[0]), ops.panel_linear(x, made[1]))


def test_a_row_by_a_gate_of_many_panels_has_the_bits_that_it_has_in_a_batch(ops: NativeOps) -> None:
    """One row reads longer pieces of either half of the matrix, see `task_of` in `native/kernels.c`."""
    for outputs in (2 * 16 * 67, 2 * 16 * 300):
        eight = torch.randint(-127, 128, (outputs, 32), dtype=torch.int8)
        matrices = [
            ops.arranged(pack_integers(eight, 32, torch.full((outputs, 1), 0.01))),
            plain(outputs, 32, torch.bfloat16),
        ]
        x = torch.randn(3, 32).bfloat16()
        for matrix in matrices:
            whole = ops.quantized_linear(x, matrix, None, "silu")
            assert torch.equal(ops.quantized_linear(x[1:2], matrix, None, "silu"), whole[1:2])


def test_rows_of_a_matrix_are_its_values(ops: NativeOps) -> None:
    for name, stored in integers(40, 256).items():
        matrix, which = ops.arranged(stored), torch.tensor([3, 39, 3, 16])
        assert isinstance(matrix, PanelMatrix)
        torch.testing.assert_close(dequantize(matrix.rows(which)), dequantize(stored)[which], msg=name)
        torch.testing.assert_close(dequantize(matrix.rows(slice(5, 30))), dequantize(stored)[5:30], msg=name)
        assert ops.integer_embedding(which, matrix, torch.bfloat16).dtype is torch.bfloat16


def test_matrices_of_several_layouts_multiply_as_one(ops: NativeOps) -> None:
    some = integers(48, 256)
    parts = (some["8 bits, True"], some["superblocks of 4 bits"])
    matrix = ops.arranged(MixedMatrix(parts))
    dense, x, bias = torch.cat([dequantize(part) for part in parts]), torch.randn(3, 256), torch.randn(96)
    agree(ops.quantized_linear(x, matrix, bias, "silu"), REFERENCE.silu_mul(x @ dense.t() + bias), 1e-4)


def test_matrices_of_checkpoints_are_arranged_and_others_stay(ops: NativeOps) -> None:
    scaled = QuantizedMatrix(torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.rand(32, 1))
    arranged, x = ops.arranged(scaled), torch.randn(2, 64)
    assert isinstance(arranged, PanelMatrix)
    agree(ops.quantized_linear(x, arranged), x @ dequantize(scaled).t(), 1e-5)
    float8, nan = (scaled._replace(weight=torch.full((32, 64), n).to(torch.float8_e4m3fn)) for n in (1.5, math.nan))
    halves = float8._replace(scale=torch.rand(32, 2), width=32)
    cut = float8._replace(scale=torch.rand(32, 2), width=128, offset=96)
    for kept in (nan, halves, cut):
        assert ops.arranged(kept) is kept
    for each in (float8, halves, cut):
        agree(ops.quantized_linear(x, ops.arranged(each)), x @ dequantize(each).t(), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 256), (100, 384), (33, 72), (17, 1), (1, 40)], ids=str)
def test_rows_rounded_to_int8_have_the_bits_of_the_reference(
    ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Integer sums are exact, and what scales them has one order. -128 is the number whose size is no int8."""
    stored = QuantizedMatrix(torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(shape[0], 1) / 99)
    matrix = ops.arranged_int8(stored)
    assert isinstance(matrix, PanelMatrix)
    assert torch.equal(matrix.values_of(), dequantize(stored))
    assert matrix.padded == -(-shape[1] // ops.unit) * ops.unit
    for rows in (0, 1, 2, 3, 5, 8, 9, 16, 17, 33, 70):
        x = (torch.randn(rows, shape[1]) * torch.logspace(-3, 3, 70)[:rows, None]).to(dtype)
        x[2:3] = 0
        bias, wider = torch.randn(shape[0]).to(dtype), F.pad(x, (16, 16))[:, 16:-16]
        for each in (None, bias):
            wanted = REFERENCE.rounded_linear(x, stored, each)
            assert torch.equal(ops.rounded_linear(x, matrix, each), wanted), rows
            assert torch.equal(ops.rounded_linear(wider, matrix, each), wanted), rows
        gates: tuple[Gate, ...] = ("silu", "gelu", "relu2")
        for gate in gates if rows and shape[0] % 2 == 0 else ():
            wanted = REFERENCE.rounded_linear(x, stored, bias, gate)
            agree(ops.rounded_linear(x, matrix, bias, gate), wanted, DTYPES[dtype])
    x = torch.randn(3, shape[1]).to(dtype)
    assert torch.equal(ops.rounded_linear(x, stored), REFERENCE.rounded_linear(x, stored))


def test_numbers_that_are_not_finite_stay_seen_where_rows_are_rounded(ops: NativeOps) -> None:
    matrix = ops.arranged_int8(QuantizedMatrix(torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 1)))
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(3, 64).bfloat16()
        x[1, 50] = bad
        made = ops.rounded_linear(x, matrix)
        assert bool(made[[0, 2]].isfinite().all())
        assert not bool(made[1].isfinite().any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 256), (100, 384), (33, 72), (1, 40)], ids=str)
def test_rows_by_float8_have_the_same_bits_in_any_batch_and_are_right(
    ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every number that float8 has, among them those without an exponent."""
    bits = torch.arange(256, dtype=torch.int16).repeat(-(-shape[0] * shape[1] // 256))[: shape[0] * shape[1]]
    bits[bits & 127 == 127] = 3
    weight = bits.to(torch.uint8).view(torch.float8_e4m3fn).view(shape)
    for width in (UNLIMITED, 128, 256):
        groups = 1 if width == UNLIMITED else -(-shape[1] // width)
        stored = QuantizedMatrix(weight, torch.rand(shape[0], groups) + 0.1, width)
        matrix, x, bias = ops.arranged(stored), torch.randn(70, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        assert isinstance(matrix, PanelMatrix)
        assert torch.equal(matrix.values_of(), dequantize(stored))
        whole = ops.quantized_linear(x, matrix, bias)
        agree(whole, x.float() @ dequantize(stored).t() + bias.float(), 4e-3 if dtype is torch.bfloat16 else 1e-5)
        for first, count in ((0, 1), (3, 2), (5, 4), (1, 8), (9, 17), (20, 33)):
            assert torch.equal(
                ops.quantized_linear(x[first : first + count], matrix, bias), whole[first : first + count]
            )
        if shape[0] % 2 == 0:
            gated = REFERENCE.apply_gate(x.float() @ dequantize(stored).t(), "silu")
            agree(ops.quantized_linear(x, matrix, None, "silu"), gated, 2 * DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_norms(ops: NativeOps, centred: bool, dtype: torch.dtype) -> None:
    for size in (1, 15, 16, 72, 128):
        x, residual = (3 * torch.randn(5, size).to(dtype) for _ in range(2))
        for number, other in ((dtype, dtype), (torch.float32, torch.float32), (torch.float32, dtype)):
            bias = torch.randn(size).to(other) if centred else None
            norm = Norm(torch.rand(size).to(number), 1e-5, bias, centred)
            agree(ops.norm(x, norm), REFERENCE.norm(x, norm), DTYPES[dtype])
            for scale in (1.0, 0.3):
                got = ops.add_norm(x, residual.clone(), norm, None, scale)
                wanted = REFERENCE.add_norm(x, residual.clone(), norm, None, scale)
                agree(got[0], wanted[0], 2 * DTYPES[dtype])
                agree(got[1], wanted[1], DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_normed_rotated_and_stored(
    ops: NativeOps, normed: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    heads, groups, dim = 6, 2, 48
    pages = Pages(12, 4)
    batch = pages.batch([(0, 0, [1] * 7), (1, 3, [1, 2]), (2, 8, [5])])
    count = len(batch.tokens)
    qkv = torch.randn(count, (heads + 2 * groups) * dim).to(dtype)
    norms = Norms(*(Norm(torch.rand(dim).to(dtype), 1e-5) for _ in range(2))) if normed else None
    for half in (0, 16, 24):
        angles = Angles(*(torch.randn(count, half) for _ in range(2)), interleaved)
        made = []
        for each in (ops, REFERENCE):
            kv = LayerKV(*(torch.zeros(12, groups, 4, dim, dtype=dtype) for _ in range(2)))
            q = each.qk_norm_rope_store_kv(qkv, heads, kv, batch, angles, norms)
            made.append((q, kv.k, kv.v))
        for got, wanted in zip(*made, strict=True):
            agree(got, wanted, DTYPES[dtype])


SCORES: dict[str, Callable[[int], dict[str, object]]] = {
    "plain": lambda heads: {},
    "window": lambda heads: {"window": 5},
    "chunk": lambda heads: {"chunk": 6},
    "cap": lambda heads: {"soft_cap": 3.0},
    "sinks": lambda heads: {"sinks": torch.randn(heads)},
    "all": lambda heads: {"window": 9, "chunk": 12, "soft_cap": 5.0, "sinks": torch.randn(heads)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", SCORES)
def test_spans_of_any_length_attend(ops: NativeOps, how: str, dtype: torch.dtype) -> None:
    for heads, groups, dim, value_dim in (
        (6, 2, 16, 16),
        (3, 3, 48, 32),
        (8, 1, 64, 64),
        (3, 1, 96, 48),
        (2, 1, 528, 16),
    ):
        scores = Scores(0.25, **SCORES[how](heads))  # type: ignore[arg-type]
        pages = Pages(80, 4)
        kv = poisoned(80, groups, 4, dim, dtype, value_dim=value_dim)
        lengths = {0: 1, 1: 70, 2: 65, 3: 20, 4: 30}
        whole = pages.batch([(s, 0, [1] * n) for s, n in lengths.items()])
        k, v = (torch.randn(len(whole.tokens), groups, size).to(dtype) for size in (dim, value_dim))
        REFERENCE.write_kv(kv, k, v, whole)
        batch = pages.batch([(s, lengths[s] - n, [1] * n) for s, n in ((0, 1), (1, 1), (2, 3), (3, 9), (4, 2))])
        q = torch.randn(len(batch.tokens), heads, dim).to(dtype)
        got = ops.attention(q, kv, ops.prepare(batch), scores)
        wanted = REFERENCE.attention(q.float(), LayerKV(kv.k.float(), kv.v.float()), batch, scores)
        assert got.dtype is dtype
        agree(got, wanted, DTYPES[dtype])


@pytest.mark.parametrize("how", SCORES)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim"),
    [(6, 2, 32, 32), (2, 2, 64, 96), (4, 2, 96, 64), (4, 1, 64, 128), (5, 1, 32, 32), (3, 1, 32, 48), (2, 1, 512, 32)],
)
def test_a_query_attends_to_the_same_bits_whatever_is_attended_with_it(
    ops: NativeOps, how: str, heads: int, groups: int, dim: int, value_dim: int
) -> None:
    """In deterministic mode: of a prompt in one piece, in chunks and token by token; 1 to 5 heads share one of K/V."""
    steady, more, length = InvariantNativeOps(ops.level), SCORES[how](heads), 150
    kv = poisoned(80, groups, 4, dim, torch.bfloat16, value_dim=value_dim)
    pages = Pages(80, 4)
    whole = pages.batch([(0, 0, [1] * length)])
    k, v = (torch.randn(length, groups, size).bfloat16() for size in (dim, value_dim))
    REFERENCE.write_kv(kv, k, v, whole)
    q = torch.randn(length, heads, dim).bfloat16()
    wanted = steady.attention(q, kv, steady.prepare(whole), Scores(0.25, **more))
    for cuts in ((0, 1, 2, 4, 9, 47, 111, 150), (0, 63, 64, 65, 67, 127, 128, 129, 149, 150)):
        for first, last in pairwise(cuts):
            batch = pages.batch([(0, first, [1] * (last - first))])
            got = steady.attention(q[first:last], kv, steady.prepare(batch), Scores(0.25, **more))
            assert torch.equal(got, wanted[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_bits_in_deterministic_mode(ops: NativeOps, dtype: torch.dtype) -> None:
    steady, x = InvariantNativeOps(ops.level), torch.randn(70, 512).to(dtype)
    matrices = [ops.arranged(stored) for stored in integers(96, 512).values()]
    for matrix in (*matrices, *([plain(96, 512, dtype)] if dtype is torch.bfloat16 else [])):
        whole = steady.quantized_linear(x, matrix, None, "silu")
        for first, count in ((0, 1), (3, 2), (5, 4), (1, 8), (9, 17), (20, 33)):
            some = slice(first, first + count)
            assert torch.equal(steady.quantized_linear(x[some], matrix, None, "silu"), whole[some])
    norm = Norm(torch.rand(256).to(dtype), 1e-6)
    assert torch.equal(steady.norm(x[:1, :256], norm), steady.norm(x[:, :256], norm)[:1])


def test_the_best_level_runs_unless_answers_must_not_depend_on_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert isinstance(engine.choose_ops(cpu), NativeOps) is (BEST is not None)
    assert isinstance(engine.choose_ops(cpu, True), InvariantNativeOps) is (BEST is not None)
    assert type(engine.choose_ops(cpu, True, kernels="torch")) is BatchInvariantOps
    monkeypatch.setattr(engine, "best_level", lambda: None)
    assert type(engine.choose_ops(cpu)) is ReferenceOps


@pytest.mark.parametrize("what", ["system", "machine", "missing", "version", "broken"])
def test_where_the_library_does_not_run_there_is_none(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    if what == "system":
        monkeypatch.setattr(library.sys, "platform", "darwin")
    elif what == "machine":
        monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    elif what == "version":
        monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    else:
        file = tmp_path / "libquire_cpu.so"  # type: ignore[operator]
        if what == "broken":
            file.write_bytes(b"no library")
        monkeypatch.setattr(library, "FILE", file)
    assert library.load() is None
    assert best_level() is None


def test_the_library_is_built_from_its_source() -> None:
    built = library.load()
    assert built is not None
    folder = library.FILE.parents[4] / "native"
    source = hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()
    built.quire_source.restype = ctypes.c_char_p
    assert built.quire_source().decode() == source, "run native/build.sh src/quire/ops/native/libquire_cpu.so"
    assert library.FILE.stat().st_size < 2 << 20


def test_an_instruction_set_can_be_chosen_and_one_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.choose_level("torch") is None
    assert type(engine.choose_ops(torch.device("cpu"), kernels="torch")) is ReferenceOps
    monkeypatch.setattr(engine, "best_level", lambda: "avx512")
    assert (engine.choose_level("auto"), engine.choose_level("avx512")) == ("avx512", "avx512")
    with pytest.raises(
        InvalidConfig, match="--cpu-kernels amx: this processor has no such instructions; it has avx2, avx512"
    ):
        engine.choose_level("amx")
    monkeypatch.setattr(engine, "best_level", lambda: None)
    assert engine.choose_level("auto") is None
    with pytest.raises(InvalidConfig, match="none of them"):
        engine.choose_level("avx512")


def test_threads_are_those_of_torch() -> None:
    assert None not in library.team_functions()


@pytest.mark.parametrize(("outputs", "inputs", "unit"), [(48, 64, 32), (33, 40, 32), (16, 130, 128), (1, 4, 32)])
def test_int8_rows_are_packed_some_at_a_time_as_all_at_once(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, unit: int
) -> None:
    monkeypatch.setattr(panels, "AT_ONCE", 1)
    numbers, scale = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs, 1)
    made, wanted = int8_panels(numbers, scale, unit, torch.zeros), in_panels(pack_rows(numbers, scale), unit)
    assert made.weight.equal(wanted.weight) and made.scale is not None and made.scale.equal(wanted.scale)
    assert (made.padded, made.group, made.kind, made.scale_kind) == (
        *(wanted.padded, wanted.group, wanted.kind, wanted.scale_kind),
    )
    assert made.values_of().equal(numbers.float() * scale)


ZEROS = {
    "none": lambda *shape: torch.full(shape, 8.0),
    "some": lambda *shape: torch.randint(0, 16, shape).float(),
    "all 0": torch.zeros,
}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(64, 256, 64), (40, 192, 32), (33, 576, 64), (48, 320, 128), (20, 512, 256)]
)
def test_int4_is_packed_from_the_checkpoints_bytes_as_from_its_numbers(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, group: int, zeros: str
) -> None:
    monkeypatch.setattr(panels, "AT_ONCE", 1)
    weight, count = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8), -(-inputs // group)
    scale, groups = torch.rand(outputs, count).half().float(), torch.arange(inputs) // group
    matrix = QuantizedMatrix(weight, scale, zero=ZEROS[zeros](outputs, count), groups=groups)
    whole = integers_of(matrix)
    assert whole is not None
    for unit in (32, 128):
        made, wanted = packing.int4_panels(matrix, unit, torch.zeros), in_panels(whole, unit)
        assert made is not None
        assert (made.padded, made.group, made.kind, made.scale_kind) == (
            *(wanted.padded, wanted.group, wanted.kind, wanted.scale_kind),
        )
        for name in ("weight", "scale", "zero", "values"):
            ours, theirs = getattr(made, name), getattr(wanted, name)
            assert (ours is None) == (theirs is None) and (ours is None or ours.equal(theirs)), name


def test_columns_that_are_moved_are_packed_from_their_numbers() -> None:
    weight, scale = torch.randint(0, 256, (16, 64), dtype=torch.uint8), torch.ones(16, 2)
    moved = torch.arange(128) % 2
    assert packing.int4_panels(QuantizedMatrix(weight, scale, zero=scale, groups=moved), 32, torch.zeros) is None
