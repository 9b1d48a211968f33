"""Ranks as threads of one process: collectives meet at a barrier, and stages of a pipeline are joined by queues. As in
processes, each rank has its own model, rows and K/V; and every result of the last stage must be the same."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.engine.executor import Description, Executor, StepHandle
from quire.layers.linear import ParallelGroup
from quire.layers.stages import LinkedPipeline
from quire.scheduler.plan import Mask, Plan, Result

R = TypeVar("R")
Passed: TypeAlias = "queue.SimpleQueue[bytes]"
TIMEOUT = 60.0


class Meeting:
    """Where `size` threads exchange values. log: how many numbers each exchange moved, rank 0's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value."""
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class ThreadPipeline(LinkedPipeline):
    """One thread's stage. received, sent: queues from the stage before and to the next one."""

    def __init__(self, stage: int, stages: int, received: Passed, sent: Passed) -> None:
        super().__init__(stage, stages)
        self.received, self.sent = received, sent
        self.now = b""

    def _header(self) -> int:
        self.now = self.received.get(timeout=TIMEOUT)
        return len(self.now)

    def _take(self, into: Tensor) -> None:
        assert into.nbytes == len(self.now)
        into.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(self.now), dtype=torch.uint8))

    def _put(self, x: Tensor | None) -> None:
        self.sent.put(b"" if x is None else x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


class ThreadGroup(ParallelGroup):
    """One thread's rank. every: where the ranks of all stages meet."""

    def __init__(self, meeting: Meeting, rank: int, every: Meeting, pipeline: ThreadPipeline) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.every, self.pipeline, self.neighbours = every, pipeline, every.size

    @property
    def number(self) -> int:
        """Among the ranks of all stages."""
        return self.pipeline.stage * self.size + self.rank

    def _note(self, kind: str, x: Tensor) -> None:
        if self.rank == 0:
            self.meeting.log.append((kind, tuple(x.shape)))

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note("all_reduce", x)
        first, *rest = self.meeting.exchange(self.rank, x)
        total = first.float()
        for part in rest:
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self._note("all_gather", x)
        parts = self.meeting.exchange(self.rank, x)
        assert [part.shape[-1] for part in parts] == list(widths)
        return torch.cat(parts, -1)

    def smallest(self, value: int) -> int:
        return int(min(self.every.exchange(self.number, value)))


class RankThreads:
    """Runs one function in the threads of all ranks at once, of each stage `size`."""

    def __init__(self, size: int, stages: int = 1) -> None:
        self.meeting = Meeting(size * stages)
        within = [self.meeting] if stages == 1 else [Meeting(size) for _ in range(stages)]
        # Between stages, and, of no use, around them all.
        passed = [[queue.SimpleQueue[bytes]() for _ in range(size)] for _ in range(stages + 1)]
        self.groups = [
            ThreadGroup(
                within[stage],
                rank,
                self.meeting,
                ThreadPipeline(stage, stages, passed[stage][rank], passed[stage + 1][rank]),
            )
            for stage in range(stages)
            for rank in range(size)
        ]
        self.meetings = {self.meeting, *within}
        self.threads = [ThreadPoolExecutor(1, f"rank-{number}") for number in range(size * stages)]

    @property
    def last(self) -> slice:
        """The ranks of the last stage."""
        return slice(len(self.groups) - self.groups[-1].size, None)

    def run(self, work: Callable[[int], R]) -> list[R]:
        """Each rank's `work(rank)`. Raises the first error that is a rank's own."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        for future in futures:
            future.add_done_callback(lambda done: self._abort() if done.exception() else None)
        errors = [future.exception() for future in futures]
        own = [error for error in errors if error is not None]
        if own:
            for meeting in self.meetings:
                meeting.barrier.reset()
            raise next((error for error in own if not isinstance(error, threading.BrokenBarrierError)), own[0])
        return [future.result() for future in futures]

    def _abort(self) -> None:
        for meeting in self.meetings:
            meeting.barrier.abort()

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()


@dataclass(slots=True)
class ThreadHandle:
    """A step on every rank."""

    ranks: RankThreads
    handles: Sequence[StepHandle]

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        self.ranks.run(lambda rank: self.handles[rank].sample(masks))

    def is_done(self) -> bool:
        return all(handle.is_done() for handle in self.handles)

    def result(self) -> Result:
        first, *others = self.ranks.run(lambda rank: self.handles[rank].result())
        assert all(other == first for other in others), "ranks disagree about what was sampled"
        return first


class ThreadExecutor:
    """An `Executor` of one executor a rank. make: creates a rank's, in its thread."""

    def __init__(self, ranks: RankThreads, make: Callable[[ParallelGroup], Executor]) -> None:
        self.ranks = ranks
        self.executors = ranks.run(lambda rank: make(ranks.groups[rank]))

    def describe(self) -> Description:
        return self.executors[0].describe()

    def launch(self, plan: Plan) -> ThreadHandle:
        return ThreadHandle(self.ranks, self.ranks.run(lambda rank: self.executors[rank].launch(plan)))

    def reset(self) -> None:
        self.ranks.run(lambda rank: self.executors[rank].reset())

    def close(self) -> None:
        self.ranks.run(lambda rank: self.executors[rank].close())
