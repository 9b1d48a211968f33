"""An engine process that notes its steps: `python -m benchmarks.counted FD`, as `quire.assembly.engine_child`.

QUIRE_BENCH_STEPS names the file. It gets a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.assembly.engine_child import main
from quire.engine.executor import Executor, StepHandle
from quire.scheduler.plan import Mask, Plan, Result

STEPS = "QUIRE_BENCH_STEPS"


class Step(NamedTuple):
    """One step: sequences and tokens that it fed, and seconds of this process's time that the executor took for it."""

    rows: int
    tokens: int
    seconds: float


class CountedHandle:
    """A step whose end is noted."""

    def __init__(self, inner: StepHandle, plan: Plan, spent: float, note: Callable[[Step], None]) -> None:
        self.inner, self.plan, self.spent, self.note = inner, plan, spent, note

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """See `StepHandle`."""
        self.inner.sample(masks)

    def is_done(self) -> bool:
        """See `StepHandle`."""
        return self.inner.is_done()

    def result(self) -> Result:
        """See `StepHandle`."""
        began = time.process_time()
        made = self.inner.result()
        spent = self.spent + time.process_time() - began
        spans = self.plan.spans
        self.note(Step(len(spans), sum(span.num_tokens for span in spans), spent))
        return made


class CountedExecutor:
    """An executor whose steps are noted."""

    def __init__(self, inner: Executor, note: Callable[[Step], None]) -> None:
        self.inner, self.note = inner, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: Plan) -> CountedHandle:
        """See `Executor`."""
        began = time.process_time()
        handle = self.inner.launch(plan)
        return CountedHandle(handle, plan, time.process_time() - began, self.note)


def noted(path: Path) -> Callable[[Step], None]:
    """What appends steps to a file."""

    def note(step: Step) -> None:
        with path.open("ab") as file:
            file.write(json.dumps(step).encode() + b"\n")

    return note


def read(path: Path) -> list[Step]:
    """The steps of a file."""
    return [Step(*json.loads(line)) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    sys.exit(main(lambda executor: CountedExecutor(executor, noted(Path(os.environ[STEPS])))))
