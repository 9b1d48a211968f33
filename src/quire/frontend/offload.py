"""The one way off the event loop for work whose cost grows with what clients send, or with what they are sent."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 1 << 12
"""Bytes from which on work leaves the loop. The slowest of it, making token ids, takes about a microsecond a byte; a
thread costs some tens of microseconds."""

PER_TOKEN, PER_SCORE = 4, 64
"""What writing a token of an answer, and a log-probability, costs, in bytes read."""


async def offload(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, whose input or output has about `size` bytes in all. Raises what it raises.

    Small work is done at once; from LARGE on it is done in a thread, and the streams of others go on meanwhile. It is
    done to the end even where the caller is cancelled.
    """
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Few: while Python runs in many threads, the loop's has to wait for all of them in turn."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="offload")
