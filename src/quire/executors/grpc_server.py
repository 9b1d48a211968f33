"""Any executor behind gRPC: one engine at a time, steps in the order they arrive. The other side is `grpc_client`."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc

from quire.engine.engine import nothing_left
from quire.engine.executor import Executor, StepHandle
from quire.errors import InvalidConfig, StepFailed
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract.translate import (
    DESCRIBE,
    OPTIONS,
    RUN,
    SERVICE,
    VERSION,
    read_masks,
    read_plan,
    send_description,
    send_result,
)
from quire.scheduler.plan import Span

TAKEOVER_TIMEOUT = 5.0
"""Seconds for which a new engine waits until the one before is gone."""


class Credentials(NamedTuple):
    """PEM texts. clients: the authority of the certificates that engines must present; None: none is asked for."""

    certificate: bytes
    key: bytes
    clients: bytes | None = None


class Refusal(Exception):
    """A client's message is invalid; the stream ends with `code`."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ExecutorServer:
    """A server around `executor`, listening once constructed. `port` is the port it got.

    address: HOST:PORT, 0 for any port. prepare: see `Engine.prepare`. Raises InvalidConfig when it cannot listen there.
    """

    def __init__(
        self,
        executor: Executor,
        address: str,
        credentials: Credentials | None = None,
        prepare: Callable[[], bool] = nothing_left,
    ) -> None:
        self.executor, self.prepare = executor, prepare
        self.instance = secrets.randbits(63)
        self._held = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(8, "executor"), options=(*OPTIONS, ("grpc.so_reuseport", 0)))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        try:
            self.port: int = self._listen(address, credentials)
        except RuntimeError as error:
            raise InvalidConfig(f"cannot listen on {address}: is it an address of this machine, and free?") from error
        self._server.start()

    def _listen(self, address: str, credentials: Credentials | None) -> int:
        if credentials is None:
            return int(self._server.add_insecure_port(address))
        pair, clients = [(credentials.key, credentials.certificate)], credentials.clients
        return int(
            self._server.add_secure_port(address, grpc.ssl_server_credentials(pair, clients, clients is not None))
        )

    def wait(self) -> None:
        """Return after `stop`."""
        self._server.wait_for_termination()

    def stop(self, grace: float = 0.0) -> None:
        """Stop listening; streams may go on for `grace` seconds. The executor stays open."""
        self._server.stop(grace).wait()

    # ---------------------------------------------------------------- the two methods

    def _handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                DESCRIBE: grpc.unary_unary_rpc_method_handler(
                    self._describe, pb.Hello.FromString, pb.Description.SerializeToString
                ),
                RUN: grpc.stream_stream_rpc_method_handler(
                    self._run, pb.Command.FromString, pb.Answer.SerializeToString
                ),
            },
        )

    def _describe(self, hello: pb.Hello, context: grpc.ServicerContext) -> pb.Description:
        try:
            agree(hello.version)
        except Refusal as refusal:
            context.abort(refusal.code, str(refusal))
        return send_description(self.executor.describe(), self.instance)

    def _run(self, commands: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Answer]:
        if not self._held.acquire(timeout=TAKEOVER_TIMEOUT):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another engine uses this executor")
        session = Session(self.executor, self.prepare, self.instance)
        try:
            yield from session.run(commands)
        except Refusal as refusal:
            context.abort(refusal.code, str(refusal))
        finally:
            session.over.set()
            self.executor.reset()
            self._held.release()


def agree(version: int) -> None:
    """Raises Refusal unless it is this contract's version."""
    if version != VERSION:
        raise Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the engine speaks version {version} of the contract and this executor version {VERSION}: "
            "run the same release of Quire on both sides",
        )


class Launched(NamedTuple):
    """A step that is not answered yet. handle: or why it could not be launched."""

    step: int
    handle: StepHandle | str


