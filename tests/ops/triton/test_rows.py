"""Norms, activations and the kernel between projection and attention, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from quire.ops.operands import XIELU, Angles, Norm, Norms
from quire.ops.quantized import E4M3, FLOAT8, Float8
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import TritonOps
from quire.ops.triton.rows import norm_warps, turns_halves
from tests.ops.batches import Pages
from tests.ops.triton.device import DEVICE, moved
from tests.pairs import pairwise

OPS, REFERENCE = TritonOps(DEVICE), ReferenceOps()
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])


def test_norms_are_summed_alike_in_any_batch_where_bits_matter() -> None:
    counts = (1, 32, 33, 64, 132, 133, 4096)
    assert [norm_warps(4096, each, DeviceInfo(sms=132)) for each in counts] == [8, 8, 16, 16, 16, 8, 8]
    assert {norm_warps(4096, each, DeviceInfo(sms=0)) for each in counts} == {8}


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 4, 130)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = (torch.randn(s).to(dtype).to(DEVICE) for s in (shape, shape, shape[-1:], shape[-1:]))
    close = {"atol": tolerance, "rtol": tolerance}
    for norm in (Norm(weight, 0.1), Norm(weight, 0.1, bias, centred=True), Norm(weight.float(), 0.1, centred=True)):
        torch.testing.assert_close(OPS.norm(x, norm), REFERENCE.norm(x, norm), **close)
        gain = torch.tensor([0.5], dtype=dtype, device=DEVICE)
        for last, first, scale, times in (
            (norm, None, 1.0, None),
            (norm, norm._replace(eps=0.2), 0.3, gain),
            (None, norm, 1.0, None),
            (None, None, 1.0, gain),
        ):
            want, stream = REFERENCE.add_norm(x, residual.clone(), last, first, scale, times)
            got, total = OPS.add_norm(x, residual.clone(), last, first, scale, times)
            torch.testing.assert_close(total, stream, **close)
            torch.testing.assert_close(got, want, **close)


@DTYPES
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_several_norms_of_one_sum_and_the_sum_of_two(
    count: int, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Bit for bit what norms one after the other make; on a card as far as sums in another order allow."""
    torch.manual_seed(count)
    x, residual, *weights = (torch.randn(s).to(dtype).to(DEVICE) for s in [(5, 130)] * 2 + [(130,)] * (count + 2))
    before, other, *norms = (
        Norm(each, 0.1 * (i + 1), each if kind == "layer" else None, centred=kind == "layer")
        for i, each in enumerate(weights)
    )
    gain = torch.tensor([0.5], dtype=dtype, device=DEVICE)
    first, total = OPS.add_norm(x, residual.clone(), norms[0], before, 0.3, gain)
    got, stream = OPS.add_norms(x, residual.clone(), norms, before, 0.3, gain)
    close = dict.fromkeys(("atol", "rtol"), tolerance if DEVICE.type == "cuda" else 0.0)
    torch.testing.assert_close(stream, total, atol=0, rtol=0)
    torch.testing.assert_close(got, [first, *(OPS.norm(total, each) for each in norms[1:])], **close)
    wanted = OPS.add_norm(x, OPS.norm(residual, other), None, before)[1]
    torch.testing.assert_close(OPS.sum_norms(x, before, residual.clone(), other), wanted, **close)
    exact, sums = REFERENCE.add_norms(x, residual.clone(), norms, before, 0.3, gain)
    torch.testing.assert_close((got, stream), (exact, sums), atol=2 * tolerance, rtol=2 * tolerance)


