"""Those who look in are told, and nothing they ask can end the engine."""

from __future__ import annotations

import socket

import pytest

from quire.engine.live_view import NoLiveView
from quire.engine.process import EngineLoop
from quire.engine.protocol import Explain, Explanation, FrameReader, ToFront
from quire.engine.step_watch import StepWatch
from quire.sim.run import SimConfig


class Broken(NoLiveView):
    """A window whose stories cannot be told."""

    def explain(self, id: str, now: float) -> bytes:
        raise KeyError(f"{id} \x1b[2J")


def ask(window: NoLiveView) -> list[Explanation]:
    here, there = socket.socketpair()
    with here, there:
        EngineLoop(SimConfig().build(), there, dict, StepWatch(), live_view=window)._handle(Explain(3, "who"))
        return list(FrameReader(ToFront).feed(here.recv(1 << 16)))


def test_a_story_that_cannot_be_told_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(Broken()) == [Explanation(3, b"null")]
    said = capsys.readouterr().err
    assert "KeyError" in said and "\x1b" not in said


def test_where_nobody_can_look_in_nothing_is_known() -> None:
    assert ask(NoLiveView()) == [Explanation(3, b"null")]
