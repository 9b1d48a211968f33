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

from quire.core.constraint import FREE, PENDING, Constraint
from quire.errors import InvalidRequest, QuireError
from quire.values import Request, StructuredOutputs


class Compiled(Protocol):
    """A grammar ready to be matched."""

    def constraint(self) -> Constraint: ...


Compile = Callable[[StructuredOutputs], Compiled]
"""Raises InvalidRequest."""


@dataclass(eq=False, slots=True)
class _Job:
    """One grammar in the making, and who waits for it: (request id, the field its client used)."""

    structure: StructuredOutputs
    due: float
    waiting: list[tuple[str, str]] = field(default_factory=list)
    begun: bool = False
    overdue: bool = False


class Workshop:
    """Makes constraints (see core.constraint.Constraints). Used from one thread, the loop's.

    compile: called in a worker; the library lets other threads run meanwhile. workers: threads that compile at once.
    seconds: from asking to answer. A worker that is still busy then is left behind and replaced, `spares` times at
    most: the library bounds its own work, so it ends, but its request does not wait for it. keep: grammars kept, those
    last used; so are the refusals. characters: of their sources together.
    """

    def __init__(
        self,
        compile: Compile,
        *,
        workers: int = 1,
        spares: int = 3,
        seconds: float = 10.0,
        keep: int = 256,
        characters: int = 1 << 23,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile, self._spares, self._seconds, self._clock = compile, spares, seconds, clock
        self._keep, self._characters, self._held = keep, characters, 0
        self._idle = workers
        self._cache: OrderedDict[StructuredOutputs, Compiled | InvalidRequest] = OrderedDict()
        self._jobs: dict[StructuredOutputs, _Job] = {}
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Job, Compiled | InvalidRequest]] = deque()
        self._bell: tuple[socket.socket, ...] = ()
        """Rung by workers, heard by the loop; there is none until somebody works."""

    # ---------------------------------------------------------------- asked by the loop

    def of(self, request: Request) -> Constraint:
        structure = request.sampling.structured_outputs
        if structure is None:
            return FREE
        if structure in self._cache:
            return self._kept(structure)
        job = self._jobs.get(structure)
        if job is None:
            job = self._jobs[structure] = _Job(structure, self._clock() + self._seconds)
            if self._idle:
                self._idle -= 1
                self._bell = self._bell or _bell()
                self._hire()
            self._todo.put(job)
        job.waiting.append((request.id, structure.param))
        return PENDING

    def made(self) -> list[tuple[str, Constraint | InvalidRequest]]:
        out: list[tuple[str, Constraint | InvalidRequest]] = []
        for end in self._bell[:1]:
            with contextlib.suppress(BlockingIOError):
                end.recv(1 << 16)
        while self._done:
            job, made = self._done.popleft()
            if not job.overdue:
                del self._jobs[job.structure]
                out += _answers(job, made)
            self._store(job.structure, made)
        now = self._clock()
        for job in [job for job in self._jobs.values() if job.due <= now]:
            del self._jobs[job.structure]
            job.overdue = True
            out += _answers(job, InvalidRequest(f"compiling it takes longer than {self._seconds:g} s: make it simpler"))
            if job.begun and self._spares:
                self._spares -= 1
                self._hire()
        return out

    def wakers(self) -> Sequence[int]:
        return [end.fileno() for end in self._bell[:1]]

    def patience(self) -> float | None:
        due = min((job.due for job in self._jobs.values()), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def now(self, request: Request) -> Constraint:
        """A constraint for a caller who has nothing else to do. Raises InvalidRequest."""
        structure = request.sampling.structured_outputs
        if structure is None:
            return FREE
        if structure not in self._cache:
            self._store(structure, _attempt(self._compile, structure))
        return self._kept(structure)

    # ---------------------------------------------------------------- behind

    def _kept(self, structure: StructuredOutputs) -> Constraint:
        made = self._cache[structure]
        self._cache.move_to_end(structure)
        if isinstance(made, InvalidRequest):
            raise _respelled(made, structure.param)
        return made.constraint()

    def _store(self, structure: StructuredOutputs, made: Compiled | InvalidRequest) -> None:
        self._held += _size(structure) - (_size(structure) if structure in self._cache else 0)
        self._cache[structure] = made
        self._cache.move_to_end(structure)
        while len(self._cache) > max(1, self._keep) or (self._held > self._characters and len(self._cache) > 1):
            self._held -= _size(self._cache.popitem(last=False)[0])

    def _hire(self) -> None:
        threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def _work(self) -> None:
        job = None
        while job is None or not job.overdue:  # who took too long has been replaced
            job = self._todo.get()
            if job is None:
                self._todo.put(None)  # for the next
                return
            if not job.overdue:
                job.begun = True
                self._done.append((job, _attempt(self._compile, job.structure)))
                with contextlib.suppress(OSError):  # full, and so readable anyway; or closed
                    self._bell[1].send(b"\0")

    def close(self) -> None:
        """Send the workers home."""
        self._todo.put(None)
        for end in self._bell:
            end.close()


def _bell() -> tuple[socket.socket, ...]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


def _attempt(compile: Compile, structure: StructuredOutputs) -> Compiled | InvalidRequest:
    try:
        return compile(structure)
    except InvalidRequest as error:
        return error
    except Exception as error:  # a library's surprise costs its request only
        why = str(error) if isinstance(error, QuireError) else type(error).__name__
        return InvalidRequest(f"{structure.param}: it cannot be compiled: {why}", param=structure.param)


def _answers(job: _Job, made: Compiled | InvalidRequest) -> list[tuple[str, Constraint | InvalidRequest]]:
    if isinstance(made, InvalidRequest):
        return [(id, _respelled(made, param)) for id, param in job.waiting]
    return [(id, made.constraint()) for id, _ in job.waiting]


def _respelled(error: InvalidRequest, param: str) -> InvalidRequest:
    """`error` in the words of a client that used the field `param`."""
    said = str(error)
    if error.param is not None:
        said = said.removeprefix(f"{error.param}: ")
    return InvalidRequest(f"{param}: {said}", param=param, code=error.code)


def _size(structure: StructuredOutputs) -> int:
    return len(structure.kind[1])
