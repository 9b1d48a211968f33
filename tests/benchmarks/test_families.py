"""Families at their published sizes: what a step reads at least, a model's folder, and one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import families
from benchmarks.workloads import BANDWIDTH
from quire.llm import LLM
from quire.models.registry import idle_parameters, parameters, read_spec
from tests.models.test_published import PUBLISHED


def test_the_floor_of_a_dense_model_is_its_weights_and_keys_and_values() -> None:
    _, config = PUBLISHED["microsoft/phi-4"]
    spec = read_spec(config)
    weights = 2 * (parameters(spec) - spec.vocab * spec.hidden)
    for batch in (1, 16):
        kv = batch * 100 * spec.kv_bytes(2)
        assert families.floor(spec, config, batch, 100) == pytest.approx((weights + kv) / BANDWIDTH)


def test_the_floor_of_a_mixture_grows_until_all_experts_are_read() -> None:
    _, config = PUBLISHED["allenai/OLMoE-1B-7B-0924"]
    spec = read_spec(config)
    head = spec.vocab * spec.hidden
    one = 2 * (parameters(spec) - idle_parameters(spec) - head) + spec.kv_bytes(2)
    many = 2 * (parameters(spec) - head) + 1000 * spec.kv_bytes(2)
    assert families.floor(spec, config, 1, 1) == pytest.approx(one / BANDWIDTH)
    assert families.floor(spec, config, 1000, 1) == pytest.approx(many / BANDWIDTH)


def test_windows_and_packed_experts_lower_the_floor() -> None:
    _, config = PUBLISHED["openai/gpt-oss-20b"]
    spec = read_spec(config)
    far, near = (families.floor(spec, config, 64, length) for length in (1128, 128))
    assert far - near == pytest.approx(64 * 1000 * spec.kv_bytes(2) / 2 / BANDWIDTH)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    assert families.floor(spec, config, 64, 1) < 0.4 * families.floor(spec, plain, 64, 1)


def test_float8_halves_what_matrices_take_and_states_are_read_and_written() -> None:
    _, config = PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"]
    spec = read_spec(config)
    plain, half = (families.floor(spec, each, 1, 0) for each in (config, {**config, **families.FP8}))
    table, states = spec.vocab * spec.hidden, sum(each.nbytes(2) for each in spec.state_shapes if each)
    matrices = parameters(spec) - idle_parameters(spec) - 2 * table
    assert half == pytest.approx((matrices + 2 * table + 2 * states) / BANDWIDTH)
    assert plain - half == pytest.approx(matrices / BANDWIDTH)


def test_a_folder_is_a_model_with_random_weights(tmp_path: Path) -> None:
    _, config = PUBLISHED["allenai/OLMo-2-1124-7B"]
    small = config | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 4, "vocab_size": 48000}
    families.write(tmp_path, small, read_spec(small))
    with LLM(str(tmp_path), load_format="dummy", dtype="float32", max_model_len=64) as llm:
        token, first = families.decode(llm, 2, 8, 4, 0)
    assert first > 0 and token + first > 0


def test_a_model_that_fails_is_a_row_that_says_why() -> None:
    row = families.in_a_process(["--batches", "x", "--here", "no such model"], "it", 120)
    assert row["model"] == "it" and "error" in row
    families.show(
        [row, {"model": "a", "ready_s": 1.0, "rows": [{"batch": 1, "ms_a_token": 1, "first_ms": 2, "floor_ms": 1}]}]
    )
