"""The engine's process is begun before the server is imported, and ends where that cannot be started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.assembly import early_engine as module
from quire.assembly import server
from quire.assembly.early_engine import ENGINE_MODULE, early_engine
from quire.cli import serve
from quire.config import Settings
from quire.engine.client import EngineProcess
from quire.engine.spawn import Spawned
from tests.forked import forking


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


def test_a_process_that_nobody_has_taken_ends_with_the_context() -> None:
    with early_engine(Settings.of()) as begun:
        assert begun is not None and begun.process.poll() is None
    assert begun.process.returncode == -9


def test_one_that_has_ended_is_left_alone() -> None:
    with early_engine(Settings.of()) as begun:
        assert begun is not None
        begun.sock.close()
        assert begun.process.wait(600) == 2
    assert begun.process.returncode == 2


def test_an_engine_with_ranks_is_started_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spawn", None)
    with early_engine(Settings.of(tensor_parallel_size=2)) as begun:
        assert begun is None


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
