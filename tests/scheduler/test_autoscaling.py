"""How many replicas an autoscaling policy asks for."""

from __future__ import annotations

import pytest

from quire.errors import InvalidConfig
from quire.scheduler.autoscaling import FleetLoad, QueuedTokensAutoscaler


def asked(scaler: QueuedTokensAutoscaler, loads: list[tuple[float, int]], running: int) -> list[int]:
    """What is asked for at (seconds, queued tokens), while what was asked for starts at once."""
    out = []
    for at, tokens in loads:
        running = scaler.desired(FleetLoad(at, tokens, running, 0))
        out.append(running)
    return out


def test_more_are_asked_for_once_more_were_wanted_for_long_enough() -> None:
    scaler = QueuedTokensAutoscaler(100, low=1, high=8, up_delay=10)
    assert asked(scaler, [(0, 350), (5, 250), (9, 900), (10, 900)], 1) == [1, 1, 1, 3]


def test_a_burst_shorter_than_the_delay_changes_nothing() -> None:
    scaler = QueuedTokensAutoscaler(100, low=1, high=8, up_delay=10)
    assert asked(scaler, [(0, 800), (5, 800), (8, 50), (10, 800), (15, 800), (19, 800)], 1) == [1] * 6


def test_fewer_are_kept_once_fewer_were_wanted_for_long_enough() -> None:
    scaler = QueuedTokensAutoscaler(100, low=2, high=8, up_delay=0, down_delay=60)
    assert asked(scaler, [(0, 0), (30, 380), (59, 0), (60, 0), (61, 0), (121, 0)], 6) == [6, 6, 6, 4, 4, 2]


def test_replicas_that_start_count() -> None:
    scaler = QueuedTokensAutoscaler(100, low=1, high=8, up_delay=0)
    assert scaler.desired(FleetLoad(0, 500, 1, 0)) == 5
    assert scaler.desired(FleetLoad(5, 500, 1, 4)) == 5


@pytest.mark.parametrize(("low", "high", "target"), [(0, 4, 10), (5, 4, 10), (1, 4, 0)])
def test_bounds_that_cannot_be_are_refused(low: int, high: int, target: int) -> None:
    with pytest.raises(InvalidConfig, match="autoscaling needs"):
        QueuedTokensAutoscaler(target, low=low, high=high)
