"""Memory that the processes of a host's GPUs share, with a driver that only notes what it is asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.ops.triton.peer_memory import REACH_PEERS, Handle, peer_memory

CPU = torch.device("cpu")
SIZE, FILL, OWN = 1 << 20, 0xFF, 0x7F00_0000_0000
FAILING = ("cuMemAlloc", "cuMemsetD8", "cuCtxSynchronize", "cuIpcGetMemHandle", "cuIpcOpenMemHandle")


def handle_of(rank: int) -> bytes:
    return bytes(range(rank, rank + 64))


class Driver:
    """Of rank 1. fails: the function that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.done = fails, list[Any]()

    def _code(self, name: str, *what: Any) -> int:
        self.done.append((name, *what))
        return 217 * (name == self.fails)

    def cuMemAlloc_v2(self, into: Any, size: ctypes.c_size_t) -> int:
        into._obj.value = OWN
        return self._code("cuMemAlloc", size.value)

    def cuMemsetD8_v2(self, at: ctypes.c_uint64, fill: ctypes.c_ubyte, size: ctypes.c_size_t) -> int:
        return self._code("cuMemsetD8", at.value, fill.value, size.value)

    def cuCtxSynchronize(self) -> int:
        return self._code("cuCtxSynchronize")

    def cuIpcGetMemHandle(self, into: Any, at: ctypes.c_uint64) -> int:
        ctypes.memmove(into, handle_of(1), 64)
        return self._code("cuIpcGetMemHandle", at.value)

    def cuIpcOpenMemHandle_v2(self, into: Any, handle: Handle, flags: int) -> int:
        into._obj.value = OWN + bytes(handle)[0]
        return self._code("cuIpcOpenMemHandle", bytes(handle), flags)


class Group:
    def size(self) -> int:
        return 3


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def gather(into: Tensor, own: Tensor, group: Group) -> None:
        assert bytes(own.tolist()) == handle_of(1)
        into.view(3, 64).copy_(torch.tensor([list(handle_of(rank)) for rank in range(3)]))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    return Group()


def test_every_ranks_memory_is_reached_and_filled_before_any_is_told(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert peer_memory(group, 1, CPU, SIZE, FILL) == [OWN + 0, OWN, OWN + 2]
    assert driver.done == [
        ("cuMemAlloc", SIZE),
        ("cuMemsetD8", OWN, FILL, SIZE),
        ("cuCtxSynchronize",),
        ("cuIpcGetMemHandle", OWN),
        *(("cuIpcOpenMemHandle", handle_of(rank), REACH_PEERS) for rank in (0, 2)),
    ]


@pytest.mark.parametrize("fails", FAILING)
def test_what_the_driver_refuses_is_a_runtime_error(fails: str, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(fails))
    with pytest.raises(RuntimeError, match=f"{fails}: CUDA error 217"):
        peer_memory(group, 1, CPU, SIZE, FILL)
