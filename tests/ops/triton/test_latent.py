"""Latent attention: keys and values as they would be made of every latent, in a naive loop, and kernels beside the
reference, over pools that are NaN wherever no sequence wrote."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from quire.ops.base import Ops
from quire.ops.batch_invariant import BatchInvariantOps
from quire.ops.operands import Angles, Norm
from quire.ops.quantized import FLOAT8, Float8
from quire.ops.ragged import LayerKV
from quire.ops.reference import ReferenceOps
from quire.ops.triton.attention import latent_tiles
from quire.ops.triton.attention_schedule import FIELDS
from quire.ops.triton.latent_mma import combine_kernel, takes
from quire.ops.triton.launch import DeviceInfo
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.types import UNLIMITED
from tests.ops.batches import Pages, poisoned
from tests.ops.test_attention import naive
from tests.ops.triton.device import DEVICE, moved
from tests.ops.triton.test_attention import DECODE, MIXED, VERIFY, Spans

REFERENCE = ReferenceOps()
IMPLEMENTATIONS = {
    "reference": REFERENCE,
    "invariant": BatchInvariantOps(),
    "kernels": TritonOps(DEVICE),
    "invariant-kernels": BatchInvariantTritonOps(DEVICE),
}

MANY: Spans = [(37 * i % 190, 1) for i in range(19)]
"""More than have one piece a program."""
HOPPER = DeviceInfo(132, (9, 0), shared=227 << 10)
NEEDS_CARD = pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter does not run Gluon")


def check(
    ops: Ops, spans: Spans, heads: int, latents: int, rotated: int, page: int = 16,
    dtype: torch.dtype = torch.float32, tolerance: float = 2e-5,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    count = 2 + sum(-(-(past + n) // page) for past, n in spans)
    pages, kv = Pages(count, page, 0), poisoned(count, 1, page, rotated, dtype, value_dim=latents)
    held = [torch.randn(past + n, 1, latents + rotated, dtype=dtype) for past, n in spans]
    for past, n in ((0, [past for past, _ in spans]), (1, [n for _, n in spans])):
        fed = [(i, spans[i][0] * past, count) for i, count in enumerate(n) if count]
        if not fed:
            continue
        batch = pages.batch([(i, start, [0] * count) for i, start, count in fed], spare=2)
        whole = torch.cat([held[i][start : start + count] for i, start, count in fed])
        REFERENCE.write_kv(kv, whole[..., latents:], whole[..., :latents], batch)
    q = torch.randn(len(batch.slots), heads, latents + rotated, dtype=dtype)
    apart = (q[..., :latents].contiguous().to(DEVICE), q[..., latents:].contiguous().to(DEVICE))
    got = ops.latent_attention(*apart, moved(kv), moved(batch), 0.3).cpu()
    assert got.shape == (len(q), heads, latents)
    starts = batch.query_start.tolist()
    for i, each in enumerate(held):
        own = slice(starts[i], starts[i + 1])
        want = naive(q[own], each, each[..., :latents], 0.3, UNLIMITED, 0.0)
        torch.testing.assert_close(got[own].double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("spans", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
def test_any_mixture_of_spans_attends_as_the_naive_loop(ops: Ops, spans: Spans) -> None:
    check(ops, spans, 6, 24, 10)


@pytest.mark.parametrize("heads", [1, 5, 16, 20, 40, 64, 128])
@pytest.mark.parametrize("page", [4, 64])
def test_any_number_of_heads_shares_latents(heads: int, page: int) -> None:
    check(IMPLEMENTATIONS["kernels"], [(70, 1), (3, 4)], heads, 32, 8, page)


def test_a_long_context_is_split_and_combined() -> None:
    check(IMPLEMENTATIONS["kernels"], [(900, 1), (30, 1)], 3, 16, 16)
    check(IMPLEMENTATIONS["kernels"], [(300, 1), (30, 1)], 128, 16, 16)


def test_the_sizes_of_published_models_in_half_precision() -> None:
    check(IMPLEMENTATIONS["kernels"], [(130, 1), (0, 20)], 16, 512, 64, 64, torch.float16, 4e-3)


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("ops", ["kernels", "invariant-kernels"])
@pytest.mark.parametrize(("heads", "page"), [(5, 4), (8, 16), (16, 64), (20, 64), (32, 16)])
@pytest.mark.parametrize("spans", [DECODE, VERIFY, MANY, [(3000, 1), (200, 2)]])
def test_latents_in_shared_memory_are_attended_as_the_naive_loop(ops: str, heads: int, page: int, spans: Spans) -> None:
    check(IMPLEMENTATIONS[ops], spans, heads, 512, 64, page, torch.float16, 4e-3)


@pytest.mark.gpu
@NEEDS_CARD
def test_latents_in_shared_memory_in_bfloat16() -> None:
    check(IMPLEMENTATIONS["kernels"], [*MANY, (1000, 1)], 16, 512, 64, 64, torch.bfloat16, 3e-2)


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("spans", [[(5000, 1), (40, 1)], [(61 * i % 700, 1) for i in range(150)]])
def test_replays_have_the_same_bits(heads: int, spans: Spans) -> None:
    """Launched one after another, each before the preceding one has ended."""
    torch.manual_seed(0)
    ops, total = IMPLEMENTATIONS["kernels"], sum(-(-(past + n) // 64) for past, n in spans) + 2
    whole = Pages(total, 64, 0).batch([(i, past, [0]) for i, (past, _) in enumerate(spans)])
    kv = LayerKV(*(torch.randn(total, 1, 64, dim, device=DEVICE).bfloat16() for dim in (64, 512)))
    q, turned = (torch.randn(len(spans), heads, dim, device=DEVICE).bfloat16() for dim in (512, 64))
    batch = ops.prepare(moved(whole))
    first = ops.latent_attention(q, turned, kv, batch, 0.05)
    for other in [ops.latent_attention(q, turned, kv, batch, 0.05) for _ in range(20)]:
        assert torch.equal(first, other)


@pytest.mark.gpu
@NEEDS_CARD
def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    spans = [(61 * i % 700, 1) for i in range(40)]
    ops, total = IMPLEMENTATIONS["invariant-kernels"], sum(past // 64 + 1 for past, _ in spans) + 2
    whole = moved(Pages(total, 64, 0).batch([(i, past, [0]) for i, (past, _) in enumerate(spans)]))
    kv = LayerKV(*(torch.randn(total, 1, 64, dim, device=DEVICE).bfloat16() for dim in (64, 512)))
    q, turned = (torch.randn(len(spans), 16, dim, device=DEVICE).bfloat16() for dim in (512, 64))
    together = ops.latent_attention(q, turned, kv, whole, 0.05)
    for i in (0, 11, 39):
        alone = replace(
            whole, kv_len=whole.kv_len[i : i + 1], page_table=whole.page_table[i : i + 1],
            query_start=whole.query_start[:2], positions=whole.positions[i : i + 1], slots=whole.slots[i : i + 1],
            tokens=whole.tokens[i : i + 1],
        )  # fmt: skip
        assert torch.equal(ops.latent_attention(q[i : i + 1], turned[i : i + 1], kv, alone, 0.05), together[i : i + 1])


def test_pieces_of_few_spans_are_combined_by_their_sums() -> None:
    """Spans of one piece are left as they are."""
    torch.manual_seed(0)
    groups, share, dim, rows, splits = 2, 8, 32, 16, (1, 5, 3, 1)
    list_of = [(2 * i, 2, 0, 99, 0, 0, i, part + cut * 65536, 0) for i, cut in enumerate(splits) for part in range(cut)]
    pieces = torch.tensor([*list_of, *[(7,) * FIELDS] * 2], dtype=torch.int32)
    parts, sums = torch.randn(len(pieces), groups, rows, dim), 3 * torch.randn(len(pieces), groups, rows)
    out, count = torch.zeros(8, groups, share, dim), torch.tensor([len(list_of)], dtype=torch.int32)
    given = [each.to(DEVICE) for each in (pieces, count, parts, sums, out)]
    combine_kernel[len(splits) * groups, rows, 2](
        *given, GROUPS=groups, SHARE=share, DIM=dim, ROWS=rows, SLICE=16, BOUND=16, MOST=8, FIELDS=FIELDS,
        DEPENDENT=False,
    )  # fmt: skip
    begin = 0
    for i, cut in enumerate(splits):
        own = slice(begin, begin + cut)
        want = (torch.softmax(sums[own] * math.log(2), 0)[..., None] * parts[own]).sum(0) * (cut > 1)
        got = given[-1][2 * i : 2 * i + 2].cpu().transpose(0, 1).reshape(groups, rows, dim)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        begin += cut


def test_what_fits_is_taken_into_shared_memory() -> None:
    def taken(latents: int = 512, rotated: int = 64, dtype: torch.dtype = torch.bfloat16, card: DeviceInfo = HOPPER,
              kept: torch.dtype | None = None) -> bool:  # fmt: skip
        q, turned = torch.zeros(2, 16, latents, dtype=dtype), torch.zeros(2, 16, rotated, dtype=dtype)
        kv = LayerKV(*(torch.zeros(2, 1, 4, dim, dtype=kept or dtype) for dim in (rotated, latents)))
        return takes(q, turned, kv, card)

    assert taken() and taken(dtype=torch.float16) and taken(card=replace(HOPPER, sms=0))
    assert not taken(dtype=torch.float32) and not taken(kept=torch.float8_e4m3fn)
    assert not taken(latents=256) and not taken(rotated=32)
    assert not taken(card=replace(HOPPER, shared=163 << 10)), "an A100's buffers would be too few"
    assert not taken(card=DeviceInfo.of(torch.device("cpu"))), "the interpreter does not run Gluon"


@pytest.mark.parametrize(
    ("share", "most", "rows"), [(16, 1, [16]), (8, 2, [16]), (16, 2, [32]), (20, 1, [32]), (16, 4, [64]), (64, 1, [64]),
                                (16, 9, [16, 64]), (20, 9, [32, 64])]
)  # fmt: skip
def test_few_rows_have_tiles_in_shared_memory(share: int, most: int, rows: list[int]) -> None:
    chosen = latent_tiles(HOPPER, share, 512, 2, most, 64, ringed=True)
    assert [(tile.rows, tile.parts > 0) for tile, _, _ in chosen] == [(each, each <= 32) for each in rows]
    assert not any(tile.parts for tile, _, _ in latent_tiles(HOPPER, share, 512, 2, most, 64))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_latents_are_normed_and_stored_and_queries_rotated(tokens: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    batch = moved(Pages(30, 4).batch([(0, 0, [0] * tokens)], spare=1))
    total = len(batch.slots)
    whole = torch.randn(total, 5 * 22 + 26, device=DEVICE)
    q, compressed = whole[:, :-26].view(total, 5, 22), whole[:, -26:]
    angle, norm = torch.randn(total, 3, device=DEVICE), Norm(torch.randn(20, device=DEVICE), 0.1)
    turn = Angles(angle.cos(), angle.sin(), interleaved)
    pools = [(torch.zeros(30, 1, 4, 6, device=DEVICE), torch.zeros(30, 1, 4, 20, device=DEVICE)) for _ in range(2)]
    made = [
        ops.norm_rope_store_latent(q, compressed, LayerKV(*pool), batch, turn, norm)
        for ops, pool in zip((IMPLEMENTATIONS["kernels"], REFERENCE), pools, strict=True)
    ]
    torch.testing.assert_close(made[0], made[1], atol=1e-5, rtol=1e-5)
    for got, want in zip(*pools, strict=True):
        torch.testing.assert_close(got[1:], want[1:], atol=1e-5, rtol=1e-5)
        assert not got[0].any(), "the null block stays as it is"
        assert want[1:].any()


@pytest.mark.parametrize("form", FLOAT8.values(), ids=FLOAT8)
def test_latents_and_keys_of_eight_bits_have_scales_of_their_own(form: Float8) -> None:
    torch.manual_seed(0)
    batch = moved(Pages(30, 16).batch([(0, 0, [0] * 20)], spare=1))
    # Held exactly, since the interpreter rounds badly.
    q = torch.randn(20, 3, 26, device=DEVICE)
    compressed = torch.randint(-3, 4, (20, 26), device=DEVICE).float()
    compressed[::7] = 3e5
    turn = Angles(torch.ones(20, 3, device=DEVICE), torch.zeros(20, 3, device=DEVICE))
    norm = Norm(torch.ones(20, device=DEVICE), 1e30)
    pools = [
        LayerKV(
            torch.zeros(30, 1, 16, 6, dtype=form.dtype, device=DEVICE),
            torch.zeros(30, 1, 16, 20, dtype=form.dtype, device=DEVICE),
            k_scale=0.5,
            v_scale=1e-15,
        )
        for _ in range(2)
    ]
    for ops, pool in zip((IMPLEMENTATIONS["kernels"], REFERENCE), pools, strict=True):
        ops.norm_rope_store_latent(q, compressed, pool, batch, turn, norm)
    got, want = pools
    assert torch.equal(got.k.float(), want.k.float()) and float(want.k.float().max()) == form.most
    torch.testing.assert_close(got.v.float(), want.v.float(), rtol=form.error * 2.2, atol=0.3)
    kv = replace(want, v_scale=0.25)
    exact = LayerKV(kv.k.float() * 0.5, kv.v.float() * 0.25)
    q = q / 100
    for name in ("kernels", "invariant-kernels"):
        small, large = (
            IMPLEMENTATIONS[name].latent_attention(q[..., :20].contiguous(), q[..., 20:].contiguous(), pool, batch, 0.1)
            for pool in (kv, exact)
        )
        torch.testing.assert_close(small, large, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("ops", ["kernels", "invariant-kernels"])
@pytest.mark.parametrize("form", FLOAT8.values(), ids=FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "latents", "rotated"), [(6, 20, 8), (16, 512, 64), (64, 512, 64)])
def test_latents_of_eight_bits_meet_queries_of_any_dtype(
    heads: int, latents: int, rotated: int, dtype: torch.dtype, form: Float8, ops: str
) -> None:
    """As held in the queries' own dtype, which holds all numbers of eight bits."""
    torch.manual_seed(0)
    spans = [(0, 32), (32, 32), (500, 1), (70, 2), (90, 64)]
    total = sum(-(-(past + n) // 16) for past, n in spans) + 2
    batch = moved(Pages(total, 16, 0).batch([(i, past, [0] * n) for i, (past, n) in enumerate(spans)], spare=3))
    pools = [torch.randn(total, 1, 16, dim, device=DEVICE).to(form.dtype) for dim in (rotated, latents)]
    small = LayerKV(*pools, k_scale=0.5, v_scale=0.25)
    large = LayerKV(pools[0].to(dtype) * 0.5, pools[1].to(dtype) * 0.25)
    q, turned = (torch.randn(len(batch.slots), heads, dim, device=DEVICE).to(dtype) for dim in (latents, rotated))
    got, want = (IMPLEMENTATIONS[ops].latent_attention(q, turned, kv, batch, 0.1)[:-3] for kv in (small, large))
    near = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(got, want, atol=near, rtol=near)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_each_head_has_its_own_matrix(ops: Ops, tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 3, 40, device=DEVICE), torch.randn(3, 60, 50, device=DEVICE)
    for left, right in ((x[..., :30], weight[:, :30]), (x, weight[:, :40].transpose(1, 2).transpose(1, 2))):
        want = torch.einsum("thn,hnm->thm", left.double(), right.double())
        torch.testing.assert_close(ops.heads_linear(left, right).double(), want, atol=1e-4, rtol=1e-4)
    turned = weight[:, 20:].transpose(1, 2)[:, :40]
    want = torch.einsum("thn,hnm->thm", x.double(), turned.double())
    torch.testing.assert_close(ops.heads_linear(x, turned).double(), want, atol=1e-4, rtol=1e-4)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    """Kernels: see test_batch_invariant."""
    ops, x, weight = IMPLEMENTATIONS["invariant"], torch.randn(70, 3, 40), torch.randn(3, 40, 50)
    whole = ops.heads_linear(x, weight)
    for at, count in ((0, 1), (3, 2), (20, 17), (69, 1)):
        assert torch.equal(ops.heads_linear(x[at : at + count], weight), whole[at : at + count])
