"""Python's own heap, as a process that serves wants it."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

import quire
from quire import SamplingParams, heap


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.freeze()  # or all modules and tests are looked through from here on: see tests/conftest.py
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


@pytest.mark.usefixtures("as_before")
def test_no_garbage_is_collected_until_a_process_has_settled() -> None:
    heap.starting()
    assert not gc.isenabled()
    heap.settled()
    assert gc.isenabled()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("triton", [False, True])
def test_what_lives_at_the_end_is_collected_only_where_it_would_be_reported(
    monkeypatch: pytest.MonkeyPatch, triton: bool
) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    if triton:
        monkeypatch.setitem(sys.modules, "triton", sys)
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    gc.freeze()
    known = [Knot()]
    heap.in_process_of_its_own()
    registered[0]()
    assert (known[0] in gc.get_objects()) == triton


def test_tests_are_excluded_again_after_these() -> None:
    """A worker of all tests has a million objects and more, which tests of memory would look through each time."""
    assert gc.get_freeze_count() > 100_000


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_name_of_the_package_is_imported(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[bool]()

    def imported(name: str) -> object:
        seen.append(gc.isenabled())
        return importlib.import_module(name)

    monkeypatch.setattr(quire, "importlib", SimpleNamespace(import_module=imported))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert quire.__getattr__("SamplingParams") is SamplingParams
        assert seen[-1] is False and gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
