"""Progress of a start: a bar where somebody watches, a line now and then where nobody does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)

ReportProgress = Callable[[int, int], None]
"""Called with how much is done, and how much there is in all."""

_WORTH_SHOWING = 1 << 28
_EVERY = 5.0
"""Seconds between two lines."""

_SOON = 1.0
"""Seconds that kernels are compiled before anything is shown: reading them from the cache takes less."""


@contextmanager
def loading(name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[ReportProgress]:
    """For bytes; shown on standard error for models above 256 MiB."""

    def line(done: int, total: int, seconds: float) -> str:
        return f"loading {name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {done / seconds / 1e9:.2f} GB/s"

    with _shown(f"loading {name}", (DownloadColumn(), TransferSpeedColumn()), line, clock) as tell:
        yield lambda done, total: tell(done, total, total >= _WORTH_SHOWING)


@contextmanager
def compiling(clock: Callable[[], float] = time.monotonic) -> Iterator[ReportProgress]:
    """For kernels; shown once it takes a while."""

    def line(done: int, total: int, seconds: float) -> str:
        return f"compiling kernels: {done} of {total}"

    began = clock()
    with _shown("compiling kernels", (MofNCompleteColumn(),), line, clock) as tell:
        yield lambda done, total: tell(done, total, clock() >= began + _SOON)


@contextmanager
def _shown(
    what: str,
    columns: Sequence[ProgressColumn],
    line: Callable[[int, int, float], str],
    clock: Callable[[], float],
) -> Iterator[Callable[[int, int, bool], None]]:
    """A callback for (done, in all, whether it is worth showing). line: of (done, in all, seconds)."""
    console = Console(stderr=True)
    bars = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*bars, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, visible=False)
        began = told = clock()

        def tell(done: int, total: int, worth: bool) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total, visible=worth)
            now = clock()
            if not console.is_terminal and worth and now >= told + _EVERY:
                told = now
                console.print(line(done, total, now - began), highlight=False, markup=False, soft_wrap=True)

        yield tell
