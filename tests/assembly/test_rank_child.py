"""What a rank's process begins before it imports torch."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire import heap
from quire.assembly import rank_child
from quire.executors.ranks import BuildRank, RankPlace, RankShape


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_a_rank_begins_beside_libraries_and_its_gpus_driver(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on until the rank is built, which knows who it is before it imports torch."""
    went_on, ran = threading.Event(), list[Any]()
    asked = BuildRank({"device": device}, 3, RankShape(4), RankPlace("127.0.0.1", 1, 4, dies_with_parent=True))
    wanted = ["open_libraries", *["make_context"] * (device != "cpu")]

    def run(link: Any, first: BuildRank, listener: int | None, wrap: str) -> None:
        threads = [each for each in threading.enumerate() if each.name in wanted]
        assert [each.name for each in threads] == wanted and not ran
        assert (first, listener, wrap) == (asked, None, "for tests") and parents == [os.getppid()]
        went_on.set()
        for each in threads:
            each.join()

    for name in ("open_libraries", "make_context"):
        monkeypatch.setattr(rank_child, name, lambda *which: (went_on.wait(), ran.append(which)))
    parents = list[int]()
    here, there = socket.socketpair()

    def linked(sock: socket.socket) -> SimpleNamespace:
        assert sock.getpeername() == here.getsockname() == ""
        sock.close()
        return SimpleNamespace(first=lambda: asked)

    loop = SimpleNamespace(RankLink=linked, die_with=parents.append)
    modules = {"quire.executors.rank_loop": loop, "quire.assembly.rank_process": SimpleNamespace(run=run)}
    monkeypatch.setattr(rank_child, "import_module", modules.__getitem__)
    monkeypatch.setattr(heap, "starting", lambda: None)
    monkeypatch.setattr(sys, "argv", ["rank_child", str(there.detach())])
    with here:
        rank_child.main(wrap="for tests")
    assert sorted(ran) == [(), *[(3,)] * (device != "cpu")]


@pytest.mark.parametrize(("rank", "count", "made"), [(0, 0, []), (0, 2, [0]), (3, 4, [3]), (3, 1, [0])])
def test_a_context_is_made_on_the_ranks_gpu(
    rank: int, count: int, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            return flags

        def cuDeviceGetCount(self, into: Any) -> None:
            into._obj.value = count

        def cuDevicePrimaryCtxRetain(self, into: Any, device: int) -> None:
            found.append(device)

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    rank_child.make_context(rank)
    assert found == made


def test_the_program_goes_on_as_the_rank() -> None:
    assert callable(__import__("quire.assembly.rank_process", fromlist=["run"]).run)
