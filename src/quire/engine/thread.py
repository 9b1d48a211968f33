"""An engine in a thread of its own, for callers in any thread: what they ask is queued and done between two steps.

Python runs signal handlers in the main thread, between any two of its bytecodes, and what a handler raises there can
leave half a step behind. Here nothing of the engine runs in a caller's thread, so neither Ctrl-C nor any other signal
can fall into a step, and a caller that is interrupted leaves behind a request that is ended, not an engine that is not
to be used again. Requests of several callers run in the same steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from quire.engine.engine import Engine
from quire.errors import Closed, Interrupted, QuireError, StepFailed
from quire.scheduler.constraint import Constraint
from quire.tokenization.escape import escape_control_lines
from quire.types import FinishReason, Request, RequestStepOutput

R = TypeVar("R")

_LOOK = 0.2
"""Seconds after which a waiting thread looks for signals."""

_PATIENCE = 5.0
"""Seconds that a process which ends waits for the step under way."""


def wait_for(answers: SimpleQueue[R]) -> R:
    """What comes next. A signal that arrives just before a thread goes to sleep does not wake it: so it looks again."""
    while True:
        with contextlib.suppress(Empty):
            return answers.get(timeout=_LOOK)


class Listener(Protocol):
    """Who hears what becomes of a request. Called in the engine's thread."""

    def take(self, event: RequestStepOutput) -> FinishReason | None:
        """None while more is wanted, else why the request is to end."""

    def lost(self, error: QuireError) -> None:
        """Nothing more will come."""


class EngineThread:
    """Runs `engine` until `close`. begin: called first in the new thread, for what a library keeps for each thread.

    Methods may be called from any thread and be interrupted anywhere. After `close` they raise Closed.
    """

    def __init__(self, engine: Engine, begin: Callable[[], None] = lambda: None) -> None:
        self._engine, self._begin = engine, begin
        self._listeners: dict[str, Listener] = {}
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed: str | None = None
        self._failure: Exception | None = None
        self._over = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- asked by callers

    def check(self) -> None:
        """Raises Closed if nothing can be asked any more."""
        if self._closed is not None:
            raise Closed(self._closed)
        if os.getpid() != self._process:
            raise Closed("this LLM was made before this process was forked, and its engine is not here: make another")

    def submit(self, requests: Sequence[tuple[Request, Constraint, Listener]]) -> None:
        """Queue all of them, or none. Raises InvalidRequest."""
        self._call(lambda: self._submit(requests))

    def end(self, ids: Sequence[str], *, wait: bool) -> None:
        """End what still runs of these. wait: until the engine is at rest, or busy with other requests."""
        with contextlib.suppress(Closed):  # everything has ended then
            if wait and self._elsewhere():
                self._call(lambda: self._end(ids, settle=True))
            else:
                self._do(lambda: self._end(ids))

    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find nothing computed before."""
        self._call(self._reset)

    def close(self) -> None:
        """End every request, with Interrupted for those waiting, and close the engine; again: wait until that is done.

        Raises what closing the engine raised.
        """
        self._stop()
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """As `close`, when nothing refers to it any more or the process ends: a step that hangs is left behind."""
        with contextlib.suppress(Empty):
            self._stop(lambda over: over.get(timeout=_PATIENCE))

    def _stop(self, wait: Callable[[SimpleQueue[None]], None] = wait_for) -> None:
        self._closed = self._closed or "this LLM has been closed: make another"
        self._put(None)
        if self._elsewhere():
            over: SimpleQueue[None] = SimpleQueue()
            self._put(lambda: over.put(None))
            wait(over)

    def _elsewhere(self) -> bool:
        return threading.current_thread() is not self._thread and os.getpid() == self._process

    def _do(self, work: Callable[[], None]) -> None:
        self.check()
        self._put(work)

    def _put(self, work: Callable[[], None] | None) -> None:
        """No lock, for a signal could leave it locked: what comes too late for the thread is answered here."""
        self._asked.put(work)
        if self._over:
            self._refuse()

    def _refuse(self) -> None:
        """Do what is asked of a thread that is over: it raises Closed, and nobody is left waiting."""
        with contextlib.suppress(Empty):
            while True:
                work = self._asked.get_nowait()
                if work is not None:
                    work()

    def _call(self, work: Callable[[], None]) -> None:
        """`work` done in the engine's thread; raises what it raised."""
        answers: SimpleQueue[Exception | None] = SimpleQueue()

        def answer() -> None:
            try:
                work()
            except Exception as error:
                answers.put(error)
            else:
                answers.put(None)

        self._do(answer)
        error = wait_for(answers)
        if error is not None:
            raise error

    # ---------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        try:
            self._begin()
            while self._obey():
                self._step()
            self._leave()
        except Exception as error:
            self._fail(error)
        self._over = True
        self._refuse()

    def _fail(self, error: Exception) -> None:
        """The engine could not be closed, or this module is wrong: `close` says so, and nobody is left waiting."""
        self._failure = error
        self._closed = self._closed or f"the engine's thread failed ({type(error).__name__})"
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lost(Interrupted(self._closed))

    def _obey(self) -> bool:
        """Do what was asked; wait for it while there is nothing to run. False when it is to end."""
        while not self._engine.has_pending_work or not self._asked.empty():
            work = self._asked.get()
            if work is None:
                return False
            work()
        return True

    def _submit(self, requests: Sequence[tuple[Request, Constraint, Listener]]) -> None:
        self.check()
        try:
            for request, constraint, listener in requests:
                self._engine.add(request, constraint)
                self._listeners[request.id] = listener
        except Exception:
            self._end([request.id for request, _, _ in requests])
            raise

    def _reset(self) -> None:
        self.check()
        self._engine.reset_prefix_cache()

    def _end(self, ids: Sequence[str], *, settle: bool = False) -> None:
        for id in ids:
            if self._listeners.pop(id, None) is not None:
                self._engine.abort(id)
        if settle:
            self._settle()

    def _settle(self) -> None:
        """Steps whose tokens nobody waits for; whatever is asked meanwhile goes first."""
        while self._engine.has_pending_work and not self._listeners and self._asked.empty() and self._closed is None:
            self._step()

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:
            print(escape_control_lines(traceback.format_exc()), file=sys.stderr, flush=True)
            self._lose(StepFailed(f"the engine failed in a step ({type(error).__name__}), and every request with it"))
            return
        for event in events:
            listener = self._listeners.get(event.id)
            if listener is None:
                continue
            why = listener.take(event)
            if event.finish is not None:
                del self._listeners[event.id]
            elif why is not None:
                del self._listeners[event.id]
                self._engine.abort(event.id, why)

    def _lose(self, error: QuireError) -> None:
        """Every request ends with `error`. Where the engine cannot start again, so does everything asked later."""
        listeners, self._listeners = self._listeners, {}
        try:
            self._engine.abandon()
        except Exception as failure:
            print(escape_control_lines(traceback.format_exc()), file=sys.stderr, flush=True)
            self._closed = f"the engine failed and could not be started again ({type(failure).__name__})"
            self._asked.put(None)
        for listener in listeners.values():
            listener.lost(error)

    def _leave(self) -> None:
        self._lose(Interrupted(self._closed or ""))
        self._engine.close()
