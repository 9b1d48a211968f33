"""The process of one rank: plans in, and from one rank results out. The other side is `executors.ranks`."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from quire.engine.engine import nothing_left
from quire.engine.executor import Executor, ImageExecutor, StepHandle
from quire.engine.protocol import FrameReader, encode_frame
from quire.errors import StepFailed
from quire.executors.ranks import (
    NO_SPANS,
    BuildRank,
    FromRank,
    HandMasks,
    Launch,
    LoadImage,
    Ping,
    Pong,
    Prepared,
    PrepareNext,
    RankShape,
    Reset,
    StepDone,
    StepError,
    ToRank,
)
from quire.scheduler.plan import Span, StepSamples

log = logging.getLogger(__name__)

ONE_RANK = RankShape()

POLL = 50e-6
"""Seconds after which it is looked again whether a step is done, while no message comes."""

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class RankLink:
    """The socket to the engine, read by a thread of its own, which answers pings whatever the rank computes.

    ended: called when the engine has closed it. It must not return: a rank may wait for others for ever.
    """

    def __init__(self, sock: socket.socket, ended: Callable[[], None] = lambda: os._exit(0)) -> None:
        self.inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self._sock, self._ended, self._lock = sock, ended, threading.Lock()
        threading.Thread(target=self._read, name="rank-link", daemon=True).start()

    def _read(self) -> None:
        frames = FrameReader(ToRank)
        try:
            self.send(Pong())
            while data := self._sock.recv(1 << 20):
                for message in frames.feed(data):
                    if isinstance(message, Ping):
                        self.send(Pong())
                    else:
                        self.inbox.put(message)
        except OSError:
            pass  # the engine is gone
        except Exception:  # the process ends below, which would be all that is seen of it
            log.exception("a message of the engine")
        finally:
            self._ended()

    def send(self, message: FromRank) -> None:
        """To the engine."""
        frame = encode_frame(message)
        with self._lock:
            self._sock.sendall(frame)

    def first(self) -> BuildRank:
        """What the rank is to be."""
        message = self.inbox.get()
        assert isinstance(message, BuildRank)
        return message


class FollowingStep(StepHandle, Protocol):
    """A step of a stage before the last: `model_runner.runner.LaunchedStep`."""

    failure: Exception | None

    def follow(self, sampled: StepSamples) -> None:
        """What the last stage has sampled, which `result` waits for."""


class Failed(NamedTuple):
    """Why a step failed, in one line, and the class of the error that began it."""

    reason: str
    kind: str


class Running(NamedTuple):
    """A launched step. handle: or why it could not be launched."""

    step: int
    handle: StepHandle | Failed


class RankLoop:
    """Runs an executor by the engine's messages, until the engine closes the link.

    Messages are handled as they arrive, also while a step runs whose result is due: the next one is launched before it
    ends. A rank of a stage before the last waits for none: what was sampled comes with later plans. One rank sends
    results, and all send failures. prepare: see `Engine.prepare`.
    """

    def __init__(
        self,
        executor: Executor,
        link: RankLink,
        rank: int,
        shape: RankShape = ONE_RANK,
        prepare: Callable[[], bool] = nothing_left,
    ) -> None:
        self.executor, self.link, self.prepare = executor, link, prepare
        self.answers, self.follows = rank == shape.answering, rank < shape.answering
        self.epoch = 0
        self._forget()

    def _forget(self) -> None:
        self.spans: tuple[Span, ...] = NO_SPANS
        self.inflight: deque[Running] = deque()
        self.unmasked: set[int] = set()

    def run(self) -> None:
        """Does not return: `RankLink` ends the process."""
        while True:
            while (message := self._next_message()) is None:
                self._answer(self.inflight.popleft())
            self._handle(message)

    def _next_message(self) -> ToRank | None:
        """The next message, or None once the oldest step is done, if no message has come before that."""
        inbox = self.link.inbox
        if not self.inflight or self.follows or self.inflight[0].step in self.unmasked:
            return inbox.get()
        handle = self.inflight[0].handle
        while True:
            done = isinstance(handle, Failed) or handle.is_done()
            try:
                return inbox.get(block=not done, timeout=POLL)
            except queue.Empty:
                if done:
                    return None

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Launch):
            self._launch(message)
        elif isinstance(message, HandMasks):
            self._sample(message)
        elif isinstance(message, LoadImage):
            cast(ImageExecutor, self.executor).load_image(message.number, message.image)
        elif isinstance(message, PrepareNext):
            self.link.send(Prepared(self.prepare()))
        elif isinstance(message, Reset):
            self.executor.reset()
            self._forget()
            self.epoch = message.epoch

    def _launch(self, message: Launch) -> None:
        self._catch_up(message)
        plan = message.plan._replace(spans=self.spans) if message.same_spans else message.plan
        self.spans = plan.spans
        try:
            handle: StepHandle | Failed = self.executor.launch(plan)
        except Exception as error:  # the engine finds out whose fault it is
            handle = failed(error)
        running = Running(message.step, handle)
        if self.follows and (isinstance(handle, Failed) or cast(FollowingStep, handle).failure):
            self._answer(running)
            return
        self.inflight.append(running)
        if plan.masked_spans and not isinstance(handle, Failed):
            self.unmasked.add(message.step)

    def _catch_up(self, message: Launch) -> None:
        """Be done with the steps whose results the engine has."""
        if self.follows:
            for samples in message.samples:
                running = self.inflight.popleft()
                cast(FollowingStep, running.handle).follow(samples)
                self._answer(running)
            return
        while self.inflight and self.inflight[0].step < message.num_received:
            self._answer(self.inflight.popleft())

    def _sample(self, message: HandMasks) -> None:
        for place, (step, handle) in enumerate(self.inflight):
            if step == message.step and not isinstance(handle, Failed):
                self.unmasked.discard(step)
                try:
                    handle.sample(message.masks)
                except Exception as error:
                    self.inflight[place] = Running(step, failed(error))

    def _answer(self, running: Running) -> None:
        step, handle = running
        if isinstance(handle, Failed):
            self.link.send(StepError(self.epoch, step, *handle))
            return
        try:
            result = handle.result()
        except Exception as error:
            self.link.send(StepError(self.epoch, step, *failed(error)))
            return
        if self.answers:
            self.link.send(StepDone(self.epoch, step, result, getattr(handle, "sampled", None)))


def failed(error: Exception) -> Failed:
    """Why a step failed, for the engine."""
    words = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
    began: BaseException = error
    while began.__cause__ is not None:
        began = began.__cause__
    return Failed(" ".join(words.split()), type(began).__name__)


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends, even while stopped. On Linux; elsewhere the closed
    socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
