"""Progress of loading: a bar where somebody watches, a line now and then where nobody does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_WORTH_SHOWING = 1 << 28
_EVERY = 5.0
"""Seconds between two lines."""


@contextmanager
def loading(name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """A callback for (bytes done, bytes in all), shown on standard error for models above 256 MiB."""
    console = Console(stderr=True)
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, visible=False)
        began = told = clock()

        def tell(done: int, total: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total, visible=total >= _WORTH_SHOWING)
            now = clock()
            if not console.is_terminal and total >= _WORTH_SHOWING and now >= told + _EVERY:
                told = now
                speed = done / (now - began) / 1e9
                line = f"loading {name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed:.2f} GB/s"
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield tell
