"""ONNX Runtime as the executor, and what is exported for it. With other executors see test_foreign.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.errors import InvalidConfig, InvalidModel
from quire.weights.locate import embedded
from quire.weights.onnx_export import export
from tests import checkpoints
from tests.executors.asked import ask, prompts


@pytest.mark.parametrize("shape", ["llama-mqa-biased-odd-dim", "llama-mha-llama3-rope", "qwen2-gqa", "qwen3-gqa"])
def test_other_architectures_export_too(shape: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path / "model", shape)
    export(tmp_path / "model", tmp_path / "graphs")
    local = build_engine(Settings.of(model=str(tmp_path / "model"), dtype="float32"))
    onnx = build_engine(Settings.of(model=str(tmp_path / "graphs"), executor="onnx"))
    vocab = local.description.vocab_size
    assert ask(onnx, prompts(vocab)) == ask(local, prompts(vocab))
    local.close()
    onnx.close()


def test_int8_is_smaller_and_answers_nearly_the_same(graphs: Path, tmp_path: Path) -> None:
    export(embedded(), tmp_path, int8=True)
    size = lambda folder: sum(f.stat().st_size for f in folder.glob("*.onnx*"))  # noqa: E731
    assert size(tmp_path) < 0.5 * size(graphs)
    engine = build_engine(Settings.of(model=str(tmp_path), executor="onnx"))
    plain = build_engine(Settings.of(model=str(graphs), executor="onnx"))
    first = [(a[0], b[0]) for a, b in zip(ask(engine, prompts(4096)), ask(plain, prompts(4096)), strict=True)]
    assert sum(a == b for a, b in first) >= 7


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ("gemma2-gqa", "export-onnx does not support Gemma2ForCausalLM"),
        ("mistral-window", "does not support sliding windows"),
    ],
)
def test_a_model_that_cannot_be_exported_is_named(shape: str, complaint: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path / "model", shape)
    with pytest.raises(InvalidModel, match=complaint):
        export(tmp_path / "model", tmp_path / "graphs")


@pytest.mark.parametrize(("version", "said"), [(None, "without a format version"), (2, "of format 2")])
def test_graphs_of_another_format_are_refused_with_what_to_do(
    version: int | None, said: str, graphs: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(graphs, tmp_path / "graphs")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quire_onnx_format") == 1
    (folder / "config.json").write_text(
        json.dumps(config if version is None else config | {"quire_onnx_format": version})
    )
    with pytest.raises(
        InvalidConfig, match=f"{said}, .* reads format 1: export the model again, with `quire export-onnx"
    ):
        build_engine(Settings.of(model=str(folder), executor="onnx"))
