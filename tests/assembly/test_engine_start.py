"""What an engine's process does before it imports torch."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire.assembly import engine_start
from quire.assembly.engine_start import Begun, early_ranks, main
from quire.assembly.place import for_child
from quire.config import Settings
from quire.engine.protocol import Configure, encode_frame


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings for which ranks were started, which are strings here."""
    found: list[Settings] = []

    def start(settings: Settings) -> str:
        found.append(settings)
        return "ranks"

    monkeypatch.setattr(engine_start, "start_ranks", start)
    return found


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"tensor_parallel_size": 2}, True),
        ({"pipeline_parallel_size": 2, "executor": "local"}, True),
        ({}, False),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, False),
        ({"tensor_parallel_size": 2, "executor": "hf"}, False),
    ],
)
def test_ranks_are_started_before_torch_is_imported(
    options: dict[str, Any], early: bool, started: list[Settings]
) -> None:
    settings = Settings.of(**options)
    made: Any = early_ranks(settings)
    assert made == ("ranks" if early else None)
    assert started == ([settings] if early else [])


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, list[Begun]]]:
    """The server's end of the link, and what the engine was begun with."""
    here, there = socket.socketpair()
    begun: list[Begun] = []

    class Engine:
        @staticmethod
        def main(begun: Begun, into: list[Begun] = begun) -> int:
            into.append(begun)
            begun.link.close()
            return 7

    monkeypatch.setattr(engine_start, "import_module", {"quire.assembly.engine_child": Engine}.__getitem__)
    monkeypatch.setattr(sys, "argv", ["engine_start", str(there.detach())])
    with here:
        yield here, begun


def test_settings_that_are_there_are_read_first(ends: Any, started: list[Settings]) -> None:
    here, begun = ends
    settings = Settings.of(tensor_parallel_size=2)
    here.sendall(encode_frame(Configure(for_child(settings))))
    assert main() == 7
    assert (begun[0].settings, begun[0].ranks, started) == (settings, "ranks", [settings])


def test_an_engine_that_waits_for_its_turn_imports_torch_meanwhile(ends: Any, started: list[Settings]) -> None:
    _, begun = ends
    assert main() == 7
    assert (begun[0].settings, begun[0].ranks, started) == (None, None, [])


def test_an_engine_whose_server_has_gone_ends(ends: Any) -> None:
    here, begun = ends
    here.close()
    assert (main(), begun) == (2, [])


def test_the_engines_module_is_there() -> None:
    assert callable(importlib.import_module("quire.assembly.engine_child").main)
