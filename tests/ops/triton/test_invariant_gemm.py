"""Products of 16-bit matrices whose rows have the same bits in any batch, though tiles differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.gemm import autotuning
from quire.ops.operands import Gate
from quire.ops.reference import ReferenceOps
from quire.ops.triton import invariant_gemm
from quire.ops.triton.gemv import GemmConfig
from quire.ops.triton.invariant_gemm import is_faster, runs_of, tile_of
from quire.ops.triton.launch import DeviceInfo, block
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from tests.ops.triton.device import DEVICE
from tests.ops.triton.test_batch_invariant import alike

__all__ = ["alike"]  # a fixture: the interpreter's products do not depend on a tile's shape

OPS, REFERENCE = BatchInvariantTritonOps(DEVICE), ReferenceOps()
KIND = torch.float16


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 1100), (136, 272)])
@pytest.mark.parametrize(("busy", "one_run_from"), [(1, 4096), (264, 4096), (264, 40)])
def test_a_row_has_the_same_bits_in_any_batch_and_is_right(
    gate: Gate, outputs: int, inputs: int, busy: int, one_run_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant_gemm, "WHOLE", one_run_from)
    torch.manual_seed(0)
    x = torch.randn(300, inputs, dtype=KIND, device=DEVICE)
    weight = torch.randn(outputs, inputs, dtype=KIND, device=DEVICE) / inputs**0.5
    bias = torch.randn(outputs, dtype=KIND, device=DEVICE)
    whole = OPS.linear(x, weight, bias, gate)
    want = REFERENCE.linear(x.float(), weight.float(), bias.float(), gate)
    assert float((whole.float() - want).norm() / want.norm()) < 2e-3
    monkeypatch.setattr(invariant_gemm, "BUSY", busy)
    for start, count in ((0, 1), (299, 1), (5, 17), (2, 65), (0, 257)):
        got = OPS.linear(x[start : start + count], weight, bias, gate)
        assert torch.equal(got, whole[start : start + count]), (start, count)
    assert not OPS.arrived.any()


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("each", "inputs"), [(32, 512), (48, 300), (56, 256)])
def test_a_tile_may_have_fewer_outputs_than_the_units_take(
    gate: Gate, each: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    outputs = 2 * each + 40  # the last tile has few
    x = torch.randn(3, inputs, dtype=KIND, device=DEVICE)
    weight = torch.randn(outputs * (1 + bool(gate)), inputs, dtype=KIND, device=DEVICE) / inputs**0.5
    monkeypatch.setattr(invariant_gemm, "WHOLE", 16)
    usual = OPS.linear(x, weight, None, gate)
    monkeypatch.setattr(invariant_gemm, "tile_of", lambda *_: GemmConfig(16, each, 64, 4, 3, 128))
    assert torch.equal(OPS.linear(x, weight, None, gate), usual)


HOPPER = DeviceInfo(sms=132, capability=(9, 0))


def test_tiles_that_are_faster_serve_few_rows_in_default_mode_too() -> None:
    def shapes(rows: int, card: DeviceInfo = HOPPER) -> list[bool]:
        plain = [is_faster(rows, outputs, False, card) for outputs in (4088, 4096, 8192, 10240)]
        return plain + [is_faster(rows, outputs, True, card) for outputs in (8192, 12288, 14336, 28672)]

    assert shapes(2) == shapes(16) == [False, True, True, True, False, False, True, True]
    assert not any(shapes(1) + shapes(17) + shapes(8, replace(HOPPER, capability=(10, 0))))


@pytest.mark.parametrize("gate", ["", "silu"])
def test_default_mode_multiplies_by_them(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_gemm, "is_faster", lambda rows, *_: rows == 5)
    x = torch.randn(6, 256, device=DEVICE).bfloat16()
    weight, bias = torch.randn(96, 256, device=DEVICE).bfloat16(), torch.randn(96, device=DEVICE).bfloat16()
    calls, plain, multiply = list[int](), TritonOps(DEVICE), invariant_gemm.multiply

    def counted(x: Tensor, *others: Any) -> None:
        calls.append(len(x))
        multiply(x, *others)

    monkeypatch.setattr(invariant_gemm, "multiply", counted)
    for rows in (4, 5, 6):
        got, want = plain.linear(x[:rows], weight, bias, gate), REFERENCE.linear(x[:rows], weight, bias, gate)
        torch.testing.assert_close(got.float(), want.float(), atol=0.4, rtol=2e-2)
    assert calls == [5]
    assert not plain.arrived.any()


def test_several_runs_are_added_in_order_whoever_computes_them() -> None:
    assert runs_of(40, 1100, False) == (768, 2)
    assert runs_of(2048, 8192, False) == (1024, 8)


def test_a_matrix_of_many_outputs_has_one_run_whose_order_a_library_has_too() -> None:
    assert runs_of(4096, 14336, False) == (14336, 1)
    assert runs_of(28672, 4096, True) == (4096, 1)
    assert runs_of(128256, 4096, False) == (4096, 1)


@pytest.mark.parametrize("gated", [True, False])
def test_every_tile_divides_a_run_and_fits(gated: bool) -> None:
    card = DeviceInfo(sms=0, shared=227 << 10)
    for rows in (1, 16, 17, 64, 65, 256, 257, 8192):
        for outputs in (64, 4096, 6144, 128256):
            tile = tile_of(rows, outputs, gated)
            assert invariant_gemm.RUN % tile.inputs == 0
            whole = tile._replace(outputs=block(tile.outputs, 64))
            assert whole.outputs % 64 == 0 and tile.warps % 4 == 0, "the matrix units take 64 outputs by four warps"
            assert whole.fitted(card, 4 if gated else 2, 2).stages == tile.stages


@pytest.mark.parametrize("outputs", [4096, 5120, 6144, 8192])
def test_outputs_of_few_rows_are_dealt_out_to_every_multiprocessor(outputs: int) -> None:
    each = tile_of(1, outputs, False).outputs
    assert each <= 64 and 100 < -(-outputs // each) <= 128
    for gated in (4096, 9728, 12288, 14336, 28672):
        each = tile_of(1, gated, True).outputs
        count = -(-gated // each)
        assert (each <= 64 and count <= 128) or 230 < count <= 256 or 500 < count <= 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [4096, 6144])
def test_sums_of_any_tile_are_equal_before_they_are_rounded(outputs: int, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    size = torch.randint(-9, 5, (700, 14336), device=DEVICE)
    x = (torch.randn(700, 14336, device=DEVICE) * 2.0**size).to(kind)
    weight = torch.randn(outputs, 14336, dtype=kind, device=DEVICE)

    def sums(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), outputs, device=DEVICE)
        invariant_gemm.multiply(rows, weight, None, out, runs_of(outputs, 14336, False), OPS.card, OPS.arrived, "")
        return out

    whole = sums(x)
    for count in (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257):
        assert torch.equal(sums(x[3 : 3 + count]), whole[3 : 3 + count]), count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inputs", [1024, 4096, 14336])
@pytest.mark.parametrize("outputs", [1024, 4096, 12288])
def test_tiles_of_real_size_have_the_same_bits(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1500, inputs, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) / inputs**0.5

    def same(gate: Gate) -> Tensor:
        whole = OPS.linear(x, weight, None, gate)
        for count in (1, 8, 16, 24, 33, 64, 100, 128, 200, 256, 300, 777):
            assert torch.equal(OPS.linear(x[7 : 7 + count], weight, None, gate), whole[7 : 7 + count]), (gate, count)
        return whole

    want = x.double() @ weight.double().T
    assert float((same("").double() - want).norm() / want.norm()) < 4e-3
    same("silu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "kind"),
    [
        (28672, 4096, torch.bfloat16),
        (6144, 4096, torch.float16),
        (4096, 4096, torch.bfloat16),
        (4096, 14336, torch.bfloat16),
        (4096, 14336, torch.float16),
    ],
)
def test_products_of_the_library_have_the_same_bits(
    gate: Gate, biased: bool, outputs: int, inputs: int, kind: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    ops = BatchInvariantTritonOps(DEVICE)
    x = torch.randn(1500, inputs, dtype=kind, device=DEVICE)
    weight = torch.randn(outputs, inputs, dtype=kind, device=DEVICE) / 64
    bias = torch.randn(outputs, dtype=kind, device=DEVICE) if biased else None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), autotuning(tmp_path / "book.json"):
        stream.wait_stream(torch.cuda.default_stream())
        whole = ops.linear(x, weight, bias, gate)
        for count in (1, 9, 16, 17, 64, 127, 128, 256, 512, 777):
            assert torch.equal(ops.linear(x[7 : 7 + count], weight, bias, gate), whole[7 : 7 + count]), count
    stream.synchronize()
    assert torch.equal(OPS.linear(x, weight, bias, gate), whole), "without the library"
    if torch.cuda.get_device_capability()[0] == 9:
        assert any(way is not ops.gemm.usual for way in ops.gemm.known.values())
