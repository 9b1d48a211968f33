"""An engine from settings that cannot be."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.assembly import engine, engine_main
from quire.assembly.engine import build_engine
from quire.config import Settings
from quire.errors import InvalidConfig


def test_settings_that_take_more_memory_than_there_is_are_refused_with_what_to_lower() -> None:
    with pytest.raises(InvalidConfig, match=r"not enough memory for this: .* KV blocks .* num_gpu_blocks_override"):
        build_engine(Settings.of(num_gpu_blocks_override=1 << 30))


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "triton"],
)
def test_a_card_that_fills_up_while_getting_ready_is_reported_in_a_line(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(settings: Settings, parallel: object) -> None:
        raise failure

    monkeypatch.setattr(engine, "build_local", full)
    with pytest.raises(InvalidConfig, match=r"not enough memory for this: .*out of memory.*gpu_memory_utilization"):
        engine.make_executor(Settings.of())


def test_other_failures_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings, parallel: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine, "build_local", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.make_executor(Settings.of())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_are_loaded_into_the_memory_that_a_host_has(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU says itself when it is full; a host would end the process."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(engine, "load_model", lambda folder, **options: given.update(options))
    monkeypatch.setattr(engine, "host_bytes", lambda: 12_345)
    monkeypatch.setattr(engine, "choose_ops", lambda *args, **options: None)
    engine._load(Settings.of(), torch.device(device), None)
    assert given["room"] == (12_345 if device == "cpu" else math.inf)


@pytest.mark.parametrize(
    ("built", "found", "options", "done"),
    [
        (True, "cuda", {}, ["driver 0", "device auto", "context"]),
        (True, "cuda", {"device": "cuda"}, ["driver 0", "device cuda", "context"]),
        (True, "cpu", {}, ["driver 0", "device auto"]),
        (True, "", {"device": "cuda"}, ["driver 0", "device cuda"]),
        (True, "cuda", {"device": "cpu"}, []),
        (True, "cuda", {"executor": "hf"}, []),
        (True, "cuda", {"tensor_parallel_size": 2}, []),
        (False, "cuda", {}, []),
    ],
)
def test_a_context_is_begun_where_this_process_may_use_a_gpu(
    monkeypatch: pytest.MonkeyPatch, built: bool, found: str, options: dict[str, Any], done: list[str]
) -> None:
    """built: whether torch is. found: the device there is; none: it is refused."""
    said = list[str]()

    def choose(name: str) -> torch.device:
        said.append(f"device {name}")
        if not found:
            raise InvalidConfig("no such device")
        return torch.device(found)

    monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)
    monkeypatch.setattr(engine, "choose_device", choose)
    monkeypatch.setattr(torch, "zeros", lambda size, device: said.append("context"))
    driver = SimpleNamespace(cuInit=lambda flags: said.append(f"driver {flags}"))
    monkeypatch.setattr(engine_main.ctypes, "CDLL", lambda name: driver)
    engine.begin_context(Settings.of(**options))
    for thread in threading.enumerate():
        if thread.name == "gpu-context":
            thread.join()
    assert said == done


def test_a_context_is_not_begun_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(engine, "choose_device", lambda name: asked.append(name) or torch.device("cpu"))
    monkeypatch.setattr(engine_main.ctypes, "CDLL", absent)
    engine.begin_context(Settings.of())
    for thread in threading.enumerate():
        if thread.name == "gpu-context":
            thread.join()
    assert asked == ["auto"]
