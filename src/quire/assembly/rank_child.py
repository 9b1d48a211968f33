"""The program of a rank's process: `python -m quire.assembly.rank_child FD`, with a socket from the engine.

As in an engine's process, torch's libraries and the GPU's driver begin in threads, before torch is imported; so does
this process's context on its GPU, which takes seconds where many processes make one at once.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

from quire import heap
from quire.assembly.engine_main import open_libraries, start_driver


def main(**how: Any) -> None:
    """Build this rank's part of the model, then run plans until the engine closes the socket or ends. how: see
    `rank_process.run`, for tests."""
    parent = os.getppid()
    threading.Thread(target=open_libraries, name="open_libraries", daemon=True).start()
    heap.starting()
    loop = import_module("quire.executors.rank_loop")
    link = loop.RankLink(socket.socket(fileno=int(sys.argv[-1])))
    asked = link.first()
    if asked.place.dies_with_parent:
        loop.die_with(parent)
    if asked.settings.get("device") != "cpu":
        threading.Thread(target=make_context, args=(asked.rank,), name="make_context", daemon=True).start()
    import_module("quire.assembly.rank_process").run(link, asked, asked.place.listener, **how)


def make_context(rank: int) -> None:
    """Make this process's context on the rank's GPU, of those that it sees: torch would keep Python's lock, so that no
    ping is answered meanwhile."""
    start_driver()
    count, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGetCount(ctypes.byref(count))
        if count.value:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank % count.value)


if __name__ == "__main__":
    main()
