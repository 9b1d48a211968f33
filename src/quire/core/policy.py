"""Who may come in, when, and in which order: admission, pressure and priority as small functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.core.blocks import Fifo, Lru, Shelf
from quire.core.sequence import Sequence
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


Pressure = Callable[[Sequence, int], int]
"""(sequence, tokens a page) -> the length up to which it is to have pages before anybody else is let in."""


def preempt(seq: Sequence, page: int) -> int:
    """Whoever fits for one step is let in; where pages run out, somebody is sent away and computed again."""
    return 0


def foresee(seq: Sequence, page: int) -> int:
    """For all it has to say already and a page's worth more, so that few are sent away soon after they came."""
    return len(seq.tokens) + page


def reserve(seq: Sequence, page: int) -> int:
    """To its end, so that nobody is ever sent away."""
    return seq.limit


ADMISSIONS: Mapping[str, Admission] = {"continuous": continuous, "static": static}
ORDERS: Mapping[str, Order] = {"fcfs": fcfs, "priority": priority}
PRESSURES: Mapping[str, Pressure] = {"preempt": preempt, "foresee": foresee, "reserve": reserve}
SHELVES: Mapping[str, Callable[[], Shelf]] = {"lru": Lru, "fifo": Fifo}
