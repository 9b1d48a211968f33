"""The program of a rank's process: `python -m quire.assembly.rank_child FD`, with a socket from the engine.

As in an engine's process, torch's libraries and the GPU's driver begin in threads, before torch is imported.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
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
        threading.Thread(target=start_driver, args=(asked.rank,), name="start_driver", daemon=True).start()
    import_module("quire.assembly.rank_process").run(link, asked, asked.place.listener, **how)


if __name__ == "__main__":
    main()
