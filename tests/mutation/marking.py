"""A plugin of pytest that writes down, line by line, which marks each test has left (to $MUTATION_MARKS)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from quire_hits import hits

from tests.mutation.marks import packed

_shared: dict[str, int] = {}
"""Marks left while fixtures that several tests share were made, by the fixture's name: they are those of each."""

_failed: set[str] = set()
"""Tests that fail here: those that look at the source, say."""


def _taken() -> int:
    """The marks since the last call, as one number."""
    now = int.from_bytes(hits[:], "little")
    hits[:] = bytes(len(hits))
    return now


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    before = _taken()
    try:
        return (yield)
    finally:
        _shared[fixturedef.argname] = here = _taken()
        hits[:] = (before | here).to_bytes(len(hits), "little")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _failed.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _taken()
    began = time.monotonic()
    result = yield
    seconds = time.monotonic() - began
    left = _taken()
    for name in getattr(item, "fixturenames", ()):
        left |= _shared.get(name, 0)
    if item.nodeid in _failed:
        return result
    row = {"test": item.nodeid, "seconds": round(seconds, 3), "hits": packed(left.to_bytes(len(hits), "little"))}
    with Path(os.environ["MUTATION_MARKS"]).open("a") as out:
        out.write(json.dumps(row) + "\n")
    return result
