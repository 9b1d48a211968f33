"""The small operations against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.matmul import can_pack, pack, packed_linear
from quire.ops.reference import ReferenceOps

OPS = ReferenceOps()
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 4, 16)])
def test_rms_norm_divides_by_the_root_of_the_mean_square(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    torch.testing.assert_close(OPS.rms_norm(x, weight, 0.1).double(), exact, atol=tolerance, rtol=tolerance)


@DTYPES
def test_add_rms_norm_also_returns_the_sum(dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = torch.randn(4, 12).to(dtype), torch.randn(4, 12).to(dtype), torch.rand(12).to(dtype)
    total = x + residual
    normed, stream = OPS.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(normed, OPS.rms_norm(total, weight, 1e-5), atol=tolerance, rtol=tolerance)


def test_layer_norm_centres_scales_and_shifts() -> None:
    x, weight, bias = torch.randn(4, 12), torch.randn(12), torch.randn(12)
    centred = x - x.mean(-1, keepdim=True)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight + bias
    torch.testing.assert_close(OPS.layer_norm(x, weight, bias, 0.1), exact)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 3))
def test_rope_rotates_pairs_by_their_angles_and_keeps_the_rest(t: int, h: int, g: int, half: int, rest: int) -> None:
    dim = 2 * half + rest
    if not dim:
        return
    torch.manual_seed(t)
    q, k, angle = torch.randn(t, h, dim), torch.randn(t, g, dim), torch.randn(t, half)
    for x, got in zip((q, k), OPS.rope(q, k, angle.cos(), angle.sin()), strict=True):
        assert got.shape == x.shape
        for i in range(t):
            for pair in range(half):
                c, s = math.cos(angle[i, pair]), math.sin(angle[i, pair])
                turn = torch.tensor([[c, -s], [s, c]])
                want = x[i, :, [pair, pair + half]] @ turn.T
                torch.testing.assert_close(got[i, :, [pair, pair + half]], want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[..., 2 * half :], x[..., 2 * half :])


@DTYPES
def test_gated_activations_take_the_gate_first(dtype: torch.dtype, tolerance: float) -> None:
    gate, up = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    fused = torch.cat((gate, up), -1)
    silu = gate.double() / (1 + (-gate.double()).exp())
    inner = math.sqrt(2 / math.pi) * (gate.double() + 0.044715 * gate.double() ** 3)
    gelu = 0.5 * gate.double() * (1 + inner.tanh())
    torch.testing.assert_close(OPS.silu_mul(fused).double(), silu * up.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(OPS.gelu_mul(fused).double(), gelu * up.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(OPS.gelu(gate).double(), gelu, atol=tolerance, rtol=tolerance)


CPU = torch.device("cpu")
PACKABLE = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, CPU)]


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("rows", [1, 3, 8, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_matrix_multiplies_like_the_plain_one(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 50).to(dtype)
    x, b = torch.randn(rows, 50).to(dtype), torch.randn(70).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(packed_linear(x, pack(weight), b).double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("shape", [(128, 80), (512, 256), (320, 96)])
def test_a_packed_product_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, x = pack(torch.randn(shape).to(dtype)), torch.randn(40, shape[1]).to(dtype)
    whole = packed_linear(x, weight, None)
    for count in (1, 2, 3, 8, 17):
        assert torch.equal(packed_linear(x[:count], weight, None), whole[:count])


def test_only_what_the_cpu_computes_in_is_packed() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))