@DTYPES
def test_activations(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x = 6 * torch.randn(3, 2100).to(dtype).to(DEVICE)
    for name in ("silu_mul", "gelu_mul", "gelu_erf_mul", "relu_mul", "gelu", "gelu_erf", "relu2"):
        want = getattr(REFERENCE, name)(x.clone())
        torch.testing.assert_close(getattr(OPS, name)(x), want, atol=tolerance, rtol=tolerance)
    how = XIELU(*torch.tensor([[0.3], [-0.6], [0.5]], device=DEVICE))
    torch.testing.assert_close(OPS.xielu(x, how), REFERENCE.xielu(x, how), atol=tolerance, rtol=tolerance)


AXES = {
    "spans": ([(0, 0, 1), (1, 0, 3)], [(0, 0, 40), (1, 0, 3)]),
    "sizes": ((4, 2, 16, 8), (7, 1, 24, 8), (3, 3, 8, 0)),
    "norms": (
        ("halves", ""),
        ("halves", "heads"),
        ("neighbours", "whole"),
        ("neighbours", "after"),
        ("halves", "values"),
    ),
    "dtype": ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)),
}
BY_DAY = [*map(list, map(dict.values, pairwise(AXES)))]
"""Of the interpreter: every pair of values."""


@pytest.mark.parametrize(
    ("spans", "heads", "groups", "dim", "half", "turned", "normed", "dtype", "tolerance"),
    [
        pytest.param(
            spans,
            *sizes,
            *norms,
            *dtype,
            marks=() if DEVICE.type == "cuda" or [spans, sizes, norms, dtype] in BY_DAY else pytest.mark.nightly,
        )
        for spans, sizes, norms, dtype in product(*AXES.values())
    ],
)
def test_heads_are_normed_rotated_and_stored(
    spans: list[tuple[int, int, int]], heads: int, groups: int, dim: int, half: int, turned: str, normed: str,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    batch = moved(Pages(30, 4).batch([(s, past, [0] * n) for s, past, n in spans]))
    tokens = len(batch.slots)
    qkv = torch.randn(tokens, (heads + 2 * groups) * dim).to(dtype).to(DEVICE)
    angle = torch.randn(tokens, half, device=DEVICE)
    wide = normed == "whole"
    weights = [torch.randn((n if wide else 1) * dim).to(dtype).to(DEVICE) for n in (heads, groups)]

    def norms(dtype: torch.dtype) -> Norms | None:
        each = [Norm(weight.to(dtype), eps) for weight, eps in zip(weights, (0.1, 0.2), strict=True)]
        values = 0.3 if normed == "values" else None
        return Norms(*each, after_rope=normed == "after", v_eps=values) if normed else None

    got = torch.zeros(2, 30, groups, 4, dim, dtype=dtype, device=DEVICE)
    want = torch.zeros_like(got, dtype=torch.float32)
    gain = torch.rand(tokens, device=DEVICE) + 0.5 if turned == "neighbours" else None
    turn = Angles(angle.cos(), angle.sin(), turned == "neighbours", gain)
    q = OPS.qk_norm_rope_store_kv(qkv, heads, LayerKV(*got), batch, turn, norms(dtype))
    expected = REFERENCE.qk_norm_rope_store_kv(qkv.float(), heads, LayerKV(*want), batch, turn, norms(torch.float32))
    torch.testing.assert_close(q.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dim", "half"), [(12, 3), (16, 8)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_gates_between_the_heads_of_queries_are_left_out_and_multiply_results(
    dtype: torch.dtype, tolerance: float, dim: int, half: int
) -> None:
    """Whether a part of a head is rotated, or all of it, by halves, which has a kernel of its own without gates."""
    torch.manual_seed(0)
    tokens, heads, groups = 7, 6, 2
    batch = moved(Pages(30, 4).batch([(0, 2, [0] * tokens)]))
    made = torch.randn(tokens, 2 * (heads + groups) * dim).to(dtype).to(DEVICE)
    angle = torch.randn(tokens, half, device=DEVICE)
    norm, turn = Norm(torch.randn(dim, device=DEVICE), 0.1), Angles(angle.cos(), angle.sin())
    got = torch.zeros(2, 30, groups, 4, dim, dtype=dtype, device=DEVICE)
    want = torch.zeros_like(got, dtype=torch.float32)
    q = OPS.qk_norm_rope_store_kv(made, heads, LayerKV(*got), batch, turn, Norms(norm, norm), gated=True)
    asked, gate = made[:, : 2 * heads * dim].view(tokens, heads, 2, dim).unbind(2)
    plain = torch.cat((asked.flatten(1), made[:, 2 * heads * dim :]), 1).float()
    expected = REFERENCE.qk_norm_rope_store_kv(plain, heads, LayerKV(*want), batch, turn, Norms(norm, norm))
    torch.testing.assert_close(q.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    weighed = OPS.sigmoid_mul(q, gate)
    torch.testing.assert_close(weighed.float(), q.float() * gate.float().sigmoid(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("normed", "dtype"), [(False, torch.float32), (True, torch.float32), (False, E4M3)], ids=str)
def test_many_heads_are_turned_by_halves(normed: bool, dtype: torch.dtype) -> None:
    """More heads than `FEW_HEADS`, and than 16 for each multiprocessor."""
    torch.manual_seed(0)
    tokens, heads, groups, dim = 140, 11, 3, 16
    batch = moved(Pages(60, 4).batch([(0, 0, [0] * 90), (1, 3, [0] * 50)]))
    qkv, angle = torch.randn(tokens, (heads + 2 * groups) * dim, device=DEVICE), torch.randn(tokens, 8, device=DEVICE)
    if dtype is E4M3:  # held exactly: the interpreter rounds badly
        qkv, angle = qkv.round(), angle * 0
    norms = Norms(*(Norm(torch.randn(dim, device=DEVICE), eps) for eps in (0.1, 0.2))) if normed else None
    turn = Angles(angle.cos(), angle.sin())
    assert turns_halves(turn, dim, norms)
    got, want = (torch.zeros(2, 60, groups, 4, dim, device=DEVICE).to(dtype) for _ in range(2))
    made, expected = (
        ops.qk_norm_rope_store_kv(qkv, heads, LayerKV(*pool, k_scale=0.5, v_scale=0.25), batch, turn, norms)
        for ops, pool in ((OPS, got), (REFERENCE, want))
    )
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.float(), want.float(), atol=1e-5, rtol=1e-5)
    assert not turns_halves(turn._replace(interleaved=True), dim, norms)
    assert not turns_halves(turn, dim + 2, norms)
    if not normed:
        few, near = replace(batch, slots=batch.slots[:3]), turn._replace(cos=turn.cos[:3], sin=turn.sin[:3])
        again = OPS.qk_norm_rope_store_kv(qkv[:3], heads, LayerKV(*torch.zeros_like(got)), few, near)
        assert torch.equal(again, made[:3]), "as the kernel of few heads rounds"


def test_queries_alone_are_normed_and_rotated_and_nothing_is_stored() -> None:
    torch.manual_seed(0)
    batch = moved(Pages(30, 4).batch([(0, 0, [0] * 3)]))
    q, angle = torch.randn(3, 4 * 16, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    norm, turn = Norm(torch.randn(16, device=DEVICE), 0.1), Angles(angle.cos(), angle.sin())
    pool = torch.zeros(2, 30, 2, 4, 16, device=DEVICE)
    got, want = (
        ops.qk_norm_rope_store_kv(q, 4, LayerKV(*pool), batch, turn, Norms(norm, norm, v_eps=0.1))
        for ops in (OPS, REFERENCE)
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert not pool.any()


@pytest.mark.parametrize("form", FLOAT8.values(), ids=FLOAT8)
def test_blocks_of_eight_bits_saturate(form: Float8) -> None:
    torch.manual_seed(0)
    batch = moved(Pages(30, 4).batch([(0, 0, [0] * 5)]))
    qkv = torch.randint(-3, 4, (5, 4 * 16), device=DEVICE).float()  # held exactly: the interpreter rounds badly
    qkv[:, ::7] = 1e6
    angles = Angles(torch.zeros(5, 0, device=DEVICE), torch.zeros(5, 0, device=DEVICE))
    got, want = (torch.zeros(2, 30, 1, 4, 16, device=DEVICE).to(form.dtype) for _ in range(2))
    for ops, pool in ((OPS, got), (REFERENCE, want)):
        ops.qk_norm_rope_store_kv(qkv, 2, LayerKV(*pool, k_scale=0.5, v_scale=2.0), batch, angles)
    assert torch.equal(got.float(), want.float())
    assert float(got.float().abs().max()) == form.most
