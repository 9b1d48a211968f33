"""What an engine's process begins before it imports anything else."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire import heap
from quire.assembly import engine_main


@pytest.mark.parametrize(
    ("argv", "begun"), [(["7"], ["open_libraries"]), (["--local", "7"], ["start_driver", "open_libraries"])]
)
def test_the_engine_begins_beside_libraries_and_driver(
    argv: list[str], begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on until the engine has begun."""
    went_on, done = threading.Event(), list[str]()

    def work(name: str) -> Any:
        def run() -> None:
            went_on.wait()
            done.append(name)

        run.__name__ = name
        return run

    def main() -> int:
        threads = [each for each in threading.enumerate() if each.name in begun]
        assert [each.name for each in threads] == begun and not done
        went_on.set()
        for each in threads:
            each.join()
        return 5

    for name in ("start_driver", "open_libraries"):
        monkeypatch.setattr(engine_main, name, work(name))
    modules = {"quire.assembly.engine_start": SimpleNamespace(main=main)}
    monkeypatch.setattr(engine_main, "import_module", modules.__getitem__)
    monkeypatch.setattr(heap, "starting", lambda: None)
    monkeypatch.setattr(sys, "argv", ["engine_main", *argv])
    assert engine_main.main() == 5
    assert sorted(done) == sorted(begun)


def test_the_libraries_that_torch_needs_are_open_before_it_is_imported() -> None:
    code = (
        "import sys; from quire.assembly.engine_main import open_libraries; open_libraries()\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libtorch_cpu.so' in maps and not {'torch', 'quire.config'} & set(sys.modules)\n"
        "import torch; print(torch.ones(2).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2.0\n", done.stderr


@pytest.mark.parametrize("found", [None, SimpleNamespace(origin=None)])
def test_without_torch_nothing_is_opened(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_main, "find_spec", lambda name: found)
    monkeypatch.setattr(engine_main, "ctypes", None)
    engine_main.open_libraries()


def test_what_cannot_be_opened_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def absent(name: str, *mode: int) -> ctypes.CDLL:
        asked.append(name.rpartition("/")[2])
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(engine_main.ctypes, "CDLL", absent)
    engine_main.open_libraries()
    engine_main.start_driver()
    assert asked == ["libtorch_global_deps.so", "libcuda.so.1"]


def test_the_program_goes_on_as_the_engine() -> None:
    assert callable(importlib.import_module("quire.assembly.engine_start").main)
