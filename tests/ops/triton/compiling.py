"""Run as a program: compiles every kernel for a compute capability, without a card. See `test_compiles`.

Arguments: the capability, the bytes of shared memory it has, and "float32" for deterministic products in that, too, or
"few" for a few kernels that soon compile, or "chunks", "gpt_oss", "latents", "indexed" or "recurrent" for those that
chunks beside decoding sequences, gpt-oss, latent attention, DeepSeek V3.2's or recurrent layers alone have.

Prints, as JSON, [kernel, bytes of shared memory, registers' worth of bytes spilled] of each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.layers.delta import DeltaConfig, split_by_head
from quire.model_runner.device_state import COUNTERS, DeviceState
from quire.model_runner.device_steps import SCORE_WIDTH
from quire.model_runner.row_state import RowState
from quire.model_runner.sampling.features import COLUMNS
from quire.model_runner.triton_steps import ForcedSteps
from quire.ops.operands import (
    XIELU,
    Angles,
    DeltaWeights,
    ExpertBiases,
    IntegerKind,
    IntegerMatrix,
    Norm,
    Norms,
    QuantizedMatrix,
    RouterWeights,
    Routing,
    ScanInputs,
    ScanWeights,
    Scores,
    TopK,
    UnnormedRow,
    VocabularyPart,
)
from quire.ops.ragged import LayerKV, LayerState, LongSpan, RaggedBatch, StateSlots
from quire.ops.triton import (
    block_tma,
    grouped_gemm,
    integer_mma,
    integer_row,
    integer_stationary,
    integer_tma,
    rounded_gemm,
    span_attention,
)
from quire.ops.triton.all_reduce import PeerSum
from quire.ops.triton.blocks import BlockCopies
from quire.ops.triton.experts import SortedSlots
from quire.ops.triton.launch import HOPPER, DeviceInfo
from quire.ops.triton.long_spans import gather_kv_kernel
from quire.ops.triton.ops import BatchInvariantTritonOps, TritonOps
from quire.ops.triton.sampler import RequestedFeatures, RowHistories, SamplingTensors, sample
from quire.types import UNLIMITED
from tests import interpreter

interpreter.install()  # as processes of tests do on a card, where it changes nothing

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITY, SHARED = int(sys.argv[1]), int(sys.argv[2])
BF16, INT, E4M3 = torch.bfloat16, torch.int32, torch.float8_e4m3fn


class NoCard:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=INT)


def halves(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def batch(spans: int, n: int) -> RaggedBatch:
    tokens = spans * n
    longs = (torch.empty(tokens, dtype=torch.int64) for _ in range(3))
    return RaggedBatch(*longs, ints(spans + 1), ints(spans), ints(spans, 64), 64, n, 4096)


def by_row(ops: TritonOps) -> None:
    """What passes once over each row."""
    x, w = halves(4, 4096), halves(4096)
    rms, layer = Norm(w, 1e-5), Norm(w, 1e-5, w, centred=True)
    ops.norm(x, rms)
    ops.norm(x, layer)
    ops.add_norm(x, x, rms)
    ops.add_norm(x, x, layer._replace(bias=None))
    ops.add_norm(x, x, None, rms, 0.2)
    ops.add_norms(x, x, [rms] * 3, rms)
    ops.sum_norms(x, rms, x, rms)
    ops.silu_mul(x)
    ops.gelu(x)
    ops.relu2(x)
    ops.relu_mul(x)
    ops.xielu(x, XIELU(*torch.empty(3, 1)))
    ops.clamped_mul(x)
    angles = Angles(torch.empty(4, 64), torch.empty(4, 64))
    kv = LayerKV(halves(4, 8, 64, 128), halves(4, 8, 64, 128))
    qkv, each = halves(4, 48 * 128), Norm(w[:128], 1e-6)
    for norms in (Norms(each, each), Norms(each, each, after_rope=True), Norms(rms, Norm(w[:1024], 1e-5))):
        ops.qk_norm_rope_store_kv(qkv, 32, kv, batch(4, 1), angles, norms)
    many = Angles(torch.empty(512, 64), torch.empty(512, 64))
    ops.qk_norm_rope_store_kv(halves(512, 48 * 128), 32, kv, batch(512, 1), many, Norms(each, each))
    turned = angles._replace(interleaved=True, query_gain=torch.empty(4))
    ops.qk_norm_rope_store_kv(qkv, 32, kv, batch(4, 1), turned)


def a_few_by_row(ops: TritonOps) -> None:
    x, w = halves(4, 4096), halves(4096)
    rms = Norm(w, 1e-5)
    ops.norm(x, Norm(w, 1e-5, w, centred=True))
    ops.add_norms(x, x, [rms] * 3, rms)
    ops.silu_mul(x)
    kv, each = LayerKV(halves(4, 8, 64, 128), halves(4, 8, 64, 128)), Norm(w[:128], 1e-6)
    angles = Angles(torch.empty(4, 64), torch.empty(4, 64))
    ops.qk_norm_rope_store_kv(halves(4, 48 * 128), 32, kv, batch(4, 1), angles, Norms(each, each))


def across(ops: TritonOps) -> None:
    """Sums over several GPUs."""
    norm = Norm(halves(4096), 1e-5)
    for size in (2, 8):
        add = PeerSum(1, [0] * size, ops.card, torch.device("cpu"))
        add(halves(4, 4096))
        add.add_norm(halves(4, 4096), halves(4, 4096), norm)
    add.add_norm(halves(64, 4096), halves(64, 4096), norm, norm, 0.2, halves(1))
    PeerSum(1, [0] * 2, ops.card, torch.device("cpu"))(torch.empty(4, 4096))


def chunks(ops: TritonOps) -> None:
    """Attention of chunks of prompts with long contexts, beside sequences that decode."""
    for heads, groups, dim, dtype in (
        (32, 8, 128, BF16),
        (16, 16, 64, BF16),
        (8, 4, 256, BF16),
        (4, 4, 80, torch.half),
    ):
        pool = LayerKV(*(halves(4, groups, 64, dim, dtype=dtype) for _ in "kv"))
        fed = replace(batch(16, 17), max_query=256, max_kv=1 << 15)
        ops.attention(halves(272, heads, dim, dtype=dtype), pool, fed, Scores(dim**-0.5))
    small = LayerKV(*(torch.empty(4, 8, 64, 128, dtype=E4M3) for _ in "kv"))
    ops.attention(halves(272, 32, 128), small, fed, Scores(0.1))


def everything(ops: TritonOps) -> None:
    by_row(ops)
    across(ops)
    angles = Angles(torch.empty(4, 64), torch.empty(4, 64))
    shapes = [(32, 8, 128, BF16), (4, 1, 256, BF16), (12, 12, 64, torch.float32)]
    shapes += [(24, 8, dim, BF16) for dim in (80, 96, 112)]
    for heads, groups, dim, dtype in shapes:
        pool = LayerKV(*(halves(4, groups, 64, dim, dtype=dtype) for _ in "kv"))
        for spans, n in ((4, 1), (64, 1), (2, 512)):
            q = halves(spans * n, heads, dim, dtype=dtype)
            ops.attention(q, pool, batch(spans, n), Scores(dim**-0.5))
    for rows in (1, 4, 16):
        ops.linear(halves(rows, 4096), halves(6144, 4096))
        ops.linear(halves(rows, 8192), halves(2048, 8192))
        ops.linear(halves(rows, 4096), halves(28672, 4096), None, "silu")
        ops.linear(halves(rows, 1152), halves(13824, 1152), None, "gelu")
        ops.linear(halves(rows, 6912), halves(1152, 6912))
    if CAPABILITY >= 89:  # before, eight bits of floating point are not known
        small = LayerKV(*(torch.empty(4, 8, 64, 128, dtype=E4M3) for _ in "kv"), k_scale=0.5)
        ops.qk_norm_rope_store_kv(halves(4, 48 * 128), 32, small, batch(4, 1), angles)
        for spans, n in ((2, 1), (64, 1), (2, 512)):
            ops.attention(halves(spans * n, 32, 128), small, batch(spans, n), Scores(0.1))
        weight = torch.empty(6144, 4096, dtype=E4M3)
        runs = QuantizedMatrix(weight, torch.empty(6144, 32), 128)
        for rows in (1, 16, 17, 64, 100):
            for matrix in (
                QuantizedMatrix(weight, torch.empty(6144, 1), 4096), QuantizedMatrix(weight, torch.empty(6144, 64), 64)
            ):  # fmt: skip
                ops.quantized_linear(halves(rows, 4096), matrix, None, "silu")
                ops.quantized_linear(halves(rows, 4096), matrix)
            for height in (1, 128):  # what cards without the library's products of runs take
                how = rounded_gemm.rounded_config(rows, 6144, 4096, gated=False)
                matrix = runs._replace(height=height)
                read = rounded_gemm.round_rows(halves(rows, 4096), ops.card, E4M3, 128)
                rounded_gemm.rounded_linear(read, matrix, None, how, ops.card, ops.arrived)
        for rows in (1, 16, 64, 300):
            ops.unrounded().quantized_linear(halves(rows, 4096), runs)
        for width in (0, 128):
            rounded_gemm.round_rows(halves(4, 24576), ops.card, E4M3, width, gate="silu")
            some = QuantizedMatrix(weight, torch.empty(6144, 32 if width else 1), width or 4096)
            rounded_gemm.norm_rounded(halves(4, 4096), halves(4, 4096), Norm(halves(4096), 1e-6), 0.5, some, ops.card)
        ops.quantized_linear(
            halves(1, 12288), QuantizedMatrix(torch.empty(4096, 12288, dtype=E4M3), torch.empty(4096, 1), 12288)
        )
        ops.quantized_linear(
            halves(8, 12288), QuantizedMatrix(torch.empty(4096, 12288, dtype=E4M3), torch.empty(4096, 1), 12288)
        )
        for rows in (64, 100):
            ops.quantized_linear(
                halves(rows, 12288), QuantizedMatrix(torch.empty(4096, 12288, dtype=E4M3), torch.empty(4096, 1), 12288)
            )
    for rows in (1, 16, 64):
        weight = torch.empty(6144, 2048, dtype=torch.uint8)
        scale, groups = torch.empty(6144, 32), torch.empty(4096, dtype=torch.int64)
        ops.quantized_linear(halves(rows, 4096), QuantizedMatrix(weight, scale, zero=scale, groups=groups))
        ops.quantized_linear(
            halves(rows, 4096), QuantizedMatrix(weight.view(torch.int8), torch.empty(6144, 1), 4096), gate="silu"
        )
    for tokens, shape in ((1, QWEN), (1, MIXTRAL), (16, QWEN), (200, QWEN), (512, QWEN), (4096, QWEN)):
        mixture(ops, tokens, *shape)
    if CAPABILITY >= 89:
        for tokens in (4, 10, 24, 64):
            for some in (ops, ops.unrounded()):
                small_mixture(some, tokens, width=128)
                small_mixture(some, tokens, width=2048)
    for tokens in (4, 64):
        small_mixture(ops, tokens, 2048, torch.int8)
    for tokens in (1, 5, 16, 64, 300):
        integer_mixtures(ops, tokens)
    gpt_oss(ops)
    for matrix in integers():
        for rows in (1, 16, 32, 64, 256, 300):
            ops.quantized_linear(halves(rows, 4096), matrix)
            ops.quantized_linear(halves(rows, 4096), matrix, None, "silu")
        ops.quantized_linear(halves(1, 4096, dtype=torch.float16), matrix)
        ops.integer_embedding(torch.empty(4, dtype=torch.int64), matrix, BF16)
    for rows in (1, 16, 64, 300):
        weight = torch.empty(6144, 4096, dtype=torch.int8)
        ops.int8_linear(halves(rows, 4096), weight, torch.empty(6144, 1))
        ops.int8_linear(halves(rows, 4096), weight, torch.empty(6144, 1), None, "silu")
    names = (*COUNTERS, *COLUMNS)
    floats = [name for name, column in COLUMNS.items() if not column.is_integer]
    columns = {name: ints(8) for name in names} | {name: torch.empty(8) for name in floats}
    settings = SamplingTensors.of(columns | {"stream": torch.empty(8, dtype=torch.int64)})
    histories = RowHistories(ints(8, 4096), ints(8), ints(8 * 4748), ints(1), ints(8))
    logits, scores = torch.empty(8, 151936), ints(8, SCORE_WIDTH)
    asked = RequestedFeatures(*[True] * len(RequestedFeatures._fields))
    sample(
        logits, ints(8), ints(8), histories, settings, ops.card, asked, tally=ints(8, 151936),
        scores=scores,
    )  # fmt: skip
    part = VocabularyPart(75968, 2, torch.clone, lambda own: own.repeat(1, 2))
    for random in (False, True):
        asked = RequestedFeatures(*[random, *[False] * 6])
        sample(
            halves(8, 75968), ints(8), ints(8), histories, settings, ops.card, asked, tally=ints(8, 8), part=part
        )  # fmt: skip


QWEN, MIXTRAL = (128, 8, 2048, 768), (8, 2, 4096, 14336)
"""Experts, those that a token uses, hidden size and the experts' width of two models."""


