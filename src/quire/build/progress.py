"""A progress bar for loading, where somebody watches and it takes long enough to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_WORTH_SHOWING = 1 << 28


@contextmanager
def loading(name: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for (bytes done, bytes in all), drawn on standard error for models above 256 MiB."""
    console = Console(stderr=True)
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, visible=False)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total >= _WORTH_SHOWING)

        yield tell
