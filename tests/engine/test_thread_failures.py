"""The engine's thread when the engine breaks: who is told what, and what can still be called afterwards."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from quire.engine import thread
from quire.engine.thread import EngineThread
from quire.errors import Closed, InvalidRequest, QuireError
from quire.scheduler.constraint import FREE
from quire.types import Request


class Breaking:
    """An engine that notes what it is asked; `broken` names the methods that raise."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls = broken, list[str]()
        self.running: dict[str, int] = {}
        self.unprepared = 0

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if what.split()[0] in self.broken:
            raise RuntimeError(what)

    @property
    def has_pending_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request, constraint: object) -> None:
        if request.id == "wrong":
            raise InvalidRequest("no")
        self.running[request.id] = 0
        self._note(f"add {request.id}")

    def prepare(self) -> bool:
        assert not self.running
        self.unprepared = max(0, self.unprepared - 1)
        return self.unprepared > 0

    def wait(self, seconds: float) -> None:
        """There is always something to step."""

    def step(self) -> list[Any]:
        self._note("step")
        time.sleep(0.001)
        return []

    def abort(self, id: str, why: str = "") -> None:
        self.running.pop(id, None)
        self._note(f"abort {id}")

    def abandon(self) -> None:
        self.running.clear()
        self._note("abandon")

    def reset_prefix_cache(self) -> None:
        self._note("reset")

    def close(self) -> None:
        self._note("close")


class Told:
    def __init__(self) -> None:
        self.errors: list[QuireError] = []

    def lost(self, error: QuireError) -> None:
        self.errors.append(error)

    def take(self, event: object) -> None:
        """No event comes."""


def request(id: str) -> Request:
    return Request(id=id, prompt=(1, 2), max_new_tokens=4)


def until(true: Any) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_step_that_raises_ends_every_request_and_later_ones_are_taken() -> None:
    engine, told = Breaking("step"), [Told(), Told()]
    running = EngineThread(engine)  # type: ignore[arg-type]
    running.submit([(request(str(i)), FREE, one) for i, one in enumerate(told)])
    until(lambda: all(one.errors for one in told))
    said = "the engine failed in a step (RuntimeError), and every request with it"
    assert [str(error) for one in told for error in one.errors] == [said, said]
    engine.broken = ()
    late = Told()
    running.submit([(request("late"), FREE, late)])
    running.end(["late", "0", "unknown"], wait=True)
    assert engine.calls.count("abort late") == 1 and "abort 0" not in engine.calls and not late.errors
    running.close()
    running.close()
    assert engine.calls[-1] == "close" and engine.calls.count("close") == 1


def test_an_idle_engine_prepares_between_two_calls() -> None:
    engine, told = Breaking("abandon"), Told()
    running = EngineThread(engine)  # type: ignore[arg-type]
    engine.unprepared = 3
    running.reset_prefix_cache()
    until(lambda: not engine.unprepared)
    running.submit([(request("a"), FREE, told)])
    until(lambda: "step" in engine.calls)
    running.end(["a"], wait=True)
    running.close()


def test_an_engine_that_cannot_start_again_refuses_later_calls() -> None:
    engine, told = Breaking("step", "abandon"), Told()
    running = EngineThread(engine)  # type: ignore[arg-type]
    running.submit([(request("a"), FREE, told)])
    until(lambda: told.errors)
    why = "the engine failed and could not be started again (RuntimeError)"
    for call in (running.check, running.reset_prefix_cache, lambda: running.submit([(request("b"), FREE, told)])):
        with pytest.raises(Closed) as refused:
            call()
        assert str(refused.value) == why
    running.end(["a"], wait=True)
    assert len(told.errors) == 1 and "add b" not in engine.calls


def test_what_closing_raises_is_raised_every_time_and_nobody_waits() -> None:
    engine, told = Breaking("close"), Told()
    running = EngineThread(engine)  # type: ignore[arg-type]
    running.submit([(request("a"), FREE, told)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="close"):
            running.close()
    assert [str(error) for error in told.errors] == ["this LLM has been closed: make another"]
    with pytest.raises(Closed, match="has been closed: make another"):
        running.check()


def test_what_cannot_begin_is_told_and_later_calls_are_refused() -> None:
    def begin() -> None:
        raise OSError("no device")

    running = EngineThread(Breaking(), begin)  # type: ignore[arg-type]
    until(lambda: running._finished)
    with pytest.raises(Closed, match=r"the engine's thread failed \(OSError\)"):
        running.submit([(request("a"), FREE, Told())])
    with pytest.raises(OSError, match="no device"):
        running.close()
    running.leave()


def test_of_requests_that_come_together_all_are_queued_or_none() -> None:
    engine, told = Breaking(), Told()
    running = EngineThread(engine)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no"):
        running.submit([(request("a"), FREE, told), (request("wrong"), FREE, told)])
    assert engine.calls == ["add a", "abort a"] and not told.errors
    running.close()


def test_a_forked_process_is_told_that_the_engine_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    running = EngineThread(Breaking())  # type: ignore[arg-type]
    other = os.getpid() + 1
    with monkeypatch.context() as inner:
        inner.setattr(thread.os, "getpid", lambda: other)
        with pytest.raises(Closed, match="before this process was forked"):
            running.check()
    running.check()
    running.close()
