"""Tensor and pipeline parallelism: one process for each rank, which all run every plan. The engine's side; no torch.

A plan goes to every rank over a socket of its own, and the result comes back from the first rank of the last stage.
What that has sampled goes to the stages before it with the next plan. Whatever ends a rank closes its socket, and no
memory is shared that would have to be cleaned up. A rank that is gone, silent, or alone in failing a step takes the
others with it: they wait for it in the middle of a sum. All are killed then, and the next step starts new ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from quire import errors
from quire.engine.executor import Description
from quire.engine.protocol import FrameReader, encode_frame
from quire.errors import QuireError, RankLost, StepFailed
from quire.ops.stages import stage_table
from quire.scheduler.plan import Mask, Plan, Result, Span, StepSamples
from quire.types import PromptImage

PING_INTERVAL = 1.0
"""Seconds after which a rank that has sent nothing is asked whether it is there, while a result is waited for."""

SILENCE = 6.0
"""Seconds without an answer after which a rank counts as hung that does not compute either."""

STUCK = 60.0
"""Seconds without an answer after which a rank counts as hung that computes, or meets the others while it starts: a
thread answers, but some calls of libraries keep Python's lock, among them those in which ranks wait for each other."""

COMPUTES = 0.1
"""Seconds of processor time that show that a silent process computes: threads of libraries that only look whether there
is something to do take far less within SILENCE."""

AGREE = 1.0
"""Seconds within which all ranks fail a step, if its request is to blame and not a rank."""

ENDING = 0.25
"""Seconds within which the end of a rank is seen whose neighbours already fail for want of it."""

CONNECT = 180.0
"""Seconds within which a new process must say something: it imports torch first."""


class RankShape(msgspec.Struct, frozen=True):
    """How ranks are numbered: `tensor` ranks of the first of `stages`, then those of the next."""

    tensor: int = 1
    stages: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tensor * self.stages

    @property
    def answering(self) -> int:
        """The rank that sends results: the first of the last stage."""
        return self.tensor * (self.stages - 1)

    def stage_of(self, rank: int) -> range:
        """The ranks of a rank's stage."""
        first = rank // self.tensor * self.tensor
        return range(first, first + self.tensor)


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank is. host, port: of the store by which ranks find each other; rank 0 listens there, on descriptor
    `listener` if that was inherited. neighbours: ranks on its host. dies_with_parent: when the thread that started it
    ends."""

    host: str
    port: int
    neighbours: int
    listener: int | None = None
    dies_with_parent: bool = False


class BuildRank(msgspec.Struct, tag=True, frozen=True):
    """The first message to a rank. settings: by option name. began: when its process was started, by the clock of its
    host; 0: of another host."""

    settings: dict[str, Any]
    rank: int
    shape: RankShape
    place: RankPlace
    began: float = 0.0


class Launch(msgspec.Struct, tag=True, frozen=True):
    """Run a plan. same_spans: its spans are the object that the plan before had, and are not sent. num_received: steps
    whose results the engine has, so that their blocks may be in use again: every rank must be past them. samples: of
    those that it has received since the last plan, for stages before the last."""

    epoch: int
    step: int
    plan: Plan
    same_spans: bool
    num_received: int
    samples: list[StepSamples] = []


class HandMasks(msgspec.Struct, tag=True, frozen=True):
    """The masks of a launched step."""

    epoch: int
    step: int
    masks: Sequence[Sequence[Mask]]


class LoadImage(msgspec.Struct, tag=True, frozen=True):
    """See `ImageExecutor.load_image`."""

    number: int
    image: PromptImage


class PrepareNext(msgspec.Struct, tag=True, frozen=True):
    """While nothing is in flight: prepare one thing that makes later steps faster. Answer with Prepared."""


class Reset(msgspec.Struct, tag=True, frozen=True):
    """Forget rows and steps; what follows is of this epoch."""

    epoch: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answer with a Pong."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The process runs."""


