"""A rank without a model, for tests of what holds ranks together: `python -m tests.executors.rank_stub FD`.

settings: `fault`, what rank `faulty` does at its plan number `at`; "" for nothing. `left`: how much each rank may
prepare; a negative number kills it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from typing import Any

from quire.executors.rank_loop import RankLink, RankLoop, die_with
from quire.executors.ranks import RankReady, RankRefused
from quire.scheduler.plan import Plan
from tests.hash_model import HashDevice, HashHandle

LONG = 100_000_000
"""Numbers whose sum takes a second and more."""


class Computed(HashHandle):
    """A step that is computed when its result is asked for."""

    def is_done(self) -> bool:
        return True


class Faulty(HashDevice):
    """Has a fault."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        super().__init__(64, 4, drafts=settings.get("drafts", 0), rows=8, seed="one for all")
        fault = settings.get("fault", "")
        self.fault = fault if rank == settings.get("faulty", 1) else fault and "waits for the faulty one"
        self.beside = fault if rank != settings.get("faulty", 1) else ""
        self.at, self.count = settings.get("at", 4), 0
        self.left = settings.get("left", (0,) * (1 + rank))[rank]

    def prepare(self) -> bool:
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left = max(0, self.left - 1)
        return bool(self.left)

    def launch(self, plan: Plan) -> HashHandle:
        self.count += 1
        if self.count == self.at:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "memory":
                raise MemoryError("there is no memory left on this rank")
            if self.fault == "exit":
                os._exit(9)
            if self.fault == "exits after its neighbour has failed":
                time.sleep(0.1)
                os._exit(9)
            if self.beside == "exits after its neighbour has failed":
                raise ConnectionError("the other rank has closed its connection")
            if self.fault == "waits, and keeps Python's lock":
                ctypes.PyDLL(None).sleep(600)
            if self.fault == "computes, and keeps Python's lock":
                self.fault = str(sum(range(LONG)))
            elif self.fault:
                time.sleep(600)
        handle: HashHandle = super().launch(plan)
        handle.__class__ = Computed
        return handle


def main() -> None:
    parent = os.getppid()
    link = RankLink(socket.socket(fileno=int(sys.argv[1])))
    asked = link.first()
    if asked.place.dies_with_parent:
        die_with(parent)
    if asked.settings.get("fault") == "refused" and asked.rank == asked.settings["faulty"]:
        link.send(RankRefused("InvalidModel", "the checkpoint is broken here"))
        signal.pause()
    if asked.settings.get("fault") == "stillborn" and asked.rank == asked.settings["faulty"]:
        os._exit(7)
    device = Faulty(asked.rank, asked.settings)
    link.send(RankReady(device.describe(), {}, {}))
    RankLoop(device, link, asked.rank, asked.shape, device.prepare).run()


if __name__ == "__main__":
    main()
