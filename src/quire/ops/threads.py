"""Threads that compute beside each other, each by torch with one thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def single_threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of `count` threads. What has not begun when an error leaves the block is cancelled."""
    pool = ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        # New threads would inherit what these have set for themselves.
        torch.set_num_threads(torch.get_num_threads())