class RankReady(msgspec.Struct, tag=True, frozen=True):
    """The rank's executor is built. limits: `assembly.limits.Limits`. gauges: see `BuiltExecutor`. seconds: of each
    stage of its start, see `ops.stages`."""

    about: Description
    limits: dict[str, int]
    gauges: dict[str, float]
    seconds: dict[str, float] = {}


class RankRefused(msgspec.Struct, tag=True, frozen=True):
    """The rank's executor cannot be built. kind: name of the error's class."""

    kind: str
    message: str


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """What was asked for by PrepareNext is done. left: whether there is more."""

    left: bool


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """What a step computed; only the rank that answers says so. samples: with several stages."""

    epoch: int
    step: int
    result: Result
    samples: StepSamples | None = None


class StepError(msgspec.Struct, tag=True, frozen=True):
    """Why this rank could not run a step. kind: the class of the error that began it."""

    epoch: int
    step: int
    reason: str
    kind: str


ToRank = BuildRank | Launch | HandMasks | LoadImage | PrepareNext | Reset | Ping
FromRank = Pong | RankReady | RankRefused | Prepared | StepDone | StepError

log = logging.getLogger(__name__)

NO_SPANS: tuple[Span, ...] = ()


class Activity(NamedTuple):
    """What a process does that says nothing. computed: its seconds of processor time so far. stopped: by a signal."""

    computed: float = 0.0
    stopped: bool = False


class RankProcess(Protocol):
    """Where a rank runs."""

    @property
    def name(self) -> str:
        """For people: 'process 4711'."""

    def exit_code(self) -> str:
        """How it ended, in words, once its connection is closed."""

    def exit_fd(self) -> int:
        """A descriptor of the caller's that becomes readable when it ends."""

    def activity(self) -> Activity:
        """What it does, as far as that is known."""

    def kill(self) -> None:
        """Make it end, also while it is stopped or waits for others."""

    def wait(self) -> None:
        """Until it has ended."""


class ChildProcess:
    """A `RankProcess` that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    @property
    def name(self) -> str:
        """See `RankProcess`."""
        return f"process {self.process.pid}"

    def exit_code(self) -> str:
        """See `RankProcess`."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def exit_fd(self) -> int:
        """See `RankProcess`."""
        return os.pidfd_open(self.process.pid)

    def activity(self) -> Activity:
        """See `RankProcess`. Linux says it."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return Activity()
        return Activity((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "T")

    def kill(self) -> None:
        """See `RankProcess`."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def wait(self) -> None:
        """See `RankProcess`."""
        self.process.wait()


class Rank:
    """One process and its socket. heard: when it sent something last; 0: never. asked: when it was last asked whether
    it is there. computed, at: its processor time when it was last seen to compute since then, and when that was."""

    def __init__(self, process: RankProcess, sock: socket.socket) -> None:
        self.process, self.sock = process, sock
        self.frames = FrameReader(FromRank)
        self.heard = self.asked = self.computed = self.at = 0.0

    def hung(self, now: float, *, starting: bool) -> bool:
        """Whether it counts as hung, if it has not answered since it was asked. starting: it may be meeting others."""
        computed, stopped = self.process.activity()
        if computed - self.computed > COMPUTES:
            self.computed, self.at = computed, now
        limit = STUCK if starting and not stopped else SILENCE
        return now - self.at > limit or now - self.asked > STUCK


StartRanks = Callable[[RankShape], Iterator[tuple[Rank, RankPlace]]]
"""Starts ranks, in order. What it has begun and not yet given away, it ends where it fails."""


