"""A pytest plugin that makes interleavings common which are rare: `python -m pytest -p tests.stress FILES`.

What may run in a thread (`quire.frontend.offload`) always does, and waits there for up to STRESS_MS milliseconds before
and after; in such threads files are slow, too; and threads take turns often. STRESS_SEED: of the waits. Tests that
count what is written at once (`test_streams.py`, `test_exchanges.py`) do not hold under it.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from quire.frontend import offload

P = ParamSpec("P")
T = TypeVar("T")

SEED = int(os.environ.get("STRESS_SEED", "0"))
MILLISECONDS = float(os.environ.get("STRESS_MS", "20"))
INTERVALS = (1e-6, 1e-5, 1e-4, 5e-3)
"""Seconds after which another thread may run; the last is Python's own."""

FILE_METHODS = ("replace", "unlink", "read_bytes", "exists")

_random = random.Random(SEED)


def _wait(chance: float, most: float) -> None:
    if _random.random() < chance:
        time.sleep(_random.random() * most / 1e3)


def _between_waits(work: Callable[P, T], chance: float, most: float) -> Callable[P, T]:
    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        # The event loop's thread is not held up: nothing else runs there meanwhile.
        if threading.current_thread() is threading.main_thread():
            return work(*args, **kwargs)
        _wait(chance, most)
        try:
            return work(*args, **kwargs)
        finally:
            _wait(chance, most)

    return run


class SlowThreads(ThreadPoolExecutor):
    """Threads whose work waits before and after it is done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor."""
        return super().submit(_between_waits(fn, 0.5, MILLISECONDS), *args, **kwargs)


def pytest_collection_finish() -> None:
    """Tests have been imported, with the sizes that they send."""
    sys.setswitchinterval(_random.choice(INTERVALS))
    fast, slow = SlowThreads(8, "offload"), SlowThreads(2, "offload-slow")
    offload.LARGE = -1
    offload._threads, offload._slow_threads = lambda: fast, lambda: slow  # type: ignore[assignment]
    for name in FILE_METHODS:
        setattr(Path, name, _between_waits(getattr(Path, name), 0.3, MILLISECONDS / 2))
