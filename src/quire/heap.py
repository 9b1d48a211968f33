"""The C library's heap: how to have it give back what nobody uses; elsewhere than on glibc nothing happens. And
Python's: how seldom it need be looked through for garbage."""

from __future__ import annotations

import atexit
import ctypes
import gc
from contextlib import suppress

_YOUNG = 50_000
"""Objects made and not freed since the last look for garbage, from which on there is another: those of some hundred
requests. By default it is 700, and what requests keep until they end was looked through again and again."""

_M_MMAP_THRESHOLD = -3
"""mallopt's name for the size from which on a block is a mapping of its own."""


def mapped_from(size: int) -> None:
    """Give blocks of `size` bytes and more back as soon as they are freed: by default one such block teaches it not to.

    Each of them costs a system call and fresh pages, so this is for processes whose work is not made of large blocks.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size)


def trim() -> None:
    """Give back the pages that are free between and behind the blocks in use: some milliseconds."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settled() -> None:
    """What there is now stays: it is not looked through for garbage again, for a third of a second where torch is."""
    gc.freeze()
    gc.set_threshold(_YOUNG)
    atexit.register(gc.unfreeze)  # or libraries that look for leaks at the end find all of it
