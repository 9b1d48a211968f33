"""Moves work whose cost grows with a request or a response off the event loop."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 1 << 12
"""Bytes from which on work is done in a thread. The slowest work, tokenization, takes about a microsecond a byte; a
thread costs some tens of microseconds."""

PER_TOKEN, PER_SCORE = 4, 64
"""The cost of writing a token and a log-probability of an answer, in bytes read."""


async def offload(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, whose input or output has about `size` bytes. Raises what `work` raises.

    Work smaller than LARGE is done at once, other work in a thread. Work that has begun is completed even if the caller
    is cancelled; work that waits for a thread is then not done at all.
    """
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), work)


async def offload_slow(work: Callable[[], T]) -> T:
    """The result of `work` that may take seconds, in threads that no other work waits for. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_slow_threads(), work)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """A few threads: the event loop's thread competes with all of them for the GIL."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="offload")


@functools.cache
def _slow_threads() -> ThreadPoolExecutor:
    """Fewer than there are processors, of which decoding needs some: a request cannot take them all."""
    return ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1) // 2), thread_name_prefix="offload-slow")
