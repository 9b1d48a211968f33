"""The program of an engine's process: `python -m quire.assembly.engine_main [--local] FD`, a socket from the server.

Two things that an engine waits for take most of a second without Python's lock: opening torch's libraries, and starting
a GPU's driver. They begin here, in threads, before anything else is imported.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from quire import heap

LOCAL = "--local"
"""Of a process that will compute with our own layers, on a GPU if there is one. One that waits for its turn does
without, as do ranks' engines."""


def main() -> int:
    """Be the engine, see `engine_start.main`."""
    for work in [start_driver] * (LOCAL in sys.argv) + [open_libraries]:
        threading.Thread(target=work, name=work.__name__, daemon=True).start()
    heap.starting()
    code: int = import_module("quire.assembly.engine_start").main()
    return code


def start_driver() -> None:
    """Start the GPU's driver, where there is one: torch would keep Python's lock meanwhile."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def open_libraries() -> None:
    """Open the libraries that torch opens when it is imported, in its order. Where that fails, torch says why."""
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        folder = Path(torch.origin).with_name("lib")
        with suppress(OSError):
            ctypes.CDLL(str(folder / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(folder / "libtorch.so"))


if __name__ == "__main__":
    sys.exit(main())