def mixture(
    ops: TritonOps, tokens: int, count: int, used: int, hidden: int, width: int, dtype: torch.dtype = BF16
) -> None:
    x = halves(tokens, hidden, dtype=dtype)
    gate_up, down = halves(1, 2 * width, hidden, dtype=dtype), halves(1, hidden, width, dtype=dtype)
    for choice in (
        TopK(used, True), TopK(used, True, sigmoid=True, groups=2, used_groups=1), TopK(used, False, margin=0.02)
    ):  # fmt: skip
        router = RouterWeights(halves(count, hidden, dtype=dtype), choice)
        ops.add_norm_route(x, x, Norm(halves(hidden), 1e-6), router, scale=0.5)
        routing = ops.route(x, router)
    for logits in (None, halves(tokens, 1, dtype=dtype)):
        ops.add_shared(x, x, logits)
    ops.experts(x, routing, gate_up.expand(count, -1, -1), down.expand(count, -1, -1), "silu")


def gpt_oss(ops: TritonOps) -> None:
    """Attention with sinks, and experts with biases and a clamped gate, in bfloat16 and in MXFP4."""
    pool, sinks = LayerKV(*(halves(4, 8, 64, 64) for _ in "kv")), torch.empty(64)
    for spans, n in ((4, 1), (64, 1), (2, 512)):
        for window, chunk in ((128, UNLIMITED), (UNLIMITED, UNLIMITED), (UNLIMITED, 256)):
            ops.attention(
                halves(spans * n, 64, 64), pool, batch(spans, n), Scores(0.125, window, sinks=sinks, chunk=chunk)
            )
    count, hidden = 32, 2880
    weight = torch.empty(2944 // 64, 1, 32, dtype=torch.uint8)
    words = ints(2944 // 128, 1)
    gate_up, down = (
        IntegerMatrix(
            weight.expand(count, -1, rows, -1), words.expand(count, -1, rows), hidden, 4, 32, IntegerKind.FLOATS, False
        )
        for rows in (2 * hidden, hidden)
    )
    biases = ExpertBiases(halves(count, 2 * hidden), halves(count, hidden))
    for tokens in (1, 5, 16, 64, 300, 1000):
        x = halves(tokens, hidden)
        routing = ops.route(x, RouterWeights(halves(count, hidden), TopK(4, True), bias=halves(count)))
        ops.quantized_experts(x, routing, gate_up, down, "clamped", biases)
        plain = (halves(1, rows, hidden).expand(count, -1, -1) for rows in (2 * hidden, hidden))
        ops.experts(x, routing, *plain, "clamped", biases)


def latents(ops: TritonOps, dtype: torch.dtype = BF16) -> None:
    """Latent attention of DeepSeek V2 Lite, whole and on a rank, and of GLM 4.7 Flash."""
    pool = LayerKV(halves(4, 1, 64, 64, dtype=dtype), halves(4, 1, 64, 512, dtype=dtype))
    angles, norm = Angles(torch.empty(1, 32), torch.empty(1, 32), interleaved=True), Norm(halves(512), 1e-6)
    for heads, plain, value in ((16, 128, 128), (8, 128, 128), (20, 192, 256)):
        weight = halves(heads, plain + value, 512, dtype=dtype)
        for spans, n in ((4, 1), (64, 1), (8, 4), (2, 512)):
            q = halves(spans * n, heads, plain + 64, dtype=dtype)
            rotated = ops.norm_rope_store_latent(q, q[:, 0], pool, batch(spans, n), angles, norm)
            absorbed = ops.heads_linear(q[..., :plain], weight[:, :plain])
            mixed = ops.latent_attention(absorbed, rotated, pool, batch(spans, n), 0.1)
            ops.heads_linear(mixed, weight[:, plain:].transpose(1, 2))


def indexed(ops: TritonOps, heads: int, spans: int, n: int) -> None:
    """DeepSeek V3.2's choice of tokens, and attention to them."""
    pool = LayerKV(halves(4, 1, 64, 64), halves(4, 1, 64, 512), index=halves(4, 1, 64, 128))
    tokens, weight = spans * n, halves(128)
    fed = ops.prepare(batch(spans, n))
    turn = Angles(torch.empty(tokens, 32), torch.empty(tokens, 32))
    ops.store_index_key(halves(tokens, 128), pool, fed, turn, Norm(weight, 1e-6, weight, centred=True))
    q, weights = halves(tokens, 64, 128), halves(tokens, 64)
    chosen = ops.choose_positions(q, weights, pool, fed, turn, 2048)
    absorbed, rotated = halves(tokens, heads, 512), halves(tokens, heads, 64)
    ops.latent_attention(absorbed, rotated, pool, fed, 0.1, chosen)


def every_indexed(ops: TritonOps, fixed: TritonOps) -> None:
    """A rank of eight: decoding, and a prompt."""
    for each in (ops, fixed):
        for spans, n in ((1, 1), (64, 1), (2, 512)):
            indexed(each, 16, spans, n)


def in_shared_memory(ops: TritonOps) -> None:
    """Latent attention of DeepSeek V2 Lite and of GLM 4.7 Flash as they decode."""
    pool = LayerKV(halves(4, 1, 64, 64), halves(4, 1, 64, 512))
    for heads in (16, 20):
        ops.latent_attention(halves(64, heads, 512), halves(64, heads, 64), pool, batch(64, 1), 0.1)


NEXT = DeltaConfig(key_heads=16, value_heads=32, key=128, value=128, width=4)
"""Qwen3-Next's."""


def recurrent(ops: TritonOps, dtype: torch.dtype = BF16) -> None:
    """Recurrent layers of Qwen3-Next, and of Nemotron-H and Granite 4-H: decoding, verification, prompts."""
    for spans, n in ((1, 1), (64, 1), (8, 4), (2, 512)):
        tokens = spans * n
        longs = (torch.empty(size, dtype=torch.int64) for size in (spans, tokens, tokens))
        fed = replace(batch(spans, n), states=StateSlots(*longs))
        state = LayerState(halves(1, 3, 8192, dtype=dtype), torch.empty(1, 32, 128, 128))
        small = (torch.empty(32), torch.empty(32))
        delta = DeltaWeights(halves(8192, 4, dtype=dtype), *small, Norm(halves(128, dtype=dtype), 1e-6))
        made = [halves(tokens, size, dtype=dtype) for size in (12288, 64)]
        ops.gated_delta(split_by_head(NEXT, made), delta, state, fed)
        for groups in (1, 8):
            wide = 8192 + 2 * groups * 128
            state = LayerState(halves(1, 3, wide, dtype=dtype), torch.empty(1, 128, 128, 64))
            weights, norm = halves(wide, 5, dtype=dtype), Norm(halves(8192, dtype=dtype), 1e-5)
            small = (torch.empty(128), torch.empty(128), torch.empty(128))
            scan = ScanWeights(weights[:, :4].contiguous(), weights[:, 4].contiguous(), *small, norm, (0.0, 1.0))
            sizes = (8192, wide, 128)
            ops.selective_scan(ScanInputs(*(halves(tokens, size, dtype=dtype) for size in sizes)), scan, state, fed)


def integers() -> list[IntegerMatrix]:
    """One of each kind."""
    zeros, superblocks, pairs, row, floats = IntegerKind
    width = {superblocks: 64, pairs: 64, row: 4096, floats: 128}

    def made(bits: int, group: int, kind: IntegerKind) -> IntegerMatrix:
        weight = torch.empty(4096 * bits // 256, 6144, 32, dtype=torch.uint8)
        words, supers = ints(4096 // width.get(kind, group), 6144), ints(16, 6144)
        return IntegerMatrix(weight, words, 4096, bits, group, kind, supers=supers)

    return [
        *(made(4, 128, zeros), made(4, 32, zeros), made(4, 32, superblocks), made(4, 32, pairs)),
        *(made(8, 32, pairs), made(8, 128, zeros), made(8, 128, row), made(8, 32, superblocks)),
        *(made(8, 16, superblocks), made(4, 32, floats)),
    ]


def small_mixture(ops: TritonOps, tokens: int, width: int, dtype: torch.dtype = E4M3) -> None:
    """Of 8 bits, and of four experts, so that each has as many tokens as in a large batch."""
    hidden, inner, count, used = 2048, 768, 4, 8
    shapes = (count * 2 * inner, hidden), (count * hidden, inner)
    gate_up, down = (
        QuantizedMatrix(torch.empty(rows, columns, dtype=dtype), torch.empty(rows, -(-columns // width)), width)
        for rows, columns in shapes
    )
    routing = Routing(ints(tokens, used), torch.empty(tokens, used))
    ops.quantized_experts(halves(tokens, hidden), routing, gate_up, down, "silu")


def integer_mixtures(ops: TritonOps, tokens: int, dtype: torch.dtype = BF16) -> None:
    """Of experts of each kind, all with the same matrix for both products."""
    count, used = 16, 8
    routing = Routing(ints(tokens, used), torch.empty(tokens, used))
    for matrix in integers():
        weight, words = matrix.weight.expand(count, -1, -1, -1), matrix.words.expand(count, -1, -1)
        supers = None if matrix.supers is None else matrix.supers.expand(count, -1, -1)
        whole = matrix._replace(weight=weight, words=words, supers=supers)
        ops.quantized_experts(halves(tokens, 4096, dtype=dtype), routing, whole, whole, "silu")
        if matrix.kind is IntegerKind.PAIRS:
            moved = whole._replace(order=torch.empty(count, 4096, dtype=torch.int64))
            ops.quantized_experts(halves(tokens, 4096, dtype=dtype), routing, moved, whole, "silu")


def alike(ops: BatchInvariantTritonOps) -> None:
    """What depends on no batch: one way for each."""
    for dtype in (BF16, *([torch.float32] if "float32" in sys.argv else [])):
        x = halves(4, 4096, dtype=dtype)
        ops.linear(x, halves(6144, 4096, dtype=dtype))
        ops.linear(x, halves(6144, 4096, dtype=dtype), None, "silu")
        ops.quantized_linear(
            x, QuantizedMatrix(torch.empty(6144, 4096, dtype=torch.int8), torch.empty(6144, 1), 4096), gate="silu"
        )
        if CAPABILITY >= 89:
            ops.quantized_linear(x, QuantizedMatrix(torch.empty(6144, 4096, dtype=E4M3), torch.empty(6144, 32), 128))
        scale, groups = torch.empty(6144, 32), torch.empty(4096, dtype=torch.int64)
        ops.quantized_linear(
            x, QuantizedMatrix(torch.empty(6144, 2048, dtype=torch.uint8), scale, zero=scale, groups=groups)
        )
        mixture(ops, 4, *QWEN, dtype)
        if CAPABILITY >= 89:
            small_mixture(ops, 4, width=128)
        integer_mixtures(ops, 4, dtype)
        for matrix in integers():
            ops.quantized_linear(x, matrix)
        pool = LayerKV(*(halves(4, 8, 64, 128, dtype=dtype) for _ in "kv"))
        ops.attention(halves(4, 32, 128, dtype=dtype), pool, batch(4, 1), Scores(0.1))
    angles, norm = Angles(torch.empty(4, 64), torch.empty(4, 64)), Norm(halves(128), 1e-6)
    kv = LayerKV(halves(4, 8, 64, 128), halves(4, 8, 64, 128))
    ops.qk_norm_rope_store_kv(halves(4, 48 * 128), 32, kv, batch(4, 1), angles, Norms(norm, norm))


def encoders(ops: TritonOps) -> None:
    """Attention with later tokens: of BERT's shape, EmbeddingGemma's, with windows too, and Gemma 3's with images."""
    for heads, groups, dim, dtype in ((12, 12, 64, BF16), (12, 12, 32, torch.float32), (3, 1, 256, BF16)):
        pool = LayerKV(*(halves(4, groups, 64, dim, dtype=dtype) for _ in "kv"))
        for spans, n in ((4, 1), (4, 8), (2, 512), (64, 64)):
            for window, ahead in ((UNLIMITED, UNLIMITED), (129, 128)):
                q = halves(spans * n, heads, dim, dtype=dtype)
                ops.attention(q, pool, batch(spans, n), Scores(dim**-0.5, window, ahead=ahead))
    pool = LayerKV(*(halves(4, 4, 64, 256) for _ in "kv"))
    for window in (512, UNLIMITED):
        placed = batch(2, 512)
        placed = replace(placed, last_visible=placed.positions)
        ops.attention(halves(1024, 8, 256), pool, placed, Scores(0.1, window))


def invariant(ops: BatchInvariantTritonOps) -> None:
    """Products of any number of rows, cut into runs or not, and attention in cells: one a program, several, all."""
    for rows in (1, 32, 64, 200, 1000):
        ops.linear(halves(rows, 4096), halves(128, 4096))
        ops.linear(halves(rows, 4096), halves(4096, 4096))
        ops.linear(halves(rows, 4096), halves(28672, 4096), None, "silu")
        ops.linear(halves(rows, 4096), halves(28672, 4096))
    shapes = [(32, 8, 128, BF16), (4, 1, 256, BF16), (12, 12, 64, torch.float32), (8, 2, 128, torch.float32)]
    for heads, groups, dim, dtype in [*shapes, (24, 8, 80, BF16), (8, 8, 256, torch.float32)]:
        pool = LayerKV(*(halves(4, groups, 64, dim, dtype=dtype) for _ in "kv"))
        for spans, n, most in ((1, 1, 4096), (1, 1, 1 << 17), (64, 1, 4096), (2, 512, 4096)):
            q, whole = halves(spans * n, heads, dim, dtype=dtype), replace(batch(spans, n), max_kv=most)
            ops.attention(q, pool, whole, Scores(dim**-0.5))


def single(ops: TritonOps) -> None:
    """Products with one output, which Triton takes for a constant, as the gate of a shared expert has it."""
    for rows in (1, 4, 16):
        ops.linear(halves(rows, 2048), halves(1, 2048))
    ops.int8_linear(halves(16, 2048), torch.empty(1, 2048, dtype=torch.int8), torch.empty(1, 1))


def around() -> None:
    """What is around a forward: of a step, and of drafting."""
    state = DeviceState(RowState(4, 64, 16, 3), spans=8, tokens=64, vocab_size=64, device=torch.device("cpu"))
    steps, tokens = ForcedSteps(torch.device("cpu"), 0.7), ints(16)
    steps.card = DeviceInfo(sms=132, capability=divmod(CAPABILITY, 10), dependent=CAPABILITY >= 90)
    steps.scatter(state.data, tokens, tokens)
    for inputs in (state.step, state.draft):
        steps.prepare_inputs(state, inputs, batch(8, 4), 64)
        steps.advance(state, inputs, 8, halves(32, 4096), halves(8, 4096))
    steps.verify(state, tokens)
    steps.lookup(state, 8, 3, 4, 2)
    for at in (-1, 0, 1):
        steps.prepare_draft(state, 8, 16, at)
    steps.write_drafts(state, tokens)


def in_registers(ops: TritonOps) -> None:
    """Products with matrices whose numbers do not pass through shared memory."""
    each = integers()
    for matrix, rows, gate in (
        *((each[0], rows, gate) for rows, gate in ((4, ""), (16, ""), (32, "silu"))),
        *((each[4], 32, "silu"), (each[6], 4, ""), (each[8], 16, "")),
    ):
        integer_mma.integer_mma(halves(rows, 4096), matrix, None, ops.card, ops.arrived, gate)
    if ops.card.capability == HOPPER:
        for gate in ("", "silu"):
            integer_tma.integer_tma(halves(64, 4096), each[0], None, ops.card, ops.arrived, gate)
        for matrix in (each[2], each[4]):
            block_tma.block_tma(halves(64, 4096), matrix, None, ops.card, ops.turns, "silu")
        for matrix, gate in ((each[0], "silu"), (each[2], ""), (each[4], "")):
            row = halves(1, 4096)
            for x in (row, UnnormedRow(row, row, row, Norm(halves(4096), 1e-5), 1.0)):
                integer_row.integer_row(x, matrix, None, ops.card, gate)
        for matrix, rows in ((each[0], 16), (each[2], 8)):
            integer_stationary.integer_stationary(halves(rows, 4096), matrix, None, ops.card, "silu")


def in_turns(ops: TritonOps) -> None:
    """Products of many rows an expert, by programs that take tiles by turns."""
    if ops.card.capability == HOPPER:
        slots = SortedSlots(ints(4096), ints(3, 36))
        grouped_gemm.grouped_product(halves(512, 2048), halves(4, 1536, 2048), slots, 8, ops.card, ops.arrived, "silu")
        grouped_gemm.grouped_product(halves(4096, 768), halves(4, 2048, 768), slots, 8, ops.card, ops.arrived)


def long_spans(ops: TritonOps) -> None:
    """Attention of long prompts on Hopper GPUs."""
    if ops.card.capability == HOPPER:
        span = LongSpan(0, 0, 512, 100)
        for dim, how in ((128, Scores(0.1)), (64, Scores(0.1, 256, sinks=torch.empty(32)))):
            q, pool = halves(512, 32, dim), LayerKV(*(halves(4, 8, 64, dim) for _ in "kv"))
            span_attention.attend_span(torch.empty_like(q), q, pool, batch(1, 512), span, how, ops.card)


def blocks() -> None:
    """Blocks of K/V in words, and in bytes."""
    for width in (4096, 15):
        copies, lines = BlockCopies([torch.empty((3, width), dtype=torch.uint8)]), torch.empty((2, width))
        copies.gather(torch.tensor([1]), lines.to(torch.uint8))
        copies.scatter(torch.tensor([1]), lines.to(torch.uint8))


def for_any_row() -> None:
    """Rows of a table begin at any multiple of four bytes, and no kernel is compiled later for some of them."""
    apart = {each.name for each in gather_kv_kernel.made.params if each.do_not_specialize_on_alignment}
    assert apart == {"pages"}


def main() -> None:
    driver.set_active(NoCard())
    plain, found = JITFunction.run, []

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = plain(self, *args, grid=grid, warmup=True, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
            said = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
        stack = re.search(r"STACK:(\d+)", said)
        assert stack is not None
        found.append((self.fn.__name__, kernel.metadata.shared, int(stack[1])))
        return kernel

    JITFunction.run = compiled
    ops = TritonOps("cpu")
    capability = divmod(CAPABILITY, 10)
    dependent = capability >= HOPPER
    options = MappingProxyType({"launch_pdl": True} if dependent else {})
    ops.card = DeviceInfo(132, capability, dependent, "tf32x3", SHARED, options)
    if "few" in sys.argv:
        a_few_by_row(ops)
        add = PeerSum(1, [0] * 2, ops.card, torch.device("cpu"))
        add(halves(4, 4096))
        add.add_norm(halves(4, 4096), halves(4, 4096), Norm(halves(4096), 1e-5))
        ops.linear(halves(1, 2048), halves(1, 2048))
        ops.linear(halves(16, 2048), halves(1, 2048))
        in_registers(ops)
        in_shared_memory(ops)
        in_turns(ops)
        long_spans(ops)
        small_mixture(ops, 64, 2048, torch.int8)
        blocks()
        for_any_row()
        around()
        print(json.dumps(found))
        return
    if "invariant" in sys.argv:
        fixed = BatchInvariantTritonOps("cpu")
        fixed.card = replace(ops.card, sms=0)
        invariant(fixed)
        print(json.dumps(found))
        return
    if "chunks" in sys.argv:
        chunks(ops)
        print(json.dumps(found))
        return
    if "gpt_oss" in sys.argv:
        gpt_oss(ops)
        print(json.dumps(found))
        return
    fixed = BatchInvariantTritonOps("cpu")
    fixed.card = replace(ops.card, sms=0)
    if "encoders" in sys.argv:
        for each in (ops, fixed):
            encoders(each)
        print(json.dumps(found))
        return
    if "latents" in sys.argv:
        for each in (ops, fixed):
            latents(each)
        print(json.dumps(found))
        return
    if "indexed" in sys.argv:
        every_indexed(ops, fixed)
        print(json.dumps(found))
        return
    if "recurrent" in sys.argv:
        recurrent(ops)
        recurrent(ops, torch.float32)
        recurrent(fixed)
        print(json.dumps(found))
        return
    everything(ops)
    single(ops)
    latents(ops, torch.float32)
    recurrent(ops, torch.float32)
    every_indexed(ops, fixed)
    for each in (ops, fixed):
        latents(each)
        recurrent(each)
    alike(fixed)
    around()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
