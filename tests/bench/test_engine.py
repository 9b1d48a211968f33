"""`quire bench engine` measures what it says it measures."""

from __future__ import annotations

import json

from click.testing import CliRunner

from quire.bench.engine import command


def run(*args: str) -> dict[str, object]:
    shown = CliRunner().invoke(command, [*args, "--json"])
    assert shown.exit_code == 0, shown.output
    found: dict[str, object] = json.loads(shown.output)
    return found


def test_it_reports_every_figure() -> None:
    found = run("--requests", "200")
    assert found["requests"] == 200 and found["max_batch_observed"] == 32
    assert set(found["latency_ms"]) == {"p50", "p95", "p99"}  # type: ignore[call-overload]
    for name in ("requests_per_s", "tokens_per_s", "average_batch_size", "peak_memory_bytes"):
        assert found[name] > 0  # type: ignore[operator]
    assert 0 < found["internal_fragmentation"] < 1 and 0 <= found["external_fragmentation"] < 1  # type: ignore[operator]


def test_simulated_time_is_exact_and_costs_no_real_time() -> None:
    args = ("--requests", "4", "--prompt", "8", "8", "--new", "101", "101", "--step-ms", "1000", "--virtual")
    found = run(*args, "--no-prefix-caching")
    assert found["seconds"] == 101.0 and found["tokens"] == 404


def test_the_same_seed_gives_the_same_tokens() -> None:
    assert run("--requests", "50", "--seed", "3")["tokens"] == run("--requests", "50", "--seed", "3")["tokens"]


def test_virtual_time_without_a_cost_is_refused() -> None:
    shown = CliRunner().invoke(command, ["--virtual"])
    assert shown.exit_code == 2 and "--step-ms" in shown.output


def test_longer_pages_waste_more_of_their_slots() -> None:
    small, large = run("--requests", "200", "--block-size", "4"), run("--requests", "200", "--block-size", "64")
    assert small["internal_fragmentation"] < large["internal_fragmentation"]  # type: ignore[operator]
