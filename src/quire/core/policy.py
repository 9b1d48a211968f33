"""Who may come in, in which order: admission and priority as small functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.core.blocks import Fifo, Lru, Shelf
from quire.values import IDLE, Request

Admission = Callable[[int, int], int]
"""(running, cap) -> how many may be opened now."""


def continuous(running: int, cap: int) -> int:
    """Join and leave between steps (Orca, OSDI 2022)."""
    return cap - running


def static(running: int, cap: int) -> int:
    """A batch runs to its end before the next one begins: the baseline continuous batching is measured against."""
    return 0 if running else cap


Order = Callable[[Request], int]
"""Request -> priority value; lower is sooner, arrival breaks ties. IDLE and above stay so."""


def fcfs(request: Request) -> int:
    return IDLE if request.priority >= IDLE else 0


def priority(request: Request) -> int:
    return request.priority


ADMISSIONS: Mapping[str, Admission] = {"continuous": continuous, "static": static}
ORDERS: Mapping[str, Order] = {"fcfs": fcfs, "priority": priority}
SHELVES: Mapping[str, Callable[[], Shelf]] = {"lru": Lru, "fifo": Fifo}
