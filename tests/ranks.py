"""Tensor-parallel ranks as threads of one process: collectives meet at a barrier. As in processes, each rank has its
own model, rows and K/V; and every rank's result must be the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.engine.executor import Description, Executor, StepHandle
from quire.layers.linear import ParallelGroup
from quire.scheduler.plan import Mask, Plan, Result

R = TypeVar("R")
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


class ThreadGroup(ParallelGroup):
    """One thread's rank."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

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
        return int(min(self.meeting.exchange(self.rank, value)))


class RankThreads:
    """Runs one function in the threads of all ranks at once."""

    def __init__(self, size: int) -> None:
        self.meeting = Meeting(size)
        self.groups = [ThreadGroup(self.meeting, rank) for rank in range(size)]
        self.threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]

    def run(self, work: Callable[[int], R]) -> list[R]:
        """Each rank's `work(rank)`. Raises the first error that is a rank's own."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        for future in futures:
            future.add_done_callback(lambda done: self.meeting.barrier.abort() if done.exception() else None)
        errors = [future.exception() for future in futures]
        own = [error for error in errors if error is not None]
        if own:
            self.meeting.barrier.reset()
            raise next((error for error in own if not isinstance(error, threading.BrokenBarrierError)), own[0])
        return [future.result() for future in futures]

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
