"""`python -m benchmarks.profile`: operations are counted as the model does them, and phases are kept apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.profile import command, work
from benchmarks.shapes import SHAPES
from quire.models.registry import idle_parameters, parameters, read_spec

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def test_operations_are_two_for_each_weight_a_token_meets_and_four_for_each_number_it_looks_back_at() -> None:
    spec = read_spec(TINY)
    matrices = 2 * (4 * 4 + 2 * (4 * 2) + 4 * 4 + 3 * 4 * 8)
    norms = (2 * 2 + 1) * 4
    assert work(spec, 5, 0, sampled=0) == 2 * 5 * (matrices + norms)
    assert work(spec, 5, 7, sampled=0) - work(spec, 5, 0, sampled=0) == 5 * 4 * 2 * 2 * 2 * 7
    assert work(spec, 5, 0, sampled=3) - work(spec, 5, 0, sampled=0) == 2 * 3 * 4 * 10


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b"])
def test_a_tied_head_is_counted_once_for_each_sample(shape: str) -> None:
    spec = read_spec(dict(SHAPES[shape]))
    tables = spec.vocab * spec.hidden * (1 if spec.tie else 2)
    assert idle_parameters(spec) == 0
    assert work(spec, 1, 0, sampled=1) == 2 * (parameters(spec) - tables + spec.vocab * spec.hidden)


def test_the_embedded_model_is_profiled_and_traced(tmp_path: Path) -> None:
    kept, trace = tmp_path / "found.json", tmp_path / "trace.json"
    asked = ["--batch", "2", "--prompt", "16", "--new", "3", "--peak", "1"]
    done = CliRunner().invoke(command, [*asked, "--json", str(kept), "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    found = json.loads(kept.read_text())
    for name in ("prefill", "decode"):
        row = found["phases"][name]
        assert 0 < row["mfu"] == pytest.approx(row["tflop_s"])
    assert any(row["name"].startswith(("aten::", "mkldnn::")) and row["calls"] for row in found["operators"])
    assert json.loads(trace.read_text())["traceEvents"]
    assert "MFU" in done.output and found["about"]["batch"] == 2
