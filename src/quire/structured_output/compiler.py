"""Compiles grammars in threads beside the engine's loop, bounded in number and time, and caches them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.errors import InvalidRequest, QuireError
from quire.scheduler.constraint import FREE, PENDING, Constraint
from quire.types import Request, StructuredOutputsParams

CompiledGrammar = Callable[[], Constraint]
"""Makes a constraint for a new sequence."""

CompileFunction = Callable[[StructuredOutputsParams], CompiledGrammar]
"""Raises InvalidRequest."""


WARM_UP = StructuredOutputsParams(regex=".")
"""What `warm_up` compiles."""


@dataclass(eq=False, slots=True)
class _Job:
    """A grammar being compiled, and the (request id, field of the request) of those that wait for it."""

    structure: StructuredOutputsParams
    deadline: float
    waiters: list[tuple[str, str]] = field(default_factory=list)
    started: bool = False
    timed_out: bool = False
    replaced: bool = False


class GrammarCompiler:
    """Makes constraints (see `scheduler.constraint.Constraints`). Used from one thread, that of the engine's loop.

    compile: called in a worker thread. workers: threads that compile at once. timeout: seconds from request to result;
    a worker that is still busy then is replaced until it is done, at most `spare_workers` at a time: the library bounds
    its work, but its request does not wait for it. max_entries: grammars and errors that are cached,
    least recently used first out. max_chars: of their sources together.
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
        self._compile = compile
        self._spare_workers = spare_workers
        self._timeout = timeout
        self._clock = clock
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._cached_chars = 0
        self._idle = workers
        self._workers = 0
        self._cache: OrderedDict[StructuredOutputsParams, CompiledGrammar | InvalidRequest] = OrderedDict()
        self._jobs: dict[StructuredOutputsParams, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Job, CompiledGrammar | InvalidRequest]] = deque()
        self._wakeup: tuple[socket.socket, ...] = ()
        """A socket pair that workers write to and the loop waits for; empty until the first grammar is compiled."""

    # ---------------------------------------------------------------- called by the loop

    def warm_up(self, structure: StructuredOutputsParams = WARM_UP) -> None:
        """Compile a structure in a worker, so that what all grammars share is ready when the first one is needed: the
        library keeps Python's lock while it reads a vocabulary, of a large one for tenths of a second."""
        self._enqueue(structure)

    def constraint_for(self, request: Request) -> Constraint:
        """See Constraints."""
        structure = request.sampling.structured_outputs
        if structure is None:
            return FREE
        if structure in self._cache:
            return self._from_cache(structure)
        job = self._jobs.get(structure) or self._enqueue(structure)
        job.waiters.append((request.id, structure.param))
        return PENDING

    def _enqueue(self, structure: StructuredOutputsParams) -> _Job:
        job = self._jobs[structure] = _Job(structure, self._clock() + self._timeout)
        if self._idle:
            self._idle -= 1
            self._wakeup = self._wakeup or _wakeup_pair()
            self._start_worker()
        self._queue.put(job)
        return job

    def poll(self) -> list[tuple[str, Constraint | InvalidRequest]]:
        """See Constraints."""
        out: list[tuple[str, Constraint | InvalidRequest]] = []
        for end in self._wakeup[:1]:
            with contextlib.suppress(BlockingIOError):
                end.recv(1 << 16)
        while self._done:
            job, made = self._done.popleft()
            if job.replaced:
                self._spare_workers += 1
                self._end_worker()
            if not job.timed_out:
                del self._jobs[job.structure]
                out += _constraints_for(job, made)
            self._store(job.structure, made)
        now = self._clock()
        for job in [job for job in self._jobs.values() if job.deadline <= now]:
            del self._jobs[job.structure]
            job.timed_out = True
            out += _constraints_for(
                job, InvalidRequest(f"compiling it takes longer than {self._timeout:g} s: simplify it")
            )
            if job.started and self._spare_workers:
                job.replaced = True
                self._spare_workers -= 1
                self._start_worker()
        return out

    def wait_fds(self) -> Sequence[int]:
        """See Constraints."""
        return [end.fileno() for end in self._wakeup[:1]]

    def timeout(self) -> float | None:
        """See Constraints."""
        due = min((job.deadline for job in self._jobs.values()), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def get_or_compile(self, request: Request) -> Constraint:
        """A constraint, compiled here if it is not cached. Raises InvalidRequest."""
        structure = request.sampling.structured_outputs
        if structure is None:
            return FREE
        if structure not in self._cache:
            self._store(structure, _attempt(self._compile, structure))
        return self._from_cache(structure)

    # ---------------------------------------------------------------- cache and workers

    def _from_cache(self, structure: StructuredOutputsParams) -> Constraint:
        made = self._cache[structure]
        self._cache.move_to_end(structure)
        if isinstance(made, InvalidRequest):
            raise _for_param(made, structure.param)
        return made()

    def _store(self, structure: StructuredOutputsParams, made: CompiledGrammar | InvalidRequest) -> None:
        self._cached_chars += _size(structure) - (_size(structure) if structure in self._cache else 0)
        self._cache[structure] = made
        self._cache.move_to_end(structure)
        while len(self._cache) > max(1, self._max_entries) or (
            self._cached_chars > self._max_chars and len(self._cache) > 1
        ):
            self._cached_chars -= _size(self._cache.popitem(last=False)[0])

    def _start_worker(self) -> None:
        self._workers += 1
        threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def _end_worker(self) -> None:
        """Any of them."""
        self._workers -= 1
        self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.timed_out:
                job.started = True
                self._done.append((job, _attempt(self._compile, job.structure)))
                # Full, and so readable anyway; or closed.
                with contextlib.suppress(OSError):
                    self._wakeup[1].send(b"\0")

    def close(self) -> None:
        """End the workers."""
        while self._workers:
            self._end_worker()
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
    except Exception as error:
        # An unexpected error of the library fails this request only.
        why = str(error) if isinstance(error, QuireError) else type(error).__name__
        return InvalidRequest(f"{structure.param}: it does not compile: {why}", param=structure.param)


def _constraints_for(
    job: _Job, made: CompiledGrammar | InvalidRequest
) -> list[tuple[str, Constraint | InvalidRequest]]:
    if isinstance(made, InvalidRequest):
        return [(id, _for_param(made, param)) for id, param in job.waiters]
    return [(id, made()) for id, _ in job.waiters]


def _for_param(error: InvalidRequest, param: str) -> InvalidRequest:
    """`error` for a client that used the field `param`."""
    why = str(error)
    if error.param is not None:
        why = why.removeprefix(f"{error.param}: ")
    return InvalidRequest(f"{param}: {why}", param=param, code=error.code)


def _size(structure: StructuredOutputsParams) -> int:
    return len(structure.kind[1])
