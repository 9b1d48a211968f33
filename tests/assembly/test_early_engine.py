"""The engine's process is begun before the server is imported, and ends where that cannot be started."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.assembly import early_engine as module
from quire.assembly import server
from quire.assembly.early_engine import ENGINE_MODULE, early_engine
from quire.assembly.place import located, of_parent
from quire.cli import serve
from quire.config import Settings
from quire.engine.client import EngineProcess
from quire.engine.protocol import Configure, FrameReader
from quire.engine.spawn import Spawned
from quire.errors import InvalidModel
from tests.forked import forking


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


def test_a_process_that_nobody_has_taken_ends_with_the_context() -> None:
    with early_engine(Settings.of()) as (settings, begun):
        assert begun.process.poll() is None and not begun.configured and settings == Settings.of()
    assert begun.process.returncode == -9


def test_one_that_has_ended_is_left_alone() -> None:
    with early_engine(Settings.of()) as (_, begun):
        begun.sock.close()
        assert begun.process.wait(600) == 2
    assert begun.process.returncode == 2


def test_an_engine_with_ranks_has_its_settings_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    process = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(module, "spawn", lambda argv, environment: Spawned(process, here))
    with here, there, early_engine(Settings.of(tensor_parallel_size=2)) as (settings, begun):
        assert begun.configured and settings == located(Settings.of(tensor_parallel_size=2))
        (sent,) = FrameReader(Configure).feed(there.recv(1 << 16))
    assert of_parent(sent.settings) == settings


def test_without_the_model_no_engine_with_ranks_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spawn", None)
    missing = Settings.of(model="/there/is/none", tensor_parallel_size=2)
    with pytest.raises(InvalidModel), early_engine(missing):
        raise AssertionError


def test_a_server_takes_the_process_that_its_command_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    def build(settings: Settings, text: object, engine: EngineProcess, started: float) -> None:
        seen.append(engine._take_standby())
        raise ZeroDivisionError

    monkeypatch.setattr(server, "build_server", build)
    with pytest.raises(ZeroDivisionError):
        serve.serve(Settings.of())
    (begun,) = seen
    assert isinstance(begun, Spawned) and begun.process.args[1:3] == ["-m", ENGINE_MODULE]
    assert begun.process.returncode == -9, "it ends with the command"


@pytest.mark.parametrize(
    ("options", "local"),
    [({}, True), ({"device": "cuda"}, True), ({"device": "cpu"}, False), ({"executor": "hf"}, False)],
)
def test_the_process_is_told_where_the_engine_may_use_a_gpu(
    options: dict[str, Any], local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = SimpleNamespace(poll=lambda: 0)
    begun = list[list[str]]()
    monkeypatch.setattr(module, "spawn", lambda argv, environment: begun.append(argv) or Spawned(process, None))
    with early_engine(Settings.of(**options)):
        assert begun == [[sys.executable, "-m", ENGINE_MODULE, *["--local"] * local]]
