from __future__ import annotations

from quire.frontend.interface import DrainRate


def leaving(every: float, count: int) -> DrainRate:
    departures = DrainRate()
    for i in range(count):
        departures.record(100.0 + i * every)
    return departures


def test_the_wait_is_the_backlog_at_the_recent_rate() -> None:
    departures = leaving(0.5, 10)
    assert departures.wait(20, 104.5) == 9


def test_a_stall_makes_the_wait_longer() -> None:
    departures = leaving(0.1, 10)
    assert departures.wait(20, 101) < departures.wait(20, 110)


def test_the_wait_stays_within_reason() -> None:
    assert leaving(0.001, 50).wait(3, 100.05) == 1
    assert leaving(30, 5).wait(2048, 300) == 60
    assert DrainRate().wait(2048, 5) == 1


def test_the_wait_is_never_shorter_than_the_backlog_takes() -> None:
    """Rounded up: a client that comes back a moment too early is refused again."""
    departures = leaving(0.5, 10)
    assert [departures.wait(backlog, 104.5) for backlog in (1, 3, 7, 20, 21)] == [1, 2, 4, 9, 10]
