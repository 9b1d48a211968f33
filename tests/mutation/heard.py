"""A plugin of pytest that writes down, line by line, which test runs and how it ended (to $MUTATION_LOG)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from pathlib import Path

import pytest

_MOST = 8 << 30
"""Bytes of data for each process: a fault that makes a loop endless must not take the machine's memory."""

with contextlib.suppress(ValueError):  # less is allowed already
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST, _MOST))


def _say(**what: object) -> None:
    with Path(os.environ["MUTATION_LOG"]).open("a") as log:
        log.write(json.dumps(what) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _say(failed=report.nodeid, what="collection")


def pytest_runtest_logstart(nodeid: str) -> None:
    _say(start=nodeid, at=time.monotonic())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _say(failed=report.nodeid, what=report.when)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _say(end=nodeid, at=time.monotonic())
