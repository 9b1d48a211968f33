"""Memory of the process: return free memory of glibc's heap to the system, and make garbage collection rarer.

Elsewhere than on glibc the heap functions do nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_YOUNG = 50_000
"""Objects allocated and not freed since the last garbage collection, after which there is another: those of some
hundred requests. With Python's 700, what requests keep until they end is scanned again and again."""

_M_MMAP_THRESHOLD = -3
"""mallopt's name for the size from which on a block is a mapping of its own."""


def mapped_from(size: int) -> None:
    """Return blocks of `size` bytes and more to the system as soon as they are freed: by default glibc raises this
    limit with the first such block.

    Each of them costs a system call and fresh pages, so this is for processes whose work is not made of large blocks.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size)


def trim() -> None:
    """Return the free pages between and behind blocks in use: some milliseconds."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def starting() -> None:
    """Collect no garbage until `settled`: what is imported stays, and looking through it again and again takes a fifth
    of the time that torch takes to import."""
    gc.disable()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def settled() -> None:
    """Exclude all present objects from garbage collection, which would take a third of a second with torch."""
    gc.freeze()
    gc.enable()
    in_process_of_its_own()


def in_process_of_its_own() -> None:
    """Make garbage collection rarer from now on, and end without one: with torch the last collections take 0.4 s."""
    gc.set_threshold(_YOUNG)
    atexit.register(_end)


def _end() -> None:
    """Leave all that still lives out of the interpreter's last collections, but where Triton's bindings would report it
    as leaked."""
    (gc.unfreeze if "triton" in sys.modules else gc.freeze)()
