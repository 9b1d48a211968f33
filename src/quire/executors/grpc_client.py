"""The executor at the other end of a gRPC connection: plans go down one stream, results come up. No torch.

How far the engine launches ahead of results is what hides the way there and back. A connection that breaks loses every
row there: the engine hears ExecutorLost, and the next step connects again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from quire.engine.executor import Description
from quire.errors import ExecutorLost, InvalidConfig, StepFailed
from quire.executors.contract import executor_pb2 as pb
from quire.executors.contract.translate import (
    DESCRIBE,
    OPTIONS,
    RUN,
    SERVICE,
    VERSION,
    read_description,
    read_result,
    send_masks,
    send_plan,
)
from quire.scheduler.plan import Mask, Plan, Result, Span


class TlsConfig(NamedTuple):
    """PEM texts. authority: of the executor's certificate. certificate, key: of this engine, if asked for."""

    authority: bytes
    certificate: bytes | None = None
    key: bytes | None = None


class RemoteHandle:
    """A step that was sent. See `StepHandle`."""

    __slots__ = ("epoch", "executor", "step")

    def __init__(self, executor: RemoteExecutor, epoch: int, step: int) -> None:
        self.executor, self.epoch, self.step = executor, epoch, step

    def sample(self, masks: Sequence[Sequence[Mask]]) -> None:
        """Send the masks."""
        self.executor.send(pb.Command(epoch=self.epoch, step=self.step, masks=send_masks(masks)))

    def is_done(self) -> bool:
        """Whether an answer has arrived: the oldest step's is the first."""
        return self.executor.has_result()

    def result(self) -> Result:
        """Raises StepFailed, or ExecutorLost when the connection is gone or silent for too long."""
        return self.executor.receive(self.epoch, self.step)


class RemoteExecutor:
    """An executor on another machine. See `Executor`.

    address: HOST:PORT. trust: for TLS; None: no encryption. connect_timeout: seconds to wait for the executor at first.
    deadline: seconds that one step may take. Raises InvalidConfig when no executor of this contract answers.
    """

    def __init__(
        self, address: str, *, trust: TlsConfig | None = None, connect_timeout: float = 30.0, deadline: float = 60.0
    ) -> None:
        self.address, self.trust, self.deadline = address, trust, deadline
        self.epoch = self.step = 0
        self.spans: tuple[Span, ...] = ()
        try:
            self.wire: Wire | None = Wire(address, trust, connect_timeout)
        except ExecutorLost as error:
            raise InvalidConfig(str(error), param="executor_address") from error
        self.description = self.wire.description
        self._begin(self.wire)

    def describe(self) -> Description:
        """As it described itself on connecting."""
        return self.description

    def launch(self, plan: Plan) -> RemoteHandle:
        """Raises ExecutorLost when there is no connection and none can be made."""
        if self.wire is None:
            self._begin(self._reconnect())
        handle = RemoteHandle(self, self.epoch, self.step)
        self.send(pb.Command(epoch=self.epoch, step=self.step, plan=send_plan(plan, self.spans)))
        self.step, self.spans = self.step + 1, plan.spans
        return handle

    def send(self, command: pb.Command) -> None:
        """Raises ExecutorLost."""
        if self.wire is None:
            raise self._lost("there is no connection")
        self.wire.send(command)

    def receive(self, epoch: int, step: int) -> Result:
        """The answer to a step. Answers of earlier epochs are skipped."""
        while self.wire is not None:
            answer = self.wire.take(self.deadline)
            if answer.epoch == epoch:
                if answer.step != step:
                    raise self._lost(f"it answered step {answer.step} where {step} was due")
                if answer.WhichOneof("kind") == "failure":
                    raise StepFailed(answer.failure)
                return read_result(answer.result)
        raise self._lost("there is no connection")

    def has_result(self) -> bool:
        """Whether `receive` returns at once."""
        return self.wire is None or self.wire.queued()

    def reset(self) -> None:
        """Begin a new epoch; on a new connection, made by the next step, where this one is broken."""
        if self.wire is not None and self.wire.broken is None:
            self._begin(self.wire)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def _begin(self, wire: Wire) -> None:
        self.wire = wire
        self.epoch, self.step, self.spans = self.epoch + 1, 0, ()
        self.send(pb.Command(epoch=self.epoch, begin=pb.Begin(version=VERSION, instance=wire.instance)))

    def _reconnect(self) -> Wire:
        wire = Wire(self.address, self.trust, 0.0)
        if wire.description != self.description:
            wire.close()
            raise self._lost("it reconnected with another model or other sizes: restart this server")
        return wire

    def _lost(self, why: str) -> ExecutorLost:
        return executor_lost(self.address, why)


