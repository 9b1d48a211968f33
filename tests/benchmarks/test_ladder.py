"""The ladder and the page table's gain: rungs are measured with and without, everything below switched on."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks import ladder, paging
from benchmarks.ladder import LADDER, compared, forgetful, rate, run
from quire.assembly.engine import build_engine
from quire.config import Settings


def test_every_rung_is_measured_without_and_with_it(tmp_path: Path) -> None:
    stored = tmp_path / "ladder.json"
    asked = [
        "embedded",
        "--scale",
        "0.05",
        "--repeat",
        "1",
        "--context",
        "256",
        "--json",
        str(stored),
    ]
    result = CliRunner().invoke(ladder.command, asked)
    assert result.exit_code == 0, result.output
    rows = json.loads(stored.read_text())["rows"]
    names = [row["rung"] for row in rows]
    steps = ["kv_cache", "continuous_batching", "paged_attention", "chunked_prefill", "prefix_caching"]
    assert names[:5] == steps
    assert all(row["without"] > 0 and row["with"] > 0 for row in rows)


def test_a_gain_is_above_one_whether_more_or_less_is_better() -> None:
    faster, sooner = LADDER[0], LADDER[3]
    assert faster.metric is rate and compared(faster, 10.0, 20.0)["gain"] == 2.0
    assert compared(sooner, 20.0, 10.0)["gain"] == 2.0


def test_pages_hold_what_a_piece_a_sequence_cannot(tmp_path: Path) -> None:
    stored = tmp_path / "paging.json"
    sizes = ["--dtype", "bfloat16", "--batch", "1", "--batch", "4", "--prompt", "4", "12", "--new", "2", "6"]
    memory = ["--context", "128", "--kv-gib", str(3.1 * 128 * 36864 / 2**30)]
    result = CliRunner().invoke(paging.command, [*sizes, *memory, "--json", str(stored)])
    assert result.exit_code == 0, result.output
    rows = {(row["layout"], row["batch"]): row for row in json.loads(stored.read_text())["rows"]}
    assert rows["standard", 4]["most_at_once"] == 2 and rows["paged", 4]["most_at_once"] == 4
    assert rows["standard", 1]["peak_kv_bytes"] == 128 * 36864
    assert rows["paged", 1]["peak_kv_bytes"] < rows["standard", 1]["peak_kv_bytes"] / 2
    assert rows["paged", 4]["used_share"] > rows["standard", 4]["used_share"]


def test_forgetting_makes_the_same_tokens_and_feeds_every_one_of_them_again() -> None:
    asked = [([5, 6, 7], 4)]
    engine = build_engine(Settings.of(max_model_len=64, enable_prefix_caching=False), keep=10)
    assert run(engine, asked, ()).new == forgetful(engine, asked).new == 4
    kept, *again = engine.completed_requests
    engine.close()
    assert kept.tokens == tuple(token for one in again for token in one.tokens)
    assert [one.prompt_tokens for one in again] == [3, 4, 5, 6]
