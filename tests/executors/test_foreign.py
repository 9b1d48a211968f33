"""Executors that others compute for: ONNX Runtime, and gRPC. Same tokens by the same interface. For transformers see
test_hf.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.assembly.engine import build_engine
from quire.assembly.grpc import host
from quire.config import Settings
from quire.errors import InvalidConfig
from tests.executors.asked import ask, prompts


@pytest.fixture(scope="module")
def want() -> Iterator[dict[str, list[tuple[int, ...]]]]:
    engine = build_engine(Settings.of(dtype="float32"))
    seeded = ask(engine, prompts(4096), temperature=1.0, seed=3, top_p=0.9)
    yield {"greedy": ask(engine, prompts(4096)), "seeded": seeded}
    engine.close()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 3, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 7, "block_size": 4},
    {"num_gpu_blocks_override": 20, "block_size": 8, "max_model_len": 128, "enable_prefix_caching": False},
    {"lookahead": 2, "block_size": 512, "batching": "static"},
    {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', "eviction_policy": "fifo"},
]
THERE = ("block_size", "num_gpu_blocks_override", "max_model_len", "lookahead", "max_num_seqs", "speculative_config")


NAMES = ["plain", "chunked", "tight", "ahead", "drafts"]
BY_DAY = {"onnx": ("plain", "tight", "drafts"), "grpc": ("chunked", "ahead", "drafts"), "onnx behind grpc": ("drafts",)}
"""Each option is seen in CI with one of the two, by itself."""


@pytest.mark.parametrize(
    ("executor", "options"),
    [
        pytest.param(
            executor,
            options,
            id=f"{executor}-{name}",
            marks=() if name in BY_DAY[executor] else pytest.mark.nightly,
        )
        for executor in BY_DAY
        for name, options in zip(NAMES, OPTIONS, strict=True)
    ],
)
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
        assert ask(engine, prompts(4096)) == want["greedy"]
        assert ask(engine, prompts(4096), temperature=1.0, seed=3, top_p=0.9) == want["seeded"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"executor": "onnx"}, "embedded has no graph: `quire export-onnx embedded FOLDER`"),
        ({"executor": "onnx", "dtype": "bfloat16"}, "computes in float32"),
        ({"executor": "onnx", "quantization": "int8"}, "--quantization does not go with --executor onnx"),
        ({"executor": "onnx", "deterministic": True}, "--deterministic does not go with --executor onnx: how ONNX"),
        ({"executor": "onnx", "kv_cache_dtype": "fp8"}, "K/V is float32"),
        ({"executor": "grpc"}, "set executor_address to its HOST:PORT"),
        ({"executor_address": "127.0.0.1:1"}, "executor_address is for executor grpc"),
        ({"executor": "grpc", "executor_address": "127.0.0.1:1", "dtype": "float32"}, "give it to `quire executor`"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_message(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        build_engine(Settings.of(**settings))