class Wire:
    """One connection: a stream, and a thread that reads it.

    broken: why it has ended; None: it has not. connect_timeout: seconds to wait for an answer; 0: an executor that is
    not there now is not waited for.
    """

    def __init__(self, address: str, trust: TlsConfig | None, connect_timeout: float) -> None:
        self.address = address
        self.broken: ExecutorLost | None = None
        self._channel = _channel(address, trust)
        self._out: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[pb.Answer | ExecutorLost] = queue.SimpleQueue()
        describe = self._method(self._channel.unary_unary, DESCRIBE, pb.Hello, pb.Description)
        try:
            theirs = describe(
                pb.Hello(version=VERSION), timeout=connect_timeout or 5.0, wait_for_ready=connect_timeout > 0
            )
        except grpc.RpcError as error:
            self._channel.close()
            raise executor_lost(address, _words(error)) from error
        if theirs.version != VERSION:
            self._channel.close()
            raise executor_lost(
                address, f"it speaks version {theirs.version} of the contract, and this is version {VERSION}"
            )
        self.description, self.instance = read_description(theirs), theirs.instance
        run = self._method(self._channel.stream_stream, RUN, pb.Command, pb.Answer)
        self._call = run(iter(self._out.get, None))
        threading.Thread(target=self._read_answers, name="executor-results", daemon=True).start()

    def _method(self, kind: Callable[..., Any], name: str, sent: Any, got: Any) -> Any:
        return kind(
            f"/{SERVICE}/{name}", request_serializer=sent.SerializeToString, response_deserializer=got.FromString
        )

    def _read_answers(self) -> None:
        why = "it ended the stream"
        try:
            for answer in self._call:
                self._in.put(answer)
        except grpc.RpcError as error:
            why = _words(error)
        self.broken = executor_lost(self.address, why)
        self._in.put(self.broken)

    def send(self, command: pb.Command) -> None:
        """Raises ExecutorLost."""
        if self.broken is not None:
            raise self.broken
        self._out.put(command)

    def take(self, timeout: float) -> pb.Answer:
        """The next answer. Raises ExecutorLost, also after `timeout` seconds without one, which ends the stream."""
        try:
            answer = self._in.get(timeout=timeout)
        except queue.Empty:
            self.broken = answer = executor_lost(self.address, f"no answer to a step within {timeout:g} s")
        if isinstance(answer, ExecutorLost):
            raise answer
        return answer

    def queued(self) -> bool:
        """Whether `take` returns at once."""
        return not self._in.empty()

    def close(self) -> None:
        """End the stream and the connection."""
        self._out.put(None)
        self._call.cancel()
        with contextlib.suppress(grpc.RpcError):
            self._channel.close()


def executor_lost(address: str, why: str) -> ExecutorLost:
    """The error for an executor that cannot be reached any more."""
    return ExecutorLost(f"the executor at {address} is lost: {why}")


def _words(error: grpc.RpcError) -> str:
    code = error.code().name.lower().replace("_", " ")
    return f"{code}: {' '.join((error.details() or 'nothing more is known').split())}"


def _channel(address: str, trust: TlsConfig | None) -> grpc.Channel:
    if trust is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(trust.authority, trust.key, trust.certificate)
    return grpc.secure_channel(address, credentials, options=OPTIONS)
