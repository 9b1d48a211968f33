"""Layers in one call of the library against the same layers one by one, to the bit, at every instruction set of this
processor and with one thread and two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.basic import NormLayer
from quire.models.llama import Block, Llama
from quire.ops.integer import pack_integers
from quire.ops.native.decoder import MOST_ROWS, NativeDecoder
from quire.ops.native.library import LEVELS, best_level
from quire.ops.native.ops import InvariantNativeOps, NativeOps
from quire.ops.operands import (
    Angles,
    AnyMatrix,
    DecoderLayer,
    Gate,
    IntegerMatrix,
    MixedMatrix,
    Norm,
    Norms,
    Projection,
    QuantizedMatrix,
    Scores,
)
from quire.ops.panels import PanelMatrix
from quire.ops.ragged import LayerKV, RaggedBatch
from quire.ops.reference import ReferenceOps
from quire.weights.load import load_model
from tests.ops.batches import Pages, poisoned

BEST = best_level()
HERE = [level for level, number in LEVELS.items() if BEST is not None and number <= LEVELS[BEST]]
HIDDEN, HEADS, GROUPS, DIM, WIDTH, PAGE = 72, 6, 2, 32, 96, 4
OUTPUTS = (HEADS + 2 * GROUPS) * DIM


@pytest.fixture(params=[(level, threads) for level in HERE for threads in (1, 2)], ids=str)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    """The operations at each level and number of threads; the best one is chosen again afterwards."""
    before, (level, threads) = torch.get_num_threads(), request.param
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield NativeOps(level)
    torch.set_num_threads(before)
    assert BEST is not None
    NativeOps(BEST)


def plain(outputs: int, inputs: int, dtype: torch.dtype) -> PanelMatrix:
    made = PanelMatrix.empty(outputs, inputs, dtype)
    made.write(0, (torch.randn(outputs, inputs) / inputs**0.5).to(dtype))
    return made


def eight_bits(ops: NativeOps, outputs: int, inputs: int) -> AnyMatrix:
    numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return ops.arranged(pack_integers(numbers, 32, torch.full((outputs, -(-inputs // 32)), 0.01)))


def eight_bit_rows(outputs: int, inputs: int) -> QuantizedMatrix:
    numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return QuantizedMatrix(numbers, torch.full((outputs, 1), 0.01))


def projection(ops: NativeOps, outputs: int, inputs: int, dtype: torch.dtype, kind: str) -> Projection:
    """A matrix: plain, of integers, for rows that are rounded, of float8, or of plain and integers in two parts."""
    bias = torch.randn(outputs).to(dtype) if kind != "plain" else None
    if kind == "rounded":
        return Projection(ops.arranged_int8(eight_bit_rows(outputs, inputs)), bias, rounded=True)
    if kind == "float8":
        numbers = (40 * torch.randn(outputs, inputs)).to(torch.float8_e4m3fn)
        return Projection(ops.arranged(eight_bit_rows(outputs, inputs)._replace(weight=numbers)), bias)
    if kind == "integers":
        return Projection(eight_bits(ops, outputs, inputs), bias)
    if kind == "mixed":
        parts = plain(64, inputs, dtype), eight_bits(ops, outputs - 64, inputs)
        return Projection(MixedMatrix(parts), bias)  # type: ignore[arg-type]
    return Projection(plain(outputs, inputs, dtype), bias)


def layer(ops: NativeOps, dtype: torch.dtype, kind: str, more: Mapping[str, Any]) -> DecoderLayer:
    single = "integers" if kind == "mixed" else kind
    norm = [Norm(torch.rand(HIDDEN).to(dtype), 1e-5) for _ in range(2)]
    made = DecoderLayer(
        norm[0],
        projection(ops, OUTPUTS, HIDDEN, dtype, kind),
        HEADS,
        None,
        Scores(0.2),
        projection(ops, HIDDEN, HEADS * DIM, dtype, single),
        1.0,
        norm[1],
        projection(ops, 2 * WIDTH, HIDDEN, dtype, single),
        "silu",
        projection(ops, HIDDEN, WIDTH, dtype, single),
        1.0,
    )
    return made._replace(**more)


def product(ops: NativeOps, x: Tensor, by: Projection, gate: Gate = "") -> Tensor:
    if by.rounded:
        return ops.rounded_linear(x, by.matrix, by.bias, gate)  # type: ignore[arg-type]
    return ops.quantized_linear(x, by.matrix, by.bias, gate)


def one_by_one(
    ops: NativeOps,
    layers: list[DecoderLayer],
    residual: Tensor,
    batch: RaggedBatch,
    kv: list[LayerKV],
    angles: list[Angles],
) -> tuple[Tensor, Tensor]:
    """What a model does without a decoder."""
    batch, x, scale = ops.prepare(batch), torch.zeros_like(residual), 1.0
    for each, pool, turned in zip(layers, kv, angles, strict=True):
        x, residual = ops.add_norm(x, residual, each.attention_norm, None, scale)
        qkv = product(ops, x, each.qkv)
        mixed = ops.self_attention(qkv, each.heads, pool, batch, turned, each.scores, each.norms)
        x = product(ops, mixed.flatten(1), each.out)
        x, residual = ops.add_norm(x, residual, each.mlp_norm, None, each.attention_scale)
        gated = product(ops, x, each.gate_up, each.gate)
        x, scale = product(ops, gated, each.down), each.mlp_scale
    return x, residual


def head_norms(dtype: torch.dtype) -> Norms:
    q, k = (Norm(torch.rand(DIM).to(dtype), 1e-6) for _ in range(2))
    return Norms(q, k)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "window and cap": {"scores": Scores(0.2, window=5, soft_cap=3.0)},
    "sinks and chunk": {"scores": Scores(0.2, chunk=6, sinks=torch.linspace(-1, 1, HEADS))},
    "scales": {"attention_scale": 0.3, "mlp_scale": 0.6, "gate": "gelu"},
}


@pytest.mark.parametrize("kind", ["plain", "integers", "mixed", "rounded", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(ops: NativeOps, dtype: torch.dtype, kind: str) -> None:
    every = [layer(ops, dtype, kind, more) for more in VARIANTS.values()]
    every.append(layer(ops, dtype, kind, {"norms": head_norms(dtype)}))
    for invariant in (False, True):
        used = InvariantNativeOps(ops.level) if invariant else ops
        decoder = used.decoder(every)
        assert isinstance(decoder, NativeDecoder)
        pages = Pages(60, PAGE)
        past = dict.fromkeys(range(5), 0)
        pools = [[poisoned(60, GROUPS, PAGE, DIM, dtype) for _ in every] for _ in range(2)]
        for counts in ({0: 7}, {0: 1}, {0: 1, 1: 8, 2: 3}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 1, 3: 2, 0: 1}, {0: 1, 1: 1}):
            batch = pages.batch([(s, past[s], [1] * n) for s, n in counts.items()], spare=len(counts) * 6)
            past |= {s: past[s] + n for s, n in counts.items()}
            rows = len(batch.tokens)
            residual = torch.randn(rows, HIDDEN).to(dtype)
            turned = [Angles(torch.randn(rows, half), torch.randn(rows, half), half == 8) for half in (16, 8, 0)]
            angles = [turned[i % 3] for i in range(len(every))]
            made = decoder(residual.clone(), used.prepare(batch), pools[0], angles)
            wanted = one_by_one(used, every, residual, batch, pools[1], angles)
            if invariant and dtype is torch.float32:  # whose products of several rows have several ways
                assert made is None
                continue
            assert made is not None
            assert torch.equal(made[0], wanted[0])
            assert torch.equal(made[1], wanted[1])
            assert all(
                torch.equal(a.nan_to_num(7), b.nan_to_num(7))
                for one, two in zip(*pools, strict=True)
                for a, b in ((one.k, two.k), (one.v, two.v))
            )


def test_batches_and_layers_that_one_call_does_not_take() -> None:
    assert BEST is not None
    with torch.inference_mode():
        ops = NativeOps(BEST)
        good = layer(ops, torch.bfloat16, "plain", {})
        reordered = replace(plain(HIDDEN, WIDTH, torch.bfloat16), order=torch.randperm(WIDTH))
        assert ReferenceOps().decoder([good]) is None
        for bad in (
            {"down": Projection(reordered, None)},
            {"gate": "relu2"},
            {"scores": Scores(0.2, ahead=3)},
            {"gate_up": projection(ops, 2 * WIDTH, HIDDEN, torch.bfloat16, "mixed")},
        ):
            assert ops.decoder([good, good._replace(**bad)]) is None
        decoder = ops.decoder([good])
        assert decoder is not None
        for rows, made in ((MOST_ROWS, True), (MOST_ROWS + 1, False)):
            batch = ops.prepare(Pages(60, PAGE).batch([(0, 0, [1] * rows)]))
            kv, residual = poisoned(60, GROUPS, PAGE, DIM, torch.bfloat16), torch.randn(rows, HIDDEN).bfloat16()
            angles = Angles(torch.rand(rows, 16), torch.rand(rows, 16))
            assert (decoder(residual, batch, [kv], [angles]) is not None) is (made and ops.many_queries > rows)
        batch, residual = ops.prepare(Pages(60, PAGE).batch([(0, 0, [1])])), torch.randn(1, HIDDEN).bfloat16()
        one = Angles(torch.rand(1, 16), torch.rand(1, 16))
        gained = one._replace(query_gain=torch.ones(1))
        floats = LayerKV(*(torch.zeros(60, GROUPS, PAGE, DIM) for _ in range(2)))
        seen = replace(batch, last_visible=torch.ones(1, dtype=torch.int64))
        good_kv = [poisoned(60, GROUPS, PAGE, DIM, torch.bfloat16)]
        assert decoder(residual, batch, good_kv, [one]) is not None
        assert decoder(residual, batch, good_kv, [gained]) is None
        assert decoder(residual, batch, [floats], [one]) is None
        assert decoder(residual, seen, good_kv, [one]) is None


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 80,
}


@pytest.mark.parametrize("quantization", ["auto", "q8_0", "int8_w8a8", "fp8"])
def test_a_model_runs_its_layers_in_one_call(tmp_path: Path, quantization: str) -> None:
    """All of them where every token's hidden state is wanted; otherwise all but the last, which computes some."""
    assert BEST is not None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    how = {"dtype": "bfloat16", "load_format": "dummy", "quantization": quantization}
    with torch.inference_mode():
        model = load_model(str(tmp_path), ops=NativeOps(BEST), **how)  # type: ignore[arg-type]
        assert isinstance(model, Llama)
        kv = [[poisoned(20, 2, PAGE, 16, torch.bfloat16) for _ in range(3)] for _ in range(2)]
        pages = Pages(20, PAGE)
        whole = pages.batch([(0, 0, [3, 9, 4]), (1, 0, [5, 6])])
        batches = [whole, replace(whole, output_indices=torch.tensor([2, 4], dtype=torch.int32))]
        decoder = model.decoder
        assert decoder[0] is not None
        for batch in batches:
            made = []
            for pool, used in zip(kv, (decoder, (None, 0)), strict=True):
                vars(model)["decoder"] = used
                made.append(model.forward(batch, pool)[[2, 4]])
            assert torch.equal(*made)


def test_a_layer_with_something_of_its_own_is_not_described(tmp_path: Path) -> None:
    assert BEST is not None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    model = load_model(str(tmp_path), dtype="bfloat16", ops=NativeOps(BEST), load_format="dummy")
    assert isinstance(model, Llama)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.describe() is not None
    block.after_mlp = NormLayer(Norm(torch.ones(64), 1e-5), model.ops)
    assert block.describe() is None
    assert model.decoder[1] == 0


def test_integers_are_in_panels(ops: NativeOps) -> None:
    assert not isinstance(eight_bits(ops, 32, 64), IntegerMatrix)
