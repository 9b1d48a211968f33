"""The flight recorder: an engine that writes down what its decisions follow from, and the decisions.

It stands at the doors alone: requests on their way in, the clock, the executor. The engine's own code knows nothing of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.engine.clock import Clock, WallClock
from quire.engine.engine import Engine
from quire.engine.events import Observer
from quire.engine.executor import Executor, StepHandle
from quire.errors import QuireError
from quire.observability import recording_format
from quire.observability.checkpoint import STATE
from quire.observability.recorder import Recorder
from quire.observability.ring import Ring
from quire.scheduler.constraint import FREE, Constraint
from quire.scheduler.plan import Mask, Plan, Result
from quire.scheduler.scheduler import Scheduler
from quire.types import FinishReason, Request, RequestStepOutput


class RecordedClock:
    """What the engine reads is remembered while it decides; what others read is not."""

    def __init__(self, inner: Clock, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.deciding = False
        self._now = inner.now

    def now(self) -> float:
        now = self._now()
        if self.deciding:
            self.recorder.at.append(now)
        return now

    def sleep_until(self, when: float) -> None:
        self.inner.sleep_until(when)


class RecordedHandle:
    __slots__ = ("inner", "recorder")

    def __init__(self, inner: StepHandle, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        try:
            self.inner.sample(masks)
        except Exception as error:
            self.recorder.failed("masks", error)
            raise

    def is_done(self) -> bool:
        return self.inner.is_done()

    def result(self) -> Result:
        try:
            result = self.inner.result()
        except Exception as error:
            self.recorder.failed("result", error)
            raise
        self.recorder.came(result)
        return result


class RecordedExecutor:
    """At the lower door."""

    def __init__(self, inner: Executor, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.describe = inner.describe

    def launch(self, plan: Plan) -> StepHandle:
        self.recorder.launched(plan)
        try:
            return RecordedHandle(self.inner.launch(plan), self.recorder)
        except Exception as error:
            self.recorder.failed("launch", error)
            raise

    def reset(self) -> None:
        self.recorder.reset()
        self.inner.reset()

    def close(self) -> None:
        self.inner.close()
        self.recorder.ring.close()


class RecordedEngine(Engine):
    """An engine whose every decision can be made again from what `recorder` writes."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        recorder: Recorder,
        clock: Clock | None = None,
        observers: Iterable[Observer] = (),
        **rest: Any,
    ) -> None:
        self.recorder = recorder
        self._read = RecordedClock(WallClock() if clock is None else clock, recorder)
        watched = (*observers, recorder)
        super().__init__(scheduler, RecordedExecutor(executor, recorder), clock=self._read, observers=watched, **rest)
        recorder.attach(scheduler, self.lookahead)
        self._begin()

    def step(self) -> list[RequestStepOutput]:
        recorder, read = self.recorder, self._read
        if not recorder.on:
            return super().step()
        if self.lookahead != recorder.depth:
            recorder.depth = self.lookahead
            recorder.write(recording_format.Deepened(recorder.at, self.lookahead))
        before = recorder.frames
        read.deciding = True
        try:
            out = super().step()
        except Exception as error:
            recorder.crashed(error)
            raise
        finally:
            read.deciding = False
        if recorder.frames == before:
            recorder.write(recording_format.Idled(recorder.at))
        if recorder.ring.full and recorder.on:
            self._begin()
        return out

    def add(self, request: Request, constraint: Constraint = FREE) -> None:
        self._read.deciding = self.recorder.on
        try:
            super().add(request, constraint)
        finally:
            self._read.deciding = False
        self.recorder.arrived(request, self.scheduler.sequences[request.id])
        if self.recorder.ring.full and self.recorder.on:
            self._begin()

    def set_constraint(self, id: str, constraint: Constraint) -> None:
        super().set_constraint(id, constraint)
        self.recorder.write(recording_format.Provided(self.recorder.at, id))

    def abort(self, id: str, why: FinishReason = "abort") -> None:
        if self._read.deciding:  # its own doing: a deadline
            super().abort(id, why)
        else:
            self._leave(id, why, super().abort, why)

    def fail(self, id: str, error: QuireError) -> None:
        if self._read.deciding:
            super().fail(id, error)
        else:
            self._leave(id, "error", super().fail, error)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.recorder.write(recording_format.Emptied(self.recorder.at))

    def _leave(self, id: str, why: FinishReason, leave: Callable[[str, Any], None], how: Any) -> None:
        if id in self.scheduler.sequences:
            self._read.deciding = True
            try:
                leave(id, how)
            finally:
                self._read.deciding = False
            self.recorder.write(recording_format.Left(self.recorder.at, id, why))

    def _begin(self) -> None:
        self.recorder.begin(self.clock.now(), self.description, self._state)

    def _state(self) -> dict[str, Any]:
        roots = {name: getattr(self, name) for name in STATE}
        return roots | {"inflight": [(planned, launched) for planned, launched, _ in self.inflight]}


def recorded(folder: Path, limit: int = 1 << 28) -> Callable[..., Engine]:
    """What makes engines that are recorded in `folder`, as `Engine` makes them. limit: bytes of all of it.

    Raises InvalidConfig if the folder cannot be written to.
    """
    ring = Ring(folder, limit)
    return lambda *parts, **rest: RecordedEngine(*parts, recorder=Recorder(ring), **rest)
