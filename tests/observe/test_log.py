from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from quire.observe.log import LoggedRim, log_stats
from quire.observe.rim_metrics import RimMetrics

LOG = logging.getLogger("quire.tests")


@pytest.fixture(autouse=True)
def _listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)


def ended(rim: RimMetrics, first: float | None) -> None:
    rim.on_end("stop", choice=0, n=2, prompt=7, cached=4, tokens=3, max_tokens=16, first=first, seconds=0.25)


def test_each_answer_is_a_line_with_counts_and_times(caplog: pytest.LogCaptureFixture) -> None:
    rim = LoggedRim("m", LOG)
    ended(rim, 0.1)
    ended(rim, None)
    rim.on_refused("draining")
    assert caplog.messages == [
        "answer 1 of 2 ended (stop): 7 prompt tokens (4 cached), 3 of at most 16 new ones, "
        "first after 0.100 s, all after 0.250 s",
        "answer 1 of 2 ended (stop): 7 prompt tokens (4 cached), 3 of at most 16 new ones, "
        "first after -, all after 0.250 s",
        "a request was refused: draining",
    ]


def test_logging_changes_no_metric() -> None:
    plain, logged = RimMetrics("m"), LoggedRim("m", LOG)
    for rim in (plain, logged):
        ended(rim, 0.1)
        rim.on_refused("draining")
    assert logged.text() == plain.text()


def test_statistics_are_logged_while_tokens_are_made_and_not_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    made = iter([5, 5, 15, 15, 15])
    cache = {"utilization": 0.25}

    def stats() -> dict[str, Any]:
        try:
            return {"generated_tokens": next(made), "active_requests": 3, "waiting_requests": 2, "cache": cache}
        except StopIteration:
            raise asyncio.CancelledError from None

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(log_stats(stats, LOG, every=0.001))
    assert caplog.messages == ["10000.0 tokens/s, 3 running, 2 waiting, 25.0 % of KV blocks used"]


def test_statistics_wait_for_an_engine_that_has_none_yet(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(log_stats(dict, LOG, every=0.001), 0.02))
    assert caplog.messages == []
