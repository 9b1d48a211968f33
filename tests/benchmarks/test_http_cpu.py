"""`python -m benchmarks.http_cpu` counts the steps of a server and of an engine alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.counted import CountedExecutor, Step, noted, read
from benchmarks.http_cpu import Turn, figures, summary
from quire.bench.layer_cost import answer
from quire.engine.engine import Engine
from quire.sim.run import SimConfig


def test_a_file_has_each_step_with_its_sequences_and_tokens(tmp_path: Path) -> None:
    plain = SimConfig(pages=64, page_size=4).build()
    engine = Engine(plain.scheduler, CountedExecutor(plain.executor, noted(tmp_path / "steps")))
    answer(engine, [[1, 2, 3], [4, 5, 6, 7]], 3)
    found = read(tmp_path / "steps")
    assert [(step.rows, step.tokens) for step in found] == [(2, 7), (2, 2), (2, 2)]
    assert all(step.seconds >= 0.0 for step in found)


def test_what_the_executor_does_not_take_is_the_hosts_and_ratios_are_offline_over_http() -> None:
    steps = [Step(8, 512, 0.5), Step(4, 4, 0.3)]
    http, offline = Turn(1.0, 2.0, 0.1, steps), Turn(0.9, 1.0, 0.0, steps)
    row = figures(http)
    assert (row["steps"], row["rows_a_step"], row["tokens"]) == (2, 6.0, 516)
    assert (row["executor_ms_a_step"], row["engine_us_a_step"], row["front_us_a_step"]) == (400.0, 50000.0, 50000.0)
    found = summary({"http": [http] * 3, "offline": [offline, offline, offline._replace(seconds=9.0)]})
    assert (found["ratio"], found["wall_ratio"]) == (0.9, 0.5)