class Session:
    """One stream, run by one thread, which makes the handles and waits for them.

    All commands that have arrived are launched before any result is waited for, so that the device is kept busy by as
    many steps as the engine sends ahead. Few commands are queued: beyond that the connection stops reading.

    prepare: see `Engine.prepare`. instance: of the server, which refuses a stream that is meant for another.
    """

    def __init__(self, executor: Executor, prepare: Callable[[], bool] = nothing_left, instance: int = 0) -> None:
        self.executor, self.prepare, self.instance = executor, prepare, instance
        self.description = executor.describe()
        self.inbox: queue.Queue[pb.Command | None] = queue.Queue(2 * (self.description.lookahead + 2))
        self.over = threading.Event()
        self.epoch: int | None = None
        self._forget()

    def _forget(self) -> None:
        self.next = 0
        self.inflight: deque[Launched] = deque()
        self.skipping: set[int] = set()
        self.open: set[int] = set()
        self.spans: tuple[Span, ...] = ()
        self.failure = ""

    def run(self, commands: Iterator[pb.Command]) -> Iterator[pb.Answer]:
        """Answers, until the commands end. Raises Refusal."""
        threading.Thread(target=self._receive, args=(commands,), daemon=True).start()
        while True:
            due = bool(self.inflight) and self.inflight[0].step not in self.skipping
            while not self.inflight and self.inbox.empty() and self.prepare():
                pass
            try:
                command = self.inbox.get(block=not due)
            except queue.Empty:
                yield self._answer()
                continue
            if command is None:
                return
            self._handle(command)

    def _receive(self, commands: Iterator[pb.Command]) -> None:
        """On its own thread, since reading a stream blocks."""
        try:
            for command in commands:
                self._enqueue(command)
                if self.over.is_set():
                    return
        except grpc.RpcError:
            pass  # the engine hung up
        except Exception:
            pass  # a cancelled stream raises a plain Exception
        self._enqueue(None)

    def _enqueue(self, command: pb.Command | None) -> None:
        while not self.over.is_set():
            try:
                self.inbox.put(command, timeout=1.0)
            except queue.Full:
                continue
            return

    def _handle(self, command: pb.Command) -> None:
        kind = command.WhichOneof("kind")
        if kind == "begin":
            agree(command.begin.version)
            if command.begin.instance not in (0, self.instance):
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this executor was started again: connect again")
            self.executor.reset()
            self._forget()
            self.epoch = command.epoch
        elif command.epoch != self.epoch:
            raise _protocol_error(f"epoch {command.epoch} has not begun: this is {self.epoch}")
        elif kind == "plan":
            self._launch(command)
        elif kind == "masks":
            self._set_masks(command)
        else:
            raise _protocol_error("a command of an unknown kind")

    def _launch(self, command: pb.Command) -> None:
        if command.step != self.next:
            raise _protocol_error(f"step {command.step} of epoch {self.epoch} came where {self.next} was due")
        self.next += 1
        try:
            plan = read_plan(command.plan, self.spans)
        except (ValueError, TypeError) as error:
            raise _protocol_error(f"step {command.step} has a plan that cannot be read: {error}") from error
        self.spans = plan.spans
        self.open.update(one.row for one in plan.new_sequences)
        strange = {span.row for span in plan.spans} | {row for row, _ in plan.new_blocks}
        strange -= self.open
        if strange:
            self.failure = self.failure or f"row {min(strange)} is not open in epoch {self.epoch}: open it first"
        if self.failure:
            self.inflight.append(Launched(command.step, self.failure))
            return
        try:
            self.inflight.append(Launched(command.step, self.executor.launch(plan)))
        except Exception as error:  # the engine finds out which request is at fault
            self.failure = reason(error)
            self.inflight.append(Launched(command.step, self.failure))
            return
        if plan.masked_spans:
            self.skipping.add(command.step)

    def _set_masks(self, command: pb.Command) -> None:
        for place, (step, handle) in enumerate(self.inflight):
            if step == command.step and not isinstance(handle, str):
                self.skipping.discard(step)
                try:
                    handle.sample(read_masks(command.masks))
                except Exception as error:
                    self.failure = reason(error)
                    self.inflight[place] = Launched(step, self.failure)

    def _answer(self) -> pb.Answer:
        step, handle = self.inflight.popleft()
        if isinstance(handle, str):
            return pb.Answer(epoch=self.epoch, step=step, failure=handle)
        try:
            return pb.Answer(epoch=self.epoch, step=step, result=send_result(handle.result()))
        except Exception as error:
            self.failure = reason(error)
            return pb.Answer(epoch=self.epoch, step=step, failure=self.failure)


def _protocol_error(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


def reason(error: Exception) -> str:
    """Why a step failed, in one line."""
    words = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
    return " ".join(words.split())
