"""`python -m benchmarks.start_cpu` writes models as large files have them, and shows medians."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from benchmarks import start_cpu as module
from benchmarks.start_cpu import Start, table, vocabulary, write_int4
from quire.bench.peers import checkpoints
from quire.weights.load import load_model

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 600,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("count", "merges"), [(600, 88), (2000, 1700)])
def test_a_vocabulary_has_as_many_tokens_and_merges_as_are_asked_for(count: int, merges: int) -> None:
    made = vocabulary(count, merges)
    assert made.get_vocab_size() == count
    assert len(json.loads(made.to_str())["model"]["merges"]) == merges
    assert made.decode(made.encode("tea  oat 3").ids) == "tea  oat 3"


def test_a_checkpoint_in_4_bits_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPES", {"tiny": SHAPE})
    plain = checkpoints.write_folder(tmp_path / "tiny-bf16", SHAPE, "bfloat16")
    folder = write_int4(plain, tmp_path / "tiny-int4")
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = {*file.keys()}
    assert "model.layers.0.mlp.up_proj.weight_packed" in names and "model.embed_tokens.weight" in names
    assert load_model(folder).spec.layers == 1
    assert write_int4(plain, folder) == folder


def test_medians_are_shown_of_each_tree(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Start(*(float(i + n) for n in range(6))) for i in (1, 9, 2)]
    Console(width=120).print(table("tiny in bf16", {"this": rows}))
    line = next(line for line in capsys.readouterr().out.splitlines() if "this" in line)
    assert line.split()[3::2][:2] == ["2.00", "3.00"]
