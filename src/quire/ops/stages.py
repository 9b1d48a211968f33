"""How long each stage of a start takes: each stage begins where the one before it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

STAGES = ("imports", "weights", "meeting", "kernels", "tuning", "graphs", "rest")
"""Of a rank's start. `meeting`: what is left of it when weights are there, beside which ranks meet. `tuning`: timing
matrix products, which other stages come to."""


class StartTimes:
    """seconds: of each stage so far. began: when the first one did, by `clock`."""

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._last, self._clock = began, clock

    def ended(self, stage: str) -> None:
        """What was done since the last call was of this stage."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    @contextmanager
    def inside(self, stage: str) -> Iterator[None]:
        """What is done in the block is of this stage, and not of the one that it is done in."""
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took
            self._last += took


START_TIMES: ContextVar[StartTimes | None] = ContextVar("start_times", default=None)
"""Of the start that runs; None: it is not measured."""


def stage_ended(stage: str) -> None:
    """See `StartTimes.ended`."""
    times = START_TIMES.get()
    if times is not None:
        times.ended(stage)


def inside_stage(stage: str) -> AbstractContextManager[None]:
    """See `StartTimes.inside`."""
    times = START_TIMES.get()
    return nullcontext() if times is None else times.inside(stage)


def stage_table(ranks: Sequence[Mapping[str, float]]) -> list[str]:
    """The seconds of each stage of the start, a line a rank, after a line of names."""
    lines = ["rank" + "".join(f"{stage:>10}" for stage in STAGES)]
    for number, seconds in enumerate(ranks):
        lines.append(f"{number:4}" + "".join(f"{seconds.get(stage, 0.0):10.1f}" for stage in STAGES))
    return lines
