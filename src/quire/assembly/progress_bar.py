"""Progress as a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

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

_COLUMNS: Mapping[str, tuple[type[ProgressColumn], ...]] = MappingProxyType(
    {"bytes": (DownloadColumn, TransferSpeedColumn), "count": (MofNCompleteColumn,)}
)


@contextmanager
def shown(title: str, unit: str) -> Iterator[Callable[[int, int, bool], None]]:
    """A callback for (done, total, whether to show it) of a bar on standard error. unit: bytes or count."""
    columns = (column() for column in _COLUMNS[unit])
    made = Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True), transient=True
    )
    with made as bar:
        task = bar.add_task(title, visible=False)
        yield lambda done, total, show: bar.update(task, completed=done, total=total, visible=show)
