"""The demo shows what happens to its requests."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from quire.bench.engine import command as bench_engine
from quire.bench.late import cpu as bench_cpu
from quire.cli.demo import command


def test_the_demo_shows_spans_waiting_pages_and_the_end() -> None:
    shown = CliRunner().invoke(
        command, ["--pages", "12", "--page-size", "4", "--max-num-seqs", "3"], env={"COLUMNS": "120"}
    )
    assert shown.exit_code == 0, shown.output
    for words in ("submitted A", "step 1", "prompt chunk", "decode", "waits for", "preempted for", "finished: length"):
        assert words in shown.output
    assert shown.output.count("finished: length") == 6
    assert "0 used, 12 free" in shown.output
    last = shown.output.rstrip().splitlines()[-1]
    assert (
        last
        == "6 requests, 32 tokens in 255 ms: 125 tokens/s; latency p50 168 ms, p99 255 ms; peak 12 of 12 pages (100%)"
    )


def test_the_demo_runs_with_look_ahead() -> None:
    shown = CliRunner().invoke(command, ["--lookahead", "1", "--requests", "30"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("finished: length") == 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "5", "2"), "5 2: the first number may not be above the second"),
        (("--new", "5", "2"), "5 2: the first number may not be above the second"),
        (("--prompt", "-1", "2"), "-1 is not in the range"),
        (("--new", "1", "999999999"), "999999999 is not in the range"),
        (("--max-num-seqs", f"{10**20}"), "is not in the range"),
    ],
)
def test_lengths_and_sizes_that_cannot_be_are_refused(words: tuple[str, ...], said: str) -> None:
    for each in (command, bench_engine):
        refused = CliRunner().invoke(each, words)
        assert refused.exit_code == 2 and said in refused.output, refused.output


def test_sizes_that_no_list_holds_and_times_that_never_end_are_refused() -> None:
    for each, words in (
        (command, ("--pages", f"{10**20}")),
        (command, ("--delay", "nan")),
        (command, ("--delay", "1e20")),
        (bench_engine, ("--blocks", f"{10**20}")),
        (bench_cpu, ("--threads", "-1")),
        (bench_cpu, ("--batch", "0")),
        (bench_cpu, ("--repeat", "0")),
    ):
        refused = CliRunner().invoke(each, words)
        assert refused.exit_code == 2 and f"Invalid value for '{words[0]}'" in refused.output, refused.output
