"""What `quire inspect`, `quire plan` and `quire config` print of models and memories of every kind, as written down."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.cli.inspect import count
from quire.config.option import amount
from tests.checkpoints import make
from tests.expected import check
from tests.quantised import SHAPE, SIZES, quantise
from tests.tokenization.vocabulary import CHATML, byte_level, save

EXPECTED = Path(__file__).parent / "expected"


def printed(folder: Path, *words: object) -> str:
    found = CliRunner(env={"QUIRE_SEED": "3"}).invoke(main, [str(word) for word in words])
    lines = [f"quire {' '.join(map(str, words))}", f"exit {found.exit_code}", *found.output.splitlines()]
    return "\n".join(line.replace(str(folder), "FOLDER") for line in lines)


@pytest.mark.parametrize(
    "shape", ["gemma3_text-gqa", SHAPE, "qwen3_moe-gqa", "qwen3_moe-raw-shares-some-dense", "gpt2-odd-heads"]
)
def test_a_model_is_described_as_written_down(shape: str, tmp_path: Path) -> None:
    make(tmp_path, shape, shard="20KB")
    config = {"eos_token": "<|end|>", "bos_token": "<|begin|>", "add_bos_token": True, "chat_template": CHATML}
    defaults = {"temperature": 0.3, "eos_token_id": [1, 3]}
    save(tmp_path, byte_level(), tokenizer_config=config, generation_config=defaults)
    check(EXPECTED / f"inspect-{shape}.txt", printed(tmp_path, "inspect", tmp_path))


def test_a_quantised_model_is_described_as_written_down(tmp_path: Path) -> None:
    make(tmp_path, SHAPE, **SIZES)
    quantise(tmp_path, "awq")
    check(EXPECTED / "inspect-awq.txt", printed(tmp_path, "inspect", tmp_path))


def test_plans_are_as_written_down(tmp_path: Path) -> None:
    make(tmp_path, SHAPE)
    plans = []
    for memory in ("0", "200k", "600k", "2MiB", "8MiB", "64MiB", "1GiB", "x"):
        plans.append(printed(tmp_path, "plan", tmp_path, "--memory", memory, "--device", "cpu", "--max-num-seqs", 4))
    for more in (
        ("--device", "cuda"),
        ("--device", "cuda", "--enforce-eager"),
        ("--device", "cuda", "--gpu-memory-utilization", "0.5", "--kv-cache-dtype", "fp8"),
        ("--device", "cuda", "--quantization", "int8", "--block-size", "32"),
        ("--device", "cpu", "--num-gpu-blocks-override", "8", "--block-size", "16"),
        ("--device", "cpu", "--num-gpu-blocks-override", "1"),
        ("--device", "cpu", "--kv-cache-memory-bytes", "100k"),
        ("--device", "cpu", "--max-model-len", "100000"),
        ("--device", "cpu", "--max-model-len", "40", "--max-num-batched-tokens", "64", "--max-num-seqs", "64"),
    ):
        plans.append(printed(tmp_path, "plan", tmp_path, "--memory", "512MiB", *more))
    check(EXPECTED / "plans.txt", "\n\n".join(plans))


def test_settings_are_shown_as_written_down(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("dtype: float32\nport: 1\nupstream-affinity: true\nbackend: vllm\n")
    words = ("config", "some/model", "--config", tmp_path / "s.yaml", "--api-key", "a", "--max-model-len", "32k")
    check(EXPECTED / "config.txt", printed(tmp_path, *words))


def test_sizes_and_counts_are_rounded_to_their_largest_unit() -> None:
    sizes = (0, 1023, 1024, (1 << 20) - 1, 1 << 20, 1 << 30, 1.5 * (1 << 40))
    assert [amount(size) for size in sizes] == [
        *("0 bytes", "1023 bytes", "1.00 KiB", "1024.00 KiB", "1.00 MiB", "1.00 GiB", "1536.00 GiB")
    ]
    numbers = (0, 999, 1000, 1_240_000, 10**9, 76_100_000_000)
    assert [count(number) for number in numbers] == ["0", "999", "1 k", "1.24 M", "1 B", "76.1 B"]
