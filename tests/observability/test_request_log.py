from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import pytest

from quire.observability.frontend_metrics import FrontendMetrics
from quire.observability.logs import FORMATS, RequestLogger, log_stats
from quire.observability.observer import ObserverGroup
from quire.types import FinishedRequest, SamplingParams, TraceContext

LOG = logging.getLogger("quire.tests")


@pytest.fixture(autouse=True)
def _listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)


def ended(first: float | None, id: str = "cmpl-1", request_id: str = "") -> FinishedRequest:
    return FinishedRequest(
        id,
        0,
        "stop",
        SamplingParams(n=2),
        TraceContext(request_id),
        prompt=7,
        cached=4,
        tokens=3,
        max_tokens=16,
        first=first,
        seconds=0.25,
    )


def test_each_answer_is_a_line_with_ids_counts_and_times(caplog: pytest.LogCaptureFixture) -> None:
    logger = RequestLogger(LOG)
    logger.on_end(ended(0.1, request_id="mine"))
    logger.on_end(ended(None))
    logger.on_refused("draining")
    assert caplog.messages == [
        "cmpl-1 (request mine): answer 1 of 2 ended (stop): 7 prompt tokens (4 cached), 3 of at most 16 new ones, "
        "first after 0.100 s, all after 0.250 s",
        "cmpl-1 (request -): answer 1 of 2 ended (stop): 7 prompt tokens (4 cached), 3 of at most 16 new ones, "
        "first after -, all after 0.250 s",
        "a request was refused: draining",
    ]
    assert caplog.records[0].fields["request_id"] == "mine"  # type: ignore[attr-defined]


def test_logging_adds_no_metric() -> None:
    plain = FrontendMetrics("m")
    both = ObserverGroup(plain, RequestLogger(LOG))
    both.on_first(1.0)
    both.on_gap(1.0, 2)
    both.on_surplus(1)
    assert both.text() == plain.text()


EVIL = "x\nINFO:     all is well\r\x1b[2J\u202e\x00\u2028\ud800"


def record(message: str, **about: Any) -> logging.LogRecord:
    made = logging.LogRecord("quire", logging.INFO, "f.py", 1, message, (), None)
    for name, value in about.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("kind", ["text", "json"])
def test_nothing_in_a_record_can_look_like_another(kind: str) -> None:
    line = FORMATS[kind]().format(record(EVIL, fields={"request_id": EVIL, "level": "critical"}))
    assert len(line.splitlines()) == 1
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in line)
    if kind == "json":
        line_fields = json.loads(line)
        assert line_fields["level"] == "info", "a field cannot stand for what the record is"
        assert line_fields["request_id"].startswith("x\\n")


def test_a_traceback_cannot_either() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        about = {"exc_info": sys.exc_info()}
    first, *rest = FORMATS["text"]().format(record("it broke", **about)).splitlines()
    assert first == "INFO:     it broke"
    assert rest and all(more.startswith("    ") for more in rest) and "\x1b" not in "".join(rest)
    line = FORMATS["json"]().format(record("it broke", **about))
    assert len(line.splitlines()) == 1 and "ValueError" in json.loads(line)["trace"] and "\x1b" not in line


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
