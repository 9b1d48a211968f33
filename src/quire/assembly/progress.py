"""Progress of loading, compiling and capturing: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

_MIN_BYTES = 1 << 28
_LINE_INTERVAL = 5.0
"""Seconds between two lines."""

_MIN_SECONDS = 1.0
"""Compiling and preparing steps are shown after so many seconds: reading kernels from the cache takes less."""


@contextmanager
def loading(name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[ReportProgress]:
    """Report bytes, on standard error, for models of 256 MiB and more."""

    def line(done: int, total: int, seconds: float) -> str:
        return f"loading {name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {done / seconds / 1e9:.2f} GB/s"

    with _progress(f"loading {name}", [DownloadColumn(), TransferSpeedColumn()], line, clock) as report:
        yield lambda done, total: report(done, total, total >= _MIN_BYTES)


@contextmanager
def compiling(clock: Callable[[], float] = time.monotonic) -> Iterator[ReportProgress]:
    """Report compiled kernels, on standard error, once it takes longer than a second."""
    with _counting("compiling kernels", clock) as report:
        yield report


@contextmanager
def preparing(clock: Callable[[], float] = time.monotonic) -> Iterator[ReportProgress]:
    """Report steps captured as graphs, or run once, on standard error, once it takes longer than a second."""
    with _counting("preparing steps", clock) as report:
        yield report


@contextmanager
def _counting(title: str, clock: Callable[[], float]) -> Iterator[ReportProgress]:
    def line(done: int, total: int, seconds: float) -> str:
        return f"{title}: {done} of {total}"

    started = clock()
    with _progress(title, [MofNCompleteColumn()], line, clock) as report:
        yield lambda done, total: report(done, total, clock() >= started + _MIN_SECONDS)


@contextmanager
def _progress(
    title: str, columns: list[ProgressColumn], line: Callable[[int, int, float], str], clock: Callable[[], float]
) -> Iterator[Callable[[int, int, bool], None]]:
    """A callback for (done, total, whether to show it). line: formats (done, total, seconds)."""
    console = Console(stderr=True)
    # Not `is_terminal`, which FORCE_COLOR sets, as notebooks do: they would show control characters.
    if console.file.isatty():
        with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
            task = bar.add_task(title, visible=False)
            yield lambda done, total, show: bar.update(task, completed=done, total=total, visible=show)
        return
    started = last_line = clock()

    def report(done: int, total: int, show: bool) -> None:
        nonlocal last_line
        now = clock()
        if show and now >= last_line + _LINE_INTERVAL:
            last_line = now
            console.print(line(done, total, now - started), highlight=False, markup=False, soft_wrap=True)

    yield report
