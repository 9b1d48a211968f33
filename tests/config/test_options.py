"""Every option at and beyond its bounds, every pair of options that cannot go together, and every unknown name, with
the words of the refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.config import OPTIONS, Settings, load
from quire.config.option import Option
from quire.config.other_servers import ELSEWHERE, UNSUPPORTED
from quire.config.speculative import parse
from quire.config.unknown import refuse
from quire.errors import InvalidConfig
from tests.expected import check

EXPECTED = Path(__file__).parent / "expected"


def outcome(values: Mapping[str, Any], *names: str) -> str:
    """What these settings are, or why they are refused."""
    try:
        settings = Settings.of(**values)
    except InvalidConfig as error:
        return f"refused ({error.param}): {error}"
    return ", ".join(f"{name}={settings.get(name)!r}" for name in names or values)


def tried(known: Option) -> list[Any]:
    """Values of all kinds, and those at the ends of the range and beyond."""
    values: list[Any] = [
        None,
        known.unset,
        "",
        "x",
        " 7 ",
        "1.5k",
        -1,
        "-1",
        0,
        1,
        1.5,
        True,
        "off",
        ["a", "b"],
        "a, ,b",
        {},
    ]
    for end, out in ((known.low, -1), (known.high, 1)):
        if math.isfinite(end):
            values += [end, end + out * (1 if known.kind == "whole" else 0.001)]
    return [*values, *known.choices[:1], *(choice.upper() for choice in known.choices[:1])]


def test_every_option_takes_and_refuses_what_is_written_down() -> None:
    lines = []
    for name, known in OPTIONS.items():
        shape = f"{known.kind} {known.section} optional {known.optional} secret {known.secret}"
        lines += [
            "",
            f"== {known.flag} {known.variable}: {shape}",
            f"{known.wants()}; shown {known.show(known.default)}",
        ]
        lines += [f"{known.choices}"] if known.choices else []
        lines += [f"{value!r} -> {outcome({name: value})}" for value in tried(known)]
    check(EXPECTED / "options.txt", "\n".join(lines))


TOGETHER: list[dict[str, Any]] = [
    {"ssl_keyfile": "k"},
    {"ssl_certfile": "c"},
    {"allowed_hosts": "a.b, *.c"},
    {"allowed_hosts": "http://a.b"},
    {"allowed_hosts": "a b"},
    {"allowed_hosts": "*.*.c"},
    {"allowed_origins": "https://a.b, *"},
    {"allowed_origins": "a.b"},
    {"allowed_origins": "https://a.b/path"},
    {"admin_key": "a", "api_key": "a"},
    {"admin_key": "a", "api_key": "b"},
    {"max_requests_per_minute": 5},
    {"max_tokens_per_minute": 5},
    {"max_tokens_per_minute": 5, "backend": "vllm"},
    {"executor": "grpc"},
    {"executor_address": "a:1"},
    {"executor": "grpc", "executor_address": "a"},
    {"executor": "grpc", "executor_address": "a:1"},
    {"executor": "grpc", "executor_address": "a:1", "executor_tls_cert": "c"},
    {"executor": "grpc", "executor_address": "a:1", "executor_tls_key": "c"},
    {"executor": "grpc", "executor_address": "a:1", "executor_tls_cert": "c", "executor_tls_key": "k"},
    {
        "executor": "grpc",
        "executor_address": "a:1",
        "executor_tls_cert": "c",
        "executor_tls_key": "k",
        "executor_tls_ca": "a",
    },
    {"executor_tls_ca": "c"},
    {"executor_start_timeout": 5},
    {"executor_step_timeout": 5},
    {"backend": "openai"},
    {"upstream": "http://a:1"},
    {"backend": "openai", "upstream": "http://a:1, http://b:2/"},
    {"backend": "openai", "upstream": "a:1"},
    {"backend": "openai", "upstream": "ftp://a:1"},
    {"backend": "openai", "upstream": "http://a:1/v2"},
    {"backend": "openai", "upstream": "http://a:1, http://a:1"},
    {"backend": "openai", "upstream": "http://a:1", "batch_dir": "b"},
    {"backend": "openai", "upstream": "http://a:1", "vllm_args": ["--x"]},
    {"backend": "vllm", "upstream": "http://a:1"},
    {"backend": "vllm", "vllm_args": ["--port", "5"]},
    {"backend": "vllm", "vllm_args": ["--x=1", "-y"]},
    {"upstream_api_key": "k"},
    {"upstream_affinity": True},
    {"vllm_log": "x"},
    {"max_num_batched_tokens": 63, "max_num_seqs": 64},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 1023, "max_model_len": 1024},
    {"enable_chunked_prefill": True, "max_num_batched_tokens": 1023, "max_model_len": 1024},
    {"enable_chunked_prefill": False, "long_prefill_token_threshold": 1},
    {"num_gpu_blocks_override": 1, "kv_cache_memory_bytes": "1GiB"},
    {"num_gpu_blocks_override": 10, "block_size": 16, "max_model_len": 161},
    {"num_gpu_blocks_override": 10, "max_model_len": 161},
]


def test_options_go_together_or_not_as_is_written_down() -> None:
    check(EXPECTED / "together.txt", "\n".join(f"{values} -> {outcome(values)}" for values in TOGETHER))


SPECULATIVE: list[Any] = [
    {},
    [],
    "x",
    {"method": "ngram"},
    {"method": "magic"},
    {"model": "m"},
    {"method": "ngram", "model": "m"},
    {"method": "draft_model"},
    {"method": "ngram", "modle": "m"},
    *(
        {"method": "ngram", name: value}
        for name in ("num_speculative_tokens", "prompt_lookup_max")
        for value in (0, 1, 32, 33, True, "4")
    ),
    {"method": "ngram", "prompt_lookup_min": 5},
    {"method": "ngram", "prompt_lookup_min": 4},
    {"method": "ngram", "prompt_lookup_min": 0},
    {"method": "ngram", "adaptive": False},
    {"method": "ngram", "adaptive": 1},
    *({"method": "ngram", "synthetic_acceptance_rate": value} for value in (None, 0, 0.5, 1, 1.01, -0.01, True, "x")),
    *({"model": "m", "quantization": value} for value in ("auto", "int8", "fp8", "awq", None)),
    {"model": 5},
]


def test_a_speculative_config_is_read_as_is_written_down() -> None:
    lines = []
    for given in SPECULATIVE:
        try:
            made = parse(given if isinstance(given, str) else json.dumps(given))
            accepted = None if made is None else made.draft_acceptance()
            said = f"{made} {None if accepted is None else round(accepted, 9)}"
        except InvalidConfig as error:
            said = f"refused ({error.param}): {error}"
        lines.append(f"{given} -> {said}")
    check(EXPECTED / "speculative.txt", "\n".join(lines))


def test_every_name_of_other_servers_is_refused_with_what_is_written_down() -> None:
    names = [*ELSEWHERE, *UNSUPPORTED, "max_num_seq", "--port2", "-O3", "-q8", "QUIRE_TP", "max-model-length", "zzzzzz"]
    assert not ELSEWHERE.keys() & UNSUPPORTED.keys()
    check(EXPECTED / "unknown.txt", "\n".join(str(refuse(name, "flag", OPTIONS)) for name in names))


FILES = [
    "",
    "port: 5\napi-key: [a, b]\nspeculative-config: {method: ngram}\n",
    "api-key: 'a, b'\nmax_model_len: auto\nlookahead: -1\n",
    "port:\n",
    "5: 1",
    "port: [1]",
    "port: 1\nport: 2",
    "a",
    "port: 1\nPort: 1",
    "model: 5\n",
    "enforce_eager: 'yes'\n",
    "enforce_eager: 2\n",
]


@pytest.mark.parametrize("number", range(len(FILES)))
def test_files_and_variables_are_read_as_is_written_down(number: int, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(FILES[number])
    environ = {"QUIRE_SEED": " 7", "QUIRE_CONFIG": "none", "HOME": "x", "QUIRE_SERVICE_HOST": "10.0.0.1"}
    try:
        settings = load({"max_num_seqs": "9", "host": "::"}, file=file, environ=environ)
        said = "\n".join(f"{name}={settings.get(name)!r} ({source})" for name, source in settings.sources.items())
    except InvalidConfig as error:
        said = f"refused ({error.param}): {error}"
    check(EXPECTED / f"file-{number}.txt", FILES[number] + "\n->\n" + said.replace(str(tmp_path), ""))
