"""The C library's heap: how to have it give back what nobody uses. Elsewhere than on glibc nothing happens."""

from __future__ import annotations

import ctypes
from contextlib import suppress

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
