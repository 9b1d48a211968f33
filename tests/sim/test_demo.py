"""The demo shows what happens to its requests."""

from __future__ import annotations

from click.testing import CliRunner

from quire.sim.demo import command


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
