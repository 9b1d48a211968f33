"""How long the next step may take, judged by those before, and a report of what the engine does when it takes longer.

The front waits for a step as long as `StepWatch.step_timeout`. Then it sends the engine process a signal, and the
process writes where every thread is and what was decided last, even when it is stuck in a library: the stacks are
written by a C handler, the decisions by a thread that the signal wakes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from quire.engine.engine import Engine
from quire.engine.events import Observer, StepRecord
from quire.engine.protocol import REPORT_SIGNAL
from quire.errors import escape_control
from quire.scheduler.plan import Plan
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Decision

_UNKNOWN = 0.1
"""Seconds a token before anything was measured: slower than any usable model."""

_MARGIN = 10.0
"""A step may take so many times what the slowest one suggests: attention costs more the longer a context is."""

_SHORT = 10.0
_LONG = 30.0
"""Seconds that any step may take, unless an option says otherwise: once steps have been measured, and before."""


class StepWatch(Observer):
    """Keeps the last steps and says how long the next may take.

    timeout: seconds that any step may take; None: 10 where steps are known to be short, 30 before any was measured.
    keep: steps remembered. out: where failures and reports are written.
    """

    def __init__(self, *, timeout: float | None = None, keep: int = 12, out: TextIO | None = None) -> None:
        self.timeout = timeout
        self.out = sys.stderr if out is None else out
        self.last: deque[StepRecord] = deque(maxlen=keep)

    def step_timeout(self, scheduler: Scheduler) -> float:
        """Seconds within which the scheduler's next step must be over.

        That is the timeout, or `_MARGIN` times what the steps before suggest, where that is more.
        """
        times, budget = scheduler.step_times, scheduler.max_num_batched_tokens
        if not times.num_steps:
            return (_LONG if self.timeout is None else self.timeout) + _UNKNOWN * budget
        known = _MARGIN * times.longest(budget)
        return max(_SHORT if self.timeout is None else self.timeout, known)

    # ---------------------------------------------------------------- an observer

    def on_step(self, record: StepRecord) -> None:
        """Remember it for reports."""
        self.last.append(record)

    def on_failure(self, reason: str, suspects: list[str], now: float) -> None:
        """Print why a step failed and which requests were on the device."""
        who = ", ".join(suspects[:8]) + (f" and {len(suspects) - 8} more" if len(suspects) > 8 else "")
        print(f"a step failed: {escape_control(reason)}\n  on the device: {who}", file=self.out, flush=True)

    # ---------------------------------------------------------------- a report

    def report(self, engine: Engine) -> str:
        """What was decided last and what is in flight. Read from another thread, so it may mix two steps."""
        return "\n".join(self._report_lines(engine))

    def _report_lines(self, engine: Engine) -> Iterator[str]:
        scheduler, now = engine.scheduler, engine.clock.now()
        gauges = engine.gauges()
        timeout = self.step_timeout(scheduler)
        yield (
            f"engine: {engine.stats.num_steps} steps committed, {gauges.running} running, {gauges.waiting} waiting, "
            f"{gauges.used_blocks} pages used, {gauges.free_blocks} free, due within {timeout:.1f} s"
        )
        for record in list(self.last):
            took = f"{record.committed - record.launched:.4f} s, {now - record.committed:.1f} s ago"
            yield f"  step {record.number} ({took}): {_step_line(record.plan, record.ids, record.decisions)}"
        for step in list(scheduler.inflight):
            ids = [seq.request.id for seq in step.seqs]
            yield f"  under way: {_step_line(step.plan, ids, step.decisions)}"

    # ---------------------------------------------------------------- a signal

    def install_signal_handler(self, engine: Engine) -> Callable[[], None]:
        """From now on REPORT_SIGNAL prints a report. Call it in the main thread; the function returned undoes it."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        before = signal.signal(REPORT_SIGNAL, lambda number, frame: None)
        faulthandler.register(REPORT_SIGNAL, file=self.out, all_threads=True, chain=True)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._report_on_signal, args=(read_end, engine), name="watch", daemon=True)
        thread.start()

        def stop() -> None:
            signal.set_wakeup_fd(-1)
            faulthandler.unregister(REPORT_SIGNAL)
            signal.signal(REPORT_SIGNAL, before)
            os.close(write_end)
            thread.join()
            os.close(read_end)

        return stop

    def _report_on_signal(self, read_end: int, engine: Engine) -> None:
        while signals := os.read(read_end, 64):
            if REPORT_SIGNAL in signals:
                try:
                    print(self.report(engine), file=self.out, flush=True)
                except Exception:  # it is read while it changes
                    traceback.print_exc(file=self.out)


def _step_line(plan: Plan, ids: list[str], decisions: list[Decision]) -> str:
    """One step in a line: the tokens that each request was fed, and the decisions."""
    fed = [
        f"{id}+{span.num_tokens}" + ("*" if span.num_samples else "") for id, span in zip(ids, plan.spans, strict=False)
    ]
    why = [" ".join(map(str, decision)) for decision in decisions]
    return " ".join(_abridge(fed)) + ("; " + ", ".join(_abridge(why)) if why else "")


def _abridge(words: list[str], most: int = 16) -> list[str]:
    return words if len(words) <= most else [*words[:most], f"and {len(words) - most} more"]
