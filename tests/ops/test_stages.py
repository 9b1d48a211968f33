"""What the time of a start goes to."""

from __future__ import annotations

from collections.abc import Iterator

from quire.ops.stages import STAGES, START_TIMES, StartTimes, inside_stage, stage_ended, stage_table


def test_every_second_of_a_start_belongs_to_one_stage() -> None:
    clock: Iterator[float] = iter([12.0, 13.0, 13.5, 20.0, 21.0])
    times = StartTimes(10.0, lambda: next(clock))
    token = START_TIMES.set(times)
    try:
        stage_ended("weights")  # 10 to 12
        with inside_stage("tuning"):  # 13 to 13.5
            pass
        stage_ended("graphs")  # 12 to 20, without tuning
        stage_ended("graphs")
    finally:
        START_TIMES.reset(token)
    assert times.seconds == {"weights": 2.0, "tuning": 0.5, "graphs": 8.5}


def test_without_a_start_nothing_is_noted() -> None:
    stage_ended("weights")
    with inside_stage("tuning"):
        pass


def test_the_table_has_a_line_for_each_rank() -> None:
    head, first, second = stage_table([{"imports": 5.04, "graphs": 12.0}, {"imports": 4.0, "rest": 0.16}])
    assert head.split() == ["rank", *STAGES]
    assert first.split() == ["0", "5.0", "0.0", "0.0", "0.0", "0.0", "12.0", "0.0"]
    assert second.split() == ["1", "4.0", "0.0", "0.0", "0.0", "0.0", "0.0", "0.2"]
