"""Python's own heap, as a process that serves wants it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from quire import heap


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Knot:
    def __init__(self) -> None:
        self.self = self


@pytest.mark.usefixtures("as_before")
def test_what_there_is_is_not_looked_through_again_and_what_comes_is() -> None:
    before = [Knot()]
    heap.settled()
    assert before[0] not in gc.get_objects()
    before.clear()
    known = [Knot()]
    assert known[0] in gc.get_objects()
    known.clear()
    gc.collect()
    assert not any(type(one) is Knot for one in gc.get_objects())
    assert gc.get_threshold()[0] > 700
