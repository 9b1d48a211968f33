"""A model in a GGUF file is ready before its matrices are packed, and says the same then and afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.assembly import engine as assembly
from quire.config import Settings
from quire.errors import InvalidModel
from quire.layers.quantization import mapped
from quire.layers.quantization.base import QuantizedWeight
from quire.layers.quantization.mapped import MappedBlocks, Scratch, pack_beside
from quire.models.registry import Model
from quire.ops.gguf_blocks import BLOCKS
from quire.ops.native.library import best_level
from quire.ops.native.ops import NativeOps
from quire.ops.operands import Gate
from quire.weights.canary import Canary
from quire.weights.entries import file_entry
from quire.weights.gguf import KINDS
from quire.weights.load import load_model
from tests.checkpoints import make
from tests.gguf_files import write
from tests.models.feeding import Feeder
from tests.ops.test_native import HERE, raw_blocks

pytestmark = pytest.mark.skipif(best_level() is None, reason="needs a processor that the kernels run on")

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


@pytest.fixture(params=HERE)
def leveled(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    """The operations at each instruction set that this processor has; the best one is chosen again afterwards."""
    yield NativeOps(request.param)
    native()


def native() -> NativeOps:
    level = best_level()
    assert level is not None
    return NativeOps(level)


def said(model: Model, prompt: Sequence[int]) -> torch.Tensor:
    """Logits of a prompt's last token."""
    return Feeder(model, page_size=16, dtype=torch.bfloat16).step([(0, list(prompt))])[0]


def blocks(kind: str, rows: Sequence[int], columns: int, ops: NativeOps) -> MappedBlocks:
    """A matrix of several parts of so many rows."""
    panels = ops.empty_blocks(kind, sum(rows), columns)
    assert panels is not None
    return MappedBlocks(kind, torch.split(raw_blocks(kind, sum(rows), columns), list(rows)), panels, ops, Scratch())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("gate", ["", "silu", "gelu_erf", "relu2"])
def test_a_product_has_the_same_bits_before_and_after_packing(
    kind: str, gate: Gate, leveled: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "STRIP", 5000)  # several strips, which cut through parts
    torch.manual_seed(0)
    ops = leveled
    for rows in ([64, 64], [48, 80, 32], [24]):
        source = blocks(kind, rows, 512, ops)
        bias = torch.randn(sum(rows)).bfloat16()
        weight = QuantizedWeight(ops, source.panels.matrix, bias, source=source)
        for count in (1, 5, 40):
            x = torch.randn(count, 512).bfloat16()
            before = weight.apply(x, gate)
            assert weight.source is source and weight.projection is None
            weight.pack()
            assert weight.source is None and weight.projection is not None
            assert torch.equal(before, weight.apply(x, gate))
            weight.source = source


def test_rows_are_those_of_the_file_in_any_order_and_columns_are_padded_with_zeros() -> None:
    ops = native()
    ops.unit = 64  # as tiles want it
    source = blocks("Q8_0", [32, 40], 96, ops)
    source.scratch.memory = torch.full((1 << 16,), 255, dtype=torch.uint8)
    (stored,) = (each for each in KINDS.values() if each.name == "Q8_0")
    whole = BLOCKS["Q8_0"](torch.cat(list(source.raw)).view(-1, stored.size)).values().view(72, 96)
    which = torch.tensor([71, 0, 40, 40, 31, 32])
    found = source.rows(which)
    assert found.padded == 128 and torch.equal(found.values_of(), whole[which])
    weight = QuantizedWeight(ops, source.panels.matrix, None, source=source)
    assert torch.equal(weight.dequantize(slice(None, None, 7)), whole[::7])
    x = torch.randn(3, 96)
    before = weight.apply(x)
    weight.pack()
    assert torch.equal(before, weight.apply(x)) and torch.equal(weight.dequantize(), whole)


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen2-gqa"])
def test_a_model_says_the_same_while_it_is_read_from_its_file(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, make(tmp_path / "source", shape, **WIDE), "Q8_0")
    unpacked: list[QuantizedWeight] = []
    packed = load_model(path, dtype="bfloat16", ops=native())
    ours: Any = load_model(path, dtype="bfloat16", ops=native(), unpacked=unpacked, canary=Canary())
    read = [weight.source for weight in unpacked]
    # Of Llama's, q and k have other rows in the file than in the model, and are packed with v.
    assert len(read) == (1 + 3 * len(ours.blocks) if shape == "llama-gqa-tied" else 2 + 4 * len(ours.blocks))
    prompt = list(range(1, 40))
    wanted = said(packed, prompt)
    assert ours.decoder == (None, 0), "which reads packed matrices"
    assert torch.equal(said(ours, prompt), wanted)
    assert [weight.source for weight in unpacked] == read
    pack_beside(unpacked).join()
    assert not any(weight.source for weight in unpacked)
    assert ours.decoder[1] == len(ours.blocks) and not ours.unpacked
    assert torch.equal(said(ours, prompt), wanted)