def child_processes(argv: Sequence[str], environment: Mapping[str, str]) -> StartRanks:
    """Ranks as processes of this host. argv: the command that starts one; the number of an inherited socket is
    appended. environment: their variables."""

    def start(shape: RankShape) -> Iterator[tuple[Rank, RankPlace]]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            for number in range(shape.size):
                here, there = socket.socketpair()
                fd = listener.fileno() if number == 0 else None
                with there:
                    process = subprocess.Popen(
                        [*argv, str(there.fileno())],
                        pass_fds=[there.fileno()] + ([] if fd is None else [fd]),
                        stdin=subprocess.DEVNULL,
                        env=dict(environment),
                        start_new_session=True,  # Ctrl-C is for the engine, which ends them
                    )
                own = threading.current_thread() is threading.main_thread()
                yield Rank(ChildProcess(process), here), RankPlace(host, port, shape.size, fd, own)

    return start


class Ranks:
    """The processes of all ranks, which are started.

    lost: which rank was lost, if any.
    """

    def __init__(self, start: StartRanks, settings: Mapping[str, Any], shape: RankShape):
        self.ranks: list[Rank] = []
        self.shape = shape
        self.lost: RankLost | None = None
        self.selector = selectors.DefaultSelector()
        self.inbox: deque[tuple[int, Any]] = deque()
        self.ready: dict[int, RankReady] = {}
        self.began = time.monotonic()
        try:
            for number, (rank, place) in enumerate(start(shape)):
                self.ranks.append(rank)
                self.selector.register(rank.sock, selectors.EVENT_READ, number)
                rank.sock.settimeout(SILENCE)  # one that is stopped, or whose host is gone, takes nothing
                here = self.began if place.dies_with_parent else 0.0
                self._send(number, encode_frame(BuildRank(dict(settings), number, shape, place, here)))
        except BaseException:
            self.kill()
            raise

    def wait_until_ready(self) -> Ranks:
        """Itself, once all have built their executors. Raises what a rank raises meanwhile, or RankLost; all are ended
        then."""
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        took, size = time.monotonic() - self.began, self.shape.size
        log.info("%d ranks are ready after %.1f s", size, took)
        for line in stage_table(self.start_seconds()):
            log.info("%s", line)
        return self

    def start_seconds(self) -> list[dict[str, float]]:
        """Of each rank's start, by stage."""
        return [self.ready[number].seconds for number in range(self.shape.size)]

    def _wait_until_ready(self) -> None:
        while len(self.ready) < len(self.ranks):
            self.poll(PING_INTERVAL)
            while self.inbox:
                number, message = self.inbox.popleft()
                if isinstance(message, RankRefused):
                    raise refused(message)
                self.ready[number] = message
            late = time.monotonic() - self.began > CONNECT
            for number, rank in enumerate(self.ranks):
                if not rank.heard and late:
                    raise self._lost(number, f"said nothing for {CONNECT:.0f} s after it was started")
            self.check_silence([number for number, rank in enumerate(self.ranks) if rank.heard])

    def broadcast(self, message: ToRank) -> None:
        """Send to every rank. Raises RankLost."""
        frame = encode_frame(message)
        for number in range(len(self.ranks)):
            self._send(number, frame)

    def _send(self, number: int, frame: bytes) -> None:
        try:
            self.ranks[number].sock.sendall(frame)
        except TimeoutError as error:
            raise self._lost(number, f"has taken no message for {SILENCE:g} s") from error
        except OSError as error:
            raise self._lost(number, self.ranks[number].process.exit_code()) from error

    def poll(self, timeout: float) -> None:
        """Read what arrives within `timeout` seconds into `inbox`. Raises RankLost for a rank that has ended."""
        for key, _ in self.selector.select(timeout):
            number, rank = key.data, self.ranks[key.data]
            try:
                data = rank.sock.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                raise self._lost(number, rank.process.exit_code())
            rank.heard = time.monotonic()
            for message in rank.frames.feed(data):
                if not isinstance(message, Pong):
                    self.inbox.append((number, message))

    def check_silence(self, numbers: Sequence[int]) -> None:
        """Ask these ranks whether they are there. Raises RankLost for one that has not answered for SILENCE and does
        nothing, or for STUCK."""
        now = time.monotonic()
        for number in numbers:
            rank = self.ranks[number]
            if rank.asked <= rank.heard:
                if now - rank.heard >= PING_INTERVAL:
                    rank.asked = rank.at = now
                    rank.computed = rank.process.activity().computed
                    self._send(number, encode_frame(Ping()))
            elif rank.hung(now, starting=number not in self.ready):
                raise self._lost(number, f"has not answered for {now - rank.asked:.1f} s")

    def _lost(self, number: int, what: str, details: str = "") -> RankLost:
        """The error for a rank without which the others cannot go on."""
        name = self.ranks[number].process.name
        self.lost = RankLost(f"rank {number} of {len(self.ranks)} ({name}) {what}", details=details)
        return self.lost

    def failed(self, number: int, error: StepError) -> RankLost:
        """The error for a rank that alone failed a step."""
        return self._lost(number, f"could not run a step ({error.kind})", error.reason)

    def kill(self) -> None:
        """End every process, also those that are stopped or wait for others."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.sock.close()
        self.selector.close()


def refused(message: RankRefused) -> QuireError:
    """The error for which a rank could not be built."""
    kind = getattr(errors, message.kind, None)
    return (
        kind(message.message) if isinstance(kind, type) and issubclass(kind, QuireError) else RankLost(message.message)
    )


class RankHandle(NamedTuple):
    """A step that all ranks were sent: a `StepHandle`."""

    executor: RankedExecutor
    epoch: int
    step: int

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """See `StepHandle`."""
        # Not every sequence of masks is a list, which is what can be sent.
        self.executor.send(HandMasks(self.epoch, self.step, [list(each) for each in masks]))

    def is_done(self) -> bool:
        """See `StepHandle`."""
        return self.executor.has_result(self.epoch, self.step)

    def result(self) -> Result:
        """See `StepHandle`. Raises RankLost too."""
        return self.executor.receive(self.epoch, self.step)


class RankedExecutor:
    """An `Executor` of one process a rank. start: starts the processes, at once and whenever they were lost. ranks:
    those that have been started. Raises as `Ranks.wait_until_ready`."""

    def __init__(self, start: Callable[[], Ranks], ranks: Ranks | None = None) -> None:
        self._start = start
        self._ranks: Ranks | None = (ranks or start()).wait_until_ready()
        ready = self._ranks.ready
        self.ready = ready[self._ranks.shape.answering]
        self._about = replace(
            self.ready.about,
            block_bytes=sum(each.about.block_bytes for each in ready.values()),
            state_bytes=sum(each.about.state_bytes for each in ready.values()),
            start_seconds=self._ranks.start_seconds(),
        )
        self._epoch = self._step = self._num_received = 0
        self._samples: list[StepSamples] = []
        self._spans = NO_SPANS
        self._prepared: list[Prepared] = []
        self._left = True
        self._results: dict[tuple[int, int], StepDone] = {}
        self._errors: dict[tuple[int, int], dict[int, StepError]] = {}

    def describe(self) -> Description:
        """That of the rank that answers; all have as many blocks, whose bytes are those on all ranks."""
        return self._about

    def exit_fds(self) -> list[int]:
        """Descriptors that become readable when a rank's process ends, for callers that wait; they close them."""
        if self._ranks is None or sys.platform != "linux":
            return []
        return [rank.process.exit_fd() for rank in self._ranks.ranks]

    def launch(self, plan: Plan) -> RankHandle:
        """Send a plan to all ranks, which are started again if they were lost. Raises RankLost."""
        if self._ranks is None:
            self._ranks = self._start().wait_until_ready()
            self._left = True
            self._begin()
        same = plan.spans is self._spans
        sent = plan._replace(spans=NO_SPANS) if same else plan
        self.send(Launch(self._epoch, self._step, sent, same, self._num_received, self._samples))
        self._samples = []
        handle = RankHandle(self, self._epoch, self._step)
        self._spans, self._step = plan.spans, self._step + 1
        return handle

    def load_image(self, number: int, image: PromptImage) -> None:
        """See `engine.executor.ImageExecutor`."""
        self.send(LoadImage(number, image))

    def prepare_next(self) -> bool:
        """While nothing is in flight, have every rank prepare one thing that makes later steps faster. False: nothing
        is left, or a rank is lost, which the next step says."""
        if self._ranks is None or not self._left:
            return False
        self._prepared = []
        try:
            self.send(PrepareNext())
            while len(self._prepared) < self._ranks.shape.size:
                self._read(PING_INTERVAL)
                self._ranks.check_silence(range(self._ranks.shape.size))
        except RankLost:
            return False
        self._left = any(each.left for each in self._prepared)
        return self._left

    def send(self, message: ToRank) -> None:
        """Send to all ranks. Raises RankLost."""
        self._alive().broadcast(message)

    def _alive(self) -> Ranks:
        if self._ranks is None:
            raise RankLost("the ranks were lost before this step")
        if self._ranks.lost is not None:
            raise self._ranks.lost
        return self._ranks

    def has_result(self, epoch: int, step: int) -> bool:
        """Whether `receive` returns or raises at once."""
        try:
            self._read(0.0)
        except RankLost:
            return True
        return (epoch, step) in self._results or any(self._errors)

    def receive(self, epoch: int, step: int) -> Result:
        """The step's result. Raises StepFailed where every rank of a stage failed it, and RankLost where only some
        did."""
        key = epoch, step
        while key not in self._results:
            self._read(PING_INTERVAL)
            if self._errors:
                self._raise_failure()
            ranks = self._alive()
            ranks.check_silence(range(len(ranks.ranks)))
        if self._errors:
            self._raise_failure()
        self._num_received = step + 1
        done = self._results.pop(key)
        if done.samples is not None:
            self._samples.append(done.samples)
        return done.result

    def _read(self, timeout: float) -> None:
        ranks = self._alive()
        ranks.poll(timeout)
        while ranks.inbox:
            number, message = ranks.inbox.popleft()
            if isinstance(message, StepDone) and message.epoch == self._epoch:
                self._results[message.epoch, message.step] = message
            elif isinstance(message, StepError) and message.epoch == self._epoch:
                self._errors.setdefault((message.epoch, message.step), {})[number] = message
            elif isinstance(message, Prepared):
                self._prepared.append(message)

    def _raise_failure(self) -> None:
        """Wait a moment for what the other ranks of the first stage that failed a step say: later ones fail with it. A
        rank that says nothing may be lost, and that be why others failed: RankLost, then."""
        ranks, key = self._alive(), min(self._errors)
        failed, began = self._errors[key], time.monotonic()
        while len(failed) < len(ranks.ranks):
            left = began + (ENDING if self._agreed(key) else AGREE) - time.monotonic()
            if left <= 0:
                break
            self._read(left)
        number = min(failed)
        if not self._agreed(key):
            raise ranks.failed(number, failed[number])
        raise StepFailed(failed[number].reason)

    def _agreed(self, key: tuple[int, int]) -> bool:
        """Whether all ranks of a stage, and of none before it, failed a step."""
        failed = self._errors[key]
        return failed.keys() >= {*self._alive().shape.stage_of(min(failed))}

    def reset(self) -> None:
        """Begin a new epoch; where a rank is lost, kill the others: the next step starts new ones."""
        if self._ranks is None:
            return
        try:
            self._begin()
        except RankLost:
            self.close()

    def _begin(self) -> None:
        self._epoch, self._spans = self._epoch + 1, NO_SPANS
        self._step = self._num_received = 0
        self._results.clear()
        self._errors.clear()
        self._samples = []
        self.send(Reset(self._epoch))

    def close(self) -> None:
        """End all ranks."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None
