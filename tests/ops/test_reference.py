"""The small operations against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops import quantized
from quire.ops.matmul import can_pack, pack, packed_linear
from quire.ops.operands import XIELU, Angles, Norm, Norms
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from tests.ops.batches import Pages

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
    torch.testing.assert_close(OPS.norm(x, Norm(weight, 0.1)).double(), exact, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("centred", [False, True])
def test_add_norm_norms_scales_adds_and_norms_again(centred: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = torch.randn(4, 12).to(dtype), torch.randn(4, 12).to(dtype), torch.rand(12).to(dtype)
    norm, first = Norm(weight, 1e-5, None, centred), Norm(weight.flip(0), 0.1, weight if centred else None, centred)
    for before, scale in ((None, 1.0), (first, 1.0), (None, 0.3), (first, 0.3)):
        total = (OPS.norm(x, before) if before else x) * scale + residual
        normed, stream = OPS.add_norm(x, residual.clone(), norm, before, scale)
        torch.testing.assert_close(stream, total, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(normed, OPS.norm(total, norm), atol=tolerance, rtol=tolerance)
        bare = OPS.add_norm(x, residual.clone(), None, before, scale)
        assert bare[0] is bare[1]
        assert torch.equal(bare[1], stream)


def test_layer_norm_centres_scales_and_shifts() -> None:
    x, weight, bias = torch.randn(4, 12), torch.randn(12), torch.randn(12)
    centred = x - x.mean(-1, keepdim=True)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight + bias
    torch.testing.assert_close(OPS.norm(x, Norm(weight, 0.1, bias, centred=True)), exact)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_rope_rotates_pairs_by_their_angles_and_keeps_the_rest(
    t: int, h: int, g: int, half: int, rest: int, interleaved: bool
) -> None:
    dim = 2 * half + rest
    if not dim:
        return
    torch.manual_seed(t)
    q, k, angle = torch.randn(t, h, dim), torch.randn(t, g, dim), torch.randn(t, half)
    for x, got in zip((q, k), OPS.rope(q, k, Angles(angle.cos(), angle.sin(), interleaved)), strict=True):
        assert got.shape == x.shape
        for i in range(t):
            for pair in range(half):
                c, s = math.cos(angle[i, pair]), math.sin(angle[i, pair])
                turn = torch.tensor([[c, -s], [s, c]])
                both = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + half]
                torch.testing.assert_close(got[i, :, both], x[i, :, both] @ turn.T, atol=1e-5, rtol=1e-5)
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
    how = XIELU(*torch.tensor([[0.3], [-0.6], [0.5]]))
    p, n, x = how.positive.double().exp().log1p(), 0.5 + how.negative.double().exp().log1p(), gate.double()
    bent = torch.where(x > 0, p * x * x, n * (torch.expm1(x.clamp(max=0)) - x)) + 0.5 * x
    torch.testing.assert_close(OPS.xielu(gate, how).double(), bent, atol=tolerance, rtol=tolerance)
    relu = gate.double().clamp(0)
    torch.testing.assert_close(OPS.relu(gate).double(), relu)
    torch.testing.assert_close(OPS.relu_mul(fused).double(), relu * up.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(OPS.relu2(gate).double(), gate.double().clamp(0) ** 2, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("together", "after"), [(False, False), (True, False), (False, True)])
def test_queries_and_keys_are_normed_head_by_head_or_together_before_or_after_rope(together: bool, after: bool) -> None:
    torch.manual_seed(0)
    batch, heads, dim = Pages(4, 8).batch([(0, 0, [0] * 5)]), 3, 8
    qkv, angle, gain = torch.randn(5, (heads + 2) * dim), torch.randn(5, dim // 2), torch.rand(5) + 1
    norms = Norms(Norm(torch.rand((heads if together else 1) * dim), 0.1), Norm(torch.rand(dim), 0.2), after)
    kv, angles = LayerKV(*torch.zeros(2, 4, 1, 8, dim)), Angles(angle.cos(), angle.sin(), query_gain=gain)
    got = OPS.qk_norm_rope_store_kv(qkv, heads, kv, batch, angles, norms)

    def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        square = x.square().mean((1, 2) if together else 2, keepdim=True)
        return x / (square + norm.eps).sqrt() * norm.weight.view(-1, dim)

    q, k = qkv[:, : heads * dim].view(5, heads, dim), qkv[:, heads * dim : (heads + 1) * dim].view(5, 1, dim)
    if after:
        q, k = OPS.rope(q, k, angles)
    q, k = normed(q, norms.q), normed(k, norms.k)
    if not after:
        q, k = OPS.rope(q, k, angles)
    torch.testing.assert_close(got, q * gain[:, None, None])
    torch.testing.assert_close(kv.k[batch.slots // 8, :, batch.slots % 8], k)


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


@pytest.mark.parametrize("by_torch", [True, False])
def test_products_of_integers_are_exact_where_torch_s_own_are_not(
    by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without VNNI they are cut to 16 bits on the way, and of one column on any."""
    trusted = by_torch and quantized.adds_exactly()
    monkeypatch.setattr(quantized, "adds_exactly", lambda: trusted)
    for columns in (1, 72, 2500):
        a, b = (torch.randint(-128, 128, (rows, columns), dtype=torch.int8) for rows in (5, 33))
        a[0], b[0] = 127, -128
        assert torch.equal(quantized.integer_product(a, b), (a.long() @ b.long().t()).float())
