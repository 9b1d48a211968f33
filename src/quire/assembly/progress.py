"""Progress of loading, compiling and capturing: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import cast

ReportProgress = Callable[[int, int], None]
"""Called with how much is done, and how much there is in all."""

_Report = Callable[[int, int, bool], None]
"""The same, and with whether to show it."""

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

    with _progress(f"loading {name}", "bytes", line, clock) as report:
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
    with _progress(title, "count", line, clock) as report:
        yield lambda done, total: report(done, total, clock() >= started + _MIN_SECONDS)


@contextmanager
def _progress(
    title: str, unit: str, line: Callable[[int, int, float], str], clock: Callable[[], float]
) -> Iterator[_Report]:
    """A callback for (done, total, whether to show it). unit: of a bar. line: formats (done, total, seconds)."""
    # Whatever FORCE_COLOR says, as it does in notebooks: they would show control characters.
    if sys.stderr.isatty():
        # Its package takes a twentieth of an engine's imports, and is of use on a terminal alone.
        bar = cast(AbstractContextManager[_Report], import_module("quire.assembly.progress_bar").shown(title, unit))
        with bar as report:
            yield report
        return
    started = last_line = clock()

    def write(done: int, total: int, show: bool) -> None:
        nonlocal last_line
        now = clock()
        if show and now >= last_line + _LINE_INTERVAL:
            last_line = now
            print(line(done, total, now - started), file=sys.stderr, flush=True)

    yield write
