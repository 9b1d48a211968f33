"""Where grammars are compiled: threads beside the engine's loop, bounded in number and time, and a cache."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.errors import InvalidRequest, QuireError
from quire.scheduler.constraint import FREE, PENDING, Constraint
from quire.types import Request, StructuredOutputsParams


class CompiledGrammar(Protocol):
    """A grammar ready to be matched."""

    def constraint(self) -> Constraint: ...


CompileFunction = Callable[[StructuredOutputsParams], CompiledGrammar]
"""Raises InvalidRequest."""


@dataclass(eq=False, slots=True)
class _Job:
    """One grammar in the making, and who waits for it: (request id, the field its client used)."""

    structure: StructuredOutputsParams
    deadline: float
    waiters: list[tuple[str, str]] = field(default_factory=list)
    started: bool = False
    timed_out: bool = False


class GrammarCompiler:
    """Makes constraints (see core.constraint.Constraints). Used from one thread, the loop's.

    compile: called in a worker; the library lets other threads run meanwhile. workers: threads that compile at once.
    seconds: from asking to answer. A worker that is still busy then is left behind and replaced, `spares` times at
    most: the library bounds its own work, so it ends, but its request does not wait for it. keep: grammars kept, those
    last used; so are the refusals. characters: of their sources together.
    """

    def __init__(
        self,
        compile: CompileFunction,
        *,
        workers: int = 1,
        spare_workers: int = 3,
        timeout: float = 10.0,
        max_entries: int = 256,
        max_chars: int = 1 << 23,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile, self._spare_workers, self._timeout, self._clock = compile, spare_workers, timeout, clock
        self._max_entries, self._max_chars, self._cached_chars = max_entries, max_chars, 0
        self._idle = workers
        self._cache: OrderedDict[StructuredOutputsParams, CompiledGrammar | InvalidRequest] = OrderedDict()
        self._jobs: dict[StructuredOutputsParams, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Job, CompiledGrammar | InvalidRequest]] = deque()
        self._wakeup: tuple[socket.socket, ...] = ()
        """Rung by workers, heard by the loop; there is none until somebody works."""

    # ---------------------------------------------------------------- asked by the loop

    def constraint_for(self, request: Request) -> Constraint:
        structure = request.sampling.structured_outputs
        if structure is None:
            return FREE
        if structure in self._cache:
            return self._from_cache(structure)
        job = self._jobs.get(structure)
        if job is None:
            job = self._jobs[structure] = _Job(structure, self._clock() + self._timeout)
            if self._idle:
                self._idle -= 1
                self._wakeup = self._wakeup or _wakeup_pair()
                self._start_worker()
            self._queue.put(job)
        job.waiters.append((request.id, structure.param))
        return PENDING

    def poll(self) -> list[tuple[str, Constraint | InvalidRequest]]:
        out: list[tuple[str, Constraint | InvalidRequest]] = []
        for end in self._wakeup[:1]:
            with contextlib.suppress(BlockingIOError):
                end.recv(1 << 16)
        while self._done:
            job, made = self._done.popleft()
            if not job.timed_out:
                del self._jobs[job.structure]
                out += _constraints_for(job, made)
            self._store(job.structure, made)
        now = self._clock()
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            del self._jobs[job.structure]
            job.timed_out = True
            out += _constraints_for(
                job, InvalidRequest(f"compiling it takes longer than {self._timeout:g} s: make it simpler")
            )
            if job.started and self._spare_workers:
                self._spare_workers -= 1
                self._start_worker()
        return out

    def wait_fds(self) -> Sequence[int]:
        return [end.fileno() for end in self._wakeup[:1]]

    def timeout(self) -> float | None:
        due = min((job.deadline for job in self._jobs.values()), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def get_or_compile(self, request: Request) -> Constraint:
        """A constraint for a caller who has nothing else to do. Raises InvalidRequest."""
        structure = request.sampling.structured_outputs
        if structure is None:
            return FREE
        if structure not in self._cache:
            self._store(structure, _attempt(self._compile, structure))
        return self._from_cache(structure)

    # ---------------------------------------------------------------- behind

    def _from_cache(self, structure: StructuredOutputsParams) -> Constraint:
        made = self._cache[structure]
        self._cache.move_to_end(structure)
        if isinstance(made, InvalidRequest):
            raise _for_param(made, structure.param)
        return made.constraint()

    def _store(self, structure: StructuredOutputsParams, made: CompiledGrammar | InvalidRequest) -> None:
        self._cached_chars += _size(structure) - (_size(structure) if structure in self._cache else 0)
        self._cache[structure] = made
        self._cache.move_to_end(structure)
        while len(self._cache) > max(1, self._max_entries) or (
            self._cached_chars > self._max_chars and len(self._cache) > 1
        ):
            self._cached_chars -= _size(self._cache.popitem(last=False)[0])

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def _work(self) -> None:
        job = None
        while job is None or not job.timed_out:  # who took too long has been replaced
            job = self._queue.get()
            if job is None:
                self._queue.put(None)  # for the next
                return
            if not job.timed_out:
                job.started = True
                self._done.append((job, _attempt(self._compile, job.structure)))
                with contextlib.suppress(OSError):  # full, and so readable anyway; or closed
                    self._wakeup[1].send(b"\0")

    def close(self) -> None:
        """Send the workers home."""
        self._queue.put(None)
        for end in self._wakeup:
            end.close()


def _wakeup_pair() -> tuple[socket.socket, ...]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


def _attempt(compile: CompileFunction, structure: StructuredOutputsParams) -> CompiledGrammar | InvalidRequest:
    try:
        return compile(structure)
    except InvalidRequest as error:
        return error
    except Exception as error:  # a library's surprise costs its request only
        why = str(error) if isinstance(error, QuireError) else type(error).__name__
        return InvalidRequest(f"{structure.param}: it cannot be compiled: {why}", param=structure.param)


def _constraints_for(
    job: _Job, made: CompiledGrammar | InvalidRequest
) -> list[tuple[str, Constraint | InvalidRequest]]:
    if isinstance(made, InvalidRequest):
        return [(id, _for_param(made, param)) for id, param in job.waiters]
    return [(id, made.constraint()) for id, _ in job.waiters]


def _for_param(error: InvalidRequest, param: str) -> InvalidRequest:
    """`error` in the words of a client that used the field `param`."""
    said = str(error)
    if error.param is not None:
        said = said.removeprefix(f"{error.param}: ")
    return InvalidRequest(f"{param}: {said}", param=param, code=error.code)


def _size(structure: StructuredOutputsParams) -> int:
    return len(structure.kind[1])
