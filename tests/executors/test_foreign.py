"""Executors that others compute for: ONNX Runtime, and gRPC. Same tokens by the same interface. For transformers see
test_hf.py."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.assembly.engine import build_engine
from quire.assembly.grpc import host
from quire.config import Settings
from quire.engine.engine import Engine
from quire.errors import InvalidConfig, InvalidModel
from quire.types import SamplingParams
from quire.weights.locate import embedded
from quire.weights.onnx_export import export
from tests import checkpoints

NEW = 16


def prompts(vocab: int) -> list[tuple[int, ...]]:
    rng = random.Random(3)
    draw = lambda n: tuple(rng.randrange(5, vocab) for _ in range(n))  # noqa: E731
    shared = draw(40)
    found = [(shared if i % 3 == 0 else ()) + draw(rng.randrange(2, 60)) for i in range(9)]
    return [*found, found[0]]


def ask(engine: Engine, vocab: int, **sampling: Any) -> list[tuple[int, ...]]:
    """Answers in the order of the prompts."""
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    ids = [engine.submit(prompt, NEW, sampling=params) for prompt in prompts(vocab)]
    said: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    while engine.has_pending_work:
        for event in engine.step():
            assert event.error is None, event.error
            said[event.id] += event.tokens
    assert engine.gauges().used_blocks == 0
    return [said[id] for id in ids]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("onnx") / "embedded"
    export(embedded(), folder)
    return folder


@pytest.fixture(scope="module")
def want() -> Iterator[dict[str, list[tuple[int, ...]]]]:
    engine = build_engine(Settings.of(dtype="float32"))
    yield {"greedy": ask(engine, 4096), "seeded": ask(engine, 4096, temperature=1.0, seed=3, top_p=0.9)}
    engine.close()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 3, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 7, "block_size": 4},
    {"num_gpu_blocks_override": 20, "block_size": 8, "max_model_len": 128, "enable_prefix_caching": False},
    {"lookahead": 2, "block_size": 512, "batching": "static"},
    {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', "eviction_policy": "fifo"},
]
THERE = ("block_size", "num_gpu_blocks_override", "max_model_len", "lookahead", "max_num_seqs", "speculative_config")


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "chunked", "tight", "ahead", "drafts"])
@pytest.mark.parametrize("executor", ["onnx", "grpc", "onnx behind grpc"])
def test_every_foreign_executor_gives_the_local_tokens(
    executor: str, options: dict[str, Any], graphs: Path, want: dict[str, list[tuple[int, ...]]]
) -> None:
    with ExitStack() as stack:
        model: dict[str, Any] = (
            {"model": str(graphs), "executor": "onnx"} if "onnx" in executor else {"dtype": "float32"}
        )
        settings = Settings.of(**model, **options)
        if "grpc" in executor:
            near = {name: value for name, value in options.items() if name not in THERE}
            far = {name: value for name, value in options.items() if name in THERE}
            server = host(Settings.of(**model, **far), "127.0.0.1:0")
            stack.callback(server.executor.close)
            stack.callback(server.stop)
            settings = Settings.of(executor="grpc", executor_address=f"127.0.0.1:{server.port}", **near)
        engine = build_engine(settings)
        stack.callback(engine.close)
        assert ask(engine, 4096) == want["greedy"]
        assert ask(engine, 4096, temperature=1.0, seed=3, top_p=0.9) == want["seeded"]


@pytest.mark.parametrize("shape", ["llama-mqa-biased-odd-dim", "llama-mha-llama3-rope", "qwen2-gqa", "qwen3-gqa"])
def test_other_architectures_export_too(shape: str, tmp_path: Path) -> None:
    checkpoints.make(tmp_path / "model", shape)
    export(tmp_path / "model", tmp_path / "graphs")
    local = build_engine(Settings.of(model=str(tmp_path / "model"), dtype="float32"))
    onnx = build_engine(Settings.of(model=str(tmp_path / "graphs"), executor="onnx"))
    vocab = local.description.vocab_size
    assert ask(onnx, vocab) == ask(local, vocab)
    local.close()
    onnx.close()


def test_int8_is_smaller_and_answers_nearly_the_same(graphs: Path, tmp_path: Path) -> None:
    export(embedded(), tmp_path, int8=True)
    size = lambda folder: sum(f.stat().st_size for f in folder.glob("*.onnx*"))  # noqa: E731
    assert size(tmp_path) < 0.5 * size(graphs)
    engine = build_engine(Settings.of(model=str(tmp_path), executor="onnx"))
    plain = build_engine(Settings.of(model=str(graphs), executor="onnx"))
    first = [(a[0], b[0]) for a, b in zip(ask(engine, 4096), ask(plain, 4096), strict=True)]
    assert sum(a == b for a, b in first) >= 7


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"executor": "onnx"}, "embedded has no graph: `quire export-onnx embedded FOLDER`"),
        ({"executor": "onnx", "dtype": "bfloat16"}, "computes in float32"),
        ({"executor": "onnx", "quantization": "int8"}, "--quantization does not go with --executor onnx"),
        ({"executor": "onnx", "deterministic": True}, "--deterministic does not go with --executor onnx: how ONNX"),
        ({"executor": "onnx", "kv_cache_dtype": "fp8"}, "K/V is float32"),
        ({"executor": "grpc"}, "say where, with executor_address"),
        ({"executor_address": "127.0.0.1:1"}, "executor_address is for executor grpc"),
        ({"executor": "grpc", "executor_address": "127.0.0.1:1", "dtype": "float32"}, "give it to `quire executor`"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_message(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        build_engine(Settings.of(**settings))


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [("gemma2-gqa", "export-onnx knows no Gemma2ForCausalLM"), ("mistral-window", "knows no sliding window")],
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
