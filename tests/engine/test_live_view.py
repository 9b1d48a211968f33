"""Explanations go to who asks, and no question can end the engine."""

from __future__ import annotations

import socket

import pytest

from quire.engine.engine import Engine
from quire.engine.process import EngineLoop, LiveView
from quire.engine.protocol import Explain, Explanation, FrameReader, ToFront
from quire.engine.step_watch import StepWatch
from quire.sim.run import SimConfig


class Broken:
    """A live view whose explanations fail."""

    def watch(self, on: bool) -> None: ...

    def frame(self, engine: Engine, now: float, *, last: bool) -> None: ...

    def explain(self, id: str, now: float) -> bytes:
        raise KeyError(f"{id} \x1b[2J")


def ask(window: LiveView | None) -> list[Explanation]:
    here, there = socket.socketpair()
    with here, there:
        EngineLoop(SimConfig().build(), there, dict, StepWatch(), live_view=window)._handle(Explain(3, "who"))
        return list(FrameReader(ToFront).feed(here.recv(1 << 16)))


def test_an_explanation_that_fails_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(Broken()) == [Explanation(3, b"null")]
    said = capsys.readouterr().err
    assert "KeyError" in said and "\x1b" not in said


def test_an_engine_without_a_live_view_explains_nothing() -> None:
    assert ask(None) == [Explanation(3, b"null")]