def test_a_matrix_of_several_types_is_packed_while_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    made = make(tmp_path / "source", "qwen2-gqa", **WIDE)
    write(path, made, lambda name: "Q4_K" if "gate_proj" in name else "Q8_0")
    unpacked: list[QuantizedWeight] = []
    ours: Any = load_model(path, dtype="bfloat16", ops=native(), unpacked=unpacked)
    assert len(unpacked) == 2 + 3 * len(ours.blocks)
    assert torch.equal(said(ours, [1, 2, 3]), said(load_model(path, dtype="bfloat16", ops=native()), [1, 2, 3]))


def test_mixtures_of_experts_are_packed_while_they_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, make(tmp_path / "source", "qwen3_moe-gqa", **WIDE, moe_intermediate_size=256), "Q8_0")
    unpacked: list[QuantizedWeight] = []
    load_model(path, dtype="bfloat16", ops=native(), unpacked=unpacked)
    assert unpacked == []


def test_a_mapped_tensor_is_its_rows_and_a_file_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(range(250)) * 40)
    entry = file_entry(file, 4500, torch.uint8, (100, 50))
    assert entry.mapped is not None
    for cut in (slice(None), slice(3, 7), slice(99, 100)):
        assert torch.equal(entry.mapped(cut), entry.read((cut,)))
    assert entry.part(3).mapped is not None and entry.transformed((50, 100), torch.t).mapped is None
    with pytest.raises(InvalidModel, match="truncated"):
        file_entry(file, 5001, torch.uint8, (100, 50)).mapped(slice(None))  # type: ignore[misc]


def test_scratch_is_as_large_as_what_was_made_in_it() -> None:
    scratch = Scratch()
    places = []
    for _ in range(3):
        scratch.begin()
        places.append([scratch.empty(10, 10, dtype=torch.float32).data_ptr() for _ in range(2)])
    assert places[1] == places[2] and len(set(places[1])) == 2
    assert all(place % 64 == places[1][0] % 64 for place, _ in pairwise([*places[1], 0]))


def test_an_engine_answers_from_the_file_and_packs_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write(path, make(tmp_path / "source", "llama-gqa-tied", **WIDE), "Q8_0")
    packing: list[QuantizedWeight] = []
    monkeypatch.setattr(assembly, "pack_beside", packing.extend)
    engine = assembly.build_engine(
        Settings.of(model=str(path), device="cpu", max_model_len=64, max_num_seqs=2, num_gpu_blocks_override=16)
    )

    def answered(prompt: list[int]) -> list[int]:
        engine.submit(prompt, 12, id="asked")
        made: list[int] = []
        while engine.has_pending_work:
            made += [token for output in engine.step() for token in output.tokens]
        return made

    before = answered([1, 2, 3])
    assert packing and all(weight.source for weight in packing) and len(before) == 12
    pack_beside(packing).join()
    engine.reset_prefix_cache()
    assert answered([1, 2, 3]) == before
    engine.executor.close()
