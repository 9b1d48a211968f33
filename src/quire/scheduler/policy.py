"""Who may come in, when, and in which order: admission, pressure and priority as small functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.scheduler.block_pool import EvictionPolicy, Fifo, Lru
from quire.scheduler.sequence import Sequence
from quire.types import BACKGROUND, Request

AdmissionPolicy = Callable[[int, int], int]
"""(running, cap) -> how many may be opened now."""


def continuous(running: int, cap: int) -> int:
    """Join and leave between steps (Orca, OSDI 2022)."""
    return cap - running


def static(running: int, cap: int) -> int:
    """A batch runs to its end before the next one begins: the baseline continuous batching is measured against."""
    return 0 if running else cap


PriorityPolicy = Callable[[Request], int]
"""Request -> priority value; lower is sooner, arrival breaks ties. IDLE and above stay so."""


def fcfs(request: Request) -> int:
    return BACKGROUND if request.priority >= BACKGROUND else 0


def priority(request: Request) -> int:
    return request.priority


ReservePolicy = Callable[[Sequence, int], int]
"""(sequence, tokens a page) -> the length up to which it is to have pages before anybody else is let in."""


def preempt(seq: Sequence, block_size: int) -> int:
    """Whoever fits for one step is let in; where pages run out, somebody is sent away and computed again."""
    return 0


def headroom(seq: Sequence, block_size: int) -> int:
    """For all it has to say already and a page's worth more, so that few are sent away soon after they came."""
    return len(seq.tokens) + block_size


def reserve(seq: Sequence, block_size: int) -> int:
    """To its end, so that nobody is ever sent away."""
    return seq.max_length


ADMISSION_POLICIES: Mapping[str, AdmissionPolicy] = {"continuous": continuous, "static": static}
PRIORITY_POLICIES: Mapping[str, PriorityPolicy] = {"fcfs": fcfs, "priority": priority}
RESERVE_POLICIES: Mapping[str, ReservePolicy] = {"preempt": preempt, "foresee": headroom, "reserve": reserve}
EVICTION_POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "fifo": Fifo}
