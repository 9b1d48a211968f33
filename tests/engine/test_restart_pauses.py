"""Pauses before a process that keeps dying is started again."""

from __future__ import annotations

import pytest

from quire.engine.timing import RestartBackoff


@pytest.mark.parametrize(
    ("first", "pauses"),
    [
        (0.5, [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (20.0, [0.0, 20.0, 30.0, 30.0]),
        (50.0, [0.0, 30.0, 30.0]),
        (0.0, [0.0, 0.0, 0.0]),
    ],
)
def test_pauses_double_up_to_half_a_minute(first: float, pauses: list[float]) -> None:
    backoff = RestartBackoff(first)
    for pause in pauses:
        assert backoff.delay == pause and backoff.next_delay() == pause
        backoff.on_death(1.0)


@pytest.mark.parametrize(("lifetime", "pause"), [(0.0, 2.0), (60.0, 2.0), (60.001, 0.0), (1e6, 0.0)])
def test_only_a_death_after_a_minute_of_life_counts_as_the_first(lifetime: float, pause: float) -> None:
    backoff = RestartBackoff(1.0)
    assert [backoff.next_delay() for _ in range(2)] == [0.0, 1.0]
    backoff.on_death(lifetime)
    assert backoff.next_delay() == pause
    assert backoff.next_delay() == (4.0 if pause else 1.0)
