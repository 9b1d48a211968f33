"""An engine in a thread of its own, for callers in any thread: calls are queued and made between two steps.

Python runs signal handlers in the main thread, between any two of its bytecodes, and what a handler raises there can
leave half a step behind. Nothing of the engine runs in a caller's thread: neither Ctrl-C nor another signal can
interrupt a step, and an interrupted caller leaves an aborted request behind, not a broken engine. Requests of several
callers run in the same steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from quire.engine.engine import Engine
from quire.errors import Closed, Interrupted, QuireError, StepFailed, print_traceback
from quire.scheduler.constraint import Constraint
from quire.types import FinishReason, Request, RequestStepOutput

R = TypeVar("R")

_POLL_INTERVAL = 0.2
"""Seconds after which a waiting thread checks for signals."""

_EXIT_TIMEOUT = 5.0
"""Seconds for which an exiting process waits for the current step."""


def wait_for(answers: SimpleQueue[R]) -> R:
    """The next item. A signal that arrives just before a thread goes to sleep does not wake it, so this polls."""
    while True:
        with contextlib.suppress(Empty):
            return answers.get(timeout=_POLL_INTERVAL)


class Listener(Protocol):
    """Gets one request's outputs. Called in the engine's thread."""

    def take(self, event: RequestStepOutput) -> FinishReason | None:
        """None while more is wanted, else the reason for which the request is to end."""

    def lost(self, error: QuireError) -> None:
        """Nothing more will come."""


class EngineThread:
    """Runs `engine` until `close`. begin: called first in the new thread, for thread-local state of libraries.

    Methods may be called from any thread and be interrupted anywhere. After `close` they raise Closed.
    """

    def __init__(self, engine: Engine, begin: Callable[[], None] = lambda: None) -> None:
        self._engine, self._begin = engine, begin
        self._listeners: dict[str, Listener] = {}
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed: str | None = None
        self._failure: Exception | None = None
        self._finished = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- in callers' threads

    def check(self) -> None:
        """Raises Closed if no call can be made any more."""
        if self._closed is not None:
            raise Closed(self._closed)
        if os.getpid() != self._process:
            raise Closed(
                "this LLM was created before this process was forked, and its engine runs in the parent: create another"
            )

    def submit(self, requests: Sequence[tuple[Request, Constraint, Listener]]) -> None:
        """Queue all of them, or none. Raises InvalidRequest."""
        self._call(lambda: self._submit(requests))

    def end(self, ids: Sequence[str], *, wait: bool) -> None:
        """End those that still run. wait: until the engine is idle, or busy with other requests."""
        with contextlib.suppress(Closed):  # everything has ended already
            if wait and self._in_other_thread():
                self._call(lambda: self._end(ids, settle=True))
            else:
                self._enqueue(lambda: self._end(ids))

    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find nothing computed before."""
        self._call(self._reset)

    def close(self) -> None:
        """End every request, with Interrupted for those waiting, and close the engine. Again: wait until that is done.

        Raises what closing the engine raised.
        """
        self._stop()
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """As `close`, when no reference is left or the process exits: a step that hangs is not waited for."""
        with contextlib.suppress(Empty):
            self._stop(lambda done: done.get(timeout=_EXIT_TIMEOUT))

    def _stop(self, wait: Callable[[SimpleQueue[None]], None] = wait_for) -> None:
        self._closed = self._closed or "this LLM has been closed: make another"
        self._put(None)
        if self._in_other_thread():
            done: SimpleQueue[None] = SimpleQueue()
            self._put(lambda: done.put(None))
            wait(done)

    def _in_other_thread(self) -> bool:
        return threading.current_thread() is not self._thread and os.getpid() == self._process

    def _enqueue(self, work: Callable[[], None]) -> None:
        self.check()
        self._put(work)

    def _put(self, work: Callable[[], None] | None) -> None:
        """Without a lock, which a signal could leave locked: what comes too late for the thread is answered here."""
        self._calls.put(work)
        if self._finished:
            self._run_late_calls()

    def _run_late_calls(self) -> None:
        """Make the calls left when the thread is over: they raise Closed, and no caller waits for ever."""
        with contextlib.suppress(Empty):
            while True:
                work = self._calls.get_nowait()
                if work is not None:
                    work()

    def _call(self, work: Callable[[], None]) -> None:
        """Run `work` in the engine's thread; raises what it raised."""
        answers: SimpleQueue[Exception | None] = SimpleQueue()

        def answer() -> None:
            try:
                work()
            except Exception as error:
                answers.put(error)
            else:
                answers.put(None)

        self._enqueue(answer)
        error = wait_for(answers)
        if error is not None:
            raise error

    # ---------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        try:
            self._begin()
            while self._run_calls():
                self._step()
            self._finish()
        except Exception as error:
            self._fail(error)
        self._finished = True
        self._run_late_calls()

    def _fail(self, error: Exception) -> None:
        """The engine could not be closed, or this module is wrong: `close` raises it, and no caller waits for ever."""
        self._failure = error
        self._closed = self._closed or f"the engine's thread failed ({type(error).__name__})"
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lost(Interrupted(self._closed))

    def _run_calls(self) -> bool:
        """Make the calls queued; wait for one while there is nothing to run. False when the thread is to end."""
        while not self._engine.has_pending_work or not self._calls.empty():
            while self._calls.empty() and self._engine.prepare():
                pass
            work = self._calls.get()
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
        """Steps whose tokens no caller waits for; calls made meanwhile go first."""
        while self._engine.has_pending_work and not self._listeners and self._calls.empty() and self._closed is None:
            self._step()

    def _step(self) -> None:
        self._engine.wait(_POLL_INTERVAL)
        try:
            events = self._engine.step()
        except Exception as error:
            print_traceback()
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
        """Every request ends with `error`. Where the engine cannot start again, so does every later call."""
        listeners, self._listeners = self._listeners, {}
        try:
            self._engine.abandon()
        except Exception as failure:
            print_traceback()
            self._closed = f"the engine failed and could not be started again ({type(failure).__name__})"
            self._calls.put(None)
        for listener in listeners.values():
            listener.lost(error)

    def _finish(self) -> None:
        self._lose(Interrupted(self._closed or ""))
        self._engine.close()
