"""`quire bench latency`, `throughput` and `startup` on the embedded model, in vLLM's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quire.bench.offline import PERCENTAGES
from quire.cli import main
from quire.cli.base import DEVELOPER_BENCHMARKS

CPU = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "256")


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def measured(*arguments: object) -> dict[str, Any]:
    done = bench(*arguments, *CPU, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


BATCH = ("--input-len", 5, "--output-len", 4, "--batch-size", 2, "--num-iters-warmup", 1, "--num-iters", 3)


def test_latency_is_the_time_of_each_batch_and_its_percentiles(tmp_path: Path) -> None:
    saved = tmp_path / "latency.json"
    found = measured("latency", *BATCH, "--output-json", saved)
    assert found == json.loads(saved.read_text())
    latencies = found["latencies"]
    assert len(latencies) == 3 and min(latencies) > 0
    assert found["avg_latency"] == pytest.approx(sum(latencies) / 3)
    assert list(found["percentiles"]) == [str(q) for q in PERCENTAGES]
    assert found["percentiles"]["50"] == sorted(latencies)[1]
    assert (found["model"], found["batch_size"], found["input_len"], found["output_len"]) == ("embedded", 2, 5, 4)


def test_latency_in_text_has_vllms_lines() -> None:
    said = bench("latency", *BATCH, "--n", 2, "--disable-detokenize", *CPU).stdout.splitlines()
    assert said[0].startswith("Avg latency: ") and said[0].endswith(" seconds")
    assert [line.partition(":")[0] for line in said[1:]] == [f"{q}% percentile latency" for q in PERCENTAGES]


def test_throughput_counts_requests_prompts_and_answers() -> None:
    lens = ("--input-len", 6, "--prefix-len", 3, "--output-len", 4, "--num-prompts", 5, "--n", 2)
    found = measured("throughput", *lens)
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (5, 45, 40)
    assert found["total_num_tokens"] == 85
    assert found["requests_per_second"] == pytest.approx(5 / found["elapsed_time"])
    assert found["tokens_per_second"] == pytest.approx(85 / found["elapsed_time"])


def test_random_lengths_are_within_the_ratio_and_the_same_every_time() -> None:
    lens = ("--input-len", 20, "--output-len", 4, "--num-prompts", 20, "--random-range-ratio", 0.5)
    one, other = (measured("throughput", *lens) for _ in range(2))
    assert one["total_prompt_tokens"] == other["total_prompt_tokens"] != 400
    assert 200 <= one["total_prompt_tokens"] <= 600 and 40 <= one["total_output_tokens"] <= 120


def test_throughput_of_conversations_takes_the_first_two_turns(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talk = [{"value": "Once upon a time there was a dog."}, {"value": "The dog was big and it was happy."}]
    path.write_text(json.dumps([{"conversations": turns} for turns in (talk, talk[:1], talk, [{"value": ""}] * 2)]))
    found = measured("throughput", "--dataset-path", path)
    assert (found["dataset_name"], found["num_requests"]) == ("sharegpt", 2)
    assert measured("throughput", "--dataset-path", path, "--output-len", 3)["total_output_tokens"] == 6


def test_throughput_of_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "The little dog", "output_tokens": 3}\n\n{"prompt": "One day", "output_tokens": 5}\n')
    found = measured("throughput", "--dataset-name", "custom", "--dataset-path", path)
    assert (found["num_requests"], found["total_output_tokens"]) == (2, 8)


def test_startup_is_measured_in_new_processes_cold_and_warm() -> None:
    found = measured("startup", "--num-iters-cold", 1, "--num-iters-warmup", 0, "--num-iters-warm", 1)
    assert len(found["cold_startup_times"]) == 1 and len(found["warm_first_token_times"]) == 1
    for phase in ("cold", "warm"):
        assert 0 < found[f"avg_{phase}_startup_time"] < found[f"avg_{phase}_first_token_time"]
        assert list(found[f"{phase}_startup_percentiles"]) == [str(q) for q in PERCENTAGES]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("latency", "--input-len", 300), "--input-len"),
        (("latency", "--batch-size", 0), "--batch-size"),
        (("latency", "--num-iter", 3), "'--num-iters'"),
        (("latency", "--output-json", "/nowhere/x.json"), "--output-json"),
        (("latency", "--model", "no-such-model"), "no-such-model"),
        (("throughput", "--random-range-ratio", 1), "--random-range-ratio"),
        (("throughput", "--dataset-name", "sharegpt"), "--dataset-path"),
        (("throughput", "--dataset-name", "random", "--dataset-path", __file__), "--dataset-name"),
        (("throughput", "--dataset-path", __file__), "is not ShareGPT's JSON"),
        (("throughput", "--dataset-name", "custom", "--dataset-path", __file__), "line 1"),
        (("throughput", "--output-len", 300), "--output-len"),
        (("startup", "--num-iters-cold", 0, "--num-iters-warm", 0), "--num-iters-cold"),
        (("startup", "--model", "no-such-model"), "no-such-model"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: tuple[object, ...], named: str) -> None:
    done = bench(*arguments, *CPU)
    assert done.exit_code == 2 and named in done.stderr and "Traceback" not in done.stderr, done.output


def test_what_makes_an_engine_fail_in_the_new_process_is_said() -> None:
    done = bench("startup", "--max-model-len", "100000")
    assert done.exit_code == 2 and "max_model_len" in done.stderr, done.output


@pytest.mark.parametrize("name", DEVELOPER_BENCHMARKS)
def test_a_benchmark_that_moved_is_refused_with_its_new_command(name: str) -> None:
    done = bench(name)
    assert done.exit_code == 2
    assert f"`python -m benchmarks.{name}` in a checkout of Quire (see benchmarks/README.md)" in done.stderr
    assert (Path(__file__).parents[2] / "benchmarks" / f"{name}.py").is_file()
