"""Executors at the other end of a connection, for tests: in this process, or in one that can be killed."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.engine.engine import nothing_left
from quire.engine.executor import Description, Executor, StepHandle
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract import translate
from quire.executors.grpc_client import RemoteExecutor
from quire.executors.grpc_server import ExecutorServer
from quire.scheduler.plan import Mask, Plan, Result, Span
from tests.forked import Popen

_READY = re.compile(r"is ready at 127\.0\.0\.1:(\d+)")


@contextmanager
def served(executor: Executor, prepare: Callable[[], bool] = nothing_left, **settings: Any) -> Iterator[RemoteExecutor]:
    """`executor` behind gRPC, seen from the other end."""
    host = ExecutorServer(executor, "127.0.0.1:0", prepare=prepare)
    try:
        remote = RemoteExecutor(f"127.0.0.1:{host.port}", **settings)
        try:
            yield remote
        finally:
            remote.close()
    finally:
        host.stop()


class Killable:
    """`quire executor` on the embedded model in a process of its own."""

    def __init__(self, folder: Path, port: int = 0, *more: str) -> None:
        self.log = folder / f"executor-{time.monotonic_ns()}.log"
        argv = [sys.executable, "-m", "quire", "executor", "--listen", f"127.0.0.1:{port}", "--max-num-seqs", "8"]
        with self.log.open("wb") as out:
            self.process = Popen([*argv, *more], stdout=out, stderr=out, start_new_session=True)
        self.port = self._wait()

    def _wait(self, seconds: float = 600.0) -> int:
        deadline = time.monotonic() + seconds
        while (said := _READY.search(self.log.read_text())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return int(said[1])

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(300)


class WiredStep:
    """A handle whose masks and result have been messages on their way."""

    def __init__(self, inner: StepHandle) -> None:
        self.inner = inner

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        sent = translate.send_masks(masks).SerializeToString()
        self.inner.sample(translate.read_masks(pb.Masks.FromString(sent)))

    def is_done(self) -> bool:
        return self.inner.is_done()

    def result(self) -> Result:
        sent = translate.send_result(self.inner.result()).SerializeToString()
        return translate.read_result(pb.Result.FromString(sent))


class Wired:
    """An executor whose plans arrive as messages, spans said once while they stay the same; no connection."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.here: tuple[Span, ...] = ()
        self.there: tuple[Span, ...] = ()

    def describe(self) -> Description:
        sent = translate.send_description(self.inner.describe(), 1).SerializeToString()
        return translate.read_description(pb.Description.FromString(sent))

    def launch(self, plan: Plan) -> WiredStep:
        sent = translate.send_plan(plan, self.here).SerializeToString()
        self.here = plan.spans
        arrived = translate.read_plan(pb.Plan.FromString(sent), self.there)
        self.there = arrived.spans
        return WiredStep(self.inner.launch(arrived))

    def reset(self) -> None:
        self.here = self.there = ()
        self.inner.reset()

    def close(self) -> None:
        self.inner.close()
